package agent_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/vm/agent"
	"github.com/gpuctl/gpuctl/guest/vm/profile"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/passthrough/bind"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
	"github.com/gpuctl/gpuctl/passthrough/sysfs/sysfstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	patience = 20 * time.Second
	auto     = "sys/bus/pci/drivers_autoprobe"
	firstAt  = "0000:00:05.0"
	secondAt = "0000:00:06.0"
	soundAt  = "0000:00:05.1"
	diskAt   = "0000:00:04.0"
)

// fakeSessions keeps the rules of offers; what runs is set by the test.
type fakeSessions struct {
	mu     sync.Mutex
	list   []*gpuctlv1.Session
	offers map[string]*gpuctlv1.Target
	fail   error
	warmed []string

	listed, offering func() // called after a list was made, and with every change of the offers
}

func (s *fakeSessions) List(context.Context) ([]*gpuctlv1.Session, error) {
	s.mu.Lock()
	list, fail, listed := slices.Clone(s.list), s.fail, s.listed
	s.mu.Unlock()
	if listed != nil {
		listed()
	}
	return list, fail
}

func (s *fakeSessions) Offer(_ context.Context, o *gpuctlv1.OfferRequest) error {
	return s.offer(func() { s.offers[o.Token] = o.Target })
}

func (s *fakeSessions) Withdraw(_ context.Context, token string) error {
	return s.offer(func() { delete(s.offers, token) })
}

func (s *fakeSessions) offer(change func()) error {
	s.mu.Lock()
	change()
	fail, offering := s.fail, s.offering
	s.mu.Unlock()
	if offering != nil {
		offering()
	}
	return fail
}

func (s *fakeSessions) Warm(_ context.Context, rt *gpuctlv1.Runtime) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.warmed = append(s.warmed, rt.Library)
	return s.fail
}

func (s *fakeSessions) set(list ...*gpuctlv1.Session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = list
}

func (s *fakeSessions) offered() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.offers[agent.Token].GetGpu()
}

// fakeProber knows runtimes by library and can be made to hang.
type fakeProber struct {
	mu    sync.Mutex
	err   error
	addrs []string
	hang  chan struct{}
	count int
}

func (p *fakeProber) Probe(ctx context.Context, rt *gpuctlv1.Runtime) (*gpuctlv1.ProbeResponse, error) {
	p.mu.Lock()
	p.count++
	err, addrs, hang := p.err, p.addrs, p.hang
	p.mu.Unlock()
	if hang != nil {
		select {
		case <-hang:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if err != nil {
		return nil, err
	}
	if strings.HasPrefix(rt.Library, "bad") {
		return nil, errors.New("cannot open shared object file")
	}
	r := &gpuctlv1.ProbeResponse{}
	for i, a := range addrs {
		r.Devices = append(r.Devices, &gpuctlv1.ProbedDevice{Index: uint32(i), Name: "model at " + a, PciAddress: a, Limits: &gpuctlv1.Limits{GlobalMemory: 1 << 30}})
	}
	return r, nil
}

func (p *fakeProber) change(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
}

type rig struct {
	t        *testing.T
	machine  *sysfstest.Machine
	sessions *fakeSessions
	prober   *fakeProber
	dir      string
	users    []string
	look     func() []string // instead of users
	driver   agent.Driver    // nil: no NVIDIA
	services *fakeServices
	lender   agent.Lender // nil: the VM lends nothing
	open     atomic.Bool
	client   gpuctlv1connect.AgentServiceClient
	made     *agent.Agent
	stop     func()
}

func display(address string, device uint16) pcitest.Function {
	return pcitest.Function{
		Address: address, Vendor: 0x10de, Device: device, Class: pci.ClassVGA << 8, Driver: "nvidia", IOMMUGroup: -1, NUMANode: -1,
		Config: pcitest.ConfigSpace{Vendor: 0x10de, Device: device, Class: pci.ClassVGA << 8, Serial: 0x123456789abcdef0}.Bytes(),
	}
}

func newRig(t *testing.T) *rig {
	m := sysfstest.New()
	m.Add(display(firstAt, 0x2236), display(secondAt, 0x2236),
		pcitest.Function{Address: soundAt, Vendor: 0x10de, Device: 0x10f8, Class: pci.ClassAudio << 8, Driver: "snd_hda_intel", IOMMUGroup: -1, NUMANode: -1},
		pcitest.Function{Address: diskAt, Vendor: 0x1af4, Device: 0x1001, Class: 0x010000, Driver: "virtio-pci", IOMMUGroup: -1, NUMANode: -1})
	for i := 3; i < 8; i++ {
		m.File(fmt.Sprintf("sys/bus/pci/slots/%d/address", i), fmt.Sprintf("0000:00:%02x\n", i))
		m.File(fmt.Sprintf("sys/bus/pci/slots/%d/power", i), "1\n")
	}
	m.File("proc/meminfo", "MemTotal:  1000 kB\nMemFree: 7 kB\nMemAvailable:    600 kB\n")
	m.File("proc/sys/kernel/random/boot_id", "boot-1\n")
	m.File("proc/sys/kernel/osrelease", "6.1.0\n")
	r := &rig{
		t: t, machine: m, dir: t.TempDir(), sessions: &fakeSessions{offers: map[string]*gpuctlv1.Target{}},
		prober: &fakeProber{addrs: []string{firstAt, secondAt}},
	}
	r.start()
	t.Cleanup(func() { r.stop() })
	return r
}

func (r *rig) start() {
	r.t.Helper()
	profiles, err := profile.Load(profile.Options{Extra: []profile.File{{Name: "test", Data: []byte(
		"version: 1\nprofiles: [{name: test, match: ['10de:*'], drivers: [nvidia], libraries: [bad.so, good.so], cuda: true}]")}}})
	if err != nil {
		r.t.Fatal(err)
	}
	cfg := agent.Config{
		Root: r.machine, Dir: r.dir, Profiles: profiles, Prober: r.prober, Sessions: r.sessions, Version: "v1", Driver: r.driver, Lender: r.lender,
		Users: func(context.Context, []pci.Address) ([]string, error) {
			if r.look != nil {
				return r.look(), nil
			}
			return r.users, nil
		},
		Poll: 10 * time.Millisecond, Ready: r.open.Store,
	}
	if r.services != nil {
		cfg.Services = r.services
	}
	a, err := agent.New(cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	r.made = a
	mux := http.NewServeMux()
	mux.Handle(a.Handler())
	srv := httptest.NewServer(mux)
	r.client = gpuctlv1connect.NewAgentServiceClient(srv.Client(), srv.URL)
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan struct{})
	go func() {
		defer close(over)
		if err := a.Run(ctx); err != nil {
			r.t.Error(err)
		}
	}()
	r.stop = sync.OnceFunc(func() {
		cancel()
		<-over
		srv.CloseClientConnections()
		srv.Close()
	})
}

func (r *rig) restart() {
	r.t.Helper()
	r.stop()
	r.start()
	r.t.Cleanup(r.stop)
}

// until waits for a state of a device.
func (r *rig) until(address, what string, ok func(*gpuctlv1.GuestDevice) bool) *gpuctlv1.GuestDevice {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	st, err := r.client.WatchDevices(ctx, connect.NewRequest(&gpuctlv1.WatchDevicesRequest{}))
	if err != nil {
		r.t.Fatal(err)
	}
	defer st.Close()
	var last *gpuctlv1.GuestDevice
	for st.Receive() {
		last = nil
		for _, d := range st.Msg().Devices {
			if d.Address == address {
				last = d
			}
		}
		if ok(last) {
			return last
		}
	}
	r.t.Fatalf("%s is never %s: %v (%v)", address, what, last, st.Err())
	return nil
}

func ready(d *gpuctlv1.GuestDevice) bool { return d.GetReady() }

func (r *rig) release(address string) error {
	_, err := r.client.Release(r.t.Context(), connect.NewRequest(&gpuctlv1.ReleaseRequest{Address: address}))
	return err
}

func (r *rig) takeUp(address string) (*gpuctlv1.GuestDevice, error) {
	resp, err := r.client.TakeUp(r.t.Context(), connect.NewRequest(&gpuctlv1.TakeUpRequest{Address: address}))
	if err != nil {
		return nil, err
	}
	return resp.Msg.Device, nil
}

func at(s string) pci.Address {
	a, err := pci.ParseAddress(s)
	if err != nil {
		panic(err)
	}
	return a
}

func (r *rig) autoprobe() string {
	b, err := r.machine.ReadFile(auto)
	if err != nil {
		r.t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// untouched says that everything is as it was before.
func (r *rig) untouched() {
	r.t.Helper()
	if d, o := r.machine.Driver(at(firstAt)), r.machine.Override(at(firstAt)); d != "nvidia" || o != "" || r.autoprobe() != "1" {
		r.t.Errorf("driver %q, override %q, autoprobe %s", d, o, r.autoprobe())
	}
	r.until(firstAt, "ready", ready)
}

func refused(t *testing.T, err error, code connect.Code, words ...string) {
	t.Helper()
	if connect.CodeOf(err) != code {
		t.Errorf("error %v, want %v", err, code)
	}
	for _, w := range words {
		if err != nil && !strings.Contains(err.Error(), w) {
			t.Errorf("error %v does not say %q", err, w)
		}
	}
}

func TestHello(t *testing.T) {
	r := newRig(t)
	d := r.until(firstAt, "ready", ready)
	if d.Driver != "nvidia" || d.Profile != "test" || d.Serial != "12-34-56-78-9a-bc-de-f0" || d.VendorId != 0x10de || d.Class != 0x030000 {
		t.Errorf("device %v", d)
	}
	if g := d.Target; g.Gpu != "vm/"+firstAt || g.Runtime.Library != "good.so" || !slices.Equal(g.Runtime.Devices, []uint32{0}) || g.Limits.GlobalMemory != 1<<30 {
		t.Errorf("target %v", g)
	}
	if second := r.until(secondAt, "ready", ready); !slices.Equal(second.Target.Runtime.Devices, []uint32{1}) {
		t.Errorf("target %v", second.Target)
	}
	resp, err := r.client.Hello(t.Context(), connect.NewRequest(&gpuctlv1.HelloRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	h := resp.Msg
	if h.Version != "v1" || h.Protocol != agent.Protocol || h.BootId != "boot-1" || h.Kernel != "6.1.0" || h.TotalMemory != 1000<<10 ||
		h.FreeMemory != 600<<10 || !h.Hotplug || h.HotplugReason != "" || len(h.Devices) != 2 || h.Instance == "" || h.UnixNs == 0 {
		t.Errorf("hello %v", h)
	}
	for i := 3; i < 8; i++ {
		r.machine.Remove(fmt.Sprintf("sys/bus/pci/slots/%d/power", i))
	}
	resp, err = r.client.Hello(t.Context(), connect.NewRequest(&gpuctlv1.HelloRequest{}))
	if err != nil || resp.Msg.Hotplug || !strings.Contains(resp.Msg.HotplugReason, "acpiphp") {
		t.Errorf("hello %v, %v", resp, err)
	}
	refused(t, r.release(firstAt), connect.CodeFailedPrecondition, "acpiphp", firstAt)
	r.untouched()
}

func TestReleaseAndTakeUp(t *testing.T) {
	r := newRig(t)
	r.until(firstAt, "ready", ready)
	r.until(secondAt, "ready", ready)
	for range 2 { // again is the same
		if err := r.release(firstAt); err != nil {
			t.Fatal(err)
		}
	}
	d := r.until(firstAt, "released", (*gpuctlv1.GuestDevice).GetReleased)
	if d.Driver != "" || d.Ready || d.Target != nil || !strings.Contains(d.Message, "released") {
		t.Errorf("device %v", d)
	}
	if got := r.sessions.offered(); got != "vm/"+secondAt || !r.open.Load() {
		t.Errorf("applications are offered %q, open %v", got, r.open.Load())
	}
	// The finding: it is seen again for a moment, and for good later.
	for range 2 {
		r.machine.Unplug(at(firstAt))
		r.until(firstAt, "gone", func(d *gpuctlv1.GuestDevice) bool { return d == nil })
		r.machine.Plug(at(firstAt))
		if got := r.machine.Driver(at(firstAt)); got != "" {
			t.Fatalf("it has the driver %s at once", got)
		}
		r.until(firstAt, "released", (*gpuctlv1.GuestDevice).GetReleased)
	}
	// Another one that is plugged meanwhile gets its driver.
	r.prober.change(func() { r.prober.addrs = []string{secondAt, "0000:00:07.0"} })
	r.machine.Add(display("0000:00:07.0", 0x20b0))
	r.until("0000:00:07.0", "ready", ready)
	// The restarted agent knows.
	r.restart()
	r.until(firstAt, "released", (*gpuctlv1.GuestDevice).GetReleased)
	r.prober.change(func() { r.prober.addrs = []string{firstAt} })
	if d, err := r.takeUp(firstAt); err != nil || d.Released || d.Driver != "nvidia" {
		t.Fatalf("%v, %v", d, err)
	}
	r.untouched()
	if _, err := r.takeUp(firstAt); err != nil {
		t.Errorf("again: %v", err)
	}
	if v := r.machine.Violations(); len(v) > 0 {
		t.Error(v)
	}
}

func TestTakeUpOfWhatIsGone(t *testing.T) {
	r := newRig(t)
	r.until(firstAt, "ready", ready)
	if err := r.release(firstAt); err != nil {
		t.Fatal(err)
	}
	r.machine.Unplug(at(firstAt))
	if d, err := r.takeUp(firstAt); err != nil || d.Message == "" || d.Driver != "" {
		t.Fatalf("%v, %v", d, err)
	}
	if r.autoprobe() != "1" {
		t.Error("drivers do not bind by themselves any more")
	}
	r.machine.Plug(at(firstAt))
	r.untouched()
	_, err := r.takeUp("0000:00:1f.0")
	refused(t, err, connect.CodeNotFound, "0000:00:1f.0")
}

// A card's other functions are released too; the VM's disk is not.
func TestReleaseOfOtherFunctions(t *testing.T) {
	r := newRig(t)
	r.until(firstAt, "ready", ready)
	if err := r.release(soundAt); err != nil {
		t.Fatal(err)
	}
	if got := r.machine.Driver(at(soundAt)); got != "" {
		t.Errorf("it has the driver %s", got)
	}
	if d, err := r.takeUp(soundAt); err != nil || d.Driver != "snd_hda_intel" {
		t.Errorf("%v, %v", d, err)
	}
	r.until(soundAt, "out of sight", func(d *gpuctlv1.GuestDevice) bool { return d == nil })
	refused(t, r.release(diskAt), connect.CodeInvalidArgument, diskAt, "1af4:1001")
	refused(t, r.release("0000:00:1e.0"), connect.CodeNotFound)
	refused(t, r.release("rm -rf"), connect.CodeInvalidArgument)
}

func TestReleaseIsRefused(t *testing.T) {
	running := gpuctlv1.SessionState_SESSION_STATE_RUNNING
	for _, c := range []struct {
		name    string
		session *gpuctlv1.Session
		users   []string
		words   []string
	}{
		{"a session runs on it", &gpuctlv1.Session{Id: "s-1", State: running, Target: &gpuctlv1.Target{Gpu: "vm/" + firstAt}, Command: "blender", Pid: 7}, nil, []string{"s-1", "blender", "suspend"}},
		{"a session that the host named otherwise", &gpuctlv1.Session{Id: "s-2", State: running, Target: &gpuctlv1.Target{
			Gpu: "hosta/gpu3", Runtime: &gpuctlv1.Runtime{Library: "good.so", Devices: []uint32{0}},
		}}, nil, []string{"s-2"}},
		{"a process has it open", nil, []string{"Xorg (pid 5) has dri/card0 open"}, []string{"Xorg"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			r.until(firstAt, "ready", ready)
			r.users = c.users
			if c.session != nil {
				r.sessions.set(c.session)
			}
			refused(t, r.release(firstAt), connect.CodeFailedPrecondition, append(c.words, firstAt)...)
			r.untouched()
			if w := r.machine.Writes(); len(w) > 0 {
				t.Errorf("the kernel was told %v", w)
			}
			// What does not use it does not matter.
			r.users = nil
			r.sessions.set(
				&gpuctlv1.Session{Id: "s-3", State: running, Target: &gpuctlv1.Target{Gpu: "vm/" + secondAt, Runtime: &gpuctlv1.Runtime{Library: "good.so", Devices: []uint32{0}}}},
				&gpuctlv1.Session{Id: "s-4", State: gpuctlv1.SessionState_SESSION_STATE_SUSPENDED, Target: &gpuctlv1.Target{Gpu: "vm/" + firstAt}},
			)
			if err := r.release(firstAt); err != nil {
				t.Error(err)
			}
		})
	}
}

// A session that is being started is waited for: it may be on the device.
func TestReleaseWaitsForStarts(t *testing.T) {
	r := newRig(t)
	r.until(firstAt, "ready", ready)
	r.sessions.set()
	// It comes with the old offer, and has a target once it was seen without one.
	var looks atomic.Int32
	r.sessions.mu.Lock()
	r.sessions.offering = sync.OnceFunc(func() {
		r.sessions.set(&gpuctlv1.Session{Id: "s-5", State: gpuctlv1.SessionState_SESSION_STATE_RUNNING})
	})
	r.sessions.listed = func() {
		if looks.Add(1) == 2 {
			r.sessions.set(&gpuctlv1.Session{Id: "s-5", State: gpuctlv1.SessionState_SESSION_STATE_RUNNING, Target: &gpuctlv1.Target{Gpu: "vm/" + firstAt}})
		}
	}
	r.sessions.mu.Unlock()
	refused(t, r.release(firstAt), connect.CodeFailedPrecondition, "s-5")
	r.untouched()
}

// Each write fails once: what was done before is undone.
func TestReleaseIsUndone(t *testing.T) {
	for n := 1; n <= 3; n++ {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			r := newRig(t)
			r.until(firstAt, "ready", ready)
			r.machine.FailWrite(n, syscall.EIO)
			refused(t, r.release(firstAt), connect.CodeInternal, "input/output error", firstAt)
			r.untouched()
			if err := r.release(firstAt); err != nil {
				t.Errorf("afterwards: %v", err)
			}
		})
	}
}

// The agent dies before or after any write; the next one finishes.
func TestReleaseIsResumed(t *testing.T) {
	for n := 1; n <= 3; n++ {
		for name, crash := range map[string]func(*sysfstest.Machine, int){"before": (*sysfstest.Machine).CrashBefore, "after": (*sysfstest.Machine).CrashAfter} {
			t.Run(fmt.Sprint(name, n), func(t *testing.T) {
				r := newRig(t)
				r.until(firstAt, "ready", ready)
				crash(r.machine, n)
				err := r.release(firstAt)
				r.stop()
				r.machine.Restart()
				r.start()
				t.Cleanup(r.stop)
				if err != nil {
					r.until(firstAt, "released", (*gpuctlv1.GuestDevice).GetReleased)
					if err := r.release(firstAt); err != nil {
						t.Fatal(err)
					}
				}
				if got := r.machine.Driver(at(firstAt)); got != "" {
					t.Errorf("it has the driver %s", got)
				}
				if _, err := r.takeUp(firstAt); err != nil {
					t.Error(err)
				}
				r.untouched()
			})
		}
	}
}

func TestRebootForgets(t *testing.T) {
	r := newRig(t)
	r.until(firstAt, "ready", ready)
	if err := r.release(firstAt); err != nil {
		t.Fatal(err)
	}
	r.stop()
	r.machine.Reboot()
	if _, err := r.machine.ReadFile(auto); err != nil {
		t.Fatal(err)
	}
	_ = r.machine.Write(t.Context(), auto, "1")
	r.machine.File("proc/sys/kernel/random/boot_id", "boot-2\n")
	r.start()
	t.Cleanup(r.stop)
	r.untouched()
}

func TestDamagedJournal(t *testing.T) {
	r := newRig(t)
	r.stop()
	for _, text := range []string{"{", `{"version":9}`} {
		if err := os.WriteFile(filepath.Join(r.dir, "released.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := agent.New(agent.Config{Root: r.machine, Dir: r.dir})
		if err == nil || !strings.Contains(err.Error(), "released.json") {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestAwaitDevice(t *testing.T) {
	r := newRig(t)
	r.until(secondAt, "ready", ready)
	await := func(ms, id uint32, not ...string) (*gpuctlv1.GuestDevice, error) {
		resp, err := r.client.AwaitDevice(t.Context(), connect.NewRequest(&gpuctlv1.AwaitDeviceRequest{VendorId: 0x10de, DeviceId: id, Not: not, TimeoutMs: ms}))
		if err != nil {
			return nil, err
		}
		return resp.Msg.Device, nil
	}
	if d, err := await(1000, 0x2236, firstAt); err != nil || d.Address != secondAt || d.Target == nil {
		t.Errorf("%v, %v", d, err)
	}
	_, err := await(50, 0x20b0)
	refused(t, err, connect.CodeDeadlineExceeded, "10de:20b0")
	r.prober.change(func() { r.prober.err = errors.New("driver/library version mismatch") })
	late := make(chan error)
	go func() {
		_, err := await(500, 0x20b0)
		late <- err
	}()
	testkit.Parked(t, "agent.service.AwaitDevice", 1)
	r.machine.Add(display("0000:00:07.0", 0x20b0))
	refused(t, <-late, connect.CodeDeadlineExceeded, "0000:00:07.0", "version mismatch", "good.so")
	r.prober.change(func() { r.prober.err, r.prober.addrs = nil, []string{"0000:00:07.0"} })
	if d, err := await(20000, 0x20b0); err != nil || d.Address != "0000:00:07.0" {
		t.Errorf("%v, %v", d, err)
	}
	_, err = await(50, 0x20b0, "7")
	refused(t, err, connect.CodeInvalidArgument)
}

// A card comes to the place of a released one, as after a migration. Who waits for it is told at once,
// as it has to be taken up.
func TestAwaitedDeviceThatIsReleasedIsToldOf(t *testing.T) {
	r := newRig(t)
	id := r.until(firstAt, "ready", ready).GetDeviceId()
	if err := r.release(firstAt); err != nil {
		t.Fatal(err)
	}
	r.machine.Unplug(at(firstAt))
	r.until(firstAt, "gone", func(d *gpuctlv1.GuestDevice) bool { return d == nil })
	came := make(chan error)
	go func() {
		resp, err := r.client.AwaitDevice(t.Context(), connect.NewRequest(&gpuctlv1.AwaitDeviceRequest{VendorId: 0x10de, DeviceId: id, Not: []string{secondAt}, TimeoutMs: 600_000}))
		if err == nil {
			err = testkit.Want(resp.Msg.GetDevice().GetAddress() == firstAt && resp.Msg.GetDevice().GetReleased() && !resp.Msg.GetDevice().GetReady(), resp.Msg)
		}
		came <- err
	}()
	testkit.Parked(t, "agent.service.AwaitDevice", 1)
	r.machine.Plug(at(firstAt))
	if err := <-came; err != nil {
		t.Error(err)
	}
}

// Applications have a GPU while there is one.
func TestOffer(t *testing.T) {
	r := newRig(t)
	r.until(firstAt, "ready", ready)
	r.until(secondAt, "ready", ready)
	for _, step := range []struct{ release, want string }{{firstAt, "vm/" + secondAt}, {secondAt, ""}} {
		if err := r.release(step.release); err != nil {
			t.Fatal(err)
		}
		if got := r.sessions.offered(); got != step.want || r.open.Load() != (step.want != "") {
			t.Errorf("offered %q, open %v, want %q", got, r.open.Load(), step.want)
		}
	}
	if _, err := r.takeUp(firstAt); err != nil {
		t.Fatal(err)
	}
	r.until(firstAt, "ready", ready)
	testkit.Until(t, "the first card is offered", func() error {
		offered, open := r.sessions.offered(), r.open.Load()
		return testkit.Want(offered == "vm/"+firstAt && open, offered, open)
	})
}

// A probe holds the driver's files: it is over before the driver is unbound.
func TestReleaseEndsAProbe(t *testing.T) {
	r := newRig(t)
	r.until(firstAt, "ready", ready)
	hang := make(chan struct{})
	defer close(hang)
	r.prober.change(func() { r.prober.hang = hang })
	r.machine.Add(display("0000:00:07.0", 0x20b0))
	r.until("0000:00:07.0", "tried", func(d *gpuctlv1.GuestDevice) bool { return strings.Contains(d.GetMessage(), "tried") })
	if err := r.release("0000:00:07.0"); err != nil {
		t.Fatal(err)
	}
}

func TestNoDriver(t *testing.T) {
	r := newRig(t)
	r.until(firstAt, "ready", ready)
	if err := r.machine.Write(t.Context(), "sys/bus/pci/drivers/nvidia/unbind", firstAt); err != nil {
		t.Fatal(err)
	}
	d := r.until(firstAt, "not ready", func(d *gpuctlv1.GuestDevice) bool { return !d.GetReady() && d.GetMessage() != "" })
	if !strings.Contains(d.Message, "no driver") || !strings.Contains(d.Message, "nvidia") {
		t.Errorf("message %q", d.Message)
	}
	if err := r.machine.Write(t.Context(), "sys/bus/pci/drivers/nvidia/bind", firstAt); err != nil {
		t.Fatal(err)
	}
	r.untouched()
}

// The users that the program asks for are bind's.
func TestUsersOfBind(t *testing.T) {
	r := newRig(t)
	r.machine.Node(at(firstAt), "nvidia", "drm/renderD128", "dri/renderD128")
	r.machine.Run(4711, "Xorg", "/dev/dri/renderD128")
	users, err := bind.New(r.machine, nil, bind.WithBootVGA()).Users(t.Context(), []pci.Address{at(firstAt)})
	if err != nil || len(users) != 1 || users[0].PID != 4711 {
		t.Errorf("%v, %v", users, err)
	}
}

// --- the gate

// The runtime that would be tried first is loaded for a card that is about to
// come.
func TestExpect(t *testing.T) {
	r := newRig(t)
	ask := connect.NewRequest(&gpuctlv1.ExpectRequest{Function: &gpuctlv1.PCIIdentity{VendorId: 0x10de, DeviceId: 0x2236, Class: 0x030000}})
	_, err := r.client.Expect(t.Context(), ask)
	refused(t, err, connect.CodeFailedPrecondition, "install it in the VM")
	_, err = r.client.Expect(t.Context(), connect.NewRequest(&gpuctlv1.ExpectRequest{}))
	refused(t, err, connect.CodeFailedPrecondition, "no profile fits 0000:0000")
	r.machine.File("etc/ld.so.conf.d/x.conf", "/usr/lib/x86_64-linux-gnu\n")
	r.machine.File("usr/lib/x86_64-linux-gnu/good.so", "ELF")
	_, err = r.client.Expect(t.Context(), ask)
	refused(t, err, connect.CodeFailedPrecondition, "0 MiB are free in the VM")
	r.machine.File("proc/meminfo", "MemTotal: 800000 kB\nMemAvailable: 700000 kB\n")
	if _, err := r.client.Expect(t.Context(), ask); err != nil || !slices.Equal(r.sessions.warmed, []string{"good.so"}) {
		t.Errorf("%v, loaded %v", err, r.sessions.warmed)
	}
}

// What a VM lacks for a card that it has not got yet is said before anything is moved.
func TestServes(t *testing.T) {
	r := newRig(t)
	nvidia := &gpuctlv1.PCIIdentity{VendorId: 0x10de, DeviceId: 0x2236, Class: 0x030000}
	for _, c := range []struct {
		name  string
		files map[string]string
		want  string
	}{
		{"a driver but no library", nil, "profile test needs bad.so or good.so: install it in the VM"},
		{"both", map[string]string{"etc/ld.so.conf.d/x.conf": "# comment\n/usr/lib/x86_64-linux-gnu\n", "usr/lib/x86_64-linux-gnu/good.so": "ELF"}, ""},
	} {
		for name, data := range c.files {
			r.machine.File(name, data)
		}
		resp, err := r.client.Serves(t.Context(), connect.NewRequest(&gpuctlv1.ServesRequest{
			Functions: []*gpuctlv1.PCIIdentity{nvidia, {VendorId: 0x1002, DeviceId: 1, Class: 0x120000}, {VendorId: 0x1234, DeviceId: 2}},
		}))
		if err != nil {
			t.Fatal(err)
		}
		got := resp.Msg.Missing
		if len(got) != 3 || got[0] != c.want || !strings.Contains(got[1], "amdgpu") || !strings.HasPrefix(got[2], "no profile fits 1234:0002") {
			t.Errorf("%s: %q", c.name, got)
		}
	}
	// The driver of the other vendor is not loaded, but can be.
	r.machine.File("lib/modules/6.1.0/modules.dep", "kernel/drivers/net/e1000.ko:\nkernel/drivers/gpu/drm/amd/amdgpu/amdgpu.ko.xz: kernel/x.ko.xz\n")
	resp, err := r.client.Serves(t.Context(), connect.NewRequest(&gpuctlv1.ServesRequest{Functions: []*gpuctlv1.PCIIdentity{{VendorId: 0x1002, DeviceId: 1, Class: 0x120000}}}))
	if err != nil {
		t.Fatal(err)
	}
	if got := resp.Msg.Missing[0]; strings.Contains(got, "kernel") || !strings.Contains(got, "install it") {
		t.Errorf("%q", got)
	}
	_, err = r.client.Serves(t.Context(), connect.NewRequest(&gpuctlv1.ServesRequest{Functions: make([]*gpuctlv1.PCIIdentity, 2000)}))
	refused(t, err, connect.CodeInvalidArgument, "no more than 1024")
}
