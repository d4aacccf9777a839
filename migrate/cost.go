package migrate

import (
	"cmp"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// Cost is the predicted cost of a migration.
type Cost struct {
	Total time.Duration
	Stop  time.Duration // downtime of the applications
	Bytes uint64        // bytes of the VM and its GPU state that are copied
	// TotalRange and StopRange are the ranges in which Total and Stop are expected.
	TotalRange, StopRange Range
}

// Range is the range in which a time is expected. Measured means that it is based on
// earlier migrations; otherwise it is an estimate for unknown hosts.
type Range struct {
	Low, High time.Duration
	Measured  bool
}

func (r Range) plus(o Range) Range {
	return Range{r.Low + o.Low, r.High + o.High, r.Measured && o.Measured}
}

// Relative errors of predictions: of an estimate in each direction, and the least of a
// measured time. The estimates are for real cards and fast hosts; in emulation, steps
// took fourteen times as long.
const (
	guessLow  = 4
	guessHigh = 16
	leastOff  = 0.25
	firstOff  = 0.5 // after one measurement
)

// rangeOf returns the range of a prediction.
func (r rate) rangeOf(d time.Duration) Range {
	if r.seen == 0 {
		return Range{Low: d / guessLow, High: d * guessHigh}
	}
	off := 1 + max(r.off, leastOff)
	return Range{Low: time.Duration(float64(d) / off), High: time.Duration(float64(d) * off), Measured: true}
}

// miss learns from the error of a prediction.
func (r *rate) miss(predicted, took time.Duration) {
	if r.seen == 0 {
		r.off = firstOff
		return
	}
	x := float64(max(took, predicted)) / float64(max(min(took, predicted), time.Millisecond))
	r.off = r.off*(1-weight) + (x-1)*weight
}

// rate is the time of a step: a fixed part, and a part that grows with the bytes.
type rate struct {
	fixed  time.Duration
	perGiB time.Duration
	seen   int
	off    float64 // mean relative error; 0.5: half as much again
}

// CostModel predicts the time of steps from earlier migrations.
type CostModel struct {
	rates map[string]rate
	swaps rate // downtime of a swap of all sessions: the fixed part
	away  rate // of states that leave the VM in a freeze and come back in a thaw
}

// NewCostModel returns a model with estimates for real hosts. It learns from each
// migration.
func NewCostModel() *CostModel {
	const second = time.Second
	return &CostModel{swaps: rate{fixed: second / 5}, rates: map[string]rate{
		StepReserve: {fixed: second / 50}, StepPrepare: {fixed: second}, StepFreeze: {fixed: second / 20, perGiB: second / 10},
		StepRelease: {fixed: second / 5}, StepDetach: {fixed: 3 * second}, StepMove: {fixed: 3 * second, perGiB: 10 * second},
		StepAttach: {fixed: 2 * second}, StepAwait: {fixed: second}, StepThaw: {fixed: second, perGiB: second / 10},
		StepPark: {fixed: second / 10}, StepRestore: {fixed: second}, StepDrop: {fixed: second / 10}, StepRenew: {fixed: second / 10},
		StepCommit: {fixed: second / 50}, StepClean: {fixed: 2 * second},
		StepBorrow: {fixed: second / 10}, StepSwap: {fixed: 2 * second, perGiB: 10 * second}, StepHome: {fixed: 2 * second, perGiB: 10 * second},
		StepStop: {fixed: 20 * second}, StepDefine: {fixed: second / 5}, StepStart: {fixed: 10 * second},
	}}
}

const (
	gib = 1 << 30
	// weight of a new measurement against the old value: after a few migrations, the
	// estimates have little influence.
	weight = 0.5
)

// Learn learns from the steps of a migration that was successful.
func (c *CostModel) Learn(m *clusterv1.Migration) {
	if m.GetState() != clusterv1.MigrationState_MIGRATION_STATE_DONE {
		return
	}
	for _, s := range m.GetSteps() {
		r, known := c.rates[s.GetName()]
		if !known || s.GetUndo() || s.GetError() != "" || s.GetTookNs() <= 0 {
			continue
		}
		took := time.Duration(s.GetTookNs())
		if n := time.Duration(s.GetStoppedNs()); n > 0 {
			w := c.swaps.weight()
			c.swaps.miss(c.swaps.fixed, n)
			c.swaps.fixed = mix(c.swaps.fixed, n, w)
			c.swaps.seen++
		}
		if away := m.GetMachine().GetAwayBytes(); away > 0 && (s.GetName() == StepFreeze || s.GetName() == StepThaw) {
			// Nearly all of the time was for the states that left the VM.
			if away >= leastAway {
				per := time.Duration(float64(took-min(r.fixed, took/2)) / (float64(away) / gib))
				c.away.miss(c.away.perGiB, per)
				c.away.perGiB = mix(c.away.perGiB, per, c.away.weight())
				c.away.seen++
			}
			continue
		}
		w := r.weight()
		r.miss(r.fixed+time.Duration(float64(r.perGiB)*float64(s.GetBytes())/gib), took)
		if s.GetBytes() >= gib/64 && r.perGiB > 0 {
			// Keep the fixed part: one measurement cannot distinguish it from the part
			// for the bytes.
			fixed := min(r.fixed, took/2)
			per := time.Duration(float64(took-fixed) / (float64(s.GetBytes()) / gib))
			r.fixed, r.perGiB = fixed, mix(r.perGiB, per, w)
		} else {
			r.fixed = mix(r.fixed, took, w)
		}
		r.seen++
		c.rates[s.GetName()] = r
	}
}

// leastAway is from how many bytes on the time of a step is used to measure the speed.
const leastAway = 1 << 20

// weight returns the weight of the next measurement.
func (r rate) weight() float64 {
	if r.seen == 0 {
		return 1 // the first measurement replaces the estimate
	}
	return weight
}

// awayTime returns how long n bytes need to leave the VM, or to come back.
func (c *CostModel) awayTime(n uint64, a *AgentFacts) time.Duration {
	switch {
	case n == 0:
		return 0
	case c.away.seen > 0:
		return time.Duration(float64(c.away.perGiB) * float64(n) / gib)
	default:
		return time.Duration(float64(n) / float64(cmp.Or(a.Bulk, slowestBulk)) * float64(time.Second))
	}
}

// slowestBulk is the assumed speed of states that leave a VM if it is unknown, in bytes
// per second.
const slowestBulk = 256 << 10

func mix(old, now time.Duration, w float64) time.Duration {
	return time.Duration(float64(old)*(1-w) + float64(now)*w)
}

// Estimates of the downtime of applications that compute while their VM moves.
const (
	movePause = time.Second // of the VM itself, when it changes hosts
	dirtyPart = 20          // a swap copies the last twentieth of the state while it is frozen
	slowLink  = 100 << 20   // bytes per second, if the link is unknown
)

// pause returns the downtime that a step causes of applications on a remote GPU.
func (c *CostModel) pause(name string, state, link uint64) (time.Duration, Range) {
	switch name {
	case StepSwap, StepHome:
		d := c.swaps.fixed
		if c.swaps.seen == 0 {
			d += time.Duration(float64(state) / dirtyPart / float64(cmp.Or(link, slowLink)) * float64(time.Second))
		}
		return d, c.swaps.rangeOf(d)
	case StepMove:
		return movePause, rate{}.rangeOf(movePause)
	}
	return 0, Range{Measured: true}
}

// price returns the cost of a candidate, step by step. link is in bytes per second.
func (c *CostModel) price(r Request, m VMFacts, host, gpu string, link uint64) (Cost, []Step) {
	far := r.far
	move := &clusterv1.MachineMove{Name: m.Name, FromHost: m.Host, ToHost: host, ToGpu: gpu, Cold: r.Cold, Parts: m.PartGPUs()}
	if far != nil {
		move.FarGpu = far.ID
	}
	if !r.Cold && far == nil {
		move.AwayBytes = sum(m.Agent.away(nil))
	}
	if len(m.GPUs) > 0 {
		move.FromGpu = m.GPUs[0]
	}
	var cost Cost
	var out []Step
	stopped, parked := false, false
	cost.TotalRange.Measured, cost.StopRange.Measured = true, true
	for _, s := range steps(move) {
		r := c.rates[s.name]
		p := Step{Name: s.name, What: s.what, Undo: s.undone, Predicted: r.fixed}
		switch s.name {
		case StepFreeze, StepThaw, StepSwap, StepHome:
			p.Bytes = m.state()
		case StepMove:
			p.Bytes = m.Memory
		}
		if p.Bytes > 0 {
			grows := time.Duration(float64(r.perGiB) * float64(p.Bytes) / gib)
			if s.name == StepMove && link > 0 && r.seen == 0 {
				grows = max(grows, time.Duration(float64(p.Bytes)/float64(link)*float64(time.Second)))
			}
			if far != nil && far.Link > 0 && r.seen == 0 && (s.name == StepSwap || s.name == StepHome) {
				grows = time.Duration(float64(p.Bytes) / float64(far.Link) * float64(time.Second))
			}
			p.Predicted += grows
		}
		p.Range = r.rangeOf(p.Predicted)
		if t := c.awayTime(move.GetAwayBytes(), m.Agent); t > 0 && (s.name == StepFreeze || s.name == StepThaw) {
			p.Predicted += t
			p.Range = p.Range.plus(c.away.rangeOf(t))
		}
		stopped = stopped || s.name == StepFreeze || s.name == StepStop
		parked = parked || s.name == StepPark
		cost.Total += p.Predicted
		cost.TotalRange = cost.TotalRange.plus(p.Range)
		cost.Bytes += p.Bytes
		if stopped || parked {
			cost.Stop += p.Predicted
			cost.StopRange = cost.StopRange.plus(p.Range)
		}
		if far != nil {
			d, within := c.pause(s.name, p.Bytes, far.Link)
			cost.Stop += d
			cost.StopRange = cost.StopRange.plus(within)
		}
		if s.name == StepThaw || s.name == StepStart {
			stopped = false
		}
		parked = parked && s.name != StepRestore
		out = append(out, p)
	}
	return cost, out
}
