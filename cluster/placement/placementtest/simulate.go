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

// Chooser finds where a claim goes in a view. It returns nothing if the claim does not
// fit. It is used in one simulation only.
type Chooser interface {
	Name() string
	Choose(v *state.View, c *clusterv1.Claim) []*clusterv1.Choice
	// Times returns how long each decision took.
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

// NewPlacer returns a Placer with a policy.
func NewPlacer(policy clusterv1.Policy) *Placer {
	return &Placer{policy: policy, cache: query.NewCache()}
}

// Name returns the name of the policy.
func (p *Placer) Name() string { return query.Enum(p.policy) }

// Choose returns the best candidate.
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

// Times returns the duration of each decision, including the compilation of expressions,
// and without updates of the index.
func (p *Placer) Times() []time.Duration { return p.times }

// Updates returns the duration of each update of the index.
func (p *Placer) Updates() []time.Duration { return p.updates }

// baseline examines hosts until one fits.
type baseline struct {
	name  string
	order func(n int) []int
	times []time.Duration
}

// FirstFit returns a Chooser that takes the first GPUs that fit, by name.
func FirstFit() Chooser {
	var same []int
	return &baseline{name: "first-fit", order: func(n int) []int {
		for i := len(same); i < n; i++ {
			same = append(same, i)
		}
		return same[:n]
	}}
}

// Random returns a Chooser that takes GPUs that fit on a random host.
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

// Report is the result of a simulation.
type Report struct {
	Policy        string
	Tasks         int
	Placed        int
	Refused       int           // choices that the state machine refused: there must be none
	Asked         int           // thousandths of a GPU, over all tasks
	Given         int           // thousandths of a GPU, over the placed tasks
	Capacity      int           // of the cluster, in thousandths of a GPU
	Allocated     float64       // largest part of the capacity that was in use at once
	Fragmentation float64       // mean part of the free capacity that the tasks could not use
	P50, P99, Max time.Duration // durations of decisions
	UpdateP99     time.Duration // duration of updates of the index, if there is one
}

func (r Report) String() string {
	return fmt.Sprintf(
		"%-10s placed %d of %d tasks (%.2f %% of the demand), at most %.2f %% allocated, %.2f %% of the free fragmented; decision p50 %s p99 %s max %s, update p99 %s",
		r.Policy, r.Placed, r.Tasks, 100*float64(r.Given)/float64(max(1, r.Asked)), 100*r.Allocated, 100*r.Fragmentation,
		r.P50, r.P99, r.Max, r.UpdateP99,
	)
}

// event is the arrival or departure of a task.
type event struct {
	at     int64
	leaves bool
	task   int
}

// Replay lets the tasks arrive and leave as in the trace. Tasks that do not fit when they
// arrive are dropped.
func (t *Trace) Replay(ch Chooser) (Report, error) {
	var events []event
	for i, task := range t.Tasks {
		events = append(events, event{task.Arrives, false, i})
		if task.Leaves > task.Arrives {
			events = append(events, event{task.Leaves, true, i})
		}
	}
	slices.SortStableFunc(events, func(a, b event) int {
		// In the same second, departures come before arrivals.
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

// Fill lets random tasks of the trace arrive and stay, until they have asked for demand
// times the capacity. How much of the capacity is allocated then shows how much the
// policy wastes.
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
	claims := map[int]string{} // claims of the running tasks
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

// Percentiles returns the median, the 99th percentile and the maximum.
func Percentiles(times []time.Duration) (p50, p99, longest time.Duration) {
	if len(times) == 0 {
		return 0, 0, 0
	}
	sorted := slices.Sorted(slices.Values(times))
	at := func(q float64) time.Duration { return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))] }
	return at(0.5), at(0.99), sorted[len(sorted)-1]
}

// fragmentation is the measure of "Beware of Fragmentation" (USENIX ATC 2023): the part
// of a host's free GPUs that a task of the workload could not use, weighted by how
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
	// Rare shapes do not change the result, and cost as much time.
	slices.SortStableFunc(f.shapes, func(a, b shape) int { return cmp.Compare(b.weight, a.weight) })
	f.shapes = f.shapes[:min(len(f.shapes), 40)]
	f.total = 0
	for _, s := range f.shapes {
		f.total += s.weight
	}
	return f
}

// of returns the part of a view's free capacity that the tasks cannot use.
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
