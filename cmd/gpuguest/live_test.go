package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/hostd/migration/endpoint"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

const farGPU, farClaim = "h3/far", "vm-far"

// lendingHost is a host that lends a GPU by its gpuguest, as hostd does for a claim.
type lendingHost struct {
	t       *testing.T
	dir     string
	guest   gpuctlv1connect.GuestServiceClient
	service gpuctlv1connect.SiteServiceClient
	net     *testkit.Relay
	claimed bool
	refuses bool // it has given the GPU to others
	dies    bool // gpuguest there is killed in the next move; another one is started
	loses   bool // its far executors are killed in the next move
	start   func()
	cmd     *exec.Cmd
	leases  []string
	where   func() string // the VM's host
	record  func() *clusterv1.Migration
}

// likeRun mounts a file system at the folder as Debian's initramfs mounts /run: nothing is
// run or loaded from there.
func likeRun(t *testing.T, dir string) {
	t.Helper()
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=711"); err != nil {
		t.Logf("no rights to mount: %v", err)
		return
	}
	t.Cleanup(func() {
		for unix.Unmount(dir, unix.MNT_DETACH) == nil { // gpuguest's mount, too
		}
	})
}

// newLendingHost starts gpuguest as on a host, with another user for each far executor than
// those in the VM.
func newLendingHost(t *testing.T, v *testVM, where func() string, record func() *clusterv1.Migration) *lendingHost {
	t.Helper()
	dir, err := os.MkdirTemp("", "far")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	likeRun(t, dir)
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0") // a port that is free
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().String()
	l.Close()
	log := &testkit.Log{}
	socket := filepath.Join(dir, "g.sock")
	h := &lendingHost{t: t, dir: dir, where: where, record: record, guest: gpuctlv1connect.NewGuestServiceClient(unixrpc.Client(socket), "http://guest"), net: testkit.NewRelay(t, "127.0.0.1:0", port)}
	h.start = func() {
		h.cmd = exec.Command(v.binary, "serve", "--socket", socket, "--app-socket", filepath.Join(dir, "a.sock"), "--rundir", dir, "--lend", port, "--executor-users", "2130800000-2130800099")
		h.cmd.Stdout, h.cmd.Stderr = log, log
		h.cmd.WaitDelay = time.Second
		if err := h.cmd.Start(); err != nil {
			t.Fatal(err)
		}
		testkit.Until(t, "the lending gpuguest answers", func() error {
			_, err := h.guest.ListLeases(v.ctx(), connect.NewRequest(&gpuctlv1.ListLeasesRequest{}))
			return err
		})
	}
	h.start()
	t.Cleanup(func() {
		for _, id := range h.leases {
			_, _ = h.guest.EndLease(context.WithoutCancel(t.Context()), connect.NewRequest(&gpuctlv1.EndLeaseRequest{Lease: id}))
		}
		_ = h.cmd.Process.Signal(syscall.SIGTERM)
		_ = h.cmd.Wait()
		if t.Failed() {
			t.Log(log)
		}
	})
	local := &endpoint.Local{Whereabouts: endpoint.Whereabouts{Name: "h3", Log: slog.New(slog.DiscardHandler)}, Lender: h, Borrows: h.borrows}
	mux := http.NewServeMux()
	local.Handle(mux)
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mux.ServeHTTP(w, r.WithContext(access.WithCaller(r.Context(), access.Caller{Kind: access.Host, Host: where()})))
	}))
	srv.EnableHTTP2 = true
	srv.StartTLS()
	t.Cleanup(srv.Close)
	h.service = gpuctlv1connect.NewSiteServiceClient(srv.Client(), srv.URL)
	return h
}

// borrows is what hostd reads in the migration's record.
func (h *lendingHost) borrows(m *gpuctlv1.SiteMachine, gpu, claim, borrower string) error {
	move := h.record().GetMachine()
	if m.GetMigration() != awayMigration || gpu != move.GetFarGpu() || claim != move.GetFarClaim() || borrower != "" && borrower != move.GetFromHost() && borrower != move.GetToHost() {
		return fmt.Errorf("no migration borrows %s by %s for %s", gpu, claim, borrower)
	}
	return nil
}

func (h *lendingHost) LendVM(_ context.Context, _ vm.VM, gpu, claim, _ string) error {
	if gpu != "far" || claim != farClaim || h.refuses {
		return migrate.ErrTaken
	}
	h.claimed = true
	return nil
}

func (h *lendingHost) LeaseVM(ctx context.Context, m vm.VM, r *clusterv1.LendRequest) (*clusterv1.LendResponse, error) {
	if !h.claimed || m.UUID != awayUUID {
		return nil, errors.New("it has no claim")
	}
	rt := &gpuctlv1.Runtime{Library: "libpocl.so.2", Devices: []uint32{0}}
	res, err := h.guest.Lend(ctx, connect.NewRequest(&gpuctlv1.LendRequest{Lease: r.GetLease(), Runtime: rt, PeerCertSha256: r.GetCertificateSha256(), OutageMs: r.GetOutageMs(), Device: r.GetDevice()}))
	if err != nil {
		return nil, err
	}
	probed, err := h.guest.Probe(ctx, connect.NewRequest(&gpuctlv1.ProbeRequest{Runtime: rt}))
	if err != nil {
		return nil, err
	}
	h.leases = append(h.leases, r.GetLease())
	return &clusterv1.LendResponse{
		Token: res.Msg.GetToken(), CertificateSha256: res.Msg.GetCertSha256(), Addresses: []string{h.net.Address()},
		Model: "far", Limits: probed.Msg.GetDevices()[0].GetLimits(),
	}, nil
}

func (h *lendingHost) EndLendVM(ctx context.Context, _ vm.VM, _ string) error {
	for _, id := range h.leases {
		if _, err := h.guest.EndLease(ctx, connect.NewRequest(&gpuctlv1.EndLeaseRequest{Lease: id})); err != nil {
			return err
		}
	}
	h.claimed, h.leases = false, nil
	return nil
}

// liveVM is a VM that moves while its application computes.
type liveVM struct {
	*movedVM
	app   *stream
	lends *lendingHost
	dies  bool // gpuguest in the VM is killed in the next move; another one is started
}

type liveSite struct {
	*moved
	live *liveVM
}

func (l *liveVM) Site(host string) migrate.Site {
	if host == "h3" {
		return &endpoint.Remote{Host: host, Migration: awayMigration, Service: l.lends.service}
	}
	return &liveSite{l.movedVM.Site(host).(*moved), l}
}

// Move is as libvirt does it: the VM computes for most of it, then its network is gone for a
// moment.
func (s *liveSite) Move(ctx context.Context, m vm.VM, to string, report migrate.Progress) error {
	if !s.live.lends.claimed { // its applications are frozen
		return s.moved.Move(ctx, m, to, report)
	}
	if s.live.lends.loses {
		return s.loses(ctx, m, to, report)
	}
	s.live.app.more(3)
	if s.live.dies {
		s.live.dies = false
		_ = s.vm.kill(syscall.SIGKILL)
		s.vm.start()
		s.live.app.more(3) // the carrier goes on without it
	}
	if h := s.live.lends; h.dies {
		h.dies = false
		_ = h.cmd.Process.Kill()
		_ = h.cmd.Wait()
		h.start()
		s.live.app.more(3) // the far executor goes on without it
	}
	before := s.live.lends.net.Passed()
	s.live.lends.net.Cut(true)
	err := s.moved.Move(ctx, m, to, report)
	s.live.lends.net.AwaitRefused(s.vm.t)
	s.live.lends.net.Cut(false)
	s.live.app.more(3)
	if s.live.lends.net.Passed() == before {
		s.vm.t.Error("the carrier has not connected again")
	}
	return err
}

// loses moves the VM while the host that lends the GPU loses the application's state. The
// application is told, and ends.
func (s *liveSite) loses(ctx context.Context, m vm.VM, to string, report migrate.Progress) error {
	records, err := filepath.Glob(filepath.Join(s.live.lends.dir, "leases", "*", "lease.json"))
	if err != nil || len(records) == 0 {
		return fmt.Errorf("no far executor is there: %w", err)
	}
	for _, path := range records {
		var rec struct{ PID int }
		b, err := os.ReadFile(path)
		if err == nil {
			err = json.Unmarshal(b, &rec)
		}
		if err == nil {
			err = syscall.Kill(rec.PID, syscall.SIGKILL)
		}
		if err != nil {
			return err
		}
	}
	if err := s.live.app.cmd.Wait(); err == nil {
		s.vm.t.Error("the application knows nothing of its loss")
	}
	return s.moved.Move(ctx, m, to, report)
}

// gaps returns the times between the iterations that an application has printed, in order.
func (a *stream) gaps() (out []time.Duration) {
	var last float64
	for _, m := range regexp.MustCompile(`iteration \d+ at ([0-9.]+)`).FindAllStringSubmatch(a.out.String(), -1) {
		at, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			a.v.t.Fatal(err)
		}
		if last > 0 {
			out = append(out, time.Duration((at-last)*float64(time.Second)))
		}
		last = at
	}
	return out
}

// waits takes the VM's card from it until an operator says so: its application computes on the
// remote GPU as long.
func (l *liveVM) waits(runner *migrate.Runner, app *stream) {
	t := l.t
	t.Helper()
	m, err := runner.Run(l.ctx(), &clusterv1.Migration{
		Id: awayMigration, Verb: "migrate", Driver: "h1", State: clusterv1.MigrationState_MIGRATION_STATE_RUNNING,
		Machine: &clusterv1.MachineMove{Uuid: awayUUID, Name: "web", FromHost: "h1", ToHost: "h1", FromGpu: "h1/a", ToGpu: "h1/a", FarGpu: farGPU, FarClaim: farClaim, Live: true, Wait: true},
	})
	if err != nil || !migrate.Waiting(m) || l.plugged {
		t.Fatalf("it does not wait: %v, %v: %s", err, m.GetState(), m.GetMessage())
	}
	app.more(5)
	m.State, m.Machine.Wait = clusterv1.MigrationState_MIGRATION_STATE_RUNNING, false
	if m, err = runner.Run(l.ctx(), m); err != nil || m.GetState() != clusterv1.MigrationState_MIGRATION_STATE_DONE || !l.plugged || l.lends.claimed {
		t.Fatalf("resumed: %v, %v: %s", err, m.GetState(), m.GetMessage())
	}
	app.more(2)
}

// newLiveVM returns a VM in which an application computes, and the name of its session.
func newLiveVM(t *testing.T) (world *liveVM, session string) {
	t.Helper()
	v := newVM(t)
	app := v.streamOf(64)
	v.plug(0x1234, 0x1111, 0x038000)
	v.await(0x1234, 0x1111)
	session = v.session(0).Id
	v.host.Close() // from now on the connection is the hosts'
	a, b := newAwayHosts(t, v)
	world = &liveVM{movedVM: &movedVM{testVM: v, at: "h1", hosts: map[string]*awayHost{"h1": a, "h2": b}, plugged: true}, app: app}
	world.lends = newLendingHost(t, v, func() string { return world.at }, func() *clusterv1.Migration { return world.record })
	for _, h := range []*awayHost{a, b} {
		peer := h.Peer
		h.Peer = func(host string) (gpuctlv1connect.SiteServiceClient, error) {
			if host == "h3" {
				return world.lends.service, nil
			}
			return peer(host)
		}
	}
	return world, session
}

// The host that lends the GPU loses what the application has there while the VM moves. The VM
// arrives, and the record says which session was lost, although its application has ended.
func TestApplicationThatIsLostWhileItsVMMovesIsNamed(t *testing.T) {
	world, id := newLiveVM(t)
	world.lends.loses = true
	world.app.more(2)
	runner := migrate.New(migrate.Config{Sites: world, Claims: world, Journal: world, Log: slog.New(slog.DiscardHandler), Patience: 5 * time.Second})
	m, err := runner.Run(world.ctx(), &clusterv1.Migration{
		Id: awayMigration, Verb: "migrate", Driver: "h1", State: clusterv1.MigrationState_MIGRATION_STATE_RUNNING,
		Machine: &clusterv1.MachineMove{Uuid: awayUUID, Name: "web", FromHost: "h1", ToHost: "h2", FromGpu: "h1/a", ToGpu: "h2/a", FarGpu: farGPU, FarClaim: farClaim, Live: true},
	})
	if err != nil || m.GetState() != clusterv1.MigrationState_MIGRATION_STATE_DONE || world.at != "h2" {
		t.Fatalf("%v, %v on %s: %s", err, m.GetState(), world.at, m.GetMessage())
	}
	lost := m.GetMachine().GetLost()
	if len(lost) != 1 || lost[0].GetId() != id || lost[0].GetReason() == "" || !strings.Contains(lost[0].GetCommand(), "stream") {
		t.Errorf("lost: %v", lost)
	}
	if !strings.Contains(m.GetMessage(), "1 session was lost on the way: "+id) {
		t.Errorf("it says %q", m.GetMessage())
	}
	t.Log(m.GetMessage())
}

// An application computes on a GPU that a third host lends to its VM while that moves to
// another host, and after that on the card which it gets there. What can go wrong before has
// gone wrong: gpuguest in the VM dies, later that of the host that lends, the card does not work there, and the GPU that was to be
// lent is taken.
func TestVMMovesWhileItsApplicationComputes(t *testing.T) {
	world, id := newLiveVM(t)
	world.dies = true
	v, app, a := world.testVM, world.app, world.hosts["h1"]
	reached, err := a.Reach(v.ctx(), awayUUID, []string{world.lends.net.Address(), "127.0.0.1:1"})
	if err != nil || len(reached) != 2 || reached[0].GetError() != "" || reached[0].GetRttNs() <= 0 || reached[1].GetError() == "" {
		t.Fatalf("%v: %v", err, reached)
	}
	fails := ""
	runner := migrate.New(migrate.Config{
		Sites: world, Claims: world, Journal: world, Log: slog.New(slog.DiscardHandler), Patience: 5 * time.Second,
		Before: func(step string, undo bool) error {
			if step == fails && !undo {
				return errors.New("broken")
			}
			return nil
		},
	})
	for _, c := range []struct {
		name, fails string
		refuses     bool
		to, at      string
		state       clusterv1.MigrationState
	}{
		{"no way home there", migrate.StepHome, false, "h2", "h1", clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK},
		{"nobody lends", "", true, "h2", "h1", clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK},
		{"all is well", "", false, "h2", "h2", clusterv1.MigrationState_MIGRATION_STATE_DONE},
	} {
		fails, world.lends.refuses, world.lends.dies = c.fails, c.refuses, c.state == clusterv1.MigrationState_MIGRATION_STATE_DONE
		app.more(2)
		before := len(app.gaps())
		m, err := runner.Run(v.ctx(), &clusterv1.Migration{
			Id: awayMigration, Verb: "migrate", Driver: "h1", State: clusterv1.MigrationState_MIGRATION_STATE_RUNNING,
			Machine: &clusterv1.MachineMove{Uuid: awayUUID, Name: "web", FromHost: "h1", ToHost: c.to, FromGpu: "h1/a", ToGpu: "h2/a", FarGpu: farGPU, FarClaim: farClaim, Live: true},
		})
		if err != nil || m.GetState() != c.state || world.at != c.at {
			t.Fatalf("%s: %v, %v on %s: %s", c.name, err, m.GetState(), world.at, m.GetMessage())
		}
		app.more(2)
		longest := slices.Max(app.gaps()[before:])
		t.Logf("%s: longest gap between results %v, downtime of swaps %v, %d results meanwhile", c.name, longest.Round(time.Millisecond), time.Duration(m.GetStoppedNs()).Round(time.Millisecond), len(app.gaps())-before)
		if slices.ContainsFunc(m.GetSteps(), func(s *clusterv1.MigrationStep) bool { return s.GetName() == migrate.StepFreeze }) {
			t.Errorf("%s: it was frozen", c.name)
		}
		if !c.refuses && m.GetStoppedNs() == 0 {
			t.Errorf("%s: its downtime is not known", c.name)
		}
		res, err := world.hosts[c.at].Sessions(v.ctx(), awayUUID)
		if err != nil || !slices.Equal(res.GetSessions(), []string{id}) {
			t.Fatalf("%s: %v run: %v", c.name, res.GetSessions(), err)
		}
		if world.lends.claimed || len(world.lends.leases) > 0 {
			t.Errorf("%s: the GPU is still lent: %v", c.name, world.lends.leases)
		}
	}
	// The same way back with its applications frozen, for comparison.
	fails = ""
	before := len(app.gaps())
	m, err := runner.Run(v.ctx(), &clusterv1.Migration{
		Id: awayMigration, Verb: "migrate", Driver: "h2", State: clusterv1.MigrationState_MIGRATION_STATE_RUNNING,
		Machine: &clusterv1.MachineMove{Uuid: awayUUID, Name: "web", FromHost: "h2", ToHost: "h1", FromGpu: "h2/a", ToGpu: "h1/a"},
	})
	if err != nil || m.GetState() != clusterv1.MigrationState_MIGRATION_STATE_DONE {
		t.Fatalf("frozen: %v, %v: %s", err, m.GetState(), m.GetMessage())
	}
	app.more(2)
	t.Logf("frozen: longest gap between results %v", slices.Max(app.gaps()[before:]).Round(time.Millisecond))
	world.waits(runner, app)
	app.verify()
	if got := strings.Count(app.out.String(), "iteration "); got < 12 {
		t.Errorf("%d results", got)
	}
}
