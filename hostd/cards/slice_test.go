package cards

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/passthrough/catalog"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
	"github.com/gpuctl/gpuctl/passthrough/sysfs/sysfstest"
	"github.com/gpuctl/gpuctl/passthrough/vgpu"
)

// slicedGPU is the card that can be cut, at slicedPF.
const slicedGPU = "a10-0"

var slicedPF = address("0000:07:00.0")

// sliced is a world's card that can be cut. The kernel's part is sysfstest's,
// the cutting vgpu's own.
type sliced struct {
	machine  *sysfstest.Machine // nil: there is none
	vfio     bool               // VMs get mediated devices and NVIDIA's vGPUs
	vfs      int                // virtual functions that there are before anything is cut
	mediated map[string]string  // VM's UUID by the device's
	profiles map[string]string  // of claims
}

// newSliced is a world with a third card, which can be cut in one way.
func newSliced(t *testing.T, kind vgpu.Kind, vfs int) *world {
	t.Helper()
	w := emptyWorld(t)
	m := sysfstest.New()
	m.Add(pcitest.Port("0000:00:01.0", "", -1, pci.PortRoot, pcitest.FullACS()), pcitest.Port("0000:00:02.0", "", -1, pci.PortRoot, pcitest.FullACS()),
		pcitest.Port("0000:00:03.0", "", -1, pci.PortRoot, pcitest.FullACS()))
	m.Add(pcitest.NVIDIACard("0000:65:00", "0000:00:01.0", -1, 0)...)
	m.Add(pcitest.SRIOVAccelerator("0000:06", "0000:00:02.0", -1, 0, 0, 0)...)
	m.Add(pcitest.SRIOVAccelerator("0000:07", "0000:00:03.0", -1, 0, 4, 0)...)
	w.machine, w.root, w.vfs = m, m, vfs
	w.mediated, w.profiles = map[string]string{}, map[string]string{}
	cards, err := pci.Scan(m)
	if err != nil || len(cards) != 3 {
		t.Fatalf("%d cards, %v", len(cards), err)
	}
	for _, c := range cards {
		for _, f := range c.Functions {
			w.driver[f.Address], w.native[f.Address] = f.Driver, f.Driver
		}
	}
	if vfs > 0 {
		if err := m.Write(t.Context(), "sys/bus/pci/devices/"+slicedPF.String()+"/sriov_numvfs", fmt.Sprint(vfs)); err != nil {
			t.Fatal(err)
		}
	}
	switch kind {
	case vgpu.Vendor:
		w.vfio = true
		m.AddVGPUTypes(slicedPF, sysfstest.VGPUType{ID: 592, Name: "NVIDIA A10-8Q", Instances: 3}, sysfstest.VGPUType{ID: 593, Name: "NVIDIA A10-4Q", Instances: 6})
	case vgpu.Mdev:
		w.vfio = true
		m.AddMdevTypes(slicedPF, sysfstest.MdevType{ID: "nvidia-592", Name: "NVIDIA A10-8Q", Description: "framebuffer=8192M, max_instance=3", API: "vfio-pci", Instances: 3})
	default:
	}
	w.start()
	return w
}

// cuts adds to hostd what it needs for slices.
func (s *sliced) cuts(c *Config) {
	if s.machine == nil {
		return
	}
	known, err := catalog.Load()
	if err != nil {
		panic(err)
	}
	w := c.Binder.(*world)
	c.Slicer = slicer{vgpu.New(s.machine, known.Lookup), w}
	if s.vfio {
		c.Mediated = mediator{w}
	}
}

func (s *sliced) slicedGPUs() []*clusterv1.GPU {
	if s.machine == nil {
		return nil
	}
	return []*clusterv1.GPU{{Name: slicedGPU, PciAddress: slicedPF.String(), Model: "A10"}}
}

// vendorTyped reports whether a function has a vGPU, which the card's own driver
// gives to VMs.
func (s *sliced) vendorTyped(f pci.Address) bool {
	if s.machine == nil || !s.vfio {
		return false
	}
	data, err := s.machine.ReadFile("sys/bus/pci/devices/" + f.String() + "/nvidia/current_vgpu_type")
	return err == nil && strings.TrimSpace(string(data)) != "0"
}

// slicer ends hostd at its calls, and sees to what must not be done.
type slicer struct {
	*vgpu.Manager
	w *world
}

func (s slicer) Make(ctx context.Context, i vgpu.Instance) error {
	return s.w.call(func() error {
		if s.w.owner[slicedPF] != "" {
			s.w.t.Errorf("a slice was made while VM %s has the card", s.w.owner[slicedPF])
		}
		return s.Manager.Make(ctx, i)
	})
}

func (s slicer) Delete(ctx context.Context, i vgpu.Instance) error {
	return s.w.call(func() error {
		if vm := s.w.mediated[i.ID]; vm != "" {
			s.w.t.Errorf("%s was deleted while VM %s has it", i.ID, vm)
		}
		if vm := s.w.owner[i.Function]; vm != "" && i.Kind == vgpu.Vendor {
			s.w.t.Errorf("the vGPU on %s was deleted while VM %s has it", i.Function, vm)
		}
		err := s.Manager.Delete(ctx, i)
		if err == nil && i.Kind == vgpu.Vendor {
			delete(s.w.dirty, i.Function)
		}
		return err
	})
}

func (s slicer) Resize(ctx context.Context, card *pci.Card, n int, use vgpu.Use) error {
	return s.w.call(func() error {
		vfs, _ := s.VFs(card)
		for _, f := range vfs {
			switch {
			case s.w.owner[f] != "":
				s.w.t.Errorf("%s was removed while VM %s has it", f, s.w.owner[f])
			case s.w.dirty[f] != "":
				s.w.t.Errorf("%s was removed without a reset", f)
			case s.w.driver[f] != "":
				s.w.t.Errorf("%s was removed while it is bound to %s", f, s.w.driver[f])
			}
		}
		return s.Manager.Resize(ctx, card, n, use)
	})
}

// mediator is the hypervisor's part for mediated devices.
type mediator struct{ w *world }

func (m mediator) Owners(context.Context) (map[string]vm.VM, error) {
	m.w.mu.Lock()
	defer m.w.mu.Unlock()
	if m.w.crashed {
		return nil, errCrashed
	}
	out := map[string]vm.VM{}
	for id, uuid := range m.w.mediated {
		out[id] = vm.VM{UUID: uuid, Name: m.w.machines[uuid].Name}
	}
	return out, nil
}

func (m mediator) Attach(_ context.Context, uuid, id string) error {
	return m.w.call(func() error {
		if !slices.Contains(m.w.machine.Mdevs(slicedPF), id) {
			return fmt.Errorf("there is no mediated device %s", id)
		}
		if m.w.mediated[id] != "" {
			return fmt.Errorf("%s is in use", id)
		}
		m.w.mediated[id] = uuid
		return nil
	})
}

func (m mediator) Detach(_ context.Context, uuid, id string) error {
	return m.w.call(func() error {
		if m.w.deaf[uuid] {
			return errors.New("timed out")
		}
		if m.w.mediated[id] != uuid {
			return fmt.Errorf("%s: no such device", id)
		}
		delete(m.w.mediated, id)
		return nil
	})
}

// checkSlices checks what must hold of slices once all is settled. w.mu is held.
func (w *world) checkSlices() {
	if w.machine == nil {
		return
	}
	cards, err := pci.Scan(w.machine)
	if err != nil {
		w.t.Error(err)
	}
	card := cards[slices.IndexFunc(cards, func(c *pci.Card) bool { return c.Address == slicedPF })]
	held := map[string]*cardAssignment{} // by function or UUID
	for _, a := range w.keeper.slices {
		if len(a.Functions) == 0 {
			w.t.Errorf("left without a function: %+v", a)
			continue
		}
		id := a.instance().ID
		held[id] = a
		owner := w.owner[a.Functions[0]]
		if a.mediated() {
			owner = w.mediated[id]
		}
		switch {
		case a.Phase == quarantined && owner == "":
		case a.Phase != attached || a.UUID != owner || owner == "":
			w.t.Errorf("VM %q has %s, and the record is %+v", owner, a.label(), a)
		case w.claims[a.Claim] != a.GPU || w.profiles[a.Claim] != a.Slice.Profile:
			w.t.Errorf("VM %s has %s without a claim of it: %v", owner, a.label(), w.claims)
		}
	}
	for f, owner := range w.owner {
		if f.Bus == slicedPF.Bus && f != slicedPF && owner != "" && held[f.String()] == nil {
			w.t.Errorf("VM %s has %s, and nobody knows", owner, f)
		}
	}
	manager := w.keeper.Slicer.(slicer).Manager
	instances, err := manager.Instances(card)
	if err != nil {
		w.t.Error(err)
	}
	for _, i := range instances {
		if i.Kind != vgpu.SRIOV && held[i.ID] == nil {
			w.t.Errorf("left: %+v", i)
		}
	}
	vfs, _ := manager.VFs(card)
	if len(held) == 0 && len(vfs) != w.vfs {
		w.t.Errorf("%d virtual functions, and there were %d", len(vfs), w.vfs)
	}
	for _, f := range vfs {
		if held[f.String()] == nil && w.driver[f] != w.native[f] {
			w.t.Errorf("%s is nobody's and bound to %q", f, w.driver[f])
		}
	}
	if len(held) > 0 && (w.driver[slicedPF] != "nvidia" || w.keeper.assignments[slicedPF] != nil) {
		w.t.Errorf("slices are out, and the card is bound to %s for %+v", w.driver[slicedPF], w.keeper.assignments[slicedPF])
	}
}

func (w *world) attachSlice(machine, gpu, profile string) error {
	return w.keeper.Attach(w.t.Context(), &gpuctlv1.AttachRequest{Machine: machine, Gpu: gpu, Profile: profile}, quiet)
}

func (w *world) detachSlice(machine, slice string) error {
	return w.keeper.Detach(w.t.Context(), &gpuctlv1.DetachRequest{Machine: machine, Gpu: slice, Unconfirmed: true}, quiet)
}

// vf is the address of a virtual function, from 0.
func vf(n int) pci.Address { return address(fmt.Sprintf("0000:07:00.%d", 4+n)) }

func TestSliceLife(t *testing.T) {
	w := newSliced(t, vgpu.SRIOV, 0)
	var steps []string
	err := w.keeper.Attach(t.Context(), &gpuctlv1.AttachRequest{Machine: "one", Gpu: slicedGPU, Profile: "vf"}, func(u *gpuctlv1.DeviceUpdate) {
		if u.GetTookNs() > 0 {
			steps = append(steps, u.GetStep())
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"claim", "cut", "take", "reset", "attach"}; !slices.Equal(steps, want) {
		t.Errorf("steps %v, want %v", steps, want)
	}
	w.settled()
	if w.owner[vf(0)] != uuid1 {
		t.Fatalf("%v", w.owner)
	}
	if err := w.attachSlice("two", slicedGPU, "vf"); err != nil {
		t.Fatal(err)
	}
	w.restart()
	w.settled()
	if w.owner[vf(1)] != uuid2 {
		t.Fatalf("%v", w.owner)
	}
	// The card is nobody's as a whole now.
	for what, err := range map[string]error{
		"attach": w.attach("two", slicedGPU, false),
		"reset":  w.keeper.Reset(t.Context(), &gpuctlv1.ResetRequest{Gpu: slicedGPU}, quiet),
		"resize": w.keeper.Resize(t.Context(), &gpuctlv1.ResizeRequest{Gpu: slicedGPU, Functions: 2}, quiet),
	} {
		if !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "VM one has a10-0 (vf 0000:07:00.4), VM two has a10-0 (vf 0000:07:00.5)") {
			t.Errorf("%s: %v", what, err)
		}
	}
	cards, err := w.keeper.Cards(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c := cards[slices.IndexFunc(cards, func(c *gpuctlv1.Card) bool { return c.GetGpu() == slicedGPU })]
	if len(c.GetSlices()) != 2 || c.GetFunctionsNow() != 4 || c.GetProfiles()[0].GetFree() != 2 || c.GetSlices()[1].GetMachineName() != "two" {
		t.Errorf("%v", c)
	}
	// The first goes and the functions stay; they go with the last.
	if err := w.detach("one", ""); err != nil {
		t.Fatal(err)
	}
	w.settled()
	if err := w.detach("two", vf(1).String()); err != nil {
		t.Fatal(err)
	}
	w.settled()
	if err := w.attach("two", slicedGPU, false); err != nil {
		t.Errorf("the whole card afterwards: %v", err)
	}
	w.settleWhole(t)
}

// settleWhole checks that the card that could be cut is a VM's as a whole, and
// then no slice can be had.
func (w *world) settleWhole(t *testing.T) {
	t.Helper()
	if w.owner[slicedPF] != uuid2 {
		t.Errorf("%v", w.owner)
	}
	if err := w.attachSlice("one", slicedGPU, "vf"); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "belongs as a whole to VM two") {
		t.Errorf("%v", err)
	}
}

func TestSlicesOfOneVM(t *testing.T) {
	w := newSliced(t, vgpu.SRIOV, 0)
	for range 2 {
		if err := w.attachSlice("one", "", "vf"); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.detach("one", slicedGPU); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "it has a10-0 (vf 0000:07:00.4), a10-0 (vf 0000:07:00.5)") {
		t.Errorf("%v", err)
	}
	w.stop(uuid1)
	w.keeper.Stopped(uuid1)
	w.keeper.work.Wait()
	w.settled()
	if len(w.keeper.slices) != 0 {
		t.Errorf("%v", w.keeper.slices)
	}
}

func TestSliceRefusals(t *testing.T) {
	for _, c := range []struct {
		name  string
		kind  vgpu.Kind
		vfs   int
		world func(w *world)
		do    func(w *world) error
		is    error
		says  string
	}{
		{"no such profile", vgpu.SRIOV, 0, nil, func(w *world) error { return w.attachSlice("one", slicedGPU, "A10-8Q") }, ErrRefused, `a10-0 has no profile "A10-8Q"; it has vf`},
		{"not to be cut", vgpu.SRIOV, 0, nil, func(w *world) error { return w.attachSlice("one", "nvidia-0", "vf") }, ErrRefused, "nvidia-0 cannot be cut into slices"},
		{"mdev on Xen", vgpu.Mdev, 0, func(w *world) { w.vfio = false; w.start() }, func(w *world) error { return w.attachSlice("one", slicedGPU, "A10-8Q") }, ErrRefused, "Xen's toolstack assigns PCI functions only"},
		{"vendor on Xen", vgpu.Vendor, 4, func(w *world) { w.vfio = false; w.start() }, func(w *world) error { return w.attachSlice("one", slicedGPU, "A10-8Q") }, ErrRefused, "Xen's toolstack assigns PCI functions only"},
		{"other size", vgpu.Vendor, 4, func(w *world) { _ = w.attachSlice("two", slicedGPU, "A10-8Q") }, func(w *world) error { return w.attachSlice("one", slicedGPU, "A10-4Q") }, ErrRefused, "all vGPUs of the GPU must have one size; VM two has a10-0 (A10-8Q 0000:07:00.4)"},
		{
			"full", vgpu.SRIOV, 1, func(w *world) { _ = w.attachSlice("two", slicedGPU, "vf") },
			func(w *world) error { return w.attachSlice("one", slicedGPU, "vf") }, ErrRefused, "no room for another vf: all virtual functions are out or scheduled; VM two has",
		},
		{"stored", vgpu.SRIOV, 0, nil, func(w *world) error {
			return w.keeper.Attach(w.t.Context(), &gpuctlv1.AttachRequest{Machine: "one", Gpu: slicedGPU, Profile: "vf", StoredOnly: true}, quiet)
		}, ErrInvalid, "a slice is made for a running VM"},
		{"persistent", vgpu.SRIOV, 0, nil, func(w *world) error {
			return w.keeper.Attach(w.t.Context(), &gpuctlv1.AttachRequest{Machine: "one", Gpu: slicedGPU, Profile: "vf", Persistent: true}, quiet)
		}, ErrRefused, "gpuctl resize a10-0"},
		{"functions lie idle", vgpu.SRIOV, 2, nil, func(w *world) error { return w.attach("one", slicedGPU, false) }, ErrRefused, "gpuctl resize a10-0 --functions 0"},
		{"too many functions", vgpu.SRIOV, 0, nil, func(w *world) error {
			return w.keeper.Resize(w.t.Context(), &gpuctlv1.ResizeRequest{Gpu: slicedGPU, Functions: 5}, quiet)
		}, ErrRefused, "4 virtual functions at most, not 5"},
		{"no functions", vgpu.SRIOV, 0, nil, func(w *world) error {
			return w.keeper.Resize(w.t.Context(), &gpuctlv1.ResizeRequest{Gpu: "nvidia-0", Functions: 1}, quiet)
		}, ErrRefused, "it has no SR-IOV"},
		{"claimed whole", vgpu.SRIOV, 0, func(w *world) { w.claims["c-1"] = slicedGPU; w.keeper.claiming["c-1"] = true }, func(w *world) error { return w.attachSlice("one", slicedGPU, "vf") }, ErrRefused, "it is claimed"},
		{"start with another's function", vgpu.SRIOV, 2, func(w *world) { _ = w.attachSlice("two", slicedGPU, "vf"); w.stop(uuid1) }, func(w *world) error { return w.prepare(uuid1, vf(0)) }, ErrRefused, "belongs to VM two (attached): gpuctl detach two 0000:07:00.4"},
		{"start with no vGPU", vgpu.Vendor, 2, func(w *world) { w.stop(uuid1) }, func(w *world) error { return w.prepare(uuid1, vf(0)) }, ErrRefused, "there is no vGPU on it"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newSliced(t, c.kind, c.vfs)
			if c.world != nil {
				c.world(w)
			}
			before := w.calls
			if err := c.do(w); !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v", err)
			}
			if w.calls > before+1 { // the claim
				t.Errorf("%d changes", w.calls-before)
			}
		})
	}
}

// A function that must not be given away is known only once it is there.
func TestSliceNotIsolated(t *testing.T) {
	w := newSliced(t, vgpu.SRIOV, 0)
	w.care = true
	if err := w.attachSlice("one", slicedGPU, "vf"); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "--accept-care") {
		t.Errorf("%v", err)
	}
	w.settled()
	if len(w.keeper.slices) != 0 {
		t.Errorf("%v", w.keeper.slices)
	}
}

// Functions that an operator made stay.
func TestLastingFunctions(t *testing.T) {
	w := newSliced(t, vgpu.SRIOV, 0)
	if err := w.keeper.Resize(t.Context(), &gpuctlv1.ResizeRequest{Gpu: slicedGPU, Functions: 2}, quiet); err != nil {
		t.Fatal(err)
	}
	w.vfs = 2
	if err := w.keeper.Attach(t.Context(), &gpuctlv1.AttachRequest{Machine: "one", Gpu: slicedGPU, Profile: "vf", Persistent: true}, quiet); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(w.stored[uuid1], []pci.Address{vf(0)}) {
		t.Errorf("%v", w.stored)
	}
	w.settled()
	// Over a stop and a start of the VM.
	w.stop(uuid1)
	w.keeper.Stopped(uuid1)
	w.keeper.work.Wait()
	w.settled()
	if err := w.prepare(uuid1, vf(0)); err != nil {
		t.Fatal(err)
	}
	w.run(uuid1, vf(0))
	w.settled()
	if err := w.detach("one", ""); err != nil {
		t.Fatal(err)
	}
	w.settled()
	if err := w.keeper.Resize(t.Context(), &gpuctlv1.ResizeRequest{Gpu: slicedGPU, Functions: 0}, quiet); err != nil {
		t.Fatal(err)
	}
	w.vfs = 0
	w.settled()
}

// What no reset brings back is kept from everybody, and so are the functions.
func TestSliceQuarantine(t *testing.T) {
	w := newSliced(t, vgpu.SRIOV, 0)
	if err := w.attachSlice("one", slicedGPU, "vf"); err != nil {
		t.Fatal(err)
	}
	w.resetFail[vf(0)] = errors.New("it does not answer")
	if err := w.detach("one", ""); !errors.Is(err, errQuarantined) {
		t.Errorf("%v", err)
	}
	w.settled()
	if err := w.attachSlice("two", slicedGPU, "vf"); err != nil || w.owner[vf(1)] != uuid2 {
		t.Errorf("%v %v", err, w.owner)
	}
	gpus, _ := w.gpus(t.Context())
	w.keeper.Annotate(gpus)
	if g := gpus[len(gpus)-1]; g.GetHealth() != clusterv1.Health_HEALTH_DEGRADED || !strings.Contains(g.GetHealthReason(), "a10-0 (vf 0000:07:00.4) is quarantined") {
		t.Errorf("%v", g)
	}
	w.restart()
	w.settled()
	delete(w.resetFail, vf(0))
	if err := w.keeper.Reset(t.Context(), &gpuctlv1.ResetRequest{Gpu: vf(0).String()}, quiet); err != nil {
		t.Fatal(err)
	}
	w.settled()
	if err := w.detach("two", ""); err != nil {
		t.Fatal(err)
	}
	w.settled()
}

// After a restart of the machine there are neither functions nor VMs.
func TestSliceAfterReboot(t *testing.T) {
	for _, c := range []struct {
		kind    vgpu.Kind
		vfs     int
		profile string
	}{{vgpu.SRIOV, 0, "vf"}, {vgpu.Mdev, 0, "A10-8Q"}} {
		w := newSliced(t, c.kind, c.vfs)
		if err := w.attachSlice("one", slicedGPU, c.profile); err != nil {
			t.Fatal(err)
		}
		w.stop(uuid1)
		clear(w.dirty)
		for f := range w.driver {
			w.driver[f] = w.native[f]
		}
		w.machine.Reboot()
		w.restart()
		w.settled()
		if len(w.keeper.slices) != 0 {
			t.Errorf("%v", w.keeper.slices)
		}
	}
}

// Given by hand: it is known whose it is.
func TestSliceByHand(t *testing.T) {
	w := newSliced(t, vgpu.SRIOV, 2)
	w.driver[vf(1)] = "pciback"
	w.run(uuid2, vf(1))
	w.settled()
	if a := w.keeper.sliceAt(vf(1)); a == nil || a.UUID != uuid2 || !a.Slice.Kept {
		t.Fatalf("%+v", a)
	}
	if err := w.attach("one", slicedGPU, false); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "VM two has a10-0 (vf 0000:07:00.5)") {
		t.Errorf("%v", err)
	}
}

// What the inventory is told goes down with what is out.
func TestProfiles(t *testing.T) {
	w := newSliced(t, vgpu.Vendor, 4)
	most := func() map[string]uint32 {
		card, _, err := w.keeper.find(t.Context(), slicedGPU)
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]uint32{}
		for _, p := range w.keeper.Profiles(card) {
			if p.GetMemory() == 0 || p.GetApart() == "" {
				t.Errorf("%v", p)
			}
			out[p.GetName()] = p.GetMaxInstances()
		}
		return out
	}
	if p := most(); p["A10-8Q"] != 3 || p["A10-4Q"] != 4 {
		t.Errorf("%v", p)
	}
	if err := w.attachSlice("one", slicedGPU, "A10-8Q"); err != nil {
		t.Fatal(err)
	}
	if p := most(); p["A10-8Q"] != 3 || p["A10-4Q"] != 0 {
		t.Errorf("%v", p)
	}
	// On Xen none of them can be had, and NVIDIA's functions are nothing alone.
	w.vfio = false
	w.restart()
	if p := most(); len(p) != 0 {
		t.Errorf("%v", p)
	}
}

// sliceScenarios are what is ended at every call.
var sliceScenarios = map[string]struct {
	kind vgpu.Kind
	vfs  int
	do   func(w *world)
}{
	"attach by profile": {vgpu.SRIOV, 0, func(w *world) { _ = w.attachSlice("one", slicedGPU, "vf") }},
	"attach any":        {vgpu.SRIOV, 0, func(w *world) { _ = w.attachSlice("one", "", "vf") }},
	"detach":            {vgpu.SRIOV, 0, func(w *world) { _ = w.attachSlice("one", slicedGPU, "vf"); _ = w.detach("one", "") }},
	"two VMs": {vgpu.SRIOV, 0, func(w *world) {
		_, _ = w.attachSlice("one", slicedGPU, "vf"), w.attachSlice("two", slicedGPU, "vf")
		_, _ = w.detach("one", ""), w.detach("two", "")
	}},
	"refused when made": {vgpu.SRIOV, 0, func(w *world) { w.care = true; _ = w.attachSlice("one", slicedGPU, "vf") }},
	"whole afterwards": {vgpu.SRIOV, 0, func(w *world) {
		_, _ = w.attachSlice("one", slicedGPU, "vf"), w.detach("one", "")
		_ = w.attach("two", slicedGPU, false)
		_ = w.detach("two", "")
	}},
	"deaf": {vgpu.SRIOV, 0, func(w *world) {
		_ = w.attachSlice("one", slicedGPU, "vf")
		w.deaf[uuid1] = true
		_ = w.detachSlice("one", "")
	}},
	"start and stop": {vgpu.SRIOV, 2, func(w *world) {
		w.stop(uuid1)
		if w.prepare(uuid1, vf(0), card1[0]) != nil {
			return
		}
		w.run(uuid1, vf(0), card1[0])
		w.stop(uuid1)
		w.keeper.Stopped(uuid1)
		w.keeper.work.Wait()
	}},
	"vendor": {vgpu.Vendor, 4, func(w *world) {
		_, _ = w.attachSlice("one", slicedGPU, "A10-8Q"), w.attachSlice("two", slicedGPU, "A10-8Q")
		_ = w.detach("one", "")
	}},
	"mediated": {vgpu.Mdev, 0, func(w *world) {
		_, _ = w.attachSlice("one", slicedGPU, "A10-8Q"), w.attachSlice("two", slicedGPU, "A10-8Q")
		_ = w.detachSlice("one", "")
	}},
}

// TestEndAtEveryCallOfSlices ends hostd at every call of every scenario, before
// and after the call has its effect, and looks what a new one makes of it.
func TestEndAtEveryCallOfSlices(t *testing.T) {
	for _, name := range slices.Sorted(maps.Keys(sliceScenarios)) {
		s := sliceScenarios[name]
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, after := range []bool{false, true} {
				for n := 1; ; n++ {
					w := newSliced(t, s.kind, s.vfs)
					w.crashAt, w.after = n, after
					s.do(w)
					w.keeper.work.Wait()
					ended := w.crashed
					w.restart()
					w.settled()
					if t.Failed() {
						t.Fatalf("ended at call %d (effect: %v); events %v", n, after, w.events)
					}
					if !ended {
						if n < 4 {
							t.Fatalf("%d calls only", n)
						}
						break
					}
				}
			}
		})
	}
}

// hostd ends while it makes a slice's functions, and again while it removes them. What it writes
// meanwhile is read by the next one.
func TestEndWhileASliceThatWasNotMadeIsTakenBack(t *testing.T) {
	w := newSliced(t, vgpu.SRIOV, 0)
	w.crashAt = 2 // after the claim
	if err := w.attachSlice("one", slicedGPU, "vf"); !errors.Is(err, errCrashed) {
		t.Fatal(err)
	}
	w.restart()
	w.crashAt = 1
	if err := w.keeper.Reconcile(t.Context()); !errors.Is(err, errCrashed) {
		t.Fatal(err)
	}
	w.restart()
	w.settled()
	if len(w.keeper.slices) > 0 {
		t.Errorf("%v", w.keeper.slices)
	}
}

// TestAnySequenceOfSlices does random things with slices and the card, and ends
// hostd at random calls.
func TestAnySequenceOfSlices(t *testing.T) {
	rounds := 15
	if testing.Short() {
		rounds = 3
	}
	for seed := range rounds {
		r := rand.New(rand.NewPCG(uint64(seed), 2))
		kind := []vgpu.Kind{vgpu.SRIOV, vgpu.Vendor, vgpu.Mdev}[seed%3]
		profile := map[vgpu.Kind]string{vgpu.SRIOV: "vf", vgpu.Vendor: "A10-8Q", vgpu.Mdev: "A10-8Q"}[kind]
		w := newSliced(t, kind, map[vgpu.Kind]int{vgpu.Vendor: 4}[kind])
		var did []string
		for range 12 {
			if r.IntN(3) == 0 {
				w.calls, w.crashAt, w.after = 0, 1+r.IntN(7), r.IntN(2) == 0
			}
			vm := []string{"one", "two"}[r.IntN(2)]
			uuid := map[string]string{"one": uuid1, "two": uuid2}[vm]
			what := r.IntN(7)
			did = append(did, fmt.Sprintf("%d %s crash at %d", what, vm, w.crashAt))
			switch what {
			case 0, 1, 2:
				_ = w.attachSlice(vm, slicedGPU, profile)
			case 3:
				w.mu.Lock()
				id := ""
				for _, a := range w.keeper.slices {
					if a.UUID == uuid {
						id = a.Slice.ID
					}
				}
				w.mu.Unlock()
				_ = w.detachSlice(vm, id)
			case 4:
				w.stop(uuid)
				w.keeper.Stopped(uuid)
			case 5:
				w.deaf[uuid] = !w.deaf[uuid]
			case 6:
				_ = w.attach(vm, slicedGPU, false)
			}
			w.keeper.work.Wait()
			if w.crashed || r.IntN(4) == 0 {
				w.restart()
			}
			w.crashAt = 0
			w.settled()
			w.mu.Lock()
			for _, m := range w.machines {
				m.State = "running"
			}
			w.mu.Unlock()
			if t.Failed() {
				t.Fatalf("seed %d: %s", seed, strings.Join(did, "; "))
			}
		}
	}
}

// Several at once for one card: each gets its own.
func TestSlicesAtOnce(t *testing.T) {
	w := newSliced(t, vgpu.SRIOV, 0)
	errs := make(chan error, 4)
	for i := range 4 {
		go func() { errs <- w.attachSlice([]string{"one", "two"}[i%2], slicedGPU, "vf") }()
	}
	for range 4 {
		select {
		case err := <-errs:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("an attach hangs")
		}
	}
	w.settled()
	if len(w.keeper.slices) != 4 {
		t.Errorf("%v", w.keeper.slices)
	}
}

func TestDamagedRecordOfSlices(t *testing.T) {
	const id = `"id":"4d1e6f2a-0000-4000-8000-000000000001"`
	entry := func(fields string) string {
		return `{"version":1,"holds":[{"card":"0000:07:00.0",` + fields + `}]}`
	}
	for name, text := range map[string]string{
		"no id":         entry(`"phase":"attached","functions":["0000:07:00.4"],"slice":{"id":"x","profile":"vf","kind":"sriov"}`),
		"no kind":       entry(`"phase":"attached","functions":["0000:07:00.4"],"slice":{` + id + `,"profile":"vf","kind":"mig"}`),
		"no function":   entry(`"phase":"attached","functions":[],"slice":{` + id + `,"profile":"vf","kind":"sriov"}`),
		"two functions": entry(`"phase":"attached","functions":["0000:07:00.4","0000:07:00.5"],"slice":{` + id + `,"profile":"vf","kind":"sriov"}`),
		"card is cut":   entry(`"phase":"cutting","functions":["0000:07:00.0"]`),
		"twice": `{"version":1,"holds":[{"card":"0000:07:00.0","phase":"attached","functions":["0000:07:00.4"],"slice":{` + id + `,"profile":"vf","kind":"sriov"}},` +
			`{"card":"0000:07:00.0","phase":"attached","functions":["0000:07:00.5"],"slice":{` + id + `,"profile":"vf","kind":"sriov"}}]}`,
	} {
		if got, err := decodeRecord([]byte(text)); err == nil {
			t.Errorf("%s was read as %v", name, got)
		}
	}
	if _, err := decodeRecord([]byte(entry(`"phase":"cutting","functions":[],"slice":{` + id + `,"profile":"vf","kind":"sriov","made":true}`))); err != nil {
		t.Error(err)
	}
}
