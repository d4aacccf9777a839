// Package timeshare decides whose command runs next on one GPU that several
// owners share. It works at the granularity of commands, and a command that
// runs is never preempted.
//
// Here live the accounts of owners, the policies (FIFO, Credit, Band, Fair),
// the prediction of how long a command will run, and the watchdog of commands
// that run too long. All of it is a state machine: time comes in as an argument,
// and there are no goroutines, no locks and no I/O. The same events give the
// same decisions.
//
// Not here: submitting commands to a device, measuring them, timers, locks,
// stopping a command that runs too long, and limits of memory. Which GPU
// somebody gets at all is decided by cluster/scheduler and cluster/placement.
//
// A user tells the [Scheduler] what happens (Join, Submit, Withdraw, Start, End, Leave),
// and after each of these asks [Scheduler.Next] what to do:
//
//	switch d := s.Next(now); d.Action {
//	case timeshare.Run:  // start the oldest command of d.Owner, and call Start
//	case timeshare.Wait: // ask again at d.Until, or after the next event
//	case timeshare.Busy: // a command runs; from d.Until on it is overdue
//	case timeshare.Idle: // nobody has a command
//	}
//
// DESIGN.md says why each policy is as it is, what it costs, and what it reaches
// in simulation.
package timeshare
