package steps

import (
	"fmt"
	"strings"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// Because returns a reason against a change. Its code is part of the API.
func Because(code, format string, args ...any) *gpuctlv1.Reason {
	return &gpuctlv1.Reason{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Planned returns a step of a plan, with its undo; empty: it has none.
func Planned(name, what, undo string) *gpuctlv1.PlannedStep {
	return &gpuctlv1.PlannedStep{Name: name, What: what, Undo: undo}
}

// Change is what is done to one VM, step by step.
type Change struct {
	GPU, Machine string
	Steps        []*gpuctlv1.PlannedStep
	Reasons      []*gpuctlv1.Reason // against it
	At           int                // number of the present step, from 1
	Report       cards.Report
}

// Over ends a change that is only planned, or that something is against: then the error says
// what is refused, and why. over means that nothing is left to do.
func (c *Change) Over(plan bool, what string) (over bool, err error) {
	switch {
	case plan:
		c.Report(&gpuctlv1.DeviceUpdate{Gpu: c.GPU, Machine: c.Machine, Plan: c.Steps, Reasons: c.Reasons, Done: true, Steps: uint32(len(c.Steps))})
		return true, nil
	case len(c.Reasons) == 0:
		return false, nil
	}
	var words []string
	for _, r := range c.Reasons {
		words = append(words, r.GetMessage())
	}
	return true, reason.Errorf(reason.Refused, "%s: %s", what, strings.Join(words, "; ")).On("vm", c.Machine)
}

// Update returns what is reported of the present step.
func (c *Change) Update(name string, took time.Duration) *gpuctlv1.DeviceUpdate {
	return &gpuctlv1.DeviceUpdate{Gpu: c.GPU, Machine: c.Machine, Step: name, StepIndex: uint32(c.At), Steps: uint32(max(c.At, len(c.Steps))), TookNs: int64(took)}
}

// Step does one step, and reports its begin and its end.
func (c *Change) Step(name string, do func() error) error {
	c.At++
	c.Report(c.Update(name, 0))
	began := time.Now()
	if err := do(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	c.Report(c.Update(name, time.Since(began)))
	return nil
}

// Done reports that all is done.
func (c *Change) Done() {
	c.Report(&gpuctlv1.DeviceUpdate{Gpu: c.GPU, Machine: c.Machine, Done: true, Steps: uint32(c.At), StepIndex: uint32(c.At)})
}
