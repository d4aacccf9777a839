package agent_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// fakeDriver is NVIDIA's driver with one GPU.
type fakeDriver struct{}

func (fakeDriver) GPUs(context.Context) ([]*gpuctlv1.DriverGPU, []uint64, error) {
	return []*gpuctlv1.DriverGPU{{Uuid: "GPU-1", PciAddress: "00000000:00:05.0", Model: "NVIDIA A10"}}, []uint64{24 << 30}, nil
}

// lateDriver shows its GPU when it is told to.
type lateDriver struct{ shows atomic.Bool }

func (d *lateDriver) GPUs(ctx context.Context) ([]*gpuctlv1.DriverGPU, []uint64, error) {
	if !d.shows.Load() {
		return nil, nil, nil
	}
	return fakeDriver{}.GPUs(ctx)
}

// NVIDIA's driver may show a card later than OpenCL serves it. Programs of OpenCL have it at
// once, and the driver is asked again, without another probe.
func TestDriverThatShowsACardLateIsAskedAgain(t *testing.T) {
	r := newRig(t)
	r.stop()
	late := &lateDriver{}
	r.driver, r.services = late, &fakeServices{runs: map[string]bool{}}
	r.machine.File("usr/lib/libcuda.so.1", "")
	r.start()
	t.Cleanup(func() { r.stop() })
	d := r.until(firstAt, "ready", ready)
	if g := d.GetTarget(); g.GetRuntime() == nil || len(g.GetDriver()) != 0 {
		t.Fatalf("%v", g)
	}
	r.until(secondAt, "ready", ready)
	probes := func() (n int) { r.prober.change(func() { n = r.prober.count }); return n }
	before := probes()
	late.shows.Store(true)
	d = r.until(firstAt, "for CUDA programs", func(d *gpuctlv1.GuestDevice) bool { return len(d.GetTarget().GetDriver()) == 1 })
	if d.GetTarget().GetRuntime() == nil || !d.GetReady() {
		t.Errorf("%v", d)
	}
	if n := probes(); n != before {
		t.Errorf("its OpenCL runtime was probed %d times more", n-before)
	}
	late.shows.Store(false) // what is known stays until the card is released
	if err := r.release(firstAt); err != nil {
		t.Fatal(err)
	}
	if _, err := r.takeUp(firstAt); err != nil {
		t.Fatal(err)
	}
	d = r.until(firstAt, "ready again", ready)
	if len(d.GetTarget().GetDriver()) != 0 {
		t.Errorf("the driver does not show it: %v", d)
	}
	r.untouched()
}

// fakeServices are services of which each watches while it runs.
type fakeServices struct {
	mu    sync.Mutex
	runs  map[string]bool
	stuck map[string]bool // do not stop
	log   []string
}

func (s *fakeServices) Watching(context.Context, []pci.Address) (out []string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, runs := range s.runs {
		if runs {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out, nil
}

func (s *fakeServices) Stop(_ context.Context, name string) error { return s.set(name, false) }

func (s *fakeServices) Start(_ context.Context, name string) error { return s.set(name, true) }

func (s *fakeServices) set(name string, runs bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log = append(s.log, name)
	if s.stuck[name] && !runs {
		return errors.New("job timed out")
	}
	s.runs[name] = runs
	return nil
}

func (s *fakeServices) running() (out []string) {
	out, _ = s.Watching(context.Background(), nil)
	return out
}

func (r *rig) untilRunning(t *testing.T, want ...string) {
	t.Helper()
	testkit.Until(t, "the services run", func() error {
		got := r.services.running()
		return testkit.Want(slices.Equal(got, want), got)
	})
}

func newDriverRig(t *testing.T, services ...string) *rig {
	r := newRig(t)
	r.stop()
	r.driver, r.services = fakeDriver{}, &fakeServices{runs: map[string]bool{}, stuck: map[string]bool{}}
	for _, s := range services {
		r.services.runs[s] = true
	}
	r.start()
	t.Cleanup(func() { r.stop() })
	return r
}

// CUDA programs can use a card that no OpenCL runtime serves. OpenCL programs wait then.
func TestCardWithoutOpenCLIsForCUDAPrograms(t *testing.T) {
	r := newDriverRig(t)
	d := r.until(firstAt, "ready", ready)
	if d.GetTarget().GetRuntime() == nil || d.GetTarget().GetDriver()[0].GetUuid() != "GPU-1" {
		t.Errorf("both can use it: %v", d.GetTarget())
	}
	r.stop()
	r.prober.change(func() { r.prober.err = errors.New("no OpenCL here") })
	r.start()
	d = r.until(firstAt, "ready", ready)
	if g := d.GetTarget(); g.GetRuntime() != nil || g.GetModel() != "NVIDIA A10" || g.GetLimits().GetGlobalMemory() != 24<<30 || g.GetGpu() != "vm/"+firstAt {
		t.Errorf("%v", g)
	}
	testkit.Until(t, "it is offered", func() error {
		got := r.sessions.offered()
		return testkit.Want(got == "vm/"+firstAt && !r.open.Load(), got, r.open.Load())
	})
	// The driver does not show the other card.
	r.until(secondAt, "useless", func(d *gpuctlv1.GuestDevice) bool {
		return !d.GetReady() && strings.Contains(d.GetMessage(), "no OpenCL here")
	})
}

func TestServicesThatWatchACardAreStoppedWhileItIsAway(t *testing.T) {
	r := newDriverRig(t, "dcgm.service", "nvidia-persistenced.service")
	r.until(firstAt, "ready", ready)
	if err := r.release(firstAt); err != nil {
		t.Fatal(err)
	}
	if got := r.services.running(); len(got) != 0 {
		t.Errorf("%v run", got)
	}
	r.restart() // the next gpuguest knows what to start
	r.until(firstAt, "released", (*gpuctlv1.GuestDevice).GetReleased)
	if got := r.services.running(); len(got) != 0 {
		t.Errorf("%v run", got)
	}
	if _, err := r.takeUp(firstAt); err != nil {
		t.Fatal(err)
	}
	r.untilRunning(t, "dcgm.service", "nvidia-persistenced.service")
	r.untouched()
}

func TestReleaseThatFailsStartsTheServicesAgain(t *testing.T) {
	r := newDriverRig(t, "dcgm.service", "nvidia-persistenced.service")
	r.until(firstAt, "ready", ready)
	r.services.stuck["nvidia-persistenced.service"] = true
	refused(t, r.release(firstAt), connect.CodeInternal, "stop nvidia-persistenced.service", "job timed out")
	r.untilRunning(t, "dcgm.service", "nvidia-persistenced.service")
	r.services.stuck = nil
	r.users = []string{"python (pid 7) has /dev/nvidia0 open"}
	refused(t, r.release(firstAt), connect.CodeFailedPrecondition, "python (pid 7)")
	r.untilRunning(t, "dcgm.service", "nvidia-persistenced.service")
	r.users = nil
	r.untouched()
}

// A program that opens the card after the first look keeps it from being unbound: NVIDIA's
// driver would wait for ever.
func TestCardThatIsOpenedMeanwhileIsNotUnbound(t *testing.T) {
	r := newDriverRig(t)
	r.until(firstAt, "ready", ready)
	looks := 0
	r.look = func() []string {
		if looks++; looks < 3 {
			return nil
		}
		return []string{"nvidia-smi (pid 9) has /dev/nvidia0 open"}
	}
	refused(t, r.release(firstAt), connect.CodeFailedPrecondition, "nvidia-smi (pid 9)")
	r.look = nil
	r.untouched()
}

// A session of a CUDA process, which names its GPU by the UUID, keeps the card.
func TestRunningCUDASessionKeepsItsCard(t *testing.T) {
	r := newDriverRig(t)
	r.until(firstAt, "ready", ready)
	s := &gpuctlv1.Session{
		Id: "d-1", Command: "train", State: gpuctlv1.SessionState_SESSION_STATE_RUNNING,
		Target: &gpuctlv1.Target{Gpu: "GPU-1", Driver: []*gpuctlv1.DriverGPU{{Uuid: "GPU-1"}}},
	}
	r.sessions.set(s)
	refused(t, r.release(firstAt), connect.CodeFailedPrecondition, "session d-1 (train")
	s.State = gpuctlv1.SessionState_SESSION_STATE_SUSPENDED
	if err := r.release(firstAt); err != nil {
		t.Error(err)
	}
}
