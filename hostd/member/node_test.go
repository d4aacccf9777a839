package member

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/cluster/remote"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/cluster/state"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

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
	log  *buffer
}

type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func timing() replica.Timing {
	return replica.Timing{
		Heartbeat: 200 * time.Millisecond, Election: 200 * time.Millisecond, Lease: 150 * time.Millisecond,
		Commit: 10 * time.Millisecond, RPC: time.Second,
		Pulse: 100 * time.Millisecond, Down: time.Second, Review: 100 * time.Millisecond, Expiry: 50 * time.Millisecond,
	}
}

func limit(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute) // on a busy machine, with the race detector
	t.Cleanup(cancel)
	return ctx
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
	m := &machine{t: t, name: name, dir: t.TempDir(), port: freePort(t), log: &buffer{}, host: &fake{claims: map[string]bool{}, uses: map[string][]string{}}}
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

func (m *machine) open(ctx context.Context) (err error) {
	m.Node, err = Open(ctx, Config{
		Dir: m.dir, Name: m.name, Listen: m.port, Version: "test", Host: m.host,
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

func until(ctx context.Context, t *testing.T, what string, f func() error) {
	t.Helper()
	for {
		err := f()
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%s: %v", what, err)
		case <-time.After(10 * time.Millisecond):
		}
	}
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
	until(ctx, t, "complete", func() error {
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
	until(ctx, t, "leader", func() error {
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

// TestThreeHosts makes a cluster over TLS and starts each of its hosts anew.
func TestThreeHosts(t *testing.T) {
	t.Parallel()
	ctx := limit(t)
	ms := cluster(ctx, t, "a", "b", "c")
	for _, m := range ms {
		for _, end := range []func(){m.stop, m.crash} {
			was := m.Self()
			end()
			m.start(ctx)
			if m.Self() != was {
				t.Fatalf("%v after %v", m.Self(), was)
			}
			complete(ctx, t, ms)
			m.apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_LabelHost{LabelHost: &clusterv1.LabelHost{
				Host: m.name, Set: map[string]string{"at": time.Now().Format("150405.000")},
			}}})
		}
	}
	for _, m := range ms {
		s := m.member().store.Status()
		if !s.GetJoined() || !s.GetQuorum() || s.GetMessage() != "" || s.GetStandalone() {
			t.Errorf("%v", s)
		}
		if err := m.view(ctx).Check(); err != nil {
			t.Error(err)
		}
	}
}

// TestTokenFromFollower: any host may make tokens.
func TestTokenFromFollower(t *testing.T) {
	t.Parallel()
	ctx := limit(t)
	ms := cluster(ctx, t, "a", "b", "c")
	_, others := leader(ctx, t, ms)
	for i, m := range others {
		d := newMachine(t, fmt.Sprintf("d%d", i))
		if err := d.Join(ctx, &clusterv1.JoinRequest{Token: m.token(ctx, &clusterv1.CreateTokenRequest{Name: d.name})}); err != nil {
			t.Fatal(err)
		}
		ms = append(ms, d)
	}
	complete(ctx, t, ms)
}

// TestJoinWithoutLeader shows a token while the host that made it, which led,
// is gone: another one forwards it to the next leader.
func TestJoinWithoutLeader(t *testing.T) {
	t.Parallel()
	ctx := limit(t)
	ms := cluster(ctx, t, "a", "b", "c")
	l, _ := leader(ctx, t, ms)
	token := l.token(ctx, &clusterv1.CreateTokenRequest{})
	l.crash()
	d := newMachine(t, "d")
	if err := d.Join(ctx, &clusterv1.JoinRequest{Token: token}); err != nil {
		t.Fatal(err)
	}
	until(ctx, t, "d known", func() error {
		if d.view(ctx).Host("d") == nil {
			return errors.New("not yet")
		}
		return nil
	})
	l.start(ctx)
	complete(ctx, t, append(ms, d))
}

// TestRefusals has everything go wrong that can with tokens and names; each
// refusal says why, costs nobody anything, and leaves a host that can join.
func TestRefusals(t *testing.T) {
	t.Parallel()
	ctx := limit(t)
	ms := cluster(ctx, t, "a", "b")
	a, other := ms[0], newMachine(t, "other")
	if err := other.Init(ctx, &clusterv1.InitRequest{}); err != nil {
		t.Fatal(err)
	}
	host := func(m *machine, r *clusterv1.CreateTokenRequest) func() *clusterv1.JoinRequest {
		return func() *clusterv1.JoinRequest { return &clusterv1.JoinRequest{Token: m.token(ctx, r)} }
	}
	anybody := &clusterv1.CreateTokenRequest{}
	used := a.token(ctx, anybody)
	u := newMachine(t, "u")
	if err := u.Join(ctx, &clusterv1.JoinRequest{Token: used}); err != nil {
		t.Fatal(err)
	}
	// A token of this cluster that pins another one's authority.
	forged := func() *clusterv1.JoinRequest {
		mine, theirs := decode(t, a.token(ctx, anybody)), decode(t, other.token(ctx, anybody))
		mine.Fingerprint = theirs.Fingerprint
		text, err := mine.Encode()
		if err != nil {
			t.Fatal(err)
		}
		return &clusterv1.JoinRequest{Token: text}
	}
	wrongSecret := func() *clusterv1.JoinRequest {
		token := decode(t, a.token(ctx, anybody))
		token.Secret[0]++
		text, err := token.Encode()
		if err != nil {
			t.Fatal(err)
		}
		return &clusterv1.JoinRequest{Token: text}
	}
	expired := host(a, &clusterv1.CreateTokenRequest{TtlS: 1})()
	time.Sleep(1100 * time.Millisecond)
	late := newMachine(t, "late")
	tests := []struct {
		name string
		join func() *clusterv1.JoinRequest
		want string
	}{
		{"empty", func() *clusterv1.JoinRequest { return &clusterv1.JoinRequest{} }, "not a join token"},
		{"cut", func() *clusterv1.JoinRequest {
			text := a.token(ctx, anybody)
			return &clusterv1.JoinRequest{Token: text[:len(text)-5]}
		}, "not a join token"},
		{"a user's", host(a, &clusterv1.CreateTokenRequest{Role: clusterv1.Role_ROLE_VIEWER, Name: "joe"}), "for a user"},
		{"used", func() *clusterv1.JoinRequest { return &clusterv1.JoinRequest{Token: used} }, "not known"},
		{"expired", func() *clusterv1.JoinRequest { return expired }, "expired"},
		{"another name's", func() *clusterv1.JoinRequest {
			return &clusterv1.JoinRequest{Token: a.token(ctx, &clusterv1.CreateTokenRequest{Name: "x"}), Host: "late"}
		}, "another name"},
		{"secret", wrongSecret, "secret"},
		{"authority", forged, "authority"},
		{"name", func() *clusterv1.JoinRequest {
			return &clusterv1.JoinRequest{Token: a.token(ctx, anybody), Host: "b"}
		}, `there is a host "b" already`},
		{"address", func() *clusterv1.JoinRequest {
			return &clusterv1.JoinRequest{Token: a.token(ctx, anybody), Address: ms[1].port}
		}, "is host b's"},
		{"no address", func() *clusterv1.JoinRequest {
			return &clusterv1.JoinRequest{Token: a.token(ctx, anybody), Address: "nonsense"}
		}, "address"},
		{"bad name", func() *clusterv1.JoinRequest {
			return &clusterv1.JoinRequest{Token: a.token(ctx, anybody), Host: "a/b"}
		}, "name"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := late.Join(ctx, tt.join())
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("%v, not %q", err, tt.want)
			}
			if late.member() != nil {
				t.Error("it is a member")
			}
			if _, err := os.Stat(identityPath(late.dir)); !missing(err) {
				t.Errorf("node.json: %v", err)
			}
		})
	}
	if err := late.Join(ctx, host(a, anybody)()); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{
		"init": late.Init(ctx, &clusterv1.InitRequest{}),
		"join": late.Join(ctx, host(a, anybody)()),
	} {
		if !errors.Is(err, ErrMember) || !errors.Is(err, replica.ErrExists) {
			t.Errorf("%s of a member: %v", name, err)
		}
	}
	complete(ctx, t, append(ms, u, late))
}

// TestNameTakenBeforeReport has two hosts of one name let in before either has
// said what it is.
func TestNameTakenBeforeReport(t *testing.T) {
	t.Parallel()
	ctx := limit(t)
	ms := cluster(ctx, t, "a")
	var wg sync.WaitGroup
	errs := make([]error, 4)
	twins := make([]*machine, len(errs))
	for i := range errs {
		twins[i] = newMachine(t, "twin")
		token := ms[0].token(ctx, &clusterv1.CreateTokenRequest{})
		wg.Go(func() { errs[i] = twins[i].Join(ctx, &clusterv1.JoinRequest{Token: token}) })
	}
	wg.Wait()
	let := 0
	for _, err := range errs {
		switch {
		case err == nil:
			let++
		case !strings.Contains(err.Error(), "twin"):
			t.Errorf("%v", err)
		}
	}
	if let != 1 {
		t.Errorf("%d of %d hosts of one name were let in: %v", let, len(errs), errs)
	}
}

// TestAtOnce inits and joins one host at the same time.
func TestAtOnce(t *testing.T) {
	t.Parallel()
	ctx := limit(t)
	a := cluster(ctx, t, "a")[0]
	b := newMachine(t, "b")
	var wg sync.WaitGroup
	errs := make([]error, 6)
	for i := range errs {
		token := a.token(ctx, &clusterv1.CreateTokenRequest{})
		wg.Go(func() {
			if i%2 == 0 {
				errs[i] = b.Init(ctx, &clusterv1.InitRequest{})
			} else {
				errs[i] = b.Join(ctx, &clusterv1.JoinRequest{Token: token})
			}
		})
	}
	wg.Wait()
	ok := 0
	for _, err := range errs {
		if err == nil {
			ok++
		} else if !errors.Is(err, ErrMember) {
			t.Error(err)
		}
	}
	if ok != 1 {
		t.Errorf("%v", errs)
	}
}

// TestHourAhead starts a cluster with the clock of its first host an hour
// ahead, which others have right.
func TestHourAhead(t *testing.T) {
	t.Parallel()
	ctx := limit(t)
	a := newMachine(t, "a")
	id := identity{Host: "a", ID: "h-ahead", Address: a.port, Cluster: "ahead", Found: true}
	key, csr, err := newRequest()
	if err != nil {
		t.Fatal(err)
	}
	if err := a.foundPKI(id, key, csr, time.Now().Add(time.Hour-time.Minute)); err != nil {
		t.Fatal(err)
	}
	if err := id.write(a.dir); err != nil {
		t.Fatal(err)
	}
	a.stop()
	a.start(ctx)
	b := newMachine(t, "b")
	if err := b.Join(ctx, &clusterv1.JoinRequest{Token: a.token(ctx, &clusterv1.CreateTokenRequest{})}); err != nil {
		t.Fatal(err)
	}
	complete(ctx, t, []*machine{a, b})
}

// TestCrashOfInit starts a host again that crashed at some step of Init.
func TestCrashOfInit(t *testing.T) {
	t.Parallel()
	steps := map[string]struct {
		member bool
		undo   func(t *testing.T, m *machine, id identity)
	}{
		"authority alone": {false, func(t *testing.T, m *machine, _ identity) {
			remove(t, identityPath(m.dir), filepath.Join(m.dir, "raft"), filepath.Join(m.dir, "pki", "node.crt"), filepath.Join(m.dir, "pki", "node.key"))
		}},
		"before node.json": {false, func(t *testing.T, m *machine, _ identity) {
			remove(t, identityPath(m.dir), filepath.Join(m.dir, "raft"))
		}},
		"before raft": {true, func(t *testing.T, m *machine, id identity) {
			id.Found = true
			write(t, m, id)
			remove(t, filepath.Join(m.dir, "raft"))
		}},
		"before the first entries are noted": {true, func(t *testing.T, m *machine, id identity) {
			id.Found = true
			write(t, m, id)
		}},
		"complete": {true, func(*testing.T, *machine, identity) {}},
	}
	for name, step := range steps {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := limit(t)
			m := newMachine(t, "a")
			if err := m.Init(ctx, &clusterv1.InitRequest{}); err != nil {
				t.Fatal(err)
			}
			id := m.member().identity
			m.crash()
			step.undo(t, m, id)
			m.start(ctx)
			if (m.member() != nil) != step.member {
				t.Fatalf("member: %v", m.member() != nil)
			}
			if !step.member {
				if err := m.Init(ctx, &clusterv1.InitRequest{}); err != nil {
					t.Fatal(err)
				}
			} else if m.Self().ID != id.ID {
				t.Errorf("%v, not %v", m.Self(), id)
			}
			complete(ctx, t, []*machine{m})
			b := newMachine(t, "b")
			if err := b.Join(ctx, &clusterv1.JoinRequest{Token: m.token(ctx, &clusterv1.CreateTokenRequest{})}); err != nil {
				t.Fatal(err)
			}
			complete(ctx, t, []*machine{m, b})
		})
	}
}

// TestCrashOfJoin does so with Join. The token is used up by then; with a new
// one the same host comes in under the same name and address.
func TestCrashOfJoin(t *testing.T) {
	t.Parallel()
	steps := map[string]struct {
		member bool
		undo   func(t *testing.T, m *machine)
	}{
		"let in, nothing noted": {false, func(t *testing.T, m *machine) {
			remove(t, identityPath(m.dir), filepath.Join(m.dir, "raft"), filepath.Join(m.dir, "pki"))
		}},
		"before node.json": {false, func(t *testing.T, m *machine) {
			remove(t, identityPath(m.dir), filepath.Join(m.dir, "raft"))
		}},
		"before raft": {true, func(t *testing.T, m *machine) {
			remove(t, filepath.Join(m.dir, "raft"))
		}},
		"complete": {true, func(*testing.T, *machine) {}},
	}
	for name, step := range steps {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := limit(t)
			a := cluster(ctx, t, "a")[0]
			b := newMachine(t, "b")
			// It is let in, and then it is gone.
			gone := b.letIn(ctx, t, a)
			step.undo(t, b)
			b.start(ctx)
			if (b.member() != nil) != step.member {
				t.Fatalf("member: %v", b.member() != nil)
			}
			if !step.member {
				if err := b.Join(ctx, &clusterv1.JoinRequest{Token: a.token(ctx, &clusterv1.CreateTokenRequest{})}); err != nil {
					t.Fatal(err)
				}
			} else if b.Self().ID != gone {
				t.Errorf("%v, not %v", b.Self(), gone)
			}
			complete(ctx, t, []*machine{a, b})
			if err := a.view(ctx).Check(); err != nil {
				t.Error(err)
			}
		})
	}
}

// letIn is what Join does up to the moment before the membership begins.
func (m *machine) letIn(ctx context.Context, t *testing.T, by *machine) (id string) {
	t.Helper()
	token := decode(t, by.token(ctx, &clusterv1.CreateTokenRequest{}))
	next, l, err := m.begin(ctx, "", "")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	key, csr, err := newRequest()
	if err != nil {
		t.Fatal(err)
	}
	res, err := remote.Enroll(ctx, token, &clusterv1.EnrollRequest{Csr: csr, Host: next.Host, HostId: next.ID, Address: next.Address, Protocol: state.Protocol})
	if err != nil {
		t.Fatal(err)
	}
	next.Cluster = res.GetClusterId()
	if err := m.joined(token, next, res, key); err != nil {
		t.Fatal(err)
	}
	m.stop()
	return next.ID
}

func decode(t *testing.T, text string) pki.Token {
	t.Helper()
	token, err := pki.DecodeToken(text)
	if err != nil {
		t.Fatal(err)
	}
	return token
}

func remove(t *testing.T, paths ...string) {
	t.Helper()
	for _, p := range paths {
		if err := os.RemoveAll(p); err != nil {
			t.Fatal(err)
		}
	}
}

func write(t *testing.T, m *machine, id identity) {
	t.Helper()
	if err := id.write(m.dir); err != nil {
		t.Fatal(err)
	}
}

// TestDamaged starts hosts whose folder is not as they left it.
func TestDamaged(t *testing.T) {
	t.Parallel()
	ctx := limit(t)
	m := newMachine(t, "a")
	if err := m.Init(ctx, &clusterv1.InitRequest{}); err != nil {
		t.Fatal(err)
	}
	m.stop()
	good, err := os.ReadFile(identityPath(m.dir))
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ text, want string }{
		"cut":    {string(good[:len(good)/2]), "node.json"},
		"empty":  {"", "node.json"},
		"newer":  {strings.Replace(string(good), `"version": 1`, `"version": 2`, 1), "version 2"},
		"no pki": {string(good), "certificate"},
	} {
		if err := os.WriteFile(identityPath(m.dir), []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if name == "no pki" {
			if err := os.Rename(filepath.Join(m.dir, "pki"), filepath.Join(m.dir, "kip")); err != nil {
				t.Fatal(err)
			}
		}
		err := m.open(ctx)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
		m.Node = nil
		if name == "no pki" {
			if err := os.Rename(filepath.Join(m.dir, "kip"), filepath.Join(m.dir, "pki")); err != nil {
				t.Fatal(err)
			}
		}
	}
	// The port is another's.
	if err := os.WriteFile(identityPath(m.dir), good, 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", m.port)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.open(ctx); err == nil || !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("%v", err)
	}
	m.Node = nil
	l.Close()
	m.start(ctx)
	complete(ctx, t, []*machine{m})
}

// TestRemoved removes a follower, then the leader: neither comes back by
// itself, nobody listens to it any more, and it says so.
func TestRemoved(t *testing.T) {
	t.Parallel()
	ctx := limit(t)
	ms := cluster(ctx, t, "a", "b", "c", "d")
	for _, which := range []string{"follower", "leader"} {
		l, others := leader(ctx, t, ms)
		out := others[0]
		if which == "leader" {
			out = l
		}
		stay := slices.DeleteFunc(slices.Clone(ms), func(m *machine) bool { return m == out })
		if _, err := stay[0].api.RemoveHost(admin(ctx), connect.NewRequest(&clusterv1.RemoveHostRequest{Host: out.name})); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		until(ctx, t, which+" told", func() error {
			res, err := out.api.Status(ctx, connect.NewRequest(&clusterv1.StatusRequest{}))
			if err != nil {
				return err
			}
			if s := res.Msg; !strings.Contains(s.GetMessage(), "removed") {
				return fmt.Errorf("status of %s: %v", out.name, s)
			}
			return nil
		})
		t.Logf("%s knows after %v", which, time.Since(began))
		_, err := out.api.SetLabels(admin(short(ctx, t)), connect.NewRequest(&clusterv1.SetLabelsRequest{Host: stay[0].name, Set: map[string]string{"x": "y"}}))
		if err == nil {
			t.Errorf("the %s still changes the cluster", which)
		}
		complete(ctx, t, stay)
		time.Sleep(500 * time.Millisecond)
		if h := stay[0].view(ctx).Host(out.name); h != nil {
			t.Errorf("it is back: %v", h)
		}
		stay[0].apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_LabelHost{LabelHost: &clusterv1.LabelHost{Host: stay[0].name, Set: map[string]string{"a": out.name}}}})
		// What is left of it does not stand in the way of its return.
		out.stop()
		remove(t, identityPath(out.dir))
		out.start(ctx)
		if err := out.Join(ctx, &clusterv1.JoinRequest{Token: stay[0].token(ctx, &clusterv1.CreateTokenRequest{})}); err != nil {
			t.Fatalf("%s: %v", out.name, err)
		}
		complete(ctx, t, ms)
	}
}

func short(ctx context.Context, t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	t.Cleanup(cancel)
	return ctx
}

// TestQuiet: a host that stays as it is costs no log entries, however it
// leaves fields out and whatever operators say about it.
func TestQuiet(t *testing.T) {
	t.Parallel()
	ctx := limit(t)
	ms := cluster(ctx, t, "a", "b", "c")
	b := ms[1]
	b.host.do(func() {
		b.host.gpus = append(b.host.gpus, &clusterv1.GPU{Name: "bare", Model: "bare card"})
		b.host.sessions = []*clusterv1.Session{{Id: "s1", Pid: 7, State: gpuctlv1.SessionState_SESSION_STATE_RUNNING, Gpus: []string{"g0"}}}
	})
	if err := b.Announce(ctx); err != nil {
		t.Fatal(err)
	}
	for _, c := range []*clusterv1.Command{
		{Op: &clusterv1.Command_RankModel{RankModel: &clusterv1.RankModel{Model: "test", Rank: 9}}},
		{Op: &clusterv1.Command_CordonGpu{CordonGpu: &clusterv1.CordonGPU{Gpu: "b/g0", Cordoned: true, Message: "dust"}}},
		{Op: &clusterv1.Command_DrainHost{DrainHost: &clusterv1.DrainHost{Host: "b", Draining: true, Message: "move"}}},
		{Op: &clusterv1.Command_LabelHost{LabelHost: &clusterv1.LabelHost{Host: "b", Set: map[string]string{"rack": "7"}}}},
	} {
		b.apply(ctx, c)
	}
	b.Kick()
	until(ctx, t, "session", func() error {
		if b.view(ctx).Object(clusterv1.Kind_KIND_SESSION, "b/s1") == nil {
			return errors.New("not yet")
		}
		return nil
	})
	time.Sleep(time.Second)
	was := b.view(ctx).Index()
	for range 10 {
		for _, m := range ms {
			if err := m.Announce(ctx); err != nil {
				t.Fatal(err)
			}
			m.Kick()
		}
		time.Sleep(200 * time.Millisecond)
	}
	v := b.view(ctx)
	if v.Index() != was {
		t.Errorf("%d entries for nothing: %v", v.Index()-was, v.Events(clusterv1.Kind_KIND_UNSPECIFIED, "", 20))
	}
	// What does change is told at once, and once.
	b.host.do(func() { b.host.gpus = b.host.gpus[1:] })
	if err := b.Announce(ctx); err != nil {
		t.Fatal(err)
	}
	v = b.view(ctx)
	events := slices.DeleteFunc(v.Events(clusterv1.Kind_KIND_UNSPECIFIED, "", 0), func(e *clusterv1.Event) bool { return e.GetIndex() <= was })
	if len(events) != 1 || v.GPU("b/g0") != nil {
		t.Errorf("%v", events)
	}
}

// TestForeignClaim is a claim that was made from outside: the host takes note,
// and gives the GPU back when nothing uses it any more.
func TestForeignClaim(t *testing.T) {
	t.Parallel()
	ctx := limit(t)
	ms := cluster(ctx, t, "a", "b", "c")
	b := ms[1]
	claim := &clusterv1.Claim{Id: "vm", Host: "b"}
	res, err := ms[2].api.CreateClaim(admin(ctx), connect.NewRequest(&clusterv1.CreateClaimRequest{Claim: claim}))
	if err != nil || len(res.Msg.GetAssignments()) != 1 {
		t.Fatalf("%v, %v", res, err)
	}
	as := res.Msg.GetAssignments()[0]
	_, gpu, _ := strings.Cut(as.GetGpu(), "/")
	b.host.do(func() { b.host.uses["vm"] = []string{gpu} })
	residence := func(want clusterv1.Residence) {
		t.Helper()
		until(ctx, t, want.String(), func() error {
			if got := ms[0].view(ctx).Assignment(as.GetId()).GetResidence(); got != want {
				return fmt.Errorf("it is %v", got)
			}
			return nil
		})
	}
	residence(clusterv1.Residence_RESIDENCE_RESIDENT)
	if _, err := ms[0].api.DeleteClaim(admin(ctx), connect.NewRequest(&clusterv1.DeleteClaimRequest{Claim: "vm"})); err != nil {
		t.Fatal(err)
	}
	residence(clusterv1.Residence_RESIDENCE_RELEASING)
	for range 5 { // as long as it is used
		b.Kick()
		time.Sleep(50 * time.Millisecond)
		residence(clusterv1.Residence_RESIDENCE_RELEASING)
	}
	// A host that does not know yet what it has does not say that it is gone.
	b.host.do(func() { b.host.unready, b.host.uses = true, map[string][]string{} })
	b.crash()
	b.start(ctx)
	time.Sleep(300 * time.Millisecond)
	residence(clusterv1.Residence_RESIDENCE_RELEASING)
	b.host.do(func() { b.host.unready = false })
	until(ctx, t, "gone", func() error {
		if v := ms[0].view(ctx); v.Claim("vm") != nil || v.Assignment(as.GetId()) != nil {
			return fmt.Errorf("%v", v.Claim("vm"))
		}
		return nil
	})
}

// TestOwnClaims are claims of a host's sessions: bound through the cluster,
// moved, released when the host forgets them, and told again when the cluster
// has lost them.
func TestOwnClaims(t *testing.T) {
	t.Parallel()
	ctx := limit(t)
	ms := cluster(ctx, t, "a", "b", "c")
	for _, b := range ms { // the leader and others
		h := b.host
		id := "own-" + b.name
		h.do(func() { h.claims[id] = true; h.uses[id] = []string{"g0", "g1"} })
		res, err := b.Claim(ctx, &clusterv1.Claim{Id: id, Expr: `name in ["g0"]`})
		if err != nil || len(res.GetAssignments()) != 1 || res.GetAssignments()[0].GetGpu() != b.name+"/g0" {
			t.Fatalf("%v, %v", res, err)
		}
		if err := b.Acquire(ctx, &clusterv1.Claim{Id: id}, []string{"g1"}, 0); err != nil {
			t.Fatal(err)
		}
		if err := b.Acquire(ctx, &clusterv1.Claim{Id: id}, []string{"g1"}, 0); err != nil {
			t.Errorf("again: %v", err)
		}
		if err := b.Acquire(ctx, &clusterv1.Claim{Id: "late-" + b.name}, []string{"g1"}, 0); !errors.Is(err, ErrTaken) {
			t.Errorf("a GPU that is held: %v", err)
		}
		if err := b.Acquire(ctx, &clusterv1.Claim{Id: "late-" + b.name}, []string{"g9"}, 0); err == nil {
			t.Errorf("a GPU that there is not: %v", err)
		}
		owned := func(want ...string) {
			t.Helper()
			until(ctx, t, fmt.Sprint("owned: ", want), func() error {
				got := map[string]bool{}
				v := ms[0].view(ctx)
				for as := range v.AssignmentsOfClaim(id) {
					if as.GetResidence() != clusterv1.Residence_RESIDENCE_RESIDENT {
						return fmt.Errorf("%v", as)
					}
					got[as.GetGpu()] = true
				}
				if names := slices.Sorted(maps.Keys(got)); !slices.Equal(names, want) {
					return fmt.Errorf("%v, claim %v", names, v.Claim(id))
				}
				return v.Check()
			})
		}
		owned(b.name+"/g0", b.name+"/g1")
		// A swap is over: the session has moved to g1.
		h.do(func() { h.uses[id] = []string{"g1"} })
		b.Kick()
		owned(b.name + "/g1")
		// Somebody deletes the claim that is in use: the GPU stays until it is not.
		if _, err := ms[2].api.DeleteClaim(admin(ctx), connect.NewRequest(&clusterv1.DeleteClaimRequest{Claim: id})); err != nil {
			t.Fatal(err)
		}
		b.Kick()
		time.Sleep(100 * time.Millisecond)
		if c := ms[0].view(ctx).Claim(id); c.GetState() != clusterv1.ClaimState_CLAIM_STATE_RELEASING || len(c.GetAssignments()) != 1 {
			t.Errorf("%v", c)
		}
		h.do(func() { delete(h.uses, id); delete(h.claims, id) })
		b.Kick()
		until(ctx, t, "released", func() error {
			if v := ms[0].view(ctx); v.Claim(id) != nil || !v.GPU(b.name+"/g1").GetFree() {
				return fmt.Errorf("%v", v.Claim(id))
			}
			return nil
		})
		// What it holds and the cluster has never heard of, it is told.
		h.do(func() {
			h.claims[id], h.uses[id] = true, []string{"g0"}
			h.holdings = []Holding{{Claim: &clusterv1.Claim{Id: id}, GPUs: []string{"g0"}, Amount: 1 << 30}}
		})
		b.Kick()
		owned(b.name + "/g0")
		h.do(func() { h.claims, h.uses, h.holdings = map[string]bool{}, map[string][]string{}, nil })
		b.Kick()
		until(ctx, t, "forgotten", func() error {
			if c := ms[0].view(ctx).Claim(id); c != nil {
				return fmt.Errorf("%v", c)
			}
			return nil
		})
	}
}

// TestHoldingOfOthers: what others were given meanwhile stays theirs.
func TestHoldingOfOthers(t *testing.T) {
	t.Parallel()
	ctx := limit(t)
	a := cluster(ctx, t, "a")[0]
	if _, err := a.api.CreateClaim(admin(ctx), connect.NewRequest(&clusterv1.CreateClaimRequest{Claim: &clusterv1.Claim{Id: "vm", Expr: `name == "g0"`}})); err != nil {
		t.Fatal(err)
	}
	a.host.do(func() {
		a.host.claims["mine"], a.host.uses["mine"] = true, []string{"g0"}
		a.host.holdings = []Holding{{Claim: &clusterv1.Claim{Id: "mine"}, GPUs: []string{"g0"}}}
	})
	a.Kick()
	until(ctx, t, "said", func() error {
		if !strings.Contains(a.log.String(), "has not given to it") {
			return errors.New("not yet")
		}
		return nil
	})
	v := a.view(ctx)
	owners := slices.Collect(v.AssignmentsOfGPU("a/g0"))
	if len(owners) != 1 || owners[0].GetClaim() != "vm" {
		t.Errorf("%v", owners)
	}
}

// TestRecords notes operations, with nobody to note them at times.
func TestRecords(t *testing.T) {
	t.Parallel()
	ctx := limit(t)
	ms := cluster(ctx, t, "a", "b", "c")
	l, others := leader(ctx, t, ms)
	b := others[0]
	r := func(step string, s clusterv1.MigrationState) *clusterv1.Migration {
		return &clusterv1.Migration{Id: "m1", Verb: "upgrade", Object: "s1", Claim: "c1", From: "g0", To: "g1", Step: step, State: s, StartedUnixMs: 1}
	}
	const running, done = clusterv1.MigrationState_MIGRATION_STATE_RUNNING, clusterv1.MigrationState_MIGRATION_STATE_DONE
	b.Record(r("freeze", running))
	b.Record(r("copy", running))
	wait := func(state clusterv1.MigrationState, step string) {
		t.Helper()
		until(ctx, t, step, func() error {
			v, err := b.member().store.Read(ctx, false)
			if err != nil {
				return err
			}
			o := v.Object(clusterv1.Kind_KIND_MIGRATION, "m1").GetMigration()
			if o.GetState() != state || o.GetStep() != step || o.GetDriver() != b.name || o.GetObject() != b.name+"/s1" {
				return fmt.Errorf("%v", o)
			}
			return nil
		})
	}
	wait(running, "copy")
	// Nobody leads for longer than one try lasts.
	l.crash()
	others[1].crash()
	b.Record(r("thaw", running))
	b.Record(r("end", done))
	time.Sleep(attempt + time.Second)
	others[1].start(ctx)
	wait(done, "end")
	l.start(ctx)
	complete(ctx, t, ms)
}

// TestInMemory is hostd --dev: a cluster of one without a folder.
func TestInMemory(t *testing.T) {
	t.Parallel()
	ctx := limit(t)
	f := &fake{claims: map[string]bool{}, uses: map[string][]string{}, gpus: []*clusterv1.GPU{{Name: "g0", Model: "m"}}}
	n, err := Open(ctx, Config{Name: "solo", Host: f, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if err := n.Announce(ctx); err != nil {
		t.Fatal(err)
	}
	res, err := n.Claim(ctx, &clusterv1.Claim{Id: "c"})
	if err != nil || len(res.GetAssignments()) != 1 {
		t.Fatalf("%v, %v", res, err)
	}
	if s := n.member().store.Status(); !s.GetStandalone() || !s.GetJoined() {
		t.Errorf("%v", s)
	}
	for name, err := range map[string]error{
		"init": n.Init(ctx, &clusterv1.InitRequest{}), "join": n.Join(ctx, &clusterv1.JoinRequest{Token: "x"}),
	} {
		if err == nil {
			t.Errorf("%s of a cluster in memory", name)
		}
	}
	if _, err := n.api.CreateToken(admin(ctx), connect.NewRequest(&clusterv1.CreateTokenRequest{})); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Errorf("token: %v", err)
	}
}

// Hosts that joined since the last snapshot are let in when all start at once,
// though nobody has applied yet that they were let in before.
func TestAllStartAtOnce(t *testing.T) {
	t.Parallel()
	ctx := limit(t)
	first := cluster(ctx, t, "a")[0]
	first.stop()
	if _, err := Recover(first.dir); err != nil { // leaves a snapshot
		t.Fatal(err)
	}
	first.start(ctx)
	ms := []*machine{first}
	leader(ctx, t, ms)
	for _, name := range []string{"b", "c"} {
		m := newMachine(t, name)
		ms = append(ms, m)
		if err := m.Join(ctx, &clusterv1.JoinRequest{Token: first.token(ctx, &clusterv1.CreateTokenRequest{})}); err != nil {
			t.Fatal(err)
		}
	}
	complete(ctx, t, ms)
	for _, m := range ms {
		m.crash()
	}
	for _, m := range ms {
		m.start(ctx)
	}
	complete(ctx, t, ms)
}
