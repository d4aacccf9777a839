package session

import (
	"context"
	"errors"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

const (
	precopyRounds = 5
	// precopyEnough ends the rounds when less than 1/100 of the memory is dirty.
	precopyEnough = 100
)

// swap moves a session to the target while its application runs. A suspended
// session is resumed there. Refusals and roll-backs are in the result.
func (m *Manager) swap(ctx context.Context, req *gpuctlv1.SwapRequest, sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
	s, err := m.lookup(req.Session)
	if err != nil {
		return nil, err
	}
	if err := checkTarget(req.Target); err != nil {
		return nil, err
	}
	if s.snapshot().SuspendedTo != "" {
		return m.resume(ctx, &gpuctlv1.ResumeRequest{Session: req.Session, Target: req.Target, FailAt: req.FailAt, TimeoutMs: req.TimeoutMs}, sink)
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

func (w *swapping) steps(op *operation) []step {
	return []step{
		{name: stepCheck, run: func(ctx context.Context) error {
			d, err := op.source.describeWithin(ctx, freezePatience(w.req.FreezeTimeoutMs))
			if err != nil {
				return err
			}
			w.usage, w.devices, op.freeze = d.Usage, len(d.Devices), d.Freezes+1
			return refuse(Reasons(w.usage, w.req.Target.Limits))
		}},
		{name: stepStart, undo: op.killTarget, run: func(ctx context.Context) error {
			return op.startTarget(ctx, w.req.Target, w.usage, w.devices)
		}},
		{name: stepPrepare, run: func(ctx context.Context) error {
			snap, err := op.source.snapshot(ctx)
			if err != nil {
				return err
			}
			op.graph = snap.Graph
			return op.target.prepare(ctx, &gpuctlv1.PrepareRequest{Graph: op.graph}, op)
		}},
		{name: stepPrecopy, undo: op.discardSource, run: func(ctx context.Context) error { return op.precopy(ctx, w.usage.GetMemory()) }},
		{name: stepFreeze, undo: op.thawSource, run: func(ctx context.Context) error {
			return op.freezeSource(ctx, w.req.FreezeTimeoutMs)
		}},
		{name: stepTransfer, run: func(ctx context.Context) error {
			if err := op.target.prepare(ctx, &gpuctlv1.PrepareRequest{Graph: op.graph, Final: true}, op); err != nil {
				return err
			}
			n, err := op.source.export(ctx, &gpuctlv1.ExportRequest{Peer: op.target.importSocket, Final: true}, op)
			op.result.BytesFrozen = n
			return err
		}},
		{name: stepSwitch, commit: true, run: func(ctx context.Context) error {
			if err := op.handOver(ctx, op.source.gen); err != nil {
				return err
			}
			op.recordDowntime()
			old := op.source.record()
			op.adoptTarget(func(r *record) { r.Op.Other = &old })
			return nil
		}},
		{name: stepRetire, run: func(ctx context.Context) error { return op.source.retire(ctx) }},
	}
}

// precopy sends contents while the application runs, in rounds, as long as each round makes
// the rest smaller. It keeps the target's objects up to date.
func (op *operation) precopy(ctx context.Context, memory uint64) error {
	dirty := ^uint64(0)
	for round := range precopyRounds {
		n, err := op.source.export(ctx, &gpuctlv1.ExportRequest{
			Peer: op.target.importSocket, All: round == 0, // earlier targets may have got what this one does not have
		}, op)
		op.result.BytesPrecopied += n
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

func checkTarget(t *gpuctlv1.Target) error {
	if t.GetRuntime().GetLibrary() == "" && t.GetRuntime().GetRemote() == nil {
		return connect.NewError(connect.CodeInvalidArgument, errors.New("the target names neither a runtime library nor a lease of another host"))
	}
	return nil
}

// plan reports whether a swap could work and what it would cost.
func (m *Manager) plan(ctx context.Context, req *gpuctlv1.PlanRequest) (*gpuctlv1.PlanResponse, error) {
	s, err := m.lookup(req.Session)
	if err != nil {
		return nil, err
	}
	if err := checkTarget(req.Target); err != nil {
		return nil, err
	}
	s.refresh(ctx, 0)
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
	op, err := s.begin(ctx, kindPlan, func(op *operation) []step {
		return []step{{name: stepPrepare, undo: op.killTarget, run: func(ctx context.Context) error {
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
