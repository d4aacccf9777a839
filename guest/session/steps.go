package session

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

// step is one named part of an operation.
type step struct {
	name string
	run  func(ctx context.Context) error
	// undo reverses what a complete or partial run has done. It is registered before run
	// begins, and repeated until it returns nil.
	undo func(ctx context.Context) error
	// commit marks the commit point: after this step has succeeded, nothing is undone.
	commit bool
}

// stepError contains the step that failed, and the undos that failed.
type stepError struct {
	step string
	err  error
	undo error
	left []step // steps that are not undone yet, in the order of their undos
}

func (e *stepError) Error() string {
	if e.undo != nil {
		return fmt.Sprintf("%s: %v; not taken back yet: %v", e.step, e.err, e.undo)
	}
	return fmt.Sprintf("%s: %v", e.step, e.err)
}

func (e *stepError) Unwrap() []error {
	if e.undo != nil {
		return []error{e.err, e.undo}
	}
	return []error{e.err}
}

// runner runs steps.
type runner struct {
	begin func(i, n int, name string) error       // called before each step: journal, progress
	after func(name string, committed bool) error // called after its work: fault injection
	late  func(name string, err error)            // called with an error after the commit point
	start time.Time                               // start of the operation
	times []*gpuctlv1.StepTime                    // filled as steps end
}

// run runs the steps in order. After an error up to the commit point, it undoes every step
// that has begun, last step first, and returns a *stepError with the undos that failed. An
// error after the commit point is passed to late, and the remaining steps still run.
func (r *runner) run(ctx context.Context, steps []step) error {
	var begun []step
	committed := false
	for i, s := range steps {
		if committed {
			ctx = context.WithoutCancel(ctx)
		}
		t := &gpuctlv1.StepTime{Step: s.name, StartNs: time.Since(r.start).Nanoseconds()}
		r.times = append(r.times, t)
		err := ctx.Err()
		if err == nil {
			err = r.begin(i, len(steps), s.name)
		}
		if err == nil {
			begun = append(begun, s)
			err = s.run(ctx)
		}
		if err == nil && s.commit {
			committed = true
		}
		if err == nil {
			err = r.after(s.name, committed)
		}
		t.DurationNs = time.Since(r.start).Nanoseconds() - t.StartNs
		if err == nil {
			continue
		}
		if committed {
			r.late(s.name, err)
			continue
		}
		slices.Reverse(begun)
		left, uerr := undo(context.WithoutCancel(ctx), begun)
		return &stepError{step: s.name, err: err, undo: uerr, left: left}
	}
	return nil
}

// undo calls the undo of each step once, in the order given. left has the steps whose undo
// failed, and err has the reasons.
func undo(ctx context.Context, steps []step) (left []step, err error) {
	var errs []error
	for _, s := range steps {
		if s.undo == nil {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, undoTimeout)
		if err := s.undo(ctx); err != nil {
			left = append(left, s)
			errs = append(errs, fmt.Errorf("undo %s: %w", s.name, err))
		}
		cancel()
	}
	return left, errors.Join(errs...)
}
