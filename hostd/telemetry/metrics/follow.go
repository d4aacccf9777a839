package metrics

import (
	"context"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/internal/wait"
)

const (
	followEvery = time.Second     // shortest time between two reads of the state
	lookAgain   = 5 * time.Second // pause while the host is in no cluster
)

// Follow measures how long claims wait, until ctx ends. It sleeps while no claim changes.
// Only the leader counts, so that the sum over all hosts is the cluster's.
func (m *Metrics) Follow(ctx context.Context) {
	if m.sources.View == nil || m.sources.Status == nil {
		return
	}
	var seen uint64
	var of string // id of the cluster that seen belongs to
	for {
		var changed <-chan struct{}
		pause := lookAgain
		if v := m.sources.View(); v != nil {
			changed, pause = v.Changed(clusterv1.Kind_KIND_CLAIM), followEvery
			switch s := m.sources.Status(); {
			case v.ClusterID() != of, s.GetLeader() == "", s.GetLeader() != s.GetHost():
			default:
				for _, d := range waits(v, seen) {
					m.bound.WithLabelValues().Observe(d.Seconds())
				}
			}
			of, seen = v.ClusterID(), v.Index()
		}
		if wait.For(ctx, pause) != nil {
			return
		}
		if changed == nil {
			continue
		}
		// A host may leave its cluster without a change of the state. Then this channel
		// is never closed.
		for waiting := true; waiting; {
			timer := time.NewTimer(lookAgain)
			select {
			case <-ctx.Done():
				timer.Stop()
				return
			case <-changed:
				waiting = false
			case <-timer.C:
				v := m.sources.View()
				waiting = v != nil && v.ClusterID() == of && v.Index() == seen
			}
			timer.Stop()
		}
	}
}

// waits returns how long claims waited that were bound after a log entry: since they were
// made, or since they lost their assignment.
func waits(v *state.View, after uint64) (all []time.Duration) {
	for _, e := range recent(v, after) {
		if e.GetKind() != clusterv1.Kind_KIND_CLAIM || e.GetType() != "Bound" || e.GetIndex() <= after {
			continue
		}
		c := v.Claim(e.GetObject())
		if c == nil {
			continue
		}
		since := c.GetCreatedUnixMs()
		for _, earlier := range v.Events(clusterv1.Kind_KIND_CLAIM, c.GetId(), 16) {
			if earlier.GetType() == "ClaimPending" && earlier.GetIndex() < e.GetIndex() && earlier.GetObject() == c.GetId() {
				since = max(since, earlier.GetUnixMs())
			}
		}
		all = append(all, time.Duration(max(e.GetUnixMs()-since, 0))*time.Millisecond)
	}
	return all
}

// recent returns the events after a log entry, and possibly some before it.
func recent(v *state.View, after uint64) []*clusterv1.Event {
	for last := 128; ; last *= 8 {
		events := v.Events(clusterv1.Kind_KIND_UNSPECIFIED, "", last)
		if len(events) < last || events[0].GetIndex() <= after {
			return events
		}
	}
}
