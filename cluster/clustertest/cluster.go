package clustertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// Options are the options of New.
type Options struct {
	Nodes  int
	Disk   bool // nodes keep their logs in files; otherwise in memory, so that a killed node loses its log
	GPUs   int  // GPUs of each host
	Labels func(node int) map[string]string
	Voters int // the voters that New waits for; 0: as many as there should be
	// Config changes a node's configuration.
	Config func(node int, c *replica.Config)
	Log    *slog.Logger
}

// Timing returns time-outs for tests: about a fifth of replica.Fast's.
func Timing() replica.Timing {
	return replica.Timing{
		Heartbeat: 60 * time.Millisecond, Election: 60 * time.Millisecond, Lease: 50 * time.Millisecond,
		Commit: 5 * time.Millisecond, RPC: 250 * time.Millisecond,
		Pulse: 50 * time.Millisecond, Down: 500 * time.Millisecond,
		Review: 50 * time.Millisecond, Expiry: 10 * time.Millisecond,
	}
}

// Cluster is a cluster of nodes n0, n1, … .
type Cluster struct {
	Network *Network
	Nodes   []*Node
	tb      testing.TB
	opts    Options
	dir     string
	calls   sync.WaitGroup
}

// Node is a node of a cluster. It gets a new store when it is started again.
type Node struct {
	Name, ID, Address string
	Disk              *Disk
	Clock             *Clock
	cluster           *Cluster
	n                 int

	mu    sync.Mutex
	store *replica.Store
	layer *layer
}

// New starts a cluster and waits until it is complete: all hosts have reported
// themselves, and each knows as many voters as there should be.
func New(tb testing.TB, opts Options) *Cluster {
	tb.Helper()
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	c := &Cluster{tb: tb, opts: opts, Network: NewNetwork(60 * time.Millisecond)}
	if opts.Disk {
		c.dir = tb.TempDir()
	}
	for i := range opts.Nodes {
		c.Nodes = append(c.Nodes, &Node{
			Name: fmt.Sprintf("n%d", i), ID: fmt.Sprintf("id-%d", i), Address: fmt.Sprintf("n%d:7000", i),
			Disk: &Disk{}, Clock: NewClock(), cluster: c, n: i,
		})
	}
	tb.Cleanup(c.close)
	ctx, cancel := context.WithTimeout(tb.Context(), 30*time.Second)
	defer cancel()
	for i, n := range c.Nodes {
		if err := n.Start(ctx); err != nil {
			tb.Fatal(err)
		}
		if i == 0 {
			if err := n.Store().Bootstrap(ctx, &clusterv1.InitCluster{ClusterId: "test"}); err != nil {
				tb.Fatal(err)
			}
		} else {
			c.Must(ctx, c.Nodes[0], &clusterv1.Command{Op: &clusterv1.Command_PutIdentity{PutIdentity: &clusterv1.PutIdentity{
				Identity: &clusterv1.Identity{Id: n.ID, Role: clusterv1.Role_ROLE_HOST, Host: n.Name},
			}}})
			// On a busy machine it may be the leader no more.
			c.Until(ctx, "a leader that adds "+n.ID, func() error { return c.Leader(ctx).Store().AddServer(ctx, n.ID, n.Address) })
		}
		if err := n.Store().Joined(ctx); err != nil {
			tb.Fatal(err)
		}
		c.Report(ctx, n)
	}
	want := min(opts.Nodes-(opts.Nodes+1)%2, 7)
	if most := c.Nodes[0].Config().Members.MaxVoters; most > 0 {
		want = min(want, most)
	}
	if opts.Voters > 0 {
		want = opts.Voters
	}
	// What only the leader has written may be lost with it.
	c.Until(ctx, fmt.Sprintf("%d voters", want), func() error {
		for _, n := range c.Nodes {
			if got := n.Voters(); len(got) != want {
				return fmt.Errorf("voters that %s knows: %v", n.Name, got)
			}
		}
		return nil
	})
	return c
}

// Report reports a node's host, with its GPUs g0, g1, … .
func (c *Cluster) Report(ctx context.Context, n *Node) {
	c.tb.Helper()
	h := &clusterv1.Host{Name: n.Name, Id: n.ID, Address: n.Address, Protocol: state.Protocol}
	var gpus []*clusterv1.GPU
	for i := range c.opts.GPUs {
		gpus = append(gpus, &clusterv1.GPU{Name: fmt.Sprintf("g%d", i), Model: "test", Vendor: "test", Type: "gpu"})
	}
	c.Must(ctx, n, &clusterv1.Command{Op: &clusterv1.Command_ReportHost{ReportHost: &clusterv1.ReportHost{Host: h, Gpus: gpus}}})
	if c.opts.Labels != nil {
		c.Must(ctx, n, &clusterv1.Command{Op: &clusterv1.Command_LabelHost{
			LabelHost: &clusterv1.LabelHost{Host: n.Name, Set: c.opts.Labels(n.n)},
		}})
	}
}

// Must applies a command through a node. It fails the test if the result is not OK.
func (c *Cluster) Must(ctx context.Context, n *Node, cmd *clusterv1.Command) *clusterv1.Result {
	c.tb.Helper()
	r, err := n.Store().Apply(ctx, cmd)
	if err != nil {
		c.tb.Fatalf("%s: %v", n.Name, err)
	}
	if r.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
		c.tb.Fatalf("%s: %v: %s", n.Name, r.GetOutcome(), r.GetMessage())
	}
	return r
}

// Until calls f until it returns no error.
func (c *Cluster) Until(ctx context.Context, what string, f func() error) {
	c.tb.Helper()
	if err := testkit.Poll(ctx, what, f); err != nil {
		c.tb.Fatal(err)
	}
}

// Leader waits for a leader and returns its node.
func (c *Cluster) Leader(ctx context.Context) *Node {
	c.tb.Helper()
	var leader *Node
	c.Until(ctx, "leader", func() error {
		for _, n := range c.Nodes {
			s := n.Store()
			if s == nil || !s.IsLeader() {
				continue
			}
			if _, err := s.ReadIndex(ctx); err == nil {
				leader = n
				return nil
			}
		}
		return errors.New("there is none")
	})
	return leader
}

// Equal waits until all running nodes have applied the same entries, and checks that
// their snapshots are equal byte for byte.
func (c *Cluster) Equal(ctx context.Context) {
	c.tb.Helper()
	views := map[string]*state.View{}
	c.Until(ctx, "equal indexes", func() error {
		var first *state.View
		for _, n := range c.Nodes {
			if s := n.Store(); s != nil {
				v := s.State().View()
				if first == nil {
					first = v
				}
				if v.Index() != first.Index() {
					return fmt.Errorf("%s has applied %d, another %d", n.Name, v.Index(), first.Index())
				}
				views[n.Name] = v
			}
		}
		return nil
	})
	var want []byte
	for _, n := range c.Nodes {
		v := views[n.Name]
		if v == nil {
			continue
		}
		if err := v.Check(); err != nil {
			c.tb.Errorf("%s: %v", n.Name, err)
		}
		var b bytes.Buffer
		if err := v.Persist(&b); err != nil {
			c.tb.Errorf("%s: %v", n.Name, err)
		}
		if want != nil && !bytes.Equal(want, b.Bytes()) {
			c.tb.Errorf("%s: its state at %d differs: %s", n.Name, v.Index(), difference(want, b.Bytes()))
		}
		want = b.Bytes()
	}
}

// difference returns the place where two snapshots begin to differ.
func difference(a, b []byte) string {
	at := 0
	for at < len(a) && at < len(b) && a[at] == b[at] {
		at++
	}
	part := func(b []byte) []byte { return b[max(0, min(at-40, len(b))):min(at+80, len(b))] }
	return fmt.Sprintf("from byte %d of %d and %d: %q and %q", at, len(a), len(b), part(a), part(b))
}

// Isolate disconnects a node from the others, in both directions.
func (c *Cluster) Isolate(n *Node) { c.Split([]*Node{n}) }

// Split disconnects some nodes from the others.
func (c *Cluster) Split(some []*Node) {
	in := map[*Node]bool{}
	for _, n := range some {
		in[n] = true
	}
	for _, a := range c.Nodes {
		for _, b := range c.Nodes {
			if in[a] != in[b] {
				c.Network.Set(a.Address, b.Address, Link{Cut: true})
			}
		}
	}
}

func (c *Cluster) close() {
	c.Network.Heal()
	for _, n := range c.Nodes {
		n.Disk.Well()
	}
	for _, n := range c.Nodes {
		n.Kill()
	}
	c.calls.Wait()
}

// Store returns the node's store; nil while the node does not run.
func (n *Node) Store() *replica.Store {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.store
}

// Voters returns the names of the voters that the node knows.
func (n *Node) Voters() []string {
	var out []string
	for _, m := range n.Store().Status().GetMembers() {
		if m.GetVoter() {
			out = append(out, m.GetHost())
		}
	}
	return out
}

// Config returns the node's configuration.
func (n *Node) Config() replica.Config {
	cfg := replica.Config{
		ID: n.ID, Name: n.Name, Address: n.Address, Version: "test",
		Peers: &peers{n}, Clock: n.Clock, Timing: Timing(), Log: n.cluster.opts.Log.With("node", n.Name),
		Members: replica.Members{Stabilize: 100 * time.Millisecond},
		Wrap:    n.Disk.wrap,
	}
	if n.cluster.dir != "" {
		cfg.Dir = filepath.Join(n.cluster.dir, n.Name)
	}
	if n.cluster.opts.Config != nil {
		n.cluster.opts.Config(n.n, &cfg)
	}
	return cfg
}

// Start starts a node that does not run. It ends faults of its disk.
func (n *Node) Start(ctx context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.store != nil {
		return nil
	}
	n.Disk.Well()
	l, err := n.cluster.Network.listen(n.Address)
	if err != nil {
		return err
	}
	cfg := n.Config()
	cfg.Stream = l
	s, err := replica.Open(ctx, cfg)
	if err != nil {
		l.kill()
		return fmt.Errorf("%s: %w", n.Name, err)
	}
	n.store, n.layer = s, l
	return nil
}

// Kill ends a node at once, as kill -9 would.
func (n *Node) Kill() {
	n.mu.Lock()
	s, l := n.store, n.layer
	n.store, n.layer = nil, nil
	n.mu.Unlock()
	if s == nil {
		return
	}
	n.Disk.set(errDead, 0)
	l.kill()
	_ = s.Halt() // its disk fails, so an error is expected
}

// Stop closes a node's store.
func (n *Node) Stop() error {
	n.mu.Lock()
	s := n.store
	n.store, n.layer = nil, nil
	n.mu.Unlock()
	if s == nil {
		return nil
	}
	return s.Close()
}

// peers is a node's replica.Forwarder.
type peers struct{ from *Node }

var _ replica.Forwarder = (*peers)(nil)

func (p *peers) call(ctx context.Context, address string, f func(*replica.Store) error) error {
	c := p.from.cluster
	c.calls.Add(1)
	defer c.calls.Done()
	return c.Network.Call(ctx, p.from.Address, address, func() error {
		for _, n := range c.Nodes {
			if n.Address == address && n.Store() != nil {
				return f(n.Store())
			}
		}
		return fmt.Errorf("%s: %w", address, ErrUnreachable)
	})
}

func (p *peers) Apply(ctx context.Context, address string, cmds []*clusterv1.Command) (rs []*clusterv1.Result, err error) {
	err = p.call(ctx, address, func(s *replica.Store) (err error) {
		rs, err = s.ApplyLocal(ctx, cmds)
		return err
	})
	if err != nil {
		return nil, err
	}
	return rs, nil
}

func (p *peers) ReadIndex(ctx context.Context, address string) (index uint64, err error) {
	err = p.call(ctx, address, func(s *replica.Store) (err error) {
		index, err = s.ReadIndex(ctx)
		return err
	})
	return index, err
}

func (p *peers) Heartbeat(ctx context.Context, address string, r *clusterv1.HeartbeatRequest) (resp *clusterv1.HeartbeatResponse, err error) {
	err = p.call(ctx, address, func(s *replica.Store) (err error) {
		resp, err = s.HandleHeartbeat(r)
		return err
	})
	return resp, err
}
