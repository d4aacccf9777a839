package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
)

// Life is how long an operation goes on. Its owner is who has the sessions.
type Life struct {
	// Ctx is of the steps up to the commit. It ends when the caller leaves, when the owner
	// ends, or with Cancel.
	Ctx context.Context
	// Rest is of undos that are tried again. It ends with the owner, or with GiveUp.
	Rest context.Context

	owner  context.Context
	cancel context.CancelCauseFunc
	giveUp context.CancelFunc
	done   chan struct{}
}

// NewLife begins one. Over ends it.
func NewLife(caller, owner context.Context) *Life {
	l := &Life{owner: owner, done: make(chan struct{})}
	l.Ctx, l.cancel = context.WithCancelCause(caller)
	l.Rest, l.giveUp = context.WithCancel(owner)
	return l
}

// Cancel has the operation undone, if it is not committed yet.
func (l *Life) Cancel(why error) { l.cancel(why) }

// GiveUp ends the repetition of undos: there is nothing left to undo.
func (l *Life) GiveUp() { l.giveUp() }

// Done is closed when the operation is over.
func (l *Life) Done() <-chan struct{} { return l.done }

// Over ends the operation for those who wait for it.
func (l *Life) Over() {
	l.cancel(nil)
	l.giveUp()
	close(l.done)
}

// Run runs the steps. An error says why they were cancelled, if they were.
func (l *Life) Run(r *Runner, steps []Step) error {
	stop := context.AfterFunc(l.owner, func() { l.cancel(errors.New("gpuguest is shutting down")) })
	defer stop()
	err := r.Run(l.Ctx, steps)
	if cause := context.Cause(l.Ctx); err != nil && cause != nil {
		err = fmt.Errorf("%w (%w)", err, cause)
	}
	return err
}

// Repeat calls try until it succeeds or is given up, and then ended. If the owner ends before
// that, the operation is over as it is: the next gpuguest goes on with it.
func (l *Life) Repeat(log *slog.Logger, try func(context.Context) error, ended func()) {
	go func() {
		if err := Retry(l.Rest, log, try); err != nil && l.owner.Err() != nil {
			l.Over()
			return
		}
		ended()
	}()
}
