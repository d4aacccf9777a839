package replica_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/clustertest"
	"github.com/gpuctl/gpuctl/cluster/replica"
)

// op is what a client asked of one GPU, and what it was told.
type op struct {
	kind  string // acquire, release, read
	gpu   string
	claim string
}

type answer struct {
	known bool   // else it may or may not have happened, now or later
	ok    bool   // of acquire: not refused
	owner string // of read
	token uint64 // of acquire and read
}

type owned struct {
	claim string
	token uint64 // highest that was seen
}

// gpuModel is a GPU with one owner at most, and tokens that only grow.
func gpuModel() porcupine.Model {
	return porcupine.Model{
		Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
			by := map[string][]porcupine.Operation{}
			for _, o := range history {
				g := o.Input.(op).gpu
				by[g] = append(by[g], o)
			}
			var out [][]porcupine.Operation
			for _, h := range by {
				out = append(out, h)
			}
			return out
		},
		Init: func() any { return owned{} },
		Step: func(state, input, output any) (bool, any) {
			s, in, out := state.(owned), input.(op), output.(answer)
			switch in.kind {
			case "acquire":
				switch {
				case !out.known && s.claim == "":
					return true, owned{in.claim, s.token}
				case !out.known:
					return true, s
				case out.ok:
					return s.claim == "" && out.token > s.token, owned{in.claim, out.token}
				}
				return s.claim != "", s
			case "release":
				if s.claim == in.claim {
					return true, owned{"", s.token}
				}
				return true, s
			}
			if out.owner != s.claim || out.owner != "" && out.token < s.token {
				return false, s
			}
			return true, owned{s.claim, max(s.token, out.token)}
		},
		DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v → %+v", input, output) },
	}
}

type chaos struct {
	*clustertest.Cluster
	t     *testing.T
	gpus  []string
	start time.Time
	seq   atomic.Int64

	mu      sync.Mutex
	history []porcupine.Operation
	never   map[string]bool   // claims that were certainly not made
	acked   map[uint64]string // entries of acknowledged acquisitions
	counts  map[string]int
}

func (c *chaos) count(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts[what]++
}

// record an operation that began at a time.
func (c *chaos) record(client int, in op, out answer, call time.Duration) {
	end := int64(time.Since(c.start))
	if !out.known {
		end = math.MaxInt64
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.history = append(c.history, porcupine.Operation{ClientId: client, Input: in, Output: out, Call: int64(call), Return: end})
	kind := in.kind
	if !out.known {
		kind += " unknown"
	} else if in.kind == "acquire" && out.ok {
		kind += " ok"
	}
	c.counts[kind]++
}

// node that runs, at random.
func (c *chaos) node() *replica.Store {
	for range 10 {
		if s := c.Nodes[rand.IntN(len(c.Nodes))].Store(); s != nil {
			return s
		}
	}
	return nil
}

// apply a command through any node, up to three times if its fate is not
// known: with the same id, it happens once.
func (c *chaos) apply(ctx context.Context, cmd *clusterv1.Command) (r *clusterv1.Result, known bool) {
	cmd.Id = fmt.Sprintf("cmd-%d", c.seq.Add(1))
	maybe := false
	for range 1 + rand.IntN(3) {
		s := c.node()
		if s == nil {
			continue
		}
		short, cancel := context.WithTimeout(ctx, time.Duration(100+rand.IntN(500))*time.Millisecond)
		r, err := s.Apply(short, cmd)
		cancel()
		if err == nil {
			return r, true
		}
		maybe = maybe || errors.Is(err, replica.ErrTimeout)
		if !maybe {
			return nil, true
		}
	}
	return nil, !maybe
}

func (c *chaos) read(ctx context.Context, client int, gpu string) *clusterv1.Assignment {
	s := c.node()
	if s == nil {
		return nil
	}
	call := time.Since(c.start)
	short, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
	defer cancel()
	v, err := s.Read(short, false)
	if err != nil {
		c.count("read failed")
		return nil
	}
	out := answer{known: true}
	var owner *clusterv1.Assignment
	for a := range v.AssignmentsOfGPU(gpu) {
		if owner != nil {
			c.t.Errorf("GPU %s has two owners: %v and %v", gpu, owner, a)
		}
		owner, out.owner, out.token = a, a.GetClaim(), a.GetToken()
	}
	c.record(client, op{kind: "read", gpu: gpu}, out, call)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.never[out.owner] {
		c.t.Errorf("claim %s holds GPU %s, though its client was told that it was never proposed", out.owner, gpu)
	}
	return owner
}

func (c *chaos) acquire(ctx context.Context, client int, gpu string) {
	id := fmt.Sprintf("c%d-%d", client, c.seq.Add(1))
	call := time.Since(c.start)
	r, known := c.apply(ctx, whole(id, gpu))
	switch {
	case !known:
		c.record(client, op{"acquire", gpu, id}, answer{}, call)
		return
	case r == nil:
		c.mu.Lock()
		defer c.mu.Unlock()
		c.never[id] = true
		c.counts["acquire not proposed"]++
		return
	}
	switch r.GetOutcome() {
	case clusterv1.Outcome_OUTCOME_OK:
		c.record(client, op{"acquire", gpu, id}, answer{known: true, ok: true, token: r.GetAssignments()[0].GetToken()}, call)
		c.mu.Lock()
		defer c.mu.Unlock()
		if other := c.acked[r.GetIndex()]; other != "" {
			c.t.Errorf("entry %d was acknowledged as claim %s and as claim %s", r.GetIndex(), other, id)
		}
		c.acked[r.GetIndex()] = id
	case clusterv1.Outcome_OUTCOME_NO_CAPACITY:
		for _, why := range r.GetReasons() {
			if why.GetCode() == "busy" {
				c.record(client, op{"acquire", gpu, id}, answer{known: true}, call)
				return
			}
		}
		c.count("acquire: host is down")
	default:
		c.t.Errorf("acquire: %v: %s", r.GetOutcome(), r.GetMessage())
	}
}

func (c *chaos) release(ctx context.Context, client int, a *clusterv1.Assignment) {
	if _, known := c.apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_DeleteClaim{
		DeleteClaim: &clusterv1.DeleteClaim{Claim: a.GetClaim()},
	}}); !known {
		return
	}
	call := time.Since(c.start)
	r, known := c.apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_ConfirmAssignments{ConfirmAssignments: &clusterv1.ConfirmAssignments{
		Host:          a.GetHost(),
		Confirmations: []*clusterv1.Confirmation{{Assignment: a.GetId(), Token: a.GetToken(), Gone: true}},
	}}})
	if known && r == nil {
		return
	}
	if known && r.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
		c.t.Errorf("release: %v: %s", r.GetOutcome(), r.GetMessage())
	}
	c.record(client, op{"release", a.GetGpu(), a.GetClaim()}, answer{known: known}, call)
}

func (c *chaos) client(ctx context.Context, client int) {
	for ctx.Err() == nil {
		gpu := c.gpus[rand.IntN(len(c.gpus))]
		if rand.IntN(2) == 0 {
			c.acquire(context.WithoutCancel(ctx), client, gpu)
		} else if a := c.read(context.WithoutCancel(ctx), client, gpu); a != nil && rand.IntN(2) == 0 {
			c.release(context.WithoutCancel(ctx), client, a)
		}
		time.Sleep(time.Duration(rand.IntN(6)) * time.Millisecond) // what a client does between
	}
}

// fault begins one and returns what ends it.
func (c *chaos) fault(ctx context.Context, n *clustertest.Node) (string, func()) {
	restart := func() {
		n.Kill()
		c.up(ctx, n)
	}
	links := func(l clustertest.Link, out, in bool) func() {
		set := func(l clustertest.Link) {
			for _, o := range c.Nodes {
				if o != n && out {
					c.Network.Set(n.Address, o.Address, l)
				}
				if o != n && in {
					c.Network.Set(o.Address, n.Address, l)
				}
			}
		}
		set(l)
		return func() { set(clustertest.Link{}) }
	}
	ms := func(most int) time.Duration { return time.Duration(1+rand.IntN(most)) * time.Millisecond }
	switch rand.IntN(15) {
	case 0:
		return "isolate", links(clustertest.Link{Cut: true}, true, true)
	case 1:
		return "cut out", links(clustertest.Link{Cut: true}, true, false)
	case 2:
		return "cut in", links(clustertest.Link{Cut: true}, false, true)
	case 3:
		return "delay", links(clustertest.Link{Delay: ms(40)}, true, true)
	case 4:
		return "delay out", links(clustertest.Link{Delay: ms(150)}, true, false)
	case 5:
		return "delay in", links(clustertest.Link{Delay: ms(150)}, false, true)
	case 6:
		return "loss", links(clustertest.Link{Loss: rand.Float64() / 3}, true, true)
	case 7:
		o := c.Nodes[rand.IntN(len(c.Nodes))]
		c.Network.Set(n.Address, o.Address, clustertest.Link{Cut: true})
		return "cut one", func() { c.Network.Set(n.Address, o.Address, clustertest.Link{}) }
	case 8:
		n.Kill()
		return "kill", func() { c.up(ctx, n) }
	case 9:
		if err := n.Stop(); err != nil {
			c.t.Logf("stop %s: %v", n.Name, err)
		}
		return "stop", func() { c.up(ctx, n) }
	case 10:
		n.Disk.Full()
		return "disk full", n.Disk.Well
	case 11:
		n.Disk.Slow(ms(30))
		return "disk slow", n.Disk.Well
	case 12:
		n.Disk.Hang()
		return "disk hangs", n.Disk.Well
	case 13:
		n.Disk.Break()
		return "disk broken", restart
	default:
		n.Clock.Jump(time.Duration(rand.IntN(7200)-3600) * time.Second)
		n.Clock.Leap(ms(2000))
		return "clock", func() {}
	}
}

func (c *chaos) up(ctx context.Context, n *clustertest.Node) {
	if err := n.Start(ctx); err != nil {
		c.t.Errorf("start: %v", err)
	}
}

// epoch injects faults while clients work, heals everything, and checks what
// the clients were told.
func (c *chaos) epoch(faults int) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	c.history = nil
	work, stop := context.WithCancel(ctx)
	var clients sync.WaitGroup
	for i := range 6 {
		clients.Go(func() { c.client(work, i) })
	}
	type pending struct {
		node *clustertest.Node
		end  func()
	}
	var open []pending
	for range faults {
		// Two of five at a time, so that there is progress.
		for len(open) > 0 && (len(open) == 2 || rand.IntN(2) == 0) {
			open[0].end()
			open = open[1:]
		}
		n := c.Nodes[rand.IntN(len(c.Nodes))]
		if rand.IntN(3) == 0 {
			for _, o := range c.Nodes {
				if s := o.Store(); s != nil && s.IsLeader() {
					n = o
				}
			}
		}
		for _, p := range open {
			if p.node == n {
				p.end()
			}
		}
		open = slices.DeleteFunc(open, func(p pending) bool { return p.node == n })
		kind, end := c.fault(ctx, n)
		c.count("fault: " + kind)
		open = append(open, pending{n, end})
		time.Sleep(time.Duration(20+rand.IntN(100)) * time.Millisecond) // how long a fault lasts
	}
	for _, p := range open {
		p.end()
	}
	c.Network.Heal()
	stop()
	clients.Wait()
	for _, n := range c.Nodes {
		if n.Store().Health() != nil { // a disk that failed during a start
			n.Kill()
			c.up(ctx, n)
		}
	}
	for _, n := range c.Nodes {
		if _, err := n.Store().Read(ctx, false); err != nil {
			c.t.Fatalf("after healing, %s: %v", n.Name, err)
		}
	}
	for i, g := range c.gpus {
		for range 2 {
			c.read(ctx, 100+i, g)
		}
	}
	result, info := porcupine.CheckOperationsVerbose(gpuModel(), c.history, 2*time.Minute)
	if result != porcupine.Ok {
		path := fmt.Sprintf("%s/chaos-%d.html", os.TempDir(), time.Now().Unix())
		if err := porcupine.VisualizePath(gpuModel(), info, path); err != nil {
			c.t.Log(err)
		}
		c.t.Errorf("history of %d operations: %v, see %s", len(c.history), result, path)
	}
	c.Until(ctx, "release everything", func() error {
		for _, g := range c.gpus {
			if a := c.read(ctx, 200, g); a != nil {
				c.release(ctx, 200, a)
				return fmt.Errorf("GPU %s is held", g)
			}
		}
		return nil
	})
	c.Equal(ctx)
}

// TestChaos makes 40 faults, or GPUCTL_CHAOS_FAULTS.
func TestChaos(t *testing.T) {
	faults := 40
	if s := os.Getenv("GPUCTL_CHAOS_FAULTS"); s != "" {
		var err error
		if faults, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	c := &chaos{
		t: t, start: time.Now(), never: map[string]bool{}, acked: map[uint64]string{}, counts: map[string]int{},
		gpus: []string{"n0/g0", "n1/g0", "n2/g0"},
	}
	c.Cluster = clustertest.New(t, clustertest.Options{Nodes: 5, Disk: true, GPUs: 1, Config: func(_ int, cfg *replica.Config) {
		cfg.SnapshotThreshold, cfg.SnapshotInterval, cfg.TrailingLogs = 100, 100*time.Millisecond, 50
		cfg.Members.Lost = 5 * time.Second
	}})
	const each = 60
	for done := 0; done < faults && !t.Failed(); done += each {
		c.epoch(min(each, faults-done))
		if done/each%10 == 9 {
			t.Logf("%d faults in %v: %v", done+each, time.Since(c.start).Round(time.Second), c.counts)
		}
	}
	t.Logf("%d faults in %v, %d entries: %v", faults, time.Since(c.start).Round(time.Second), c.Nodes[0].Store().State().View().Index(), c.counts)
}
