package timeshare

import "errors"

// What a [Scheduler] refuses. A refused event changes nothing.
var (
	// ErrConfig means that a [Config] can't be worked with.
	ErrConfig = errors.New("invalid scheduler configuration")
	// ErrWeight means that a weight is not between 1 and [MaxWeight].
	ErrWeight = errors.New("weight out of range")
	// ErrOwnerExists means that an owner joins that is there already, or whose
	// last command still runs.
	ErrOwnerExists = errors.New("owner exists")
	// ErrUnknownOwner means that nobody has joined by that name, or has left.
	ErrUnknownOwner = errors.New("unknown owner")
	// ErrTooMany means that there are [MaxOwners] owners, or that an owner would
	// have more than [Config].MaxPending commands pending.
	ErrTooMany = errors.New("too many")
	// ErrCount means that less than one command is submitted.
	ErrCount = errors.New("number of commands out of range")
	// ErrTime means that a time is negative, before that of an earlier event, or
	// later than [MaxTime].
	ErrTime = errors.New("time out of order")
	// ErrDuration means that a command is said to have run for a negative time,
	// or longer than since its start.
	ErrDuration = errors.New("run time out of range")
	// ErrNothingPending means that a command starts of an owner that has none.
	ErrNothingPending = errors.New("no command pending")
	// ErrBusy means that a command starts while another one runs.
	ErrBusy = errors.New("a command is running")
	// ErrNotRunning means that a command ends that has not started, or has ended.
	ErrNotRunning = errors.New("command is not running")
)
