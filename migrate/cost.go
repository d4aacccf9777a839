package migrate

import (
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// Cost is what a migration is predicted to take.
type Cost struct {
	Total time.Duration
	Stop  time.Duration // that the applications stand still
	Bytes uint64        // of the VM and its GPU state that are copied
}

// rate is what a step takes: a part that is the same each time, and one that
// grows with the bytes.
type rate struct {
	fixed  time.Duration
	perGiB time.Duration
	seen   int
}

// CostModel predicts steps from those that were seen.
type CostModel struct{ rates map[string]rate }

// NewCostModel returns a model with figures of real hosts' order; it learns
// better ones from every migration.
func NewCostModel() *CostModel {
	const second = time.Second
	return &CostModel{map[string]rate{
		StepReserve: {fixed: second / 50}, StepPrepare: {fixed: second}, StepFreeze: {fixed: second / 20, perGiB: second / 10},
		StepRelease: {fixed: second / 5}, StepDetach: {fixed: 3 * second}, StepMove: {fixed: 3 * second, perGiB: 10 * second},
		StepAttach: {fixed: 2 * second}, StepAwait: {fixed: second}, StepThaw: {fixed: second, perGiB: second / 10},
		StepCommit: {fixed: second / 50}, StepClean: {fixed: 2 * second},
		StepStop: {fixed: 20 * second}, StepDefine: {fixed: second / 5}, StepStart: {fixed: 10 * second},
	}}
}

const (
	gib = 1 << 30
	// weight of a new sight against what was known: a few migrations suffice
	// to forget the figures that were guessed.
	weight = 0.5
)

// Learn takes the steps of a migration that came to its good end.
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
		w := weight
		if r.seen == 0 {
			w = 1 // a sight is worth more than a guess
		}
		if s.GetBytes() >= gib/64 && r.perGiB > 0 {
			// The fixed part is kept: with bytes both can't be told apart by one sight.
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

func mix(old, now time.Duration, w float64) time.Duration {
	return time.Duration(float64(old)*(1-w) + float64(now)*w)
}

// price is what a candidate costs, step by step. link is in bytes per second.
func (c *CostModel) price(m MachineFacts, host, gpu string, link uint64, cold bool) (Cost, []Step) {
	move := &clusterv1.MachineMove{Name: m.Name, FromHost: m.Host, ToHost: host, ToGpu: gpu, Cold: cold}
	if len(m.GPUs) > 0 {
		move.FromGpu = m.GPUs[0]
	}
	var cost Cost
	var out []Step
	stopped := false
	for _, s := range steps(move) {
		r := c.rates[s.name]
		p := Step{Name: s.name, What: s.what, Undo: s.undone, Predicted: r.fixed}
		switch s.name {
		case StepFreeze, StepThaw:
			p.Bytes = m.state()
		case StepMove:
			p.Bytes = m.Memory
		}
		if p.Bytes > 0 {
			grows := time.Duration(float64(r.perGiB) * float64(p.Bytes) / gib)
			if s.name == StepMove && link > 0 && r.seen == 0 {
				grows = max(grows, time.Duration(float64(p.Bytes)/float64(link)*float64(time.Second)))
			}
			p.Predicted += grows
		}
		stopped = stopped || s.name == StepFreeze || s.name == StepStop
		cost.Total += p.Predicted
		cost.Bytes += p.Bytes
		if stopped {
			cost.Stop += p.Predicted
		}
		if s.name == StepThaw || s.name == StepStart {
			stopped = false
		}
		out = append(out, p)
	}
	return cost, out
}
