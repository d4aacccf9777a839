package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/guest/statestream"
	"github.com/gpuctl/gpuctl/hostd/migration/endpoint"
	"github.com/gpuctl/gpuctl/hostd/migration/stash"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

// awayHost does what hostd does for the states of a migration.
type awayHost struct {
	*endpoint.Local
	dir     string
	service gpuctlv1connect.SiteServiceClient // as another host calls it
	parties bool
}

// oneCard is a host's only card, which the VM has or gets.
type oneCard struct {
	endpoint.Keeper
	vendor, device uint16
}

func (k oneCard) Identity(context.Context, string) (*gpuctlv1.PCIIdentity, error) {
	return &gpuctlv1.PCIIdentity{VendorId: uint32(k.vendor), DeviceId: uint32(k.device), Class: 0x038000}, nil
}

type oneChannel string

func (c oneChannel) Channel(context.Context, string) (string, error) { return string(c), nil }

const (
	awayUUID      = "6d696772-6174-4000-8000-00000000a3a7"
	awayMigration = "m-1"
)

// newAwayHosts returns two hosts that can reach each other.
func newAwayHosts(t *testing.T, v *testVM) (a, b *awayHost) {
	t.Helper()
	return newHosts(t, v, map[string]oneCard{"h1": {vendor: 0x1234, device: 0x1111}, "h2": {vendor: 0x1af4, device: 0x1050}})
}

// newHosts returns the hosts h1 and h2 with these cards.
func newHosts(t *testing.T, v *testVM, cards map[string]oneCard) (a, b *awayHost) {
	t.Helper()
	all := map[string]*awayHost{}
	for name, card := range cards {
		h := &awayHost{dir: t.TempDir(), parties: true}
		log := slog.New(slog.DiscardHandler)
		s, err := stash.Open(stash.Config{Dir: h.dir, Log: log, Limit: func(uint64) (uint64, error) { return 64 << 20, nil }})
		if err != nil {
			t.Fatal(err)
		}
		h.Local = &endpoint.Local{Whereabouts: endpoint.Whereabouts{Name: name, Log: log}, Keeper: card, Stash: s}
		h.Guests = endpoint.NewGuests(endpoint.GuestsConfig{Channels: oneChannel(v.console.Socket()), Log: log})
		t.Cleanup(func() { h.Guests.Close() })
		h.Peer = func(host string) (gpuctlv1connect.SiteServiceClient, error) { return all[host].service, nil }
		h.Party = func(m *gpuctlv1.SiteMachine, other string) error {
			if all[other] == nil || other == name || !h.parties || m.GetMigration() != awayMigration {
				return errors.New("it has no part in it")
			}
			return nil
		}
		mux := http.NewServeMux()
		h.Handle(mux)
		srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			other := map[string]string{"h1": "h2", "h2": "h1"}[name]
			mux.ServeHTTP(w, r.WithContext(access.WithCaller(r.Context(), access.Caller{Kind: access.Host, Host: other})))
		}))
		srv.EnableHTTP2 = true
		srv.StartTLS()
		t.Cleanup(srv.Close)
		h.service = gpuctlv1connect.NewSiteServiceClient(srv.Client(), srv.URL)
		all[name] = h
	}
	return all["h1"], all["h2"]
}

func (h *awayHost) freeze(ctx context.Context, id string, to *awayHost) error {
	return h.Freeze(ctx, &gpuctlv1.SiteSessionsRequest{
		Machine:  &gpuctlv1.SiteMachine{Uuid: awayUUID, Name: "web", Migration: awayMigration},
		Sessions: []string{id}, Away: []string{id}, To: to.Name,
	}, func(uint64, uint64, string) {})
}

func (h *awayHost) deposit(ctx context.Context, id string, to *awayHost) error {
	return h.Deposit(ctx, &gpuctlv1.SiteSessionsRequest{
		Machine:  &gpuctlv1.SiteMachine{Uuid: awayUUID, Name: "web", Migration: awayMigration},
		Sessions: []string{id}, To: to.Name,
	}, func(uint64, uint64, string) {})
}

func (h *awayHost) thaw(ctx context.Context, id string) error {
	return h.Thaw(ctx, &gpuctlv1.SiteMachine{Uuid: awayUUID}, h.Name+"/a", []string{id}, func(uint64, uint64, string) {})
}

// running returns the sessions that compute, as reported to the host.
func (h *awayHost) running(t *testing.T, ctx context.Context) []string {
	t.Helper()
	res, err := h.Sessions(ctx, awayUUID)
	if err != nil {
		t.Fatal(err)
	}
	return res.GetSessions()
}

// A session's state leaves the VM for the memory of two hosts while it is extracted, and
// comes back from the second host, on another card. Before that, everything that can go
// wrong on the way has gone wrong.
func TestVMStateLeaves(t *testing.T) {
	v := newVM(t)
	app := v.stream()
	v.plug(0x1234, 0x1111, 0x038000)
	d := v.await(0x1234, 0x1111)
	id := v.session(0).Id
	v.host.Close() // from now on the connection is the hosts'

	a, b := newAwayHosts(t, v)
	x := leaving{v: v, id: id, a: a, b: b}
	x.staysWhereHostsRefuse(t)
	x.staysWhenItsHostDies(t)
	mark := x.freezes(t)
	x.moves(t, d.Address)
	x.survivesADamagedCopy(t, mark)
	app.more(2) // with the state that came back
	app.verify()
	for _, h := range []*awayHost{a, b} {
		if err := h.Forget(&gpuctlv1.SiteMachine{Uuid: awayUUID, Migration: awayMigration}); err != nil {
			t.Error(err)
		}
		if left, _ := os.ReadDir(h.dir); len(left) > 0 {
			t.Errorf("%s keeps %v", h.Name, left)
		}
	}
}

// leaving is a VM whose session's state is sent to two hosts.
type leaving struct {
	v    *testVM
	id   string
	a, b *awayHost
}

func (x leaving) goesOn(t *testing.T, what string) {
	t.Helper()
	if got := x.a.running(t, x.v.ctx()); !slices.Equal(got, []string{x.id}) {
		t.Fatalf("%s: %v run", what, got)
	}
	for _, h := range []*awayHost{x.a, x.b} {
		// h1 cancels its call to h2, so h2 drops its part a moment later.
		testkit.Until(t, what+": "+h.Name+" has no part of the state", func() error {
			left, _ := filepath.Glob(filepath.Join(h.dir, "*", "*", "*.part"))
			return testkit.Want(len(left) == 0, left)
		})
	}
}

func (x leaving) refused(t *testing.T, what string, err error, says string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), says) {
		t.Fatalf("%s: %v; want %q", what, err, says)
	}
	x.goesOn(t, what)
}

func (x leaving) staysWhereHostsRefuse(t *testing.T) {
	t.Helper()
	id, a, b, ctx := x.id, x.a, x.b, x.v.ctx()
	// A host refuses a state that it has no room for, or of a migration that it is not part
	// of.
	limit := b.Stash.Limit
	b.Stash.Limit = func(uint64) (uint64, error) { return 64 << 10, nil }
	x.refused(t, "h2 is full", a.freeze(ctx, id, b), "no room for GPU states")
	b.Stash.Limit = limit
	b.parties = false
	x.refused(t, "h2 does not know the migration", a.freeze(ctx, id, b), "no part")
	b.parties = true
	a.parties = false
	x.refused(t, "h1 does not know h2", a.freeze(ctx, id, b), "no part")
	a.parties = true
	// The transfer to h2 is interrupted in the middle, and so is the transfer out of the
	// VM.
	peer := a.Peer
	a.Peer = func(string) (gpuctlv1connect.SiteServiceClient, error) { return cutOff(t, 100<<10) }
	x.refused(t, "h2 goes away", a.freeze(ctx, id, b), "host h2")
	a.Peer = peer
	bulk := a.Guests.Bulk
	a.Guests.Bulk = func(ctx context.Context, uuid string) (*http.Client, func(), error) {
		c, done, err := bulk(ctx, uuid)
		return &http.Client{Transport: &leaky{c.Transport, 150 << 10}}, done, err
	}
	x.refused(t, "the way out breaks", a.freeze(ctx, id, b), "")
	a.Guests.Bulk = bulk
}

func (x leaving) staysWhenItsHostDies(t *testing.T) {
	t.Helper()
	id, a, b, ctx := x.id, x.a, x.b, x.v.ctx()
	// hostd of h1 dies while the state is sent. Its successor connects again, and the
	// session continues. h1 and h2 drop what they had of the state.
	bulk := a.Guests.Bulk
	half := &halfway{after: 150 << 10, goOn: make(chan struct{})}
	a.Guests.Bulk = func(ctx context.Context, uuid string) (*http.Client, func(), error) {
		c, done, err := bulk(ctx, uuid)
		half.RoundTripper = c.Transport
		return &http.Client{Transport: half}, done, err
	}
	frozen := make(chan error, 1)
	go func() { frozen <- a.freeze(ctx, id, b) }()
	testkit.Until(t, "some of the state is at h2", func() error {
		parts, _ := filepath.Glob(filepath.Join(b.dir, "*", "*", "*.part"))
		info, err := os.Stat(strings.Join(parts, " "))
		return testkit.Want(err == nil && info.Size() > 0, parts, err)
	})
	a.Guests.Forget(awayUUID)
	close(half.goOn)
	if err := <-frozen; err == nil {
		t.Fatal("frozen without a host")
	}
	a.Guests.Bulk = bulk
	testkit.Until(t, "the session goes on", func() error {
		got := a.running(t, ctx)
		return testkit.Want(slices.Equal(got, []string{id}), got)
	})
	x.goesOn(t, "hostd of h1 died")
}

func (x leaving) freezes(t *testing.T) statestream.Mark {
	t.Helper()
	id, a, b, ctx := x.id, x.a, x.b, x.v.ctx()
	testkit.Until(t, "it is frozen, once what was under way there is undone", func() error {
		err := a.freeze(ctx, id, b)
		if err != nil && !errors.Is(err, migrate.ErrUnreachable) {
			t.Fatal(err)
		}
		return err
	})
	here, err := a.Stash.Find(awayUUID, id)
	if err != nil || here.Mark.Size < 2*streamKiB<<10 {
		t.Fatalf("%v, %v", here, err)
	}
	if there, err := b.Stash.Find(awayUUID, id); err != nil || there.Mark != here.Mark {
		t.Fatalf("%v, %v; on h1 %v", there, err, here)
	}
	if got := a.running(t, ctx); len(got) != 0 {
		t.Fatalf("%v run", got)
	}
	if err := a.freeze(ctx, id, b); err != nil { // by another driver
		t.Fatal(err)
	}
	return here.Mark
}

func (x leaving) moves(t *testing.T, address string) {
	t.Helper()
	v, a, ctx := x.v, x.a, x.v.ctx()
	// gpuguest is killed. The VM goes to h2, and gets another card there.
	_ = v.kill(syscall.SIGKILL)
	v.start()
	testkit.Until(t, "the card is released", func() error {
		_, err := connectAgent(ctx, a).Release(ctx, connect.NewRequest(&gpuctlv1.ReleaseRequest{Address: address}))
		return err
	})
	v.unplug()
	if _, err := connectAgent(ctx, a).TakeUp(ctx, connect.NewRequest(&gpuctlv1.TakeUpRequest{Address: address})); err != nil {
		t.Fatal(err)
	}
	a.Guests.Forget(awayUUID)
	v.console.Migrate()
	v.plug(0x1af4, 0x1050, 0x038000)
}

func (x leaving) survivesADamagedCopy(t *testing.T, mark statestream.Mark) {
	t.Helper()
	id, a, b, ctx := x.id, x.a, x.b, x.v.ctx()
	// h2's copy is damaged: nothing runs with it, and h1 still has its own.
	body := filepath.Join(b.dir, awayUUID, id, mark.ID+".state")
	data, err := os.ReadFile(body)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)/2] ^= 1
	if err := os.WriteFile(body, data, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := b.thaw(ctx, id); !errors.Is(err, statestream.ErrCorrupt) {
		t.Fatalf("thawed with a wrong byte: %v", err)
	}
	if err := b.Forget(&gpuctlv1.SiteMachine{Uuid: awayUUID, Migration: awayMigration}); err != nil {
		t.Fatal(err)
	}
	if err := b.thaw(ctx, id); !errors.Is(err, stash.ErrNotFound) {
		t.Fatalf("thawed without a state: %v", err)
	}
	b.Guests.Forget(awayUUID)
	if err := a.deposit(ctx, id, b); err != nil {
		t.Fatal(err)
	}
	a.Guests.Forget(awayUUID)
	if err := b.thaw(ctx, id); err != nil {
		t.Fatal(err)
	}
	if err := b.thaw(ctx, id); err != nil { // by another driver
		t.Fatal(err)
	}
	if got := b.running(t, ctx); !slices.Equal(got, []string{id}) {
		t.Fatalf("%v run", got)
	}
}

// stream is an application that computes in a VM.
type stream struct {
	v   *testVM
	kib string
	cmd *exec.Cmd
	in  io.Closer
	out testkit.Log
}

const streamKiB = 160 // in each of its two buffers

func (v *testVM) stream() *stream { return v.streamOf(streamKiB) }

// streamOf starts one with so many KiB in each of its two buffers.
func (v *testVM) streamOf(kib int) *stream {
	v.t.Helper()
	a := &stream{v: v, kib: fmt.Sprint(kib)}
	a.cmd = exec.Command(filepath.Join(v.dir, "stream"), "--stdin", "--verbose", "--kib", a.kib, "--buffers", "2")
	a.cmd.Env = []string{"OCL_ICD_VENDORS=" + v.icd + "/", "PATH=" + os.Getenv("PATH")}
	a.cmd.Stdout, a.cmd.Stderr = &a.out, &a.out
	in, err := a.cmd.StdinPipe()
	if err != nil {
		v.t.Fatal(err)
	}
	a.in = in
	if err := a.cmd.Start(); err != nil {
		v.t.Fatal(err)
	}
	v.t.Cleanup(func() {
		_ = a.cmd.Process.Kill()
		if v.t.Failed() {
			v.t.Log(a.out.String())
		}
	})
	return a
}

// more waits until the application has done n more iterations.
func (a *stream) more(n int) {
	a.v.t.Helper()
	done := func() int { return strings.Count(a.out.String(), "iteration ") }
	before := done()
	testkit.Until(a.v.t, fmt.Sprintf("iteration %d", before+n), func() error { return testkit.Want(done() >= before+n, done()) })
}

// verify ends the application and compares its result with that of a run without gpuctl.
func (a *stream) verify() {
	t := a.v.t
	t.Helper()
	a.in.Close()
	if err := a.cmd.Wait(); err != nil {
		t.Fatalf("the application: %v", err)
	}
	m := regexp.MustCompile(`checksum (\d+) ([0-9a-f]+)`).FindStringSubmatch(a.out.String())
	if m == nil {
		t.Fatalf("the application has no result: %s", a.out.String())
	}
	vendors := filepath.Join(a.v.dir, "native")
	a.v.write(filepath.Join(vendors, "pocl.icd"), "libpocl.so.2\n")
	native := exec.Command(filepath.Join(a.v.dir, "stream"), "--iterations", m[1], "--kib", a.kib, "--buffers", "2")
	native.Env = []string{"OCL_ICD_VENDORS=" + vendors + "/", "HOME=" + a.v.dir, "PATH=" + os.Getenv("PATH")}
	want, err := native.Output()
	if err != nil || !bytes.Contains(want, []byte(m[0])) {
		t.Fatalf("%s, without gpuctl %s (%v)", m[0], want, err)
	}
}

// moved is a host of a migration. The part for the VM's applications is real; the cards and
// the transport are simulated.
type moved struct {
	*endpoint.Remote
	h  *awayHost
	vm *movedVM
}

// movedVM is a VM and the host that it is on.
type movedVM struct {
	*testVM
	at      string
	hosts   map[string]*awayHost
	record  *clusterv1.Migration
	plugged bool
	// card is told which host's card the VM has now; empty: none. nil: nobody is told.
	card func(host string)
}

func (m *movedVM) has(host string) {
	if m.card != nil {
		m.card(host)
	}
}

func (m *movedVM) Site(host string) migrate.Site {
	h := m.hosts[host]
	return &moved{&endpoint.Remote{Host: host, Migration: awayMigration, Service: h.service}, h, m}
}

func (m *movedVM) Reserve(context.Context, string, vm.VM, string) error  { return nil }
func (m *movedVM) EndClaim(context.Context, string, vm.VM, string) error { return nil }

func (m *movedVM) Put(_ context.Context, r *clusterv1.Migration) (*clusterv1.Migration, error) {
	m.record = proto.CloneOf(r)
	return proto.CloneOf(r), nil
}

func (s *moved) Where(context.Context, vm.VM) (migrate.Presence, error) {
	if s.vm.at == s.h.Name {
		return migrate.Running, nil
	}
	return migrate.Absent, nil
}

func (s *moved) Prepare(ctx context.Context, _ vm.VM, _, _ string) (*gpuctlv1.PCIIdentity, error) {
	return s.h.Keeper.Identity(ctx, "")
}

func (s *moved) GiveBack(context.Context, vm.VM, string) error { return nil }

func (s *moved) Attach(ctx context.Context, _ vm.VM, _ string, _ bool, at string) error {
	if at != "0000:00:05.0" {
		s.vm.t.Errorf("the card is to be at %q", at)
	}
	if !s.vm.plugged {
		s.vm.has(s.h.Name)
		id, _ := s.h.Keeper.Identity(ctx, "")
		s.vm.plug(uint16(id.GetVendorId()), uint16(id.GetDeviceId()), 0x038000)
		s.vm.plugged = true
	}
	return nil
}

func (s *moved) Detach(context.Context, vm.VM, string) (string, error) {
	if s.vm.plugged {
		s.vm.has("")
		s.vm.unplug()
		s.vm.plugged = false
	}
	return "0000:00:05.0", nil
}

func (s *moved) Move(_ context.Context, _ vm.VM, to string, _ migrate.Progress) error {
	for _, away := range s.vm.record.GetMachine().GetAway() {
		if state, err := s.vm.hosts[to].Stash.Find(awayUUID, away); err != nil {
			s.vm.t.Errorf("the VM goes to %s before its state: %v %v", to, state, err)
		}
	}
	s.h.Guests.Forget(awayUUID)
	s.vm.console.Migrate()
	s.vm.at = to
	return nil
}

// A VM that has no room for its application's state is migrated. The driver decides to send
// the state out of the VM. The application computes the right result, after one roll-back
// and one complete migration.
func TestVMMovesWithoutItsState(t *testing.T) {
	v := newVM(t)
	v.tree.Write("proc/meminfo", "MemTotal: 1024 kB\nMemAvailable: 16 kB\n")
	app := v.stream()
	v.plug(0x1234, 0x1111, 0x038000)
	v.await(0x1234, 0x1111)
	id := v.session(0).Id
	v.host.Close() // from now on the connection is the hosts'
	a, b := newAwayHosts(t, v)
	world := &movedVM{testVM: v, at: "h1", hosts: map[string]*awayHost{"h1": a, "h2": b}, plugged: true}
	fails := ""
	runner := migrate.New(migrate.Config{
		Sites: world, Claims: world, Journal: world, Log: slog.New(slog.DiscardHandler), Patience: time.Second,
		Before: func(step string, undo bool) error {
			if step == fails && !undo {
				return errors.New("broken")
			}
			return nil
		},
	})
	for _, c := range []struct {
		fails, at string
		state     clusterv1.MigrationState
	}{
		{migrate.StepThaw, "h1", clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK},
		{"", "h2", clusterv1.MigrationState_MIGRATION_STATE_DONE},
	} {
		fails = c.fails
		m, err := runner.Run(v.ctx(), &clusterv1.Migration{
			Id: awayMigration, Verb: "migrate", Driver: "h1", State: clusterv1.MigrationState_MIGRATION_STATE_RUNNING,
			Machine: &clusterv1.MachineMove{Uuid: awayUUID, Name: "web", FromHost: "h1", ToHost: "h2", FromGpu: "h1/a", ToGpu: "h2/a"},
		})
		if err != nil || m.GetState() != c.state || world.at != c.at {
			t.Fatalf("%v, %v on %s: %s", err, m.GetState(), world.at, m.GetMessage())
		}
		if got := m.GetMachine(); !slices.Equal(got.GetAway(), []string{id}) || got.GetAwayBytes() < 2*streamKiB<<10 {
			t.Errorf("away: %v, %d bytes", got.GetAway(), got.GetAwayBytes())
		}
		if got := world.hosts[c.at].running(t, v.ctx()); !slices.Equal(got, []string{id}) {
			t.Fatalf("%v run", got)
		}
		for _, h := range world.hosts {
			if left, _ := os.ReadDir(h.dir); len(left) > 0 {
				t.Errorf("%s keeps %v", h.Name, left)
			}
		}
		app.more(2) // with the state that came back
	}
	app.verify()
}

// connectAgent connects to the VM's agent as a host does.
func connectAgent(ctx context.Context, h *awayHost) gpuctlv1connect.AgentServiceClient {
	client, _, err := h.Guests.Bulk(ctx, awayUUID)
	if err != nil {
		client = http.DefaultClient
	}
	return gpuctlv1connect.NewAgentServiceClient(client, "http://vm")
}

// cutOff returns a host that closes the connection after so many bytes of a state.
func cutOff(t *testing.T, after int) (gpuctlv1connect.SiteServiceClient, error) {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		buf := make([]byte, after)
		for n := 0; n < after; {
			k, err := r.Body.Read(buf[n:])
			if n += k; err != nil {
				break
			}
		}
		panic(http.ErrAbortHandler)
	}))
	t.Cleanup(srv.Close)
	return gpuctlv1connect.NewSiteServiceClient(srv.Client(), srv.URL), nil
}

// halfway delays answers after so many bytes, until goOn is closed.
type halfway struct {
	http.RoundTripper
	after int
	goOn  chan struct{}
}

func (h *halfway) RoundTrip(r *http.Request) (*http.Response, error) {
	res, err := h.RoundTripper.RoundTrip(r)
	if err == nil {
		res.Body = &halfwayBody{ReadCloser: res.Body, halfway: h, left: h.after}
	}
	return res, err
}

type halfwayBody struct {
	io.ReadCloser
	*halfway
	left int
}

func (b *halfwayBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		<-b.goOn
		return b.ReadCloser.Read(p)
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}

// leaky interrupts answers after so many bytes.
type leaky struct {
	http.RoundTripper
	after int
}

func (l *leaky) RoundTrip(r *http.Request) (*http.Response, error) {
	res, err := l.RoundTripper.RoundTrip(r)
	if err == nil {
		res.Body = &leakyBody{ReadCloser: res.Body, left: l.after}
	}
	return res, err
}

type leakyBody struct {
	io.ReadCloser
	left int
}

func (b *leakyBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, errors.New("the way is broken")
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}
