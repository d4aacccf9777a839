package sessions

import (
	"context"
	"time"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/cost"
)

const million = 1_000_000

// ofLink converts what the cluster knows of a link, for moves over it or back.
func ofLink(l *clusterv1.Link, back bool) cost.Link {
	out := cost.Link{
		RTT: time.Duration(l.GetRttNs()), Rate: float64(l.GetRate()), Samples: l.GetSamples(),
		Moves: l.GetMoves(), Fixed: time.Duration(l.GetFixedNs()).Seconds(), Frozen: float64(l.GetFrozenPpm()) / million,
	}
	if back {
		out.Moves, out.Fixed, out.Frozen = l.GetBackMoves(), time.Duration(l.GetBackFixedNs()).Seconds(), float64(l.GetBackFrozenPpm())/million
	}
	return out
}

// enter writes what is known now into the link's record.
func enter(l *clusterv1.Link, c cost.Link, back bool) *clusterv1.Link {
	if l == nil {
		l = &clusterv1.Link{}
	}
	l.RttNs, l.Rate, l.Samples = int64(c.RTT), uint64(c.Rate), c.Samples
	fixed, frozen := int64(c.Fixed*float64(time.Second)), uint32(c.Frozen*million)
	if back {
		l.BackMoves, l.BackFixedNs, l.BackFrozenPpm = c.Moves, fixed, frozen
	} else {
		l.Moves, l.FixedNs, l.FrozenPpm = c.Moves, fixed, frozen
	}
	return l
}

// calibrate measures the link to a host, if that was not done in the last hour.
func (h *Host) calibrate(ctx context.Context, host string) {
	err := h.Cluster.Calibrate(ctx, host, func(l *clusterv1.Link, rtt time.Duration, rate float64) *clusterv1.Link {
		return enter(l, ofLink(l, false).Calibrated(rtt, rate), false)
	})
	if err != nil && ctx.Err() == nil {
		h.Log.Debug("link not measured", "host", host, "err", err)
	}
}

// otherEnd returns the other host of a move; empty: it is within this host.
func (h *Host) otherEnd(from []string, to placement) string {
	switch {
	case to.far():
		return hostOf(to[0].GetId())
	case len(from) > 0 && far(from[0]):
		return hostOf(from[0])
	}
	return ""
}

func ofRange(r cost.Range) *gpuctlv1.Prediction {
	return &gpuctlv1.Prediction{LowNs: int64(r.Low), HighNs: int64(r.High), Measured: r.Measured}
}

func here(plan *gpuctlv1.PlanResponse) cost.Here {
	return cost.Here{Total: time.Duration(plan.GetPredictedNs()), Stop: time.Duration(plan.GetPredictedStopNs()), Measured: plan.GetTotal().GetMeasured()}
}

// price adds to a plan what the network does to it: the way of the state, the downtime,
// and how much slower the session computes at its target.
func (h *Host) price(ctx context.Context, s *gpuctlv1.Session, to placement, plan *gpuctlv1.PlanResponse, res *gpuctlv1.HostPlanResponse) {
	from := splitIDs(s.GetTarget().GetGpu())
	res.Path = h.pathOf(from, to.ids(), h.goesStraight(ctx, s, to))
	host := h.otherEnd(from, to)
	if host == "" {
		return
	}
	h.calibrate(ctx, host)
	link := ofLink(h.Cluster.Link(host), !to.far())
	total, stop := link.Move(s.GetUsage().GetMemory(), here(plan))
	res.PredictedNs, res.PredictedStopNs = int64(total.Likely), int64(stop.Likely)
	res.Total, res.Stop = ofRange(total), ofRange(stop)
	if to.far() {
		each := link.PerSecond(activity(s, time.Now()))
		res.PerSecond, res.PerSecondNs = ofRange(each), int64(each.Likely)
	}
}

// activity returns what a session has done in a second, on average since it began.
func activity(s *gpuctlv1.Session, now time.Time) cost.Activity {
	lived := now.Sub(time.UnixMilli(s.GetStartedUnixMs())).Seconds()
	if lived < 1 {
		lived = 1
	}
	return cost.Activity{Calls: float64(s.GetUsage().GetCalls()) / lived, Waits: -1}
}

// learn compares a move over the network with what was predicted, and refines what is
// known of the link.
func (h *Host) learn(op *operation, s *gpuctlv1.Session, to placement, r *gpuctlv1.SwapResult) {
	host := h.otherEnd(splitIDs(s.GetTarget().GetGpu()), to)
	if host == "" || r.GetStoppedNs() <= 0 || r.GetBytesStraight() > 0 { // contents went over another link
		return
	}
	old := h.Cluster.Link(host)
	link, memory := ofLink(old, !to.far()), s.GetUsage().GetMemory()
	_, predicted := link.Move(memory, op.here)
	now := enter(proto.CloneOf(old), link.Learn(memory, r.GetBytesFrozen(), op.here, time.Duration(r.GetStoppedNs())), !to.far())
	now.To, now.PredictedStopNs, now.StoppedNs = host, int64(predicted.Likely), r.GetStoppedNs()
	h.Log.Info("moved over the network", "session", op.Session, "host", host, "predicted", predicted.Likely, "low", predicted.Low, "high", predicted.High,
		"stopped", time.Duration(r.GetStoppedNs()), "measured", predicted.Measured)
	h.work.Go(func() {
		if err := h.Cluster.ReportLink(h.ctx, now); err != nil && h.ctx.Err() == nil {
			h.Log.Debug("link not reported", "host", host, "err", err)
		}
	})
}
