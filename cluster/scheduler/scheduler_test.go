package scheduler_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/clustertest"
	"github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/cluster/scheduler"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const gib = 1 << 30

// start makes a cluster whose hosts have GPUs of 8 GiB each.
func start(t *testing.T, nodes, gpus int, config func(int, *replica.Config)) *clustertest.Cluster {
	t.Helper()
	ctx := testkit.Context(t)
	c := clustertest.New(t, clustertest.Options{Nodes: nodes, Config: config})
	for _, n := range c.Nodes {
		report(ctx, t, c, n, gpus)
	}
	return c
}

func report(ctx context.Context, t *testing.T, c *clustertest.Cluster, n *clustertest.Node, gpus int) {
	t.Helper()
	r := &clusterv1.ReportHost{Host: &clusterv1.Host{Name: n.Name, Id: n.ID, Address: n.Address, Protocol: state.Protocol}}
	for i := range gpus {
		r.Gpus = append(r.Gpus, &clusterv1.GPU{
			Name: fmt.Sprintf("g%d", i), Model: "test", Vendor: "test", Type: "gpu", Runtime: "pocl", RuntimeKey: "k",
			Limits: &gpuctlv1.Limits{GlobalMemory: 8 * gib, MaxAlloc: 4 * gib},
		})
	}
	c.Must(ctx, n, &clusterv1.Command{Op: &clusterv1.Command_ReportHost{ReportHost: r}})
}

func on(n *clustertest.Node) *scheduler.Scheduler {
	return scheduler.New(n.Store(), slog.New(slog.DiscardHandler))
}

func whole(id string) *clusterv1.Claim { return &clusterv1.Claim{Id: id, Owner: "test"} }

func waiting(id string) *clusterv1.Claim {
	return &clusterv1.Claim{Id: id, Owner: "test", Unmet: clusterv1.Unmet_UNMET_WAIT}
}

func reasons(d placement.Decision) (out []string) {
	for r := range d.Rejected() {
		for _, why := range r.GetReasons() {
			out = append(out, why.GetCode())
		}
	}
	return out
}

func gone(ctx context.Context, t *testing.T, c *clustertest.Cluster, n *clustertest.Node, claim string) {
	t.Helper()
	r := c.Must(ctx, n, &clusterv1.Command{Op: &clusterv1.Command_DeleteClaim{DeleteClaim: &clusterv1.DeleteClaim{Claim: claim}}})
	words := map[string][]*clusterv1.Confirmation{}
	for _, as := range r.GetAssignments() {
		words[as.GetHost()] = append(words[as.GetHost()], &clusterv1.Confirmation{Assignment: as.GetId(), Token: as.GetToken(), Gone: true})
	}
	for host, w := range words {
		c.Must(ctx, n, &clusterv1.Command{Op: &clusterv1.Command_ConfirmAssignments{
			ConfirmAssignments: &clusterv1.ConfirmAssignments{Host: host, Confirmations: w},
		}})
	}
}

func TestCreate(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := start(t, 3, 1, nil)
	tests := []struct {
		name        string
		claim       *clusterv1.Claim
		assignments int
		why         string // code of a reason, when it is refused
		outcome     clusterv1.Outcome
		err         error
	}{
		{name: "bad id", claim: whole("a b"), outcome: clusterv1.Outcome_OUTCOME_INVALID},
		{name: "two on one host", claim: &clusterv1.Claim{Id: "two", Owner: "test", Count: 2}, why: "count"},
		{name: "whole", claim: whole("whole"), assignments: 1},
		{name: "share", claim: &clusterv1.Claim{Id: "share", Owner: "test", MinMemory: gib}, assignments: 1},
		{name: "second share", claim: &clusterv1.Claim{Id: "share-2", Owner: "test", MinMemory: 2 * gib}, assignments: 1},
		{name: "too large", claim: &clusterv1.Claim{Id: "large", Owner: "test", MinMemory: 9 * gib}, why: "memory"},
		{name: "no such host", claim: &clusterv1.Claim{Id: "nowhere", Owner: "test", Host: "n9"}, why: "host"},
		{name: "bad expression", claim: &clusterv1.Claim{Id: "expr", Owner: "test", Expr: "memory >"}, err: placement.ErrInvalid},
	}
	s := on(c.Nodes[1])
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			o, err := s.Create(ctx, tt.claim, "test", "n1")
			var answer *scheduler.Error
			switch {
			case tt.err != nil:
				if !errors.Is(err, tt.err) {
					t.Fatalf("%v, not %v", err, tt.err)
				}
			case tt.outcome != 0:
				if !errors.As(err, &answer) || answer.Result.GetOutcome() != tt.outcome || answer.Error() == "" {
					t.Fatalf("%v, not %v", err, tt.outcome)
				}
			case err != nil:
				t.Fatal(err)
			case tt.why != "":
				if got := reasons(o.Decision); o.Claim != nil || len(o.Assignments) > 0 || !strings.Contains(strings.Join(got, " "), tt.why) {
					t.Fatalf("%v with reasons %v, not %s", o.Claim, got, tt.why)
				}
			case o.Claim.GetState() != clusterv1.ClaimState_CLAIM_STATE_BOUND || len(o.Assignments) != tt.assignments:
				t.Fatalf("claim %v with %d assignments", o.Claim, len(o.Assignments))
			}
		})
	}
	c.Equal(ctx)
}

// TestRepeated creates one claim again and again, at once and from all hosts,
// when it is the very claim that holds the only GPU.
func TestRepeated(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := start(t, 3, 0, nil)
	report(ctx, t, c, c.Nodes[0], 1)
	for round := range 10 {
		id := fmt.Sprintf("claim-%d", round)
		var wg sync.WaitGroup
		for i := range 9 {
			n := c.Nodes[i%3]
			wg.Go(func() {
				o, err := on(n).Create(ctx, whole(id), "test", n.Name)
				if err != nil || o.Claim.GetId() != id || len(o.Assignments) != 1 {
					t.Errorf("%s from %s: %v with %d assignments, %v", id, n.Name, o.Claim, len(o.Assignments), err)
				}
			})
		}
		wg.Wait()
		_, err := on(c.Nodes[2]).Create(ctx, &clusterv1.Claim{Id: id, Owner: "test", Count: 2}, "test", "n2")
		var answer *scheduler.Error
		if !errors.As(err, &answer) || answer.Result.GetOutcome() != clusterv1.Outcome_OUTCOME_ALREADY_EXISTS || !strings.Contains(err.Error(), "count") {
			t.Errorf("with another count: %v", err)
		}
		gone(ctx, t, c, c.Nodes[1], id)
	}
	c.Equal(ctx)
}

// TestContention lets many claims from all hosts at few GPUs.
func TestContention(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	const claims, perHost = 60, 4
	c := start(t, 3, perHost, nil)
	var schedulers []*scheduler.Scheduler
	for _, n := range c.Nodes {
		schedulers = append(schedulers, on(n))
	}
	var bound, refused atomic.Int32
	var wg sync.WaitGroup
	for i := range claims {
		wg.Go(func() {
			o, err := schedulers[i%3].Create(ctx, whole(fmt.Sprintf("c%d", i)), "test", c.Nodes[i%3].Name)
			switch {
			case err != nil:
				t.Errorf("claim %d: %v", i, err)
			case len(o.Assignments) == 1:
				bound.Add(1)
			case len(reasons(o.Decision)) > 0:
				refused.Add(1)
			default:
				t.Errorf("claim %d: refused without a reason", i)
			}
		})
	}
	wg.Wait()
	if bound.Load() != 3*perHost || refused.Load() != claims-3*perHost {
		t.Errorf("%d bound, %d refused, of %d on %d GPUs", bound.Load(), refused.Load(), claims, 3*perHost)
	}
	c.Equal(ctx) // checks that every GPU has one owner
}

func task(s *atomic.Pointer[scheduler.Scheduler]) replica.LeaderTask {
	return replica.LeaderTask{Name: "pending claims", Run: func(ctx context.Context, l *replica.Lead) error {
		if testkit.Poll(ctx, "a scheduler", func() error { return testkit.Want(s.Load() != nil) }) == nil {
			s.Load().Run(ctx, l)
		}
		return nil
	}}
}

// TestWaiting has claims wait for capacity, which comes, goes and moves with
// the leader.
func TestWaiting(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	running := make([]atomic.Pointer[scheduler.Scheduler], 3)
	c := start(t, 3, 1, func(n int, cfg *replica.Config) { cfg.Tasks = []replica.LeaderTask{task(&running[n])} })
	for i, n := range c.Nodes {
		running[i].Store(on(n))
	}
	n := c.Nodes[1]
	s := on(n)
	for i := range 3 {
		if o, err := s.Create(ctx, whole(fmt.Sprintf("held-%d", i)), "test", n.Name); err != nil || len(o.Assignments) != 1 {
			t.Fatalf("claim %d: %v, %v", i, o.Claim, err)
		}
	}
	for i := range 4 {
		o, err := s.Create(ctx, waiting(fmt.Sprintf("wait-%d", i)), "test", n.Name)
		if err != nil || o.Claim.GetState() != clusterv1.ClaimState_CLAIM_STATE_PENDING || o.Claim.GetMessage() == "" || len(reasons(o.Decision)) == 0 {
			t.Fatalf("claim %d: %v, %v", i, o.Claim, err)
		}
		for _, n := range c.Nodes { // the order is by their times
			n.Clock.Jump(2 * time.Millisecond)
		}
	}
	bound := func(want ...string) {
		t.Helper()
		c.Until(ctx, fmt.Sprint(want, " bound"), func() error {
			v, err := n.Store().Read(ctx, false)
			if err != nil {
				return err
			}
			for _, id := range want {
				if got := v.Claim(id); got.GetState() != clusterv1.ClaimState_CLAIM_STATE_BOUND {
					return fmt.Errorf("claim %s is %v: %s", id, got.GetState(), got.GetMessage())
				}
			}
			return nil
		})
	}
	gone(ctx, t, c, n, "held-0")
	bound("wait-0")
	c.Must(ctx, n, &clusterv1.Command{Op: &clusterv1.Command_DrainHost{DrainHost: &clusterv1.DrainHost{Host: "n0", Draining: true, Message: "test"}}})
	report(ctx, t, c, n, 2)
	bound("wait-1")
	// The next leader goes on with what waits.
	old := c.Leader(ctx)
	old.Kill()
	if n == old {
		n = c.Nodes[2]
	}
	c.Leader(ctx)
	gone(ctx, t, c, n, "wait-1")
	bound("wait-2")
	v, err := n.Store().Read(ctx, false)
	if err != nil {
		t.Fatal(err)
	}
	if got := v.Claim("wait-3"); got.GetState() != clusterv1.ClaimState_CLAIM_STATE_PENDING {
		t.Errorf("%v", got)
	}
	for i := range 3 {
		if got := v.Claim(fmt.Sprintf("wait-%d", i)); got != nil && len(got.GetAssignments()) != 1 {
			t.Errorf("%v", got)
		}
	}
}

// TestWhatRemovedHostsHadIsGivenUp removes one host before and one while a leader looks.
func TestWhatRemovedHostsHadIsGivenUp(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := start(t, 3, 3, nil)
	leader := c.Leader(ctx)
	var out []*clustertest.Node
	for _, n := range c.Nodes {
		if n != leader {
			out = append(out, n)
		}
	}
	first, second := out[0], out[1]
	put := func(id, by, gpu string) {
		t.Helper()
		claim, op := waiting(id), &clusterv1.PutClaim{}
		if by != "" {
			claim.Labels = map[string]string{placement.LabelManagedBy: by}
		}
		if op.Claim = claim; gpu != "" {
			op.Choices = []*clusterv1.Choice{{Gpu: gpu, Kind: clusterv1.VGPUKind_VGPU_KIND_WHOLE}}
		}
		c.Must(ctx, leader, &clusterv1.Command{Op: &clusterv1.Command_PutClaim{PutClaim: op}})
	}
	put("vm", first.ID, first.Name+"/g0")
	put("waits", first.ID, "")
	put("abroad", first.ID, leader.Name+"/g0")
	put("deleted", "", first.Name+"/g1")
	put("operators", "", first.Name+"/g2")
	put("others", second.ID, second.Name+"/g0")
	put("joining", "id-9", leader.Name+"/g1")
	c.Must(ctx, leader, &clusterv1.Command{Op: &clusterv1.Command_PutIdentity{PutIdentity: &clusterv1.PutIdentity{
		Identity: &clusterv1.Identity{Id: "id-9", Role: clusterv1.Role_ROLE_HOST, Host: "n9"},
	}}})
	c.Must(ctx, leader, &clusterv1.Command{Op: &clusterv1.Command_DeleteClaim{DeleteClaim: &clusterv1.DeleteClaim{Claim: "deleted"}}})
	remove := func(n *clustertest.Node) {
		t.Helper()
		c.Must(ctx, leader, &clusterv1.Command{Op: &clusterv1.Command_RemoveHost{RemoveHost: &clusterv1.RemoveHost{Host: n.Name, Force: true}}})
	}
	states := func(want map[string]clusterv1.ClaimState) {
		t.Helper()
		c.Until(ctx, "given up", func() error {
			v := leader.Store().State().View()
			got := map[string]clusterv1.ClaimState{}
			for c := range v.Claims() {
				got[c.GetId()] = c.GetState()
			}
			if !maps.Equal(got, want) {
				return fmt.Errorf("%v", got)
			}
			return v.Check()
		})
	}
	remove(first)
	hold := make(chan struct{})
	close(hold)
	inner, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		l := &stuck{state: leader.Store().State(), apply: leader.Store().Apply, held: make(chan struct{}, 1), hold: hold}
		if err := scheduler.GiveUp(inner, l); err != nil && inner.Err() == nil {
			t.Error(err)
		}
	})
	const pending, bound, releasing = clusterv1.ClaimState_CLAIM_STATE_PENDING, clusterv1.ClaimState_CLAIM_STATE_BOUND, clusterv1.ClaimState_CLAIM_STATE_RELEASING
	// What is on a host that is there, that host has to free.
	states(map[string]clusterv1.ClaimState{"abroad": releasing, "operators": pending, "others": bound, "joining": bound})
	remove(second)
	states(map[string]clusterv1.ClaimState{"abroad": releasing, "operators": pending, "joining": bound})
	cancel()
	wg.Wait()
}

// slow is a log whose proposals take a while to get there.
type slow struct {
	scheduler.Log
	hold chan struct{}
	held chan struct{}
}

func (s *slow) Apply(ctx context.Context, c *clusterv1.Command) (*clusterv1.Result, error) {
	if c.GetAssign() != nil {
		select {
		case s.held <- struct{}{}:
		default:
		}
		select {
		case <-s.hold:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return s.Log.Apply(ctx, c)
}

// TestTakenMeanwhile has the GPU that was chosen go to somebody else before
// the proposal is there.
func TestTakenMeanwhile(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := start(t, 1, 2, nil)
	n := c.Nodes[0]
	l := &slow{Log: n.Store(), hold: make(chan struct{}), held: make(chan struct{}, 1)}
	s := scheduler.New(l, slog.New(slog.DiscardHandler))
	if _, err := s.Create(ctx, whole("a"), "test", n.Name); err != nil {
		t.Fatal(err)
	}
	c.Must(ctx, n, &clusterv1.Command{Op: &clusterv1.Command_CordonGpu{CordonGpu: &clusterv1.CordonGPU{Gpu: "n0/g0", Cordoned: true}}})
	done := make(chan error, 1)
	var o scheduler.Outcome
	go func() {
		var err error
		o, err = s.Assign(ctx, placement.Request{Claim: n.Store().State().View().Claim("a"), Verb: placement.Migrate, From: []string{"n0/g0"}}, "test")
		done <- err
	}()
	<-l.held
	c.Must(ctx, n, &clusterv1.Command{Op: &clusterv1.Command_PutClaim{PutClaim: &clusterv1.PutClaim{
		Claim: whole("thief"), Choices: []*clusterv1.Choice{{Gpu: "n0/g1", Kind: clusterv1.VGPUKind_VGPU_KIND_WHOLE}},
	}}})
	close(l.hold)
	if err := <-done; err != nil || o.Claim != nil || len(reasons(o.Decision)) == 0 {
		t.Errorf("%v with reasons %v, %v", o.Claim, reasons(o.Decision), err)
	}
}

// TestNoLeader ends with its context, and says why.
func TestNoLeader(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := start(t, 3, 1, nil)
	for _, n := range c.Nodes[1:] {
		n.Kill()
	}
	short, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
	defer cancel()
	began := time.Now()
	_, err := on(c.Nodes[0]).Create(short, whole("a"), "test", "n0")
	if !errors.Is(err, replica.ErrNoLeader) && !errors.Is(err, replica.ErrTimeout) {
		t.Errorf("%v", err)
	}
	if d := time.Since(began); d > 2*time.Second {
		t.Errorf("it took %v", d)
	}
}

// TestPreviousLeader keeps a proposal of one term from binding, a second time,
// a claim that the next leader has bound.
func TestPreviousLeader(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	c := start(t, 3, 2, nil)
	r := c.Must(ctx, c.Nodes[0], &clusterv1.Command{Op: &clusterv1.Command_PutClaim{PutClaim: &clusterv1.PutClaim{Claim: waiting("w")}}})
	old := c.Leader(ctx)
	lead := &stuck{state: old.Store().State(), apply: old.Store().Apply, held: make(chan struct{}, 1), hold: make(chan struct{})}
	inner, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	s := on(old)
	wg.Go(func() { s.Run(inner, lead) })
	<-lead.held
	// Meanwhile another leader binds it.
	next := on(c.Nodes[1])
	if o, err := next.Assign(ctx, placement.Request{Claim: r.GetClaim()}, "test"); err != nil || len(o.Assignments) != 1 {
		t.Fatalf("%v, %v", o.Claim, err)
	}
	refused := make(chan struct{}, 1)
	lead.apply = func(context.Context, *clusterv1.Command) (*clusterv1.Result, error) {
		select {
		case refused <- struct{}{}:
		default:
		}
		return nil, replica.ErrNotLeader
	}
	close(lead.hold)
	<-refused
	time.Sleep(100 * time.Millisecond) // nothing tells that it does not try elsewhere
	cancel()
	wg.Wait()
	v, err := c.Nodes[2].Store().Read(ctx, false)
	if err != nil {
		t.Fatal(err)
	}
	if got := v.Claim("w"); len(got.GetAssignments()) != 1 {
		t.Errorf("%v", got)
	}
}

// stuck is a leadership that is lost with a proposal under way.
type stuck struct {
	state *state.Store
	apply func(context.Context, *clusterv1.Command) (*clusterv1.Result, error)
	held  chan struct{}
	hold  chan struct{}
}

func (s *stuck) Apply(ctx context.Context, c *clusterv1.Command) (*clusterv1.Result, error) {
	select {
	case s.held <- struct{}{}:
	default:
	}
	<-s.hold
	return s.apply(ctx, proto.CloneOf(c))
}

func (s *stuck) View() *state.View { return s.state.View() }
