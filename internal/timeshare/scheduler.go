package timeshare

import (
	"fmt"
	"slices"
	"time"
)

// Action is what to do with the GPU.
type Action int

// The actions of a [Decision].
const (
	Idle Action = iota // nobody has a command
	Run                // start the oldest command of Owner
	Wait               // start nothing, though there is a command: Owner is expected to come
	Busy               // a command of Owner runs
)

func (a Action) String() string {
	switch a {
	case Idle:
		return "idle"
	case Run:
		return "run"
	case Wait:
		return "wait"
	case Busy:
		return "busy"
	}
	return fmt.Sprintf("action %d", int(a))
}

// Decision is the answer of [Scheduler.Next]. It holds until the next event, or
// until Until.
type Decision struct {
	Action Action
	Owner  OwnerID

	// Until is, for Wait, when to ask again at the latest; for Busy, when to call
	// [Scheduler.Overrun], unless that has reported the command. 0: no time changes the answer.
	Until time.Duration
}

// Overrun is a command that runs longer than it should.
type Overrun struct {
	Owner OwnerID
	Since time.Duration // when it was started
}

// Totals is how the time on the clock was spent.
type Totals struct {
	Busy   time.Duration // commands ran
	Waited time.Duration // idle on purpose, for an owner
	Idle   time.Duration // nobody had a command
	Other  time.Duration // from a decision to the start, and from the end of a run to its report
}

// Scheduler shares one GPU. All times are durations since one epoch of the
// user's choice and never go back; a monotonic clock is right. It is not safe
// for use by several goroutines.
//
// The zero value is of no use: call [New].
type Scheduler struct {
	config Config
	policy policy
	byID   map[OwnerID]*owner
	owners []*owner // in the order in which they joined

	now     time.Duration
	seq     uint64
	pending int           // commands, of all owners
	waiting *owner        // for whom the GPU is kept idle, nil: nobody
	until   time.Duration // when that ends at the latest
	totals  Totals

	running  *owner
	kind     Kind          // of the running command
	started  time.Duration // when it was
	reported bool          // that it is overdue
}

// leastCost is what a command costs its owner at least, though it ran for less or for
// no time that could be measured. Were such commands free, their owner could run them without end.
const leastCost = time.Microsecond

// policy decides for a Scheduler. Each event is told once it is in the accounts.
type policy interface {
	joined(o *owner)
	left(o *owner)
	weighed(o *owner, old int)           // its weight was changed
	arrived(o *owner)                    // has a command after having had none, pending or running
	started(o *owner)                    //
	ended(o *owner, ran time.Duration)   //
	passed(o *owner, idle time.Duration) // the GPU was idle: for o, or because nobody had a command
	next(now time.Duration) Decision     // nothing runs and somebody has a command; no effect if asked again
	// keeps reports whether next will wait for the owner whose command runs, if that costs so much.
	keeps(o *owner, cost time.Duration) bool
}

// New returns a scheduler without owners. Its errors wrap [ErrConfig].
func New(c Config) (*Scheduler, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	s := &Scheduler{config: c, byID: map[OwnerID]*owner{}}
	switch c.Policy {
	case FIFO:
		s.policy = &fifo{s: s}
	case Credit, Band:
		s.policy = &credit{s: s}
	case Fair:
		s.policy = &fair{s: s}
	}
	return s, nil
}

// Join adds an owner. Its errors wrap [ErrTime], [ErrWeight], [ErrOwnerExists] or
// [ErrTooMany].
func (s *Scheduler) Join(now time.Duration, id OwnerID, weight int) error {
	if err := s.checkTime(now); err != nil {
		return err
	}
	if weight < 1 || weight > MaxWeight {
		return fmt.Errorf("owner %q: weight %d is not between 1 and %d: %w", id, weight, MaxWeight, ErrWeight)
	}
	if o := s.byID[id]; o != nil {
		if o.leaving {
			return fmt.Errorf("owner %q has left, but its last command still runs: %w", id, ErrOwnerExists)
		}
		return fmt.Errorf("owner %q: %w", id, ErrOwnerExists)
	}
	if len(s.owners) >= MaxOwners {
		return fmt.Errorf("owner %q would be one of more than %d owners: %w", id, MaxOwners, ErrTooMany)
	}
	s.pass(now)
	o := &owner{id: id, weight: weight, usage: Usage{Weight: weight}}
	s.byID[id] = o
	s.owners = append(s.owners, o)
	s.policy.joined(o)
	return nil
}

// Leave removes an owner, and returns how many of its commands were pending;
// they will not run. If a command of it runs, that keeps the GPU until End is
// called for it, and no owner of this name can join before. Its errors wrap [ErrTime]
// or [ErrUnknownOwner].
func (s *Scheduler) Leave(now time.Duration, id OwnerID) (dropped int, err error) {
	o, err := s.event(now, id)
	if err != nil {
		return 0, err
	}
	dropped = o.usage.Pending
	s.pending -= dropped
	o.usage.Pending, o.queue, o.first = 0, nil, 0
	if s.running == o {
		o.leaving = true
	} else {
		s.remove(o)
	}
	return dropped, nil
}

// Submit adds n commands of one kind to those that an owner has pending. They
// must be ready to run: one that depends on others is submitted when these have ended. Its errors
// wrap [ErrTime], [ErrUnknownOwner], [ErrCount] or [ErrTooMany].
func (s *Scheduler) Submit(now time.Duration, id OwnerID, k Kind, n int) error {
	if n < 1 {
		return fmt.Errorf("owner %q submits %d commands: %w", id, n, ErrCount)
	}
	if o := s.byID[id]; o != nil && n > s.config.MaxPending-o.usage.Pending {
		return fmt.Errorf("owner %q has %d commands pending and submits %d; %d may be pending: %w",
			id, o.usage.Pending, n, s.config.MaxPending, ErrTooMany)
	}
	o, err := s.event(now, id)
	if err != nil {
		return err
	}
	arrives := !o.pending() && s.running != o
	if arrives && o.ended {
		o.think.add(min(now-o.since, maxThink), thinkShift)
	}
	s.seq++
	o.push(batch{kind: k, count: n, seq: s.seq})
	s.pending += n
	if s.waiting == o {
		s.waiting = nil
	}
	if arrives {
		s.policy.arrived(o)
	}
	return nil
}

// Withdraw takes back one pending command of an owner: its submitter does not want it to
// run any more, or has died. index counts the owner's pending commands, oldest first. Its
// errors wrap [ErrTime], [ErrUnknownOwner] or [ErrNothingPending].
func (s *Scheduler) Withdraw(now time.Duration, id OwnerID, index int) error {
	if o := s.byID[id]; o != nil && (index < 0 || index >= o.usage.Pending) {
		return fmt.Errorf("owner %q has %d commands pending, and command %d is withdrawn: %w", id, o.usage.Pending, index, ErrNothingPending)
	}
	o, err := s.event(now, id)
	if err != nil {
		return err
	}
	o.drop(index)
	s.pending--
	return nil
}

// SetWeight changes an owner's weight. What it has had until now was charged with the old
// one. Its errors wrap [ErrTime], [ErrWeight] or [ErrUnknownOwner].
func (s *Scheduler) SetWeight(now time.Duration, id OwnerID, weight int) error {
	if weight < 1 || weight > MaxWeight {
		return fmt.Errorf("owner %q: weight %d is not between 1 and %d: %w", id, weight, MaxWeight, ErrWeight)
	}
	o, err := s.event(now, id)
	if err != nil {
		return err
	}
	old := o.weight
	o.weight, o.usage.Weight = weight, weight
	o.rest %= time.Duration(weight)
	s.policy.weighed(o, old)
	return nil
}

// Start says that the oldest pending command of an owner was started. It need
// not be the owner that Next named. Its errors wrap [ErrTime],
// [ErrUnknownOwner], [ErrBusy] or [ErrNothingPending].
func (s *Scheduler) Start(now time.Duration, id OwnerID) error {
	if s.running != nil {
		return fmt.Errorf("owner %q starts a command while one of %q runs: %w", id, s.running.id, ErrBusy)
	}
	if o := s.byID[id]; o != nil && !o.pending() {
		return fmt.Errorf("owner %q: %w", id, ErrNothingPending)
	}
	o, err := s.event(now, id)
	if err != nil {
		return err
	}
	s.kind = o.pop()
	s.pending--
	s.running, s.started, s.reported = o, now, false
	s.waiting = nil
	s.policy.started(o)
	return nil
}

// End says that the command of an owner that was started has ended, whether or not it
// succeeded, and how long it kept the GPU. That time is charged. It has to
// come from a clock that the owner has no influence on: now minus the time of
// the start if there is no better one. Its errors wrap [ErrTime],
// [ErrUnknownOwner], [ErrNotRunning] or [ErrDuration].
func (s *Scheduler) End(now time.Duration, id OwnerID, ran time.Duration) error {
	if err := s.checkTime(now); err != nil {
		return err
	}
	o := s.byID[id]
	if o == nil {
		return fmt.Errorf("owner %q: %w", id, ErrUnknownOwner)
	}
	if s.running != o {
		return fmt.Errorf("owner %q: %w", id, ErrNotRunning)
	}
	if ran < 0 || ran > now-s.started {
		return fmt.Errorf("owner %q: a command is said to have run %v in the %v since its start: %w", id, ran, now-s.started, ErrDuration)
	}
	s.now = now
	s.running = nil
	s.totals.Busy += ran
	s.totals.Other += now - s.started - ran
	o.usage.Busy += ran
	o.usage.Commands++
	o.length.learn(s.kind, ran)
	o.ended, o.since = true, now
	s.policy.ended(o, max(ran, leastCost))
	if o.leaving {
		s.remove(o)
	}
	return nil
}

// Next decides what the GPU does at a time. Asked again at the same time it
// answers the same. If now is before the last event, the time of that one
// counts, and [MaxTime] instead of anything later.
func (s *Scheduler) Next(now time.Duration) Decision {
	s.pass(min(max(now, s.now), MaxTime))
	if s.running != nil {
		d := Decision{Action: Busy, Owner: s.running.id}
		if s.config.Overdue > 0 && !s.reported {
			d.Until = s.started + s.config.Overdue
		}
		return d
	}
	s.waiting = nil
	if s.pending == 0 {
		return Decision{Action: Idle}
	}
	d := s.policy.next(s.now)
	if d.Action == Wait {
		s.waiting, s.until = s.byID[d.Owner], d.Until
	}
	return d
}

// Keeps reports whether the GPU will be kept idle for the owner whose command runs, once that has
// ended and if nobody else submits something. That is so even if the command lasts twice
// as long as expected. An answer of false says nothing.
func (s *Scheduler) Keeps() bool {
	if s.running == nil || s.running.leaving || s.running.pending() {
		return false
	}
	length, known := s.running.length.predict(s.kind)
	return known && s.policy.keeps(s.running, 2*length)
}

// Overrun reports the running command if it has run for [Config].Overdue or longer, and
// only once for each command.
func (s *Scheduler) Overrun(now time.Duration) (Overrun, bool) {
	s.pass(min(max(now, s.now), MaxTime))
	if s.running == nil || s.reported || s.config.Overdue == 0 || s.now-s.started < s.config.Overdue {
		return Overrun{}, false
	}
	s.reported = true
	return Overrun{Owner: s.running.id, Since: s.started}, true
}

// Usage returns what an owner has had since it joined. Its errors wrap
// [ErrUnknownOwner].
func (s *Scheduler) Usage(id OwnerID) (Usage, error) {
	o := s.byID[id]
	if o == nil {
		return Usage{}, fmt.Errorf("owner %q: %w", id, ErrUnknownOwner)
	}
	return o.usage, nil
}

// Totals returns how the time was spent from the epoch to the last event. A command
// that runs is not in it yet.
func (s *Scheduler) Totals() Totals { return s.totals }

// event checks time and owner of an event, and lets the time pass.
func (s *Scheduler) event(now time.Duration, id OwnerID) (*owner, error) {
	if err := s.checkTime(now); err != nil {
		return nil, err
	}
	o := s.byID[id]
	if o == nil || o.leaving {
		return nil, fmt.Errorf("owner %q: %w", id, ErrUnknownOwner)
	}
	s.pass(now)
	return o, nil
}

func (s *Scheduler) checkTime(now time.Duration) error {
	if now < s.now || now > MaxTime {
		return fmt.Errorf("time %v is not between %v and %v: %w", now, s.now, MaxTime, ErrTime)
	}
	return nil
}

// pass accounts for the time since the last event.
func (s *Scheduler) pass(now time.Duration) {
	d := now - s.now
	if s.waiting != nil {
		waited := min(d, max(s.until-s.now, 0))
		s.totals.Waited += waited
		s.waiting.usage.Waited += waited
		s.policy.passed(s.waiting, waited)
		d -= waited
	}
	s.now = now
	switch {
	case s.running != nil: // End accounts for it
	case s.pending == 0:
		s.totals.Idle += d
		s.policy.passed(nil, d)
	default:
		s.totals.Other += d
	}
}

func (s *Scheduler) remove(o *owner) {
	delete(s.byID, o.id)
	s.owners = slices.DeleteFunc(s.owners, func(other *owner) bool { return other == o })
	if s.waiting == o {
		s.waiting = nil
	}
	s.policy.left(o)
}

func run(o *owner) Decision { return Decision{Action: Run, Owner: o.id} }
