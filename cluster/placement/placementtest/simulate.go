package placementtest

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/cluster/query"
	"github.com/gpuctl/gpuctl/cluster/state"
)

// Chooser finds where a claim goes in a view; nothing if nowhere. It serves one
// simulation.
type Chooser interface {
	Name() string
	Choose(v *state.View, c *clusterv1.Claim) []*clusterv1.Choice
	// Times are how long each decision took.
	Times() []time.Duration
}

// Placer chooses by placement.Place.
type Placer struct {
	policy  clusterv1.Policy
	index   *placement.Index
	cache   *query.Cache
	times   []time.Duration
	updates []time.Duration
}

// NewPlacer makes a chooser of a policy.
func NewPlacer(policy clusterv1.Policy) *Placer {
	return &Placer{policy: policy, cache: query.NewCache()}
}

// Name of the policy.
func (p *Placer) Name() string { return query.Enum(p.policy) }

// Choose the best candidate.
func (p *Placer) Choose(v *state.View, c *clusterv1.Claim) []*clusterv1.Choice {
	start := time.Now()
	if p.index == nil {
		p.index = placement.NewIndex(v)
	} else {
		p.index.Update(v)
		p.updates = append(p.updates, time.Since(start))
	}
	start = time.Now()
	req := placement.Request{Claim: c, Limit: 1}
	if c.GetExpr() != "" {
		q, err := p.cache.Compile(clusterv1.Kind_KIND_GPU, c.GetExpr())
		if err != nil {
			return nil
		}
		req.Expr = q
	}
	d := placement.Place(p.index, req)
	p.times = append(p.times, time.Since(start))
	if !d.OK() {
		return nil
	}
	return d.Candidates[0].Choices
}

// Times of the decisions, with the compilation of expressions, without updates
// of the index.
func (p *Placer) Times() []time.Duration { return p.times }

// Updates are how long it took to bring the index up to date, each time.
func (p *Placer) Updates() []time.Duration { return p.updates }

// baseline goes through hosts until one fits.
type baseline struct {
	name  string
	order func(n int) []int
	times []time.Duration
}

// FirstFit takes the first GPUs that fit, by name.
func FirstFit() Chooser {
	var same []int
	return &baseline{name: "first-fit", order: func(n int) []int {
		for i := len(same); i < n; i++ {
			same = append(same, i)
		}
		return same[:n]
	}}
}

// Random takes GPUs that fit of any host.
func Random(seed uint64) Chooser {
	rng := rand.New(rand.NewPCG(seed, 2)) //nolint:gosec // repeatable
	return &baseline{name: "random", order: rng.Perm}
}

func (b *baseline) Name() string           { return b.name }
func (b *baseline) Times() []time.Duration { return b.times }

func (b *baseline) Choose(v *state.View, c *clusterv1.Claim) []*clusterv1.Choice {
	start := time.Now()
	defer func() { b.times = append(b.times, time.Since(start)) }()
	match := func(*clusterv1.Object) (bool, error) { return true, nil }
	if c.GetExpr() != "" {
		q, err := query.Compile(clusterv1.Kind_KIND_GPU, c.GetExpr())
		if err != nil {
			return nil
		}
		match = q.Matcher()
	}
	var hosts []string
	for h := range v.Hosts() {
		hosts = append(hosts, h.GetName())
	}
	for _, i := range b.order(len(hosts)) {
		var choices []*clusterv1.Choice
		for g := range v.GPUsOfHost(hosts[i]) {
			choice := &clusterv1.Choice{Gpu: g.GetId(), Memory: c.GetMinMemory()}
			fits := g.GetFree()
			if c.GetMinMemory() > 0 {
				fits = g.GetFreeMemory() >= c.GetMinMemory()
			}
			if ok, err := match(&clusterv1.Object{Object: &clusterv1.Object_Gpu{Gpu: g}}); err != nil || !ok || !fits {
				continue
			}
			if choices = append(choices, choice); len(choices) == int(max(1, c.GetCount())) {
				return choices
			}
		}
	}
	return nil
}

// Report is what a simulation found.
type Report struct {
	Policy        string
	Tasks         int
	Placed        int
	Refused       int           // by the state, of what was chosen: there must be none
	Asked         int           // thousandths of a GPU, of all tasks
	Given         int           // of those placed
	Capacity      int           // of the cluster
	Allocated     float64       // highest part of the capacity that was held at once
	Fragmentation float64       // mean part of the free capacity that the tasks could not use, over the run
	P50, P99, Max time.Duration // of a decision
	UpdateP99     time.Duration // of the index, where there is one
}

func (r Report) String() string {
	return fmt.Sprintf(
		"%-10s placed %d of %d tasks (%.2f %% of the demand), at most %.2f %% allocated, %.2f %% of the free fragmented; decision p50 %s p99 %s max %s, update p99 %s",
		r.Policy, r.Placed, r.Tasks, 100*float64(r.Given)/float64(max(1, r.Asked)), 100*r.Allocated, 100*r.Fragmentation,
		r.P50, r.P99, r.Max, r.UpdateP99,
	)
}

// event of a simulation.
type event struct {
	at     int64
	leaves bool
	task   int
}

// Replay has the tasks come and go as in the trace. Those that do not fit when
// they come are gone.
func (t *Trace) Replay(ch Chooser) (Report, error) {
	var events []event
	for i, task := range t.Tasks {
		events = append(events, event{task.Arrives, false, i})
		if task.Leaves > task.Arrives {
			events = append(events, event{task.Leaves, true, i})
		}
	}
	slices.SortStableFunc(events, func(a, b event) int {
		// Who leaves makes room for who comes in the same second.
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(b2i(b.leaves), b2i(a.leaves)))
	})
	return t.simulate(ch, events)
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// Fill has tasks come that are drawn from the trace's, and none go, until they
// have asked for a multiple of the capacity. How much of it is then allocated
// is what the policy wastes.
func (t *Trace) Fill(ch Chooser, demand float64, seed uint64) (Report, error) {
	capacity := 0
	for _, n := range t.Nodes {
		capacity += 1000 * n.GPUs
	}
	if len(t.Tasks) == 0 || capacity == 0 {
		return Report{}, fmt.Errorf("trace: no tasks or no GPUs")
	}
	rng := rand.New(rand.NewPCG(seed, 3)) //nolint:gosec // repeatable
	var events []event
	for asked := 0; float64(asked) < demand*float64(capacity); {
		i := rng.IntN(len(t.Tasks))
		asked += t.Tasks[i].demand()
		events = append(events, event{int64(len(events)), false, i})
	}
	return t.simulate(ch, events)
}

func (t *Trace) simulate(ch Chooser, events []event) (Report, error) {
	c, err := t.Cluster()
	if err != nil {
		return Report{}, err
	}
	policy := clusterv1.Policy_POLICY_UNSPECIFIED
	if p, ok := ch.(*Placer); ok {
		policy = p.policy
	}
	r := Report{Policy: ch.Name()}
	for _, n := range t.Nodes {
		r.Capacity += 1000 * n.GPUs
	}
	frag := newFragmentation(t)
	held, samples := 0, 0
	claims := map[int]string{} // of tasks that are there
	for i, e := range events {
		task := t.Tasks[e.task]
		if e.leaves {
			if id, ok := claims[e.task]; ok {
				c.Delete(id)
				delete(claims, e.task)
				held -= task.demand()
			}
			continue
		}
		r.Tasks++
		r.Asked += task.demand()
		id := fmt.Sprintf("t%d", i)
		claim := task.Claim(id, policy)
		if choices := ch.Choose(c.Store.View(), claim); choices != nil {
			if res := c.Put(claim, choices); res.GetOutcome() == clusterv1.Outcome_OUTCOME_OK {
				r.Placed++
				r.Given += task.demand()
				held += task.demand()
				claims[e.task] = id
				r.Allocated = max(r.Allocated, float64(held)/float64(r.Capacity))
			} else {
				r.Refused++
			}
		}
		if i%200 == 199 {
			r.Fragmentation += frag.of(c.Store.View())
			samples++
		}
	}
	r.Fragmentation /= float64(max(1, samples))
	r.P50, r.P99, r.Max = Percentiles(ch.Times())
	if p, ok := ch.(*Placer); ok {
		_, r.UpdateP99, _ = Percentiles(p.Updates())
	}
	return r, nil
}

// Percentiles are the median, the 99th and the longest of some times.
func Percentiles(times []time.Duration) (p50, p99, longest time.Duration) {
	if len(times) == 0 {
		return 0, 0, 0
	}
	sorted := slices.Sorted(slices.Values(times))
	at := func(q float64) time.Duration { return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))] }
	return at(0.5), at(0.99), sorted[len(sorted)-1]
}

// fragmentation is that of "Beware of Fragmentation" (USENIX ATC 2023): of a
// host's free GPUs, what a task of the workload could not use, weighed by how
// frequent such tasks are.
type fragmentation struct {
	shapes []shape
	total  float64
}

type shape struct {
	gpus, milli int
	task        Task
	weight      float64
}

func newFragmentation(t *Trace) *fragmentation {
	f := &fragmentation{}
	at := map[string]int{}
	for _, task := range t.Tasks {
		k := fmt.Sprint(task.GPUs, task.Milli, task.Models)
		if _, ok := at[k]; !ok {
			at[k] = len(f.shapes)
			f.shapes = append(f.shapes, shape{gpus: task.GPUs, milli: min(1000, task.demand()), task: task})
		}
		f.shapes[at[k]].weight++
		f.total++
	}
	// The rare ones change nothing and cost as much.
	slices.SortStableFunc(f.shapes, func(a, b shape) int { return cmp.Compare(b.weight, a.weight) })
	f.shapes = f.shapes[:min(len(f.shapes), 40)]
	f.total = 0
	for _, s := range f.shapes {
		f.total += s.weight
	}
	return f
}

// of a view: the part of what is free that the tasks cannot use.
func (f *fragmentation) of(v *state.View) float64 {
	var free, lost float64
	for h := range v.Hosts() {
		var left []int
		model := ""
		for g := range v.GPUsOfHost(h.GetName()) {
			left = append(left, int(g.GetFreeMemory()/milli))
			model = g.GetModel()
		}
		sum := 0
		for _, n := range left {
			sum += n
		}
		if sum == 0 {
			continue
		}
		free += float64(sum)
		for _, s := range f.shapes {
			fit, useless := 0, 0
			for _, n := range left {
				if n >= s.milli {
					fit++
				} else {
					useless += n
				}
			}
			if fit < s.gpus || len(s.task.Models) > 0 && !slices.Contains(s.task.Models, model) {
				useless = sum
			}
			lost += float64(useless) * s.weight / f.total
		}
	}
	if free == 0 {
		return 0
	}
	return lost / free
}
