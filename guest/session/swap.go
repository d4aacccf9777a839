package session

import (
	"context"
	"errors"
	"fmt"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/engine"
)

const (
	precopyRounds = 5
	// precopyEnough ends the rounds when less than 1/100 of the memory is dirty.
	precopyEnough = 100
)

// Swap moves a session to the target while its application runs. A suspended
// session is resumed there. Refusals and roll-backs are in the result.
func (m *Manager) Swap(ctx context.Context, req *gpuctlv1.SwapRequest, sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
	s, err := m.lookup(req.Session)
	if err != nil {
		return nil, err
	}
	if req.Rehearse {
		return nil, errNoRehearsal(req.Session)
	}
	if err := checkTarget(req.Target); err != nil {
		return nil, err
	}
	if s.snapshot().SuspendedTo != "" {
		return m.Resume(ctx, &gpuctlv1.ResumeRequest{Session: req.Session, Target: req.Target, FailAt: req.FailAt, TimeoutMs: req.TimeoutMs}, sink)
	}
	w := &swapping{req: req}
	op, err := s.begin(ctx, kindSwap, w.steps, req.FailAt, stillPatience(req.TimeoutMs, req.FreezeTimeoutMs), sink)
	if err != nil {
		return nil, err
	}
	res := op.run()
	if res.Error == "" {
		m.model.learn(res, w.usage)
	}
	return res, nil
}

// swapping is the state that the steps of a swap share.
type swapping struct {
	req     *gpuctlv1.SwapRequest
	usage   *gpuctlv1.Usage
	devices int
}

func (w *swapping) steps(op *operation) []engine.Step {
	return []engine.Step{
		{Name: stepCheck, Run: func(ctx context.Context) error {
			d, err := op.source.describeBusy(ctx, freezePatience(w.req.FreezeTimeoutMs), op)
			if err != nil {
				return err
			}
			w.usage, w.devices, op.freeze = d.Usage, len(d.Devices), d.Freezes+1
			return engine.Refuse(Reasons(w.usage, w.req.Target.Limits))
		}},
		{Name: stepStart, Undo: op.killTarget, Run: func(ctx context.Context) error {
			return op.startTarget(ctx, w.req.Target, w.usage, w.devices)
		}},
		{Name: stepPrepare, Run: func(ctx context.Context) error {
			snap, err := op.source.snapshot(ctx)
			if err != nil {
				return err
			}
			op.graph = snap.Graph
			return op.target.prepare(ctx, &gpuctlv1.PrepareRequest{Graph: op.graph}, op)
		}},
		{Name: stepPrecopy, Undo: op.discardSource, Run: func(ctx context.Context) error {
			op.chooseWay(w.req.Target)
			return op.precopy(ctx, w.usage.GetMemory())
		}},
		{Name: stepFreeze, Undo: op.thawSource, Run: func(ctx context.Context) error {
			return op.freezeSource(ctx, w.req.FreezeTimeoutMs)
		}},
		{Name: stepTransfer, Run: func(ctx context.Context) error {
			if err := op.target.prepare(ctx, &gpuctlv1.PrepareRequest{Graph: op.graph, Final: true}, op); err != nil {
				return err
			}
			n, err := op.exportTo(ctx, &gpuctlv1.ExportRequest{Final: true})
			op.result.BytesFrozen = n
			if err != nil {
				return err
			}
			return op.verify(ctx)
		}},
		{Name: stepSwitch, Commit: true, Run: func(ctx context.Context) error {
			if err := op.handOver(ctx, op.source.gen); err != nil {
				return err
			}
			op.recordDowntime()
			old := op.source.record()
			op.adoptTarget(func(r *record) { r.Op.Other = &old })
			return nil
		}},
		{Name: stepRetire, Run: func(ctx context.Context) error { return op.retireSource(op.source.retire(ctx)) }},
	}
}

// precopy sends contents while the application runs, in rounds, as long as each round makes
// the rest smaller. It keeps the target's objects up to date.
func (op *operation) precopy(ctx context.Context, memory uint64) error {
	dirty := ^uint64(0)
	for round := range precopyRounds {
		// Earlier targets may have got what this one does not have.
		n, err := op.exportTo(ctx, &gpuctlv1.ExportRequest{All: round == 0})
		op.result.BytesPrecopied += n
		if err != nil && op.fetch != "" && ctx.Err() == nil {
			if err = op.detour(ctx, err); err == nil {
				n, err = op.exportTo(ctx, &gpuctlv1.ExportRequest{All: true})
				op.result.BytesPrecopied += n
			}
		}
		if err != nil {
			return err
		}
		snap, err := op.source.snapshot(ctx)
		if err != nil {
			return err
		}
		op.graph = snap.Graph
		if err := op.target.prepare(ctx, &gpuctlv1.PrepareRequest{Graph: op.graph}, op); err != nil {
			return err
		}
		if snap.Dirty <= memory/precopyEnough || snap.Dirty >= dirty {
			return nil
		}
		dirty = snap.Dirty
	}
	return nil
}

// How contents go between two remote GPUs, for those who watch.
const (
	wayStraight = "straight from one host to the other"
	wayHome     = "through this host"
)

// chooseWay decides how contents go to the target: straight, if that was prepared.
func (op *operation) chooseWay(target *gpuctlv1.Target) {
	if op.fetch = target.GetRuntime().GetRemote().GetFetch(); op.fetch != "" {
		op.reporter.Waits(wayStraight)
	}
}

// exportTo sends contents to the target.
func (op *operation) exportTo(ctx context.Context, req *gpuctlv1.ExportRequest) (uint64, error) {
	req.Peer, req.Fetch = op.target.importSocket, op.fetch
	n, err := op.source.export(ctx, req, op)
	op.result.BytesStraight += n.straight
	return n.bytes, err
}

// detour makes all contents go through this host, as they cannot go straight. What is still
// on its way to the target must not arrive after what is sent now. The source is asked to let
// go of the connection, too: who has it would hold it until the end of the swap.
func (op *operation) detour(ctx context.Context, why error) error {
	if err := op.target.endFetch(ctx); err != nil {
		return errors.Join(why, err)
	}
	op.fetch, op.result.Detour = "", why.Error()
	op.s.log.Warn("contents go through this host", "err", why)
	op.reporter.Waits(wayHome + ": " + why.Error())
	return nil
}

// errNoRehearsal: what a portable session needs of a target is found by a plan that builds
// there, without touching the session.
func errNoRehearsal(session string) error {
	return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("session %s uses OpenCL: a plan with --build tries its target without touching it, so there is no rehearsal", session))
}

func checkTarget(t *gpuctlv1.Target) error {
	if t.GetRuntime().GetLibrary() == "" && t.GetRuntime().GetRemote() == nil {
		return connect.NewError(connect.CodeInvalidArgument, errors.New("the target names neither a runtime library nor a lease of another host"))
	}
	return nil
}

// Plan reports whether a swap could work and what it would cost.
func (m *Manager) Plan(ctx context.Context, req *gpuctlv1.PlanRequest) (*gpuctlv1.PlanResponse, error) {
	s, err := m.lookup(req.Session)
	if err != nil {
		return nil, err
	}
	if req.Rehearse {
		return nil, errNoRehearsal(req.Session)
	}
	if err := checkTarget(req.Target); err != nil {
		return nil, err
	}
	if answered, _ := s.refresh(0); answered != nil {
		select {
		case <-answered:
		case <-ctx.Done():
		}
	}
	kind := kindSwap
	now := s.snapshot()
	if now.SuspendedTo != "" {
		kind = kindResume
	}
	resp := &gpuctlv1.PlanResponse{
		Reasons: Reasons(now.Usage, req.Target.Limits),
		Steps:   stepNames(kind),
		Bytes:   now.Usage.GetMemory(),
	}
	if now.State == gpuctlv1.SessionState_SESSION_STATE_LOST {
		resp.Reasons = append(resp.Reasons, &gpuctlv1.Reason{Code: "lost", Message: "the session is lost: " + now.Message})
	}
	total, stop := m.model.predict(now.Usage)
	resp.PredictedNs, resp.PredictedStopNs = total.Nanoseconds(), stop.Nanoseconds()
	resp.Total, resp.Stop = m.model.spread(total), m.model.spread(stop)
	if !req.Build || len(resp.Reasons) > 0 {
		return resp, nil
	}
	rs, err := s.tryTarget(ctx, req.Target)
	if err != nil {
		return nil, err
	}
	resp.Reasons = rs
	return resp, nil
}

// tryTarget starts the target, makes the session's objects on it, and ends it.
func (s *session) tryTarget(ctx context.Context, target *gpuctlv1.Target) ([]*gpuctlv1.Reason, error) {
	drop := errors.New("dropped")
	op, err := s.begin(ctx, kindPlan, func(op *operation) []engine.Step {
		return []engine.Step{{Name: stepPrepare, Undo: op.killTarget, Run: func(ctx context.Context) error {
			usage, devices, graph, err := s.needs(ctx, op.source)
			if err != nil {
				return err
			}
			if err := op.startTarget(ctx, target, usage, devices); err != nil {
				return err
			}
			if err := op.target.prepare(ctx, &gpuctlv1.PrepareRequest{Graph: graph}, op); err != nil {
				return err
			}
			return drop // success: the undo ends the target
		}}}
	}, "", buildTimeout, func(*gpuctlv1.Progress) {})
	if err != nil {
		return nil, err
	}
	res := op.run()
	switch {
	case res.Refused:
		return res.Reasons, nil
	case errors.Is(op.failure, drop):
		return nil, nil
	}
	// Any error of the target is a reason why it can't serve.
	return []*gpuctlv1.Reason{{Code: "build", Message: res.Error}}, nil
}

// needs returns what a target has to make: the objects of the running session, or those at
// the time of its suspend.
func (s *session) needs(ctx context.Context, source *executor) (usage *gpuctlv1.Usage, devices int, graph []byte, err error) {
	if source == nil {
		graph, err = s.readGraph()
		return s.snapshot().Usage, 0, graph, err
	}
	d, err := source.describe(ctx)
	if err != nil {
		return nil, 0, nil, err
	}
	snap, err := source.snapshot(ctx)
	if err != nil {
		return nil, 0, nil, err
	}
	return d.Usage, len(d.Devices), snap.Graph, nil
}
