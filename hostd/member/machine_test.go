package member

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// fake is a host that gives GPUs to claims as it is told.
type fake struct {
	mu       sync.Mutex
	unready  bool
	gpus     []*clusterv1.GPU
	claims   map[string]bool     // that it made
	uses     map[string][]string // GPUs by claim
	holdings []Holding
	sessions []*clusterv1.Session
}

var _ Host = (*fake)(nil)

func (f *fake) do(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fake) Report(context.Context) (*clusterv1.Host, []*clusterv1.GPU, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &clusterv1.Host{Hypervisor: "none", Cpus: 4, BootId: "boot"}, slices.Clone(f.gpus), nil
}

func (f *fake) Facts(context.Context) (*clusterv1.HostFacts, error) {
	return &clusterv1.HostFacts{Load1: 1, Gpus: []*clusterv1.GPUFacts{{Gpu: "g0"}}}, nil
}

func (f *fake) Knows(claim string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.claims[claim]
}

func (f *fake) Uses(claim, gpu string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Contains(f.uses[claim], gpu)
}

func (f *fake) Holdings() []Holding {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.holdings)
}

func (f *fake) Sessions() (out []*clusterv1.Session) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.sessions {
		out = append(out, proto.CloneOf(s))
	}
	return out
}

func (f *fake) Ready() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return !f.unready
}

// machine is a host of a test, which may be a member or not.
type machine struct {
	*Node
	t    *testing.T
	name string
	dir  string
	port string // its address
	host *fake
	log  *testkit.Log
}

func timing() replica.Timing {
	return replica.Timing{
		Heartbeat: 200 * time.Millisecond, Election: 200 * time.Millisecond, Lease: 150 * time.Millisecond,
		Commit: 10 * time.Millisecond, RPC: time.Second,
		Pulse: 100 * time.Millisecond, Down: time.Second, Review: 100 * time.Millisecond, Expiry: 50 * time.Millisecond,
	}
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// newMachine starts hostd's part of a host with two GPUs of 8 GiB.
func newMachine(t *testing.T, name string) *machine {
	t.Helper()
	m := &machine{t: t, name: name, dir: t.TempDir(), port: freePort(t), log: &testkit.Log{}, host: &fake{claims: map[string]bool{}, uses: map[string][]string{}}}
	for i := range 2 {
		m.host.gpus = append(m.host.gpus, &clusterv1.GPU{
			Name: fmt.Sprintf("g%d", i), Model: "test", Type: "gpu", Health: clusterv1.Health_HEALTH_OK,
			Limits: &gpuctlv1.Limits{GlobalMemory: 8 << 30},
		})
	}
	if err := m.open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		m.stop()
		if t.Failed() {
			t.Logf("log of %s:\n%s", name, m.log)
		}
	})
	return m
}

// started returns a node of a host that has started.
func started(ctx context.Context, h Host, c Config) (*Node, error) {
	n := New(ctx, c)
	if err := n.Start(ctx, Served{Host: h}); err != nil {
		return nil, err
	}
	return n, nil
}

func (m *machine) open(ctx context.Context) (err error) {
	m.Node, err = started(ctx, m.host, Config{
		Dir: m.dir, Name: m.name, Listen: m.port, Version: "test",
		Timing: timing(), Members: replica.Members{Stabilize: 300 * time.Millisecond},
		Logger: slog.New(slog.NewTextHandler(m.log, &slog.HandlerOptions{Level: slog.LevelInfo})),
	})
	return err
}

// start a machine that was stopped.
func (m *machine) start(ctx context.Context) {
	m.t.Helper()
	if err := m.open(ctx); err != nil {
		m.t.Fatalf("%s: %v", m.name, err)
	}
}

func (m *machine) stop() {
	if m.Node != nil {
		if err := m.Close(); err != nil {
			m.t.Errorf("%s: %v", m.name, err)
		}
		m.Node = nil
	}
}

// crash ends a machine that tells nobody.
func (m *machine) crash() {
	if live := m.member(); live != nil {
		_ = live.store.Halt()
	}
	m.stop()
}

func admin(ctx context.Context) context.Context {
	return access.WithCaller(ctx, access.Caller{Kind: access.Local, Role: clusterv1.Role_ROLE_ADMIN})
}

func (m *machine) token(ctx context.Context, r *clusterv1.CreateTokenRequest) string {
	m.t.Helper()
	res, err := m.api.CreateToken(admin(ctx), connect.NewRequest(r))
	if err != nil {
		m.t.Fatal(err)
	}
	return res.Msg.GetToken()
}

func (m *machine) view(ctx context.Context) *state.View {
	m.t.Helper()
	v, err := m.member().store.Read(ctx, false)
	if err != nil {
		m.t.Fatalf("%s: %v", m.name, err)
	}
	return v
}

func (m *machine) apply(ctx context.Context, c *clusterv1.Command) *clusterv1.Result {
	m.t.Helper()
	res, err := m.member().store.Apply(ctx, c)
	if err != nil {
		m.t.Fatalf("%s: %v", m.name, err)
	}
	if res.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
		m.t.Fatalf("%s: %v", m.name, res)
	}
	return res
}

// cluster makes one of machines with these names.
func cluster(ctx context.Context, t *testing.T, names ...string) []*machine {
	t.Helper()
	var ms []*machine
	for i, name := range names {
		m := newMachine(t, name)
		ms = append(ms, m)
		if i == 0 {
			if err := m.Init(ctx, &clusterv1.InitRequest{}); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if err := m.Join(ctx, &clusterv1.JoinRequest{Token: ms[0].token(ctx, &clusterv1.CreateTokenRequest{})}); err != nil {
			t.Fatal(err)
		}
	}
	complete(ctx, t, ms)
	return ms
}

// complete waits until all are known with their GPUs, and as many vote as
// should.
func complete(ctx context.Context, t *testing.T, ms []*machine) {
	t.Helper()
	want := len(ms) - (len(ms)+1)%2
	testkit.Until(t, "complete", func() error {
		for _, m := range ms {
			v, err := m.member().store.Read(ctx, false)
			if err != nil {
				return err
			}
			hosts := slices.Collect(v.Hosts())
			voters := 0
			for _, x := range m.member().store.Status().GetMembers() {
				if x.GetVoter() {
					voters++
				}
			}
			if len(hosts) != len(ms) || voters != want || len(slices.Collect(v.GPUs())) != 2*len(ms) {
				return fmt.Errorf("%s knows %d hosts, %d voters", m.name, len(hosts), voters)
			}
		}
		return nil
	})
}

func leader(ctx context.Context, t *testing.T, ms []*machine) (l *machine, others []*machine) {
	t.Helper()
	testkit.Until(t, "leader", func() error {
		l, others = nil, nil
		for _, m := range ms {
			switch {
			case m.Node == nil:
			case m.member() != nil && m.member().store.IsLeader():
				l = m
			default:
				others = append(others, m)
			}
		}
		if l == nil {
			return errors.New("there is none")
		}
		_, err := l.member().store.ReadIndex(ctx)
		return err
	})
	return l, others
}

func short(ctx context.Context, t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	t.Cleanup(cancel)
	return ctx
}
