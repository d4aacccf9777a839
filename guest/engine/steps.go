package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// undoTimeout is the time limit of each attempt of an undo.
const undoTimeout = 30 * time.Second

// Step is one named part of an operation.
type Step struct {
	Name string
	Run  func(ctx context.Context) error
	// Undo reverses what a complete or partial run has done. It is registered before Run
	// begins, and repeated until it returns nil.
	Undo func(ctx context.Context) error
	// Commit marks the commit point: after this step has succeeded, nothing is undone.
	Commit bool
}

// StepError contains the step that failed, and the undos that failed.
type StepError struct {
	Step string
	Err  error
	Undo error
	Left []Step // steps that are not undone yet, in the order of their undos
}

func (e *StepError) Error() string {
	if e.Undo != nil {
		return fmt.Sprintf("%s: %v; not taken back yet: %v", e.Step, e.Err, e.Undo)
	}
	return fmt.Sprintf("%s: %v", e.Step, e.Err)
}

func (e *StepError) Unwrap() []error {
	if e.Undo != nil {
		return []error{e.Err, e.Undo}
	}
	return []error{e.Err}
}

// Runner runs steps.
type Runner struct {
	Begin func(i, n int, name string) error       // called before each step: journal, progress
	After func(name string, committed bool) error // called after its work: fault injection
	Late  func(name string, err error)            // called with an error after the commit point
	Start time.Time                               // start of the operation
	Times []*gpuctlv1.StepTime                    // filled as steps end
}

// Run runs the steps in order. After an error up to the commit point, it undoes every step
// that has begun, last step first, and returns a *StepError with the undos that failed. An
// error after the commit point is passed to Late, and the remaining steps still run.
func (r *Runner) Run(ctx context.Context, steps []Step) error {
	var begun []Step
	committed := false
	for i, s := range steps {
		if committed {
			ctx = context.WithoutCancel(ctx)
		}
		t := &gpuctlv1.StepTime{Step: s.Name, StartNs: time.Since(r.Start).Nanoseconds()}
		r.Times = append(r.Times, t)
		err := ctx.Err()
		if err == nil {
			err = r.Begin(i, len(steps), s.Name)
		}
		if err == nil {
			begun = append(begun, s)
			err = s.Run(ctx)
		}
		if err == nil && s.Commit {
			committed = true
		}
		if err == nil {
			err = r.After(s.Name, committed)
		}
		t.DurationNs = time.Since(r.Start).Nanoseconds() - t.StartNs
		if err == nil {
			continue
		}
		if committed {
			r.Late(s.Name, err)
			continue
		}
		slices.Reverse(begun)
		left, uerr := Undo(context.WithoutCancel(ctx), begun)
		return &StepError{Step: s.Name, Err: err, Undo: uerr, Left: left}
	}
	return nil
}

// Undo calls the undo of each step once, in the order given. left has the steps whose undo
// failed, and err has the reasons.
func Undo(ctx context.Context, steps []Step) (left []Step, err error) {
	var errs []error
	for _, s := range steps {
		if s.Undo == nil {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, undoTimeout)
		if err := s.Undo(ctx); err != nil {
			left = append(left, s)
			errs = append(errs, fmt.Errorf("undo %s: %w", s.Name, err))
		}
		cancel()
	}
	return left, errors.Join(errs...)
}
