package endpoint

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/excerpt"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// Rehearse has NVIDIA's driver take the state of each CUDA program of a VM from its GPU and put
// it back where it was, one after the other, and sends the progress of each with its result. It
// refuses before it touches anything. patience is how long running kernels may take to end; 0:
// two minutes.
func (l *Local) Rehearse(ctx context.Context, uuid, name string, patience time.Duration, send func(*gpuctlv1.OperationUpdate) error) error {
	refuse := func(format string, args ...any) error {
		return reason.Coded(reason.Errorf(reason.Refused, "vm %s: %s", name, fmt.Sprintf(format, args...)).On("vm", name))
	}
	all, refused, err := l.adopted(ctx, uuid)
	if errors.Is(err, errNoAgent) {
		return refuse("%v", err)
	}
	if err != nil {
		return err
	}
	var against []string
	for _, r := range refused {
		var why []string
		for _, one := range r.GetReasons() {
			why = append(why, one.GetMessage())
		}
		against = append(against, fmt.Sprintf("process %d (%s) uses CUDA and can't be moved: %s", r.GetPid(), excerpt.Of(r.GetCommand(), 60), excerpt.Of(strings.Join(why, "; "), 500)))
	}
	var run []*gpuctlv1.Session
	for _, s := range all {
		switch {
		case s.GetEngine() != driverEngine:
		case s.GetState() == gpuctlv1.SessionState_SESSION_STATE_RUNNING:
			run = append(run, s)
		default:
			if err := settled(s); err != nil {
				against = append(against, fmt.Sprintf("session %s (%s): %v", s.GetId(), s.GetCommand(), err))
			}
		}
	}
	switch {
	case len(against) > 0:
		return refuse("%s", strings.Join(against, "; "))
	case len(run) == 0:
		return refuse("no CUDA program computes in it")
	}
	_, o, err := l.sessions(ctx, uuid)
	for _, s := range run {
		if err == nil {
			err = rehearse(ctx, o, s, timesOf(ctx, patience), send)
		}
	}
	return err
}

// rehearse lets one session go through it. The error is of the call; how it went for the session is
// in its result.
func rehearse(ctx context.Context, o *guest, s *gpuctlv1.Session, times freezeTimes, send func(*gpuctlv1.OperationUpdate) error) error {
	stream, err := o.work.Swap(ctx, connect.NewRequest(&gpuctlv1.SwapRequest{Session: s.GetId(), Rehearse: true, FreezeTimeoutMs: times.freeze, TimeoutMs: times.still}))
	if err != nil {
		return fmt.Errorf("session %s (%s): %w", s.GetId(), s.GetCommand(), err)
	}
	defer stream.Close()
	ended := false
	for !ended && stream.Receive() {
		u := &gpuctlv1.OperationUpdate{Session: s.GetId(), Progress: stream.Msg()}
		r := u.GetProgress().GetResult()
		if r.GetRefused() {
			u.Rejected = []*gpuctlv1.Candidate{{Gpu: s.GetTarget().GetGpu(), Model: s.GetTarget().GetModel(), Reasons: r.GetReasons()}}
		}
		if err := send(u); err != nil {
			return err
		}
		ended = r != nil
	}
	if !ended {
		return fmt.Errorf("session %s (%s): %w", s.GetId(), s.GetCommand(), errors.Join(errors.New("its gpuguest went away; gpuctl vms -o wide says when it is back, and the session is where it was or held then"), stream.Err()))
	}
	return nil
}
