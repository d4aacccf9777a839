package borrow

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/hostd/migration/endpoint"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

const gib = 1 << 30

var web = vm.Info{VM: vm.VM{UUID: "11111111-2222-4333-8444-555555555501", Name: "web"}, State: "running"}

// world is the host h1 with the VM web, in a cluster of which h1, h2 and h3 lend GPUs and h4
// does not.
type world struct {
	t     *testing.T
	store *state.Store

	mu       sync.Mutex
	index    uint64
	vm       vm.Info
	where    migrate.Presence
	protocol uint32
	sessions []string // that compute on the remote GPU
	answers  int      // how often it still says what they are; negative: always
	card     bool
	deaf     error // why the VM cannot be told
	told     string
	ends     int // how often telling it has ended
	left     int // how often its channel was closed
	reach    map[string]string
	lends    map[string]error // by host
	asked    []string
	home     []string
	relayed  func(address string) bool // what the VM's carriers may reach through this host; nil: nothing
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, store: state.New(), vm: web, where: migrate.Running, answers: -1, protocol: endpoint.BorrowProtocol, reach: map[string]string{}, lends: map[string]error{}}
	for _, h := range []struct {
		name, gpu string
		rank      uint32
		memory    uint64
	}{{"h1", "mid", 2, 4 * gib}, {"h2", "low", 1, 2 * gib}, {"h3", "big", 3, 8 * gib}, {"h4", "best", 4, 16 * gib}} {
		host := &clusterv1.Host{Name: h.name, Id: "id-" + h.name, Address: h.name + ":7650", LendAddress: h.name + ":7651", Protocol: state.Protocol}
		if h.name == "h4" {
			host.LendAddress = ""
		}
		w.apply(&clusterv1.Command{Op: &clusterv1.Command_PutIdentity{PutIdentity: &clusterv1.PutIdentity{Identity: &clusterv1.Identity{Id: host.GetId(), Host: h.name, Role: clusterv1.Role_ROLE_HOST}}}})
		w.apply(&clusterv1.Command{Op: &clusterv1.Command_ReportHost{ReportHost: &clusterv1.ReportHost{Host: host, Gpus: []*clusterv1.GPU{{
			Id: h.name + "/" + h.gpu, Name: h.gpu, Host: h.name, Present: true, Runtime: "libpocl.so.2", RuntimeKey: "pocl", Model: h.gpu, Rank: h.rank,
			Health: clusterv1.Health_HEALTH_OK, Limits: &gpuctlv1.Limits{GlobalMemory: h.memory},
		}}}}})
	}
	return w
}

func (w *world) apply(c *clusterv1.Command) *clusterv1.Result {
	w.index++
	c.Version = state.VersionOf(c)
	res := w.store.Apply(w.index, c)
	if res.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
		w.t.Errorf("%v", res)
	}
	return res
}

// bind makes a lasting claim, as the host that lends does.
func (w *world) bind(uuid, name, gpu string, memory uint64) {
	w.apply(&clusterv1.Command{Op: &clusterv1.Command_PutClaim{PutClaim: &clusterv1.PutClaim{
		Claim: &clusterv1.Claim{
			Id: endpoint.LastingClaim(uuid), Count: 1, MinMemory: memory,
			Labels: map[string]string{endpoint.LabelVM: uuid, endpoint.LabelName: name, placement.LabelManagedBy: "id-" + migrate.HostOf(gpu)},
		},
		Choices: []*clusterv1.Choice{{Gpu: gpu, Memory: memory}},
	}}})
}

func (w *world) locked(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

func (w *world) HostName() string                          { return "h1" }
func (w *world) View() *state.View                         { return w.store.View() }
func (w *world) Read(context.Context) (*state.View, error) { return w.store.View(), nil }
func (w *world) Site(host string) (gpuctlv1connect.SiteServiceClient, error) {
	return &lendingSite{world: w, host: host}, nil
}

func (w *world) Find(_ context.Context, ref string) (vm.Info, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if ref != w.vm.Name && ref != w.vm.UUID {
		return vm.Info{}, cards.ErrNotFound
	}
	return w.vm, nil
}

// lendingSite is a host that lends.
type lendingSite struct {
	gpuctlv1connect.SiteServiceClient
	world *world
	host  string
}

func (s *lendingSite) Lend(_ context.Context, r *connect.Request[gpuctlv1.SiteLendRequest]) (*connect.Response[gpuctlv1.SiteDone], error) {
	w, m := s.world, r.Msg
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked = append(w.asked, "lend "+m.GetGpu())
	if err := w.lends[s.host]; err != nil {
		return nil, err
	}
	if m.GetMachine().GetMigration() != "" || m.GetClaim() != endpoint.LastingClaim(m.GetMachine().GetUuid()) || migrate.HostOf(m.GetGpu()) != s.host {
		w.t.Errorf("%v", m)
	}
	w.bind(m.GetMachine().GetUuid(), m.GetMachine().GetName(), m.GetGpu(), m.GetMinMemory())
	return connect.NewResponse(&gpuctlv1.SiteDone{}), nil
}

func (s *lendingSite) EndLend(_ context.Context, r *connect.Request[gpuctlv1.SiteLendRequest]) (*connect.Response[gpuctlv1.SiteDone], error) {
	w, m := s.world, r.Msg
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked = append(w.asked, "end "+m.GetGpu())
	if w.told != "" {
		w.t.Error("it ends while the VM is told of it")
	}
	if w.store.View().Claim(m.GetClaim()) == nil {
		return connect.NewResponse(&gpuctlv1.SiteDone{}), nil
	}
	w.apply(&clusterv1.Command{Op: &clusterv1.Command_DeleteClaim{DeleteClaim: &clusterv1.DeleteClaim{Claim: m.GetClaim()}}})
	var gone []*clusterv1.Confirmation
	for as := range w.store.View().AssignmentsOfClaim(m.GetClaim()) {
		gone = append(gone, &clusterv1.Confirmation{Assignment: as.GetId(), Token: as.GetToken(), Gone: true})
	}
	w.apply(&clusterv1.Command{Op: &clusterv1.Command_ConfirmAssignments{ConfirmAssignments: &clusterv1.ConfirmAssignments{Host: s.host, Confirmations: gone}}})
	w.sessions = nil
	return connect.NewResponse(&gpuctlv1.SiteDone{}), nil
}

func (s *lendingSite) Follow(_ context.Context, r *connect.Request[gpuctlv1.SiteLendRequest]) (*connect.Response[gpuctlv1.SiteDone], error) {
	s.world.locked(func() { s.world.asked = append(s.world.asked, "follow "+r.Msg.GetGpu()) })
	return connect.NewResponse(&gpuctlv1.SiteDone{}), nil
}

// vmSite is the VM's host, as the keeper uses it.
type vmSite struct{ *world }

func (s vmSite) Where(_ context.Context, uuid string) (migrate.Presence, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if uuid != s.vm.UUID {
		return migrate.Absent, nil
	}
	return s.where, nil
}

func (s vmSite) Reach(_ context.Context, _ string, addresses []string) (out []*gpuctlv1.Reached, err error) {
	for _, a := range addresses {
		out = append(out, &gpuctlv1.Reached{Error: s.reach[a]})
	}
	return out, nil
}

func (s vmSite) AgentProtocol(context.Context, string) (uint32, error) { return s.protocol, nil }

func (s vmSite) ServeRemote(ctx context.Context, _ vm.VM, lent endpoint.Lent, ready func()) error {
	s.mu.Lock()
	if err := s.deaf; err != nil {
		s.mu.Unlock()
		return err
	}
	s.told = fmt.Sprint(lent.GPU, " ", lent.Memory)
	s.mu.Unlock()
	ready()
	<-ctx.Done()
	s.locked(func() { s.told, s.ends = "", s.ends+1 })
	return ctx.Err()
}

func (s vmSite) Computing(ctx context.Context, _, _ string) ([]string, error) {
	s.mu.Lock()
	mute, sessions := s.answers == 0, slices.Clone(s.sessions)
	if s.answers > 0 {
		s.answers--
	}
	s.mu.Unlock()
	if mute {
		<-ctx.Done()
	}
	return sessions, ctx.Err()
}

func (s vmSite) Left(string) { s.locked(func() { s.left++ }) }

func (s vmSite) HasCard(context.Context, string) (bool, error) { return s.card, nil }

func (s vmSite) BringHome(_ context.Context, _ vm.VM, sessions []string, _ migrate.Progress) error {
	s.locked(func() { s.home, s.sessions = append(s.home, sessions...), nil })
	return nil
}

func (s vmSite) Relay(ctx context.Context, _ vm.VM, may func(string) bool) error {
	s.locked(func() { s.relayed = may })
	<-ctx.Done()
	s.locked(func() { s.relayed = nil })
	return ctx.Err()
}

// run has a keeper of the host h1 run until the test ends.
func (w *world) run() *Keeper {
	w.t.Helper()
	k := New(Config{Node: w, Site: vmSite{w}, VMs: w, Log: slog.New(slog.DiscardHandler), Tell: 2 * time.Second})
	ctx, cancel := context.WithCancel(w.t.Context())
	var work sync.WaitGroup
	work.Go(func() { k.Run(ctx) })
	w.t.Cleanup(func() {
		cancel()
		work.Wait()
	})
	return k
}

func (w *world) attach(k *Keeper, r *gpuctlv1.AttachRemoteRequest) (last *gpuctlv1.DeviceUpdate, err error) {
	r.Machine = "web"
	err = k.Attach(w.t.Context(), r, func(u *gpuctlv1.DeviceUpdate) { last = u })
	return last, err
}

func (w *world) tells(k *Keeper, want string) {
	w.t.Helper()
	testkit.Until(w.t, "the VM is told of "+want, func() error {
		k.Kick()
		w.mu.Lock()
		defer w.mu.Unlock()
		return testkit.Want(w.told == want, w.told)
	})
}

// The best GPU is lent whole, the lowest that has room by memory; what does not fit is named.
func TestTheFittingGPUIsLentToAVM(t *testing.T) {
	taken := connect.NewWireError(connect.CodeResourceExhausted, errors.New("taken"))
	for name, c := range map[string]struct {
		req  *gpuctlv1.AttachRemoteRequest
		set  func(*world)
		gets string
		says string
	}{
		"whole":                 {&gpuctlv1.AttachRemoteRequest{}, nil, "h3/big 0", ""},
		"by memory":             {&gpuctlv1.AttachRemoteRequest{MinMemory: gib}, nil, fmt.Sprint("h2/low ", gib), ""},
		"by more memory":        {&gpuctlv1.AttachRemoteRequest{MinMemory: 3 * gib}, nil, fmt.Sprint("h1/mid ", 3*gib), ""},
		"by an expression":      {&gpuctlv1.AttachRemoteRequest{Expr: "model == 'mid'"}, nil, "h1/mid 0", ""},
		"by name, of this host": {&gpuctlv1.AttachRemoteRequest{Gpu: "mid"}, nil, "h1/mid 0", ""},
		"beside another":        {&gpuctlv1.AttachRemoteRequest{MinMemory: gib}, func(w *world) { w.bind("other", "o", "h2/low", gib) }, fmt.Sprint("h2/low ", gib), ""},
		"no room beside it":     {&gpuctlv1.AttachRemoteRequest{Gpu: "h2/low", MinMemory: 2 * gib}, func(w *world) { w.bind("other", "o", "h2/low", gib) }, "", "are needed"},
		"not whole beside it":   {&gpuctlv1.AttachRemoteRequest{Gpu: "h2/low"}, func(w *world) { w.bind("other", "o", "h2/low", gib) }, "", "in use"},
		"not reached":           {&gpuctlv1.AttachRemoteRequest{}, func(w *world) { w.reach["h3:7651"] = "no route" }, "h1/mid 0", ""},
		"none reached":          {&gpuctlv1.AttachRemoteRequest{Gpu: "h3/big"}, func(w *world) { w.reach["h3:7651"] = "no route" }, "", "no route"},
		"lends nothing":         {&gpuctlv1.AttachRemoteRequest{Gpu: "h4/best"}, nil, "", "lends nothing"},
		"too large":             {&gpuctlv1.AttachRemoteRequest{MinMemory: 99 * gib}, nil, "", "are needed"},
		"no such GPU":           {&gpuctlv1.AttachRemoteRequest{Gpu: "h9/x"}, nil, "", "there is no GPU"},
		"an old gpuguest":       {&gpuctlv1.AttachRemoteRequest{}, func(w *world) { w.protocol = 3 }, "", "install a newer one"},
		"a stopped VM":          {&gpuctlv1.AttachRemoteRequest{}, func(w *world) { w.vm.State = "shutoff" }, "", "--persistent"},
		"no definition":         {&gpuctlv1.AttachRemoteRequest{Persistent: true}, nil, "", "no stored definition"},
		"it has one":            {&gpuctlv1.AttachRemoteRequest{}, func(w *world) { w.bind(web.UUID, "web", "h1/mid", gib) }, "", "has h1/mid already"},
		"taken meanwhile":       {&gpuctlv1.AttachRemoteRequest{}, func(w *world) { w.lends["h3"] = taken }, "h1/mid 0", ""},
		"all taken":             {&gpuctlv1.AttachRemoteRequest{Gpu: "h3/big"}, func(w *world) { w.lends["h3"] = taken }, "", "taken"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			if c.set != nil {
				c.set(w)
			}
			k := w.run()
			last, err := w.attach(k, c.req)
			if c.says != "" {
				if err == nil || !strings.Contains(err.Error(), c.says) {
					t.Fatalf("%v; want %q", err, c.says)
				}
				return
			}
			if err != nil || !last.GetDone() || !strings.HasPrefix(c.gets, last.GetGpu()) {
				t.Fatalf("%v: %v", err, last)
			}
			w.tells(k, c.gets)
			if of := k.Of(web.UUID); of.GetGpu() != last.GetGpu() || of.GetMemory() != c.req.GetMinMemory() {
				t.Errorf("%v", of)
			}
		})
	}
}

// A plan changes nothing. A GPU of which the VM cannot be told is given back.
func TestAnAttachEndsWholeOrUndone(t *testing.T) {
	w := newWorld(t)
	k := w.run()
	last, err := w.attach(k, &gpuctlv1.AttachRemoteRequest{Plan: true, MinMemory: gib})
	if err != nil || len(last.GetPlan()) != 2 || len(last.GetReasons()) > 0 || len(w.asked) > 0 {
		t.Errorf("%v: %v, %v", err, last, w.asked)
	}
	w.locked(func() { w.deaf = errors.New("gpuguest has gone") })
	if _, err = w.attach(k, &gpuctlv1.AttachRemoteRequest{MinMemory: gib}); err == nil || !strings.Contains(err.Error(), "gpuguest has gone") {
		t.Errorf("%v", err)
	}
	if c := w.store.View().Claim(endpoint.LastingClaim(web.UUID)); c != nil || k.Of(web.UUID) != nil {
		t.Errorf("its claim is left: %v", c)
	}
	// The host that lends may have bound the claim although its answer is lost.
	w.locked(func() {
		w.deaf, w.asked = nil, nil
		w.lends["h2"] = connect.NewError(connect.CodeUnavailable, errors.New("the connection broke"))
	})
	if _, err = w.attach(k, &gpuctlv1.AttachRemoteRequest{MinMemory: gib, Gpu: "h2/low"}); err == nil {
		t.Error("it is done")
	}
	w.locked(func() {
		if !slices.Contains(w.asked, "end h2/low") {
			t.Errorf("nobody has ended it: %v", w.asked)
		}
	})
}

// A VM that takes questions and does not answer keeps its GPU only from who asks whether it
// computes there, and nobody for longer than it may take to answer.
func TestAVMThatDoesNotAnswerDoesNotKeepItsGPU(t *testing.T) {
	for name, answers := range map[string]int{"never": 0, "only for the plan": 1} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			k := w.run()
			if _, err := w.attach(k, &gpuctlv1.AttachRemoteRequest{MinMemory: gib}); err != nil {
				t.Fatal(err)
			}
			k.Tell = 50 * time.Millisecond
			w.locked(func() { w.answers = answers })
			detach := func(unconfirmed bool) error {
				ended := make(chan error, 1)
				go func() {
					ended <- k.Detach(t.Context(), &gpuctlv1.DetachRemoteRequest{Machine: "web", Unconfirmed: unconfirmed}, func(*gpuctlv1.DeviceUpdate) {})
				}()
				testkit.Until(t, "the detach ends", func() error { return testkit.Want(len(ended) == 1, "it waits for the VM") })
				return <-ended
			}
			if err := detach(false); err == nil || k.Of(web.UUID) == nil {
				t.Errorf("nobody knows whether it computes there: %v", err)
			}
			if err := detach(true); err != nil || k.Of(web.UUID) != nil {
				t.Errorf("unconfirmed: %v", err)
			}
		})
	}
}

// Sessions come home to the VM's own card. Without one, they are not taken their GPU unless
// somebody wants that.
func TestADetachLosesNoSessions(t *testing.T) {
	w := newWorld(t)
	k := w.run()
	begin := func() {
		t.Helper()
		if _, err := w.attach(k, &gpuctlv1.AttachRemoteRequest{MinMemory: gib}); err != nil {
			t.Fatal(err)
		}
		w.locked(func() { w.sessions = []string{"s-1", "s-2"} })
	}
	detach := func(r *gpuctlv1.DetachRemoteRequest) (last *gpuctlv1.DeviceUpdate, err error) {
		err = k.Detach(t.Context(), r, func(u *gpuctlv1.DeviceUpdate) { last = u })
		return last, err
	}
	begin()
	if _, err := detach(&gpuctlv1.DetachRemoteRequest{Machine: "web"}); !reason.Is(err, reason.Refused) || !strings.Contains(err.Error(), "2 sessions") {
		t.Errorf("%v", err)
	}
	if _, err := detach(&gpuctlv1.DetachRemoteRequest{Machine: "web", Gpu: "h3/big"}); !reason.Is(err, reason.NotFound) {
		t.Errorf("another GPU: %v", err)
	}
	w.tells(k, fmt.Sprint("h2/low ", gib)) // still
	w.locked(func() { w.card = true })
	if last, err := detach(&gpuctlv1.DetachRemoteRequest{Machine: "web", Plan: true}); err != nil || len(last.GetPlan()) != 3 || len(w.home) > 0 {
		t.Errorf("%v %v", err, last)
	}
	if last, err := detach(&gpuctlv1.DetachRemoteRequest{Machine: "web", Gpu: "h2/low"}); err != nil || !last.GetDone() || !slices.Equal(w.home, []string{"s-1", "s-2"}) {
		t.Errorf("%v %v, home: %v", err, last, w.home)
	}
	w.tells(k, "")
	if _, err := detach(&gpuctlv1.DetachRemoteRequest{Machine: "web"}); !reason.Is(err, reason.NotFound) {
		t.Errorf("a second time: %v", err)
	}
	w.locked(func() { w.card = false })
	begin()
	if _, err := detach(&gpuctlv1.DetachRemoteRequest{Machine: "web", Unconfirmed: true}); err != nil || k.Of(web.UUID) != nil {
		t.Errorf("%v", err)
	}
	// The VM is nowhere any more.
	begin()
	w.locked(func() { w.vm.Name, w.vm.UUID = "other", "u-other" })
	if _, err := detach(&gpuctlv1.DetachRemoteRequest{Machine: "web"}); !reason.Is(err, reason.Refused) {
		t.Errorf("%v", err)
	}
	if _, err := detach(&gpuctlv1.DetachRemoteRequest{Machine: web.UUID, Unconfirmed: true}); err != nil {
		t.Error(err)
	}
	if _, err := detach(&gpuctlv1.DetachRemoteRequest{Machine: "web", Unconfirmed: true}); !errors.Is(err, cards.ErrNotFound) {
		t.Errorf("%v", err)
	}
}

// early is a node whose state changes right after it was read for the first time.
type early struct {
	*world
	then func()
}

func (e *early) Read(context.Context) (*state.View, error) {
	v, then := e.View(), e.then
	if e.then = nil; then != nil {
		then()
	}
	return v, nil
}

// A detach that was slow to begin does not take the GPU that the VM has got meanwhile.
func TestADetachTakesNoLaterGPU(t *testing.T) {
	w := newWorld(t)
	w.bind(web.UUID, "web", "h2/low", gib)
	change := func() {
		lender := &lendingSite{world: w, host: "h2"}
		req := connect.NewRequest(&gpuctlv1.SiteLendRequest{Machine: &gpuctlv1.SiteMachine{Uuid: web.UUID, Name: "web"}, Claim: endpoint.LastingClaim(web.UUID)})
		if _, err := lender.EndLend(t.Context(), req); err != nil {
			t.Error(err)
		}
		w.bind(web.UUID, "web", "h3/big", gib)
	}
	k := New(Config{Node: &early{w, change}, Site: vmSite{w}, VMs: w, Log: slog.New(slog.DiscardHandler), Tell: time.Second})
	err := k.Detach(t.Context(), &gpuctlv1.DetachRemoteRequest{Machine: "web", Gpu: "h2/low"}, func(*gpuctlv1.DeviceUpdate) {})
	if of := k.Of(web.UUID); !reason.Is(err, reason.NotFound) || of.GetGpu() != "h3/big" {
		t.Errorf("%v; it has %v", err, of)
	}
}

// A VM is told of its GPU by the host on which it runs, and by no other.
func TestTheHostOfAVMServesIt(t *testing.T) {
	w := newWorld(t)
	w.where = migrate.Absent
	k := w.run()
	w.locked(func() { w.bind(web.UUID, "web", "h2/low", gib) })
	w.locked(func() { w.bind("u-elsewhere", "elsewhere", "h3/big", gib) })
	k.Kick()
	w.tells(k, "")
	w.locked(func() { w.where = migrate.Running }) // it has come here
	w.tells(k, fmt.Sprint("h2/low ", gib))
	w.locked(func() {
		if !slices.Contains(w.asked, "follow h2/low") || slices.Contains(w.asked, "follow h3/big") {
			t.Errorf("%v", w.asked)
		}
		w.where = migrate.Moving
	})
	for range 3 {
		k.Kick()
	}
	w.tells(k, fmt.Sprint("h2/low ", gib))
	w.locked(func() { w.where = migrate.Absent })
	w.tells(k, "")
	testkit.Until(t, "its channel is closed", func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		return testkit.Want(w.left == 1, w.left)
	})
	// A claim that somebody else has made in the VM's name lends nothing.
	w.locked(func() { w.where = migrate.Running })
	w.tells(k, fmt.Sprint("h2/low ", gib))
	w.locked(func() {
		w.apply(&clusterv1.Command{Op: &clusterv1.Command_PutClaim{PutClaim: &clusterv1.PutClaim{
			Claim:   &clusterv1.Claim{Id: "mine", Count: 1, Labels: map[string]string{endpoint.LabelVM: web.UUID, placement.LabelManagedBy: "id-h3"}},
			Choices: []*clusterv1.Choice{{Gpu: "h1/mid"}},
		}}})
	})
	if of := k.Of(web.UUID); of.GetGpu() != "h2/low" {
		t.Errorf("%v", of)
	}
}

// A GPU of a service VM is reached at that VM's addresses, of which one is enough.
func TestAGPUOfAServiceVMIsReachedAtTheVM(t *testing.T) {
	w := newWorld(t)
	host := proto.CloneOf(w.store.View().Host("h2"))
	w.apply(&clusterv1.Command{Op: &clusterv1.Command_ReportHost{ReportHost: &clusterv1.ReportHost{Host: host, Gpus: []*clusterv1.GPU{{
		Name: "vm-svc", Runtime: "service-vm", RuntimeKey: "vm", Model: "A10", Server: "svc", LendAddresses: []string{"192.0.2.7:7651", "192.0.2.8:7651"},
		Health: clusterv1.Health_HEALTH_OK, Limits: &gpuctlv1.Limits{GlobalMemory: 2 * gib},
	}}}}})
	k := w.run()
	w.locked(func() { w.reach["192.0.2.7:7651"], w.reach["192.0.2.8:7651"] = "no route", "no route" })
	if _, err := w.attach(k, &gpuctlv1.AttachRemoteRequest{Gpu: "h2/vm-svc", MinMemory: gib}); err == nil || !strings.Contains(err.Error(), "service VM svc") {
		t.Errorf("%v", err)
	}
	w.locked(func() { w.reach["h2:7651"], w.reach["192.0.2.8:7651"] = "no route", "" }) // its host need not be reached
	if last, err := w.attach(k, &gpuctlv1.AttachRemoteRequest{Gpu: "h2/vm-svc", MinMemory: gib}); err != nil || last.GetGpu() != "h2/vm-svc" {
		t.Errorf("%v: %v", err, last)
	}
}
