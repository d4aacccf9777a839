package vgpu_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/gpuctl/gpuctl/passthrough/catalog"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
	"github.com/gpuctl/gpuctl/passthrough/sysfs/sysfstest"
	"github.com/gpuctl/gpuctl/passthrough/vgpu"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	gib = 1 << 30
	dir = "sys/bus/pci/devices/"
	pf  = "0000:65:00.0"
)

type fataler interface {
	Helper()
	Fatal(...any)
}

func addr(t fataler, s string) pci.Address {
	t.Helper()
	a, err := pci.ParseAddress(s)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// machine has a card of 24 GiB (an A10) with up to 16 virtual functions.
func machine(vfs string) *sysfstest.Machine {
	m := sysfstest.New()
	m.Load(sysfstest.Pciback())
	m.Add(pcitest.SRIOVAccelerator("0000:65", "", -1, 0, 16, 0)...)
	if vfs != "" {
		if err := m.Write(context.Background(), dir+pf+"/sriov_numvfs", vfs); err != nil {
			panic(err)
		}
	}
	return m
}

func vendorMachine(vfs string) *sysfstest.Machine {
	m := machine(vfs)
	a, _ := pci.ParseAddress(pf)
	m.AddVGPUTypes(
		a, sysfstest.VGPUType{ID: 590, Name: "NVIDIA A10-24Q", Instances: 1}, sysfstest.VGPUType{ID: 591, Name: "NVIDIA A10-12Q", Instances: 2},
		sysfstest.VGPUType{ID: 592, Name: "NVIDIA A10-8Q", Instances: 3}, sysfstest.VGPUType{ID: 593, Name: "NVIDIA A10-4Q", Instances: 6},
		sysfstest.VGPUType{ID: 600, Name: "NVIDIA A10-9000X", Instances: 2}, // of a driver that is newer than the catalogue
	)
	return m
}

func mdevMachine() *sysfstest.Machine {
	m := machine("")
	a, _ := pci.ParseAddress(pf)
	m.AddMdevTypes(
		a, sysfstest.MdevType{ID: "nvidia-592", Name: "NVIDIA A10-8Q", Description: "num_heads=4, frl_config=60, framebuffer=8192M, max_resolution=7680x4320, max_instance=3", API: "vfio-pci", Instances: 3},
		sysfstest.MdevType{ID: "nvidia-593", Name: "NVIDIA A10-4Q", Description: "num_heads=4, framebuffer=4096M, max_instance=6", API: "vfio-pci", Instances: 6},
		sysfstest.MdevType{ID: "acme-1", Name: "", Description: "low_gm_size: 128MB\nhigh_gm_size: 512MB\nfence: 4\n", API: "vfio-pci", Instances: 2},
	)
	return m
}

func manager(t fataler, m sysfs.Root, opts ...vgpu.Option) (*vgpu.Manager, *pci.Card) {
	t.Helper()
	c, err := catalog.Load()
	if err != nil {
		t.Fatal(err)
	}
	return vgpu.New(m, c.Lookup, opts...), scan(t, m)
}

func scan(t fataler, m sysfs.Root) *pci.Card {
	t.Helper()
	cards, err := pci.Scan(m)
	if err != nil || len(cards) != 1 {
		t.Fatal("scan:", cards, err)
	}
	return cards[0]
}

func list(t fataler, m *vgpu.Manager, card *pci.Card, use vgpu.Use) map[string]vgpu.Profile {
	t.Helper()
	profiles, err := m.List(card, use)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]vgpu.Profile{}
	for _, p := range profiles {
		if _, twice := out[p.Name]; twice {
			t.Fatal("profile twice:", p.Name)
		}
		out[p.Name] = p
	}
	return out
}

// One machine, four cards: each its own way.
func TestKindIsTheCards(t *testing.T) {
	plain := sysfstest.New()
	plain.Add(pcitest.NVIDIACard("0000:65:00", "", -1, 0)...)
	for _, c := range []struct {
		name string
		m    *sysfstest.Machine
		want vgpu.Kind
	}{
		{"vendor's, virtual functions are out", vendorMachine("16"), vgpu.Vendor},
		{"vendor's, none is out yet", vendorMachine(""), vgpu.SRIOV},
		{"mediated", mdevMachine(), vgpu.Mdev},
		{"virtual functions", machine("4"), vgpu.SRIOV},
		{"neither", plain, vgpu.None},
	} {
		m, card := manager(t, c.m)
		if got := m.Kind(card); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
		if profiles, err := m.List(card, vgpu.Use{}); err != nil || (len(profiles) == 0) != (c.want == vgpu.None) {
			t.Errorf("%s: %v, %v", c.name, profiles, err)
		}
	}
}

func TestVendor(t *testing.T) {
	fake := vendorMachine("16")
	m, card := manager(t, fake)
	p := list(t, m, card, vgpu.Use{})
	for name, want := range map[string]uint32{"A10-24Q": 1, "A10-12Q": 2, "A10-8Q": 3, "A10-4Q": 6, "A10-9000X": 1, "A10-1Q": 0, "A10-24C": 0} {
		if p[name].Free != want || (p[name].Why == "") != (want > 0) {
			t.Errorf("%s: %+v, want %d free", name, p[name], want)
		}
	}
	if v := p["A10-8Q"]; v.Memory != 8*gib || v.Max != 3 || v.Kind != vgpu.Vendor {
		t.Errorf("%+v", v)
	}
	i, undo, err := m.Create(t.Context(), card, "A10-8Q", "", vgpu.Use{Held: []string{"0000:65:00.4"}})
	if err != nil || i.ID != "0000:65:00.5" || i.Profile != "A10-8Q" {
		t.Fatalf("%+v, %v", i, err)
	}
	if all, err := m.Instances(card); err != nil || !slices.Equal(all, []vgpu.Instance{i}) {
		t.Errorf("instances %v, %v", all, err)
	}
	p = list(t, m, card, vgpu.Use{Scheduled: map[string]uint32{"A10-8Q": 1}})
	if v := p["A10-8Q"]; v.Free != 1 || v.Existing != 1 || v.Scheduled != 1 {
		t.Errorf("%+v", v)
	}
	if v := p["A10-4Q"]; v.Free != 0 || !strings.Contains(v.Why, "must have one size") {
		t.Errorf("%+v", v)
	}
	_, _, err = m.Create(t.Context(), card, "A10-4Q", "", vgpu.Use{})
	if !errors.Is(err, vgpu.ErrFull) {
		t.Errorf("another size: %v", err)
	}
	if _, _, err := m.Create(t.Context(), card, "A40-8Q", "", vgpu.Use{}); !errors.Is(err, vgpu.ErrProfile) {
		t.Errorf("another card's: %v", err)
	}
	if err := m.Whole(card); !errors.Is(err, vgpu.ErrInUse) {
		t.Errorf("the card while a vGPU is out: %v", err)
	}
	if err := m.Resize(t.Context(), card, 0, vgpu.Use{}); !errors.Is(err, vgpu.ErrInUse) || !strings.Contains(err.Error(), i.ID) {
		t.Errorf("resize while a vGPU is out: %v", err)
	}
	for range 2 {
		if err := undo(t.Context()); err != nil {
			t.Errorf("undo: %v", err)
		}
	}
	if all, _ := m.Instances(card); len(all) != 0 {
		t.Errorf("instances %v", all)
	}
	if err := m.Resize(t.Context(), card, 0, vgpu.Use{}); err != nil {
		t.Error(err)
	}
	if err := m.Whole(card); err != nil {
		t.Error(err)
	}
}

// A full card's table is empty: the name comes from before, or from NVML.
func TestNamesOfAFullCard(t *testing.T) {
	fake := vendorMachine("16")
	m, card := manager(t, fake)
	if _, _, err := m.Create(t.Context(), card, "A10-24Q", "", vgpu.Use{}); err != nil {
		t.Fatal(err)
	}
	after := func(opts ...vgpu.Option) (string, vgpu.Profile) {
		again, card := manager(t, fake, opts...)
		all, err := again.Instances(card)
		if err != nil || len(all) != 1 {
			t.Fatalf("%v, %v", all, err)
		}
		return all[0].Profile, list(t, again, card, vgpu.Use{})["A10-24Q"]
	}
	if all, _ := m.Instances(card); len(all) != 1 || all[0].Profile != "A10-24Q" {
		t.Errorf("instances %v", all)
	}
	if name, p := after(); name != "type-590" || p.Free != 0 {
		t.Errorf("a new manager: %s, %+v", name, p)
	}
	if name, p := after(vgpu.WithTypeName(func(id uint32) string { return map[uint32]string{590: "NVIDIA A10-24Q"}[id] })); name != "A10-24Q" || p.Existing != 1 {
		t.Errorf("with NVML: %s, %+v", name, p)
	}
}

func TestVendorFails(t *testing.T) {
	for _, c := range []struct {
		name string
		set  func(*sysfstest.Machine)
		want error
	}{
		{"the driver refuses", func(m *sysfstest.Machine) { m.FailWrite(1, syscall.EIO) }, syscall.EIO},
		{"another state is shown", func(m *sysfstest.Machine) {
			m.Attr("sys/devices/pci0000:65/0000:65:00.4/nvidia/current_vgpu_type", func() (string, error) { return "0\n", nil }, func(string) error { return nil })
		}, vgpu.ErrReadBack},
	} {
		fake := vendorMachine("2")
		m, card := manager(t, fake)
		c.set(fake)
		i, undo, err := m.Create(t.Context(), card, "A10-8Q", "", vgpu.Use{})
		if !errors.Is(err, c.want) || i != (vgpu.Instance{}) || strings.Contains(err.Error(), "%!") {
			t.Errorf("%s: %+v, %v", c.name, i, err)
		}
		if err := undo(t.Context()); err != nil {
			t.Errorf("%s: undo: %v", c.name, err)
		}
	}
	// A VM has it.
	fake := vendorMachine("2")
	m, card := manager(t, fake)
	i, _, err := m.Create(t.Context(), card, "A10-8Q", "", vgpu.Use{})
	if err != nil {
		t.Fatal(err)
	}
	if err := fake.Write(t.Context(), dir+i.ID+"/driver_override", "pciback"); err != nil {
		t.Fatal(err)
	}
	if fake.Driver(i.Function) != "" {
		if err := fake.Write(t.Context(), dir+i.ID+"/driver/unbind", i.ID); err != nil {
			t.Fatal(err)
		}
	}
	if err := fake.Write(t.Context(), "sys/bus/pci/drivers_probe", i.ID); err != nil {
		t.Fatal(err)
	}
	if err := fake.Give(i.Function, "vm1"); err != nil {
		t.Fatal(err)
	}
	if err := m.Delete(t.Context(), i); !errors.Is(err, vgpu.ErrInUse) {
		t.Errorf("a VM has it: %v", err)
	}
	// What cannot be read is an error and not nothing.
	fake.Attr("sys/devices/pci0000:65/0000:65:00.5/nvidia/current_vgpu_type", func() (string, error) { return "many\n", nil }, nil)
	if all, err := m.Instances(card); err == nil {
		t.Errorf("instances %v", all)
	}
	if all, err := m.List(card, vgpu.Use{}); err == nil {
		t.Errorf("profiles %v", all)
	}
}

// A hung driver ends with the caller's patience; what it did is undone later.
func TestHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := vendorMachine("2")
		m, card := manager(t, fake)
		release := fake.HangWrite(1)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, undo, err := m.Create(ctx, card, "A10-8Q", "", vgpu.Use{})
		if !errors.Is(err, sysfs.ErrStuck) {
			t.Fatalf("got %v", err)
		}
		release()
		synctest.Wait()
		if all, _ := m.Instances(card); len(all) != 1 {
			t.Fatalf("the kernel went on and has made %v", all)
		}
		if err := undo(t.Context()); err != nil {
			t.Error(err)
		}
		if all, _ := m.Instances(card); len(all) != 0 {
			t.Errorf("instances %v", all)
		}
	})
}

func TestMdev(t *testing.T) {
	fake := mdevMachine()
	m, card := manager(t, fake)
	p := list(t, m, card, vgpu.Use{})
	for name, want := range map[string]uint32{"A10-8Q": 3, "A10-4Q": 6, "acme-1": 2} {
		if p[name].Free != want || p[name].Kind != vgpu.Mdev {
			t.Errorf("%s: %+v, want %d free", name, p[name], want)
		}
	}
	for _, c := range []struct {
		name      string
		scheduled map[string]uint32
		profile   string
		free      uint32
	}{
		{"of its own kind", map[string]uint32{"A10-8Q": 2}, "A10-8Q", 1},
		{"too many", map[string]uint32{"A10-8Q": 9}, "A10-8Q", 0},
		{"of another size", map[string]uint32{"A10-4Q": 1}, "A10-8Q", 0},
		{"another series of the size", map[string]uint32{"A10-8C": 1}, "A10-8Q", 2},
		{"unknown", map[string]uint32{"B7-3Q": 1}, "A10-8Q", 0},
		{"of a kind without figures", map[string]uint32{"A10-8Q": 1}, "acme-1", 1},
		{"more than a number", map[string]uint32{"acme-1": 1<<32 - 1}, "acme-1", 0},
	} {
		if got := list(t, m, card, vgpu.Use{Scheduled: c.scheduled})[c.profile]; got.Free != c.free || (got.Why == "") != (c.free > 0) {
			t.Errorf("scheduled %s: %+v, want %d free", c.name, got, c.free)
		}
	}
	const id = "11111111-2222-4333-8444-555555555555"
	i, undo, err := m.Create(t.Context(), card, "A10-8Q", id, vgpu.Use{})
	if err != nil || i.ID != id || i.Function != addr(t, pf) || !slices.Equal(fake.Mdevs(addr(t, pf)), []string{id}) {
		t.Fatalf("%+v, %v, %v", i, err, fake.Mdevs(addr(t, pf)))
	}
	if _, again, err := m.Create(t.Context(), card, "A10-8Q", id, vgpu.Use{}); err == nil {
		t.Error("the same UUID twice")
	} else if err := again(t.Context()); err != nil || len(fake.Mdevs(addr(t, pf))) != 1 {
		t.Errorf("the undo of what was refused has taken the other's: %v", err)
	}
	second, _, err := m.Create(t.Context(), card, "A10-8Q", "", vgpu.Use{})
	if err != nil || !vgpu.IsUUID(second.ID) {
		t.Fatalf("%+v, %v", second, err)
	}
	if _, _, err := m.Create(t.Context(), card, "A10-8Q", "../../x", vgpu.Use{}); err == nil {
		t.Error("a path was taken for a UUID")
	}
	if all, err := m.Instances(card); err != nil || len(all) != 2 {
		t.Errorf("%v, %v", all, err)
	}
	if v := list(t, m, card, vgpu.Use{})["A10-4Q"]; v.Free != 0 {
		t.Errorf("%+v", v)
	}
	if err := m.Whole(card); !errors.Is(err, vgpu.ErrInUse) {
		t.Errorf("%v", err)
	}
	for range 2 {
		if err := errors.Join(undo(t.Context()), m.Delete(t.Context(), second)); err != nil {
			t.Error(err)
		}
	}
	if left := fake.Mdevs(addr(t, pf)); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	if err := m.Whole(card); err != nil {
		t.Error(err)
	}
	if err := m.Delete(t.Context(), vgpu.Instance{ID: "../../x", Kind: vgpu.Mdev}); err == nil {
		t.Error("a path was deleted")
	}
	fake.Attr("sys/devices/pci0000:65/0000:65:00.0/mdev_supported_types/nvidia-592/available_instances", func() (string, error) { return "-3\n", nil }, nil)
	if profiles, err := m.List(card, vgpu.Use{}); err == nil {
		t.Errorf("%v", profiles)
	}
}

func TestVirtualFunctions(t *testing.T) {
	fake := machine("")
	m, card := manager(t, fake)
	if p := list(t, m, card, vgpu.Use{})["vf"]; p.Free != 16 || p.Memory != 24*gib/16 {
		t.Errorf("%+v", p)
	}
	if _, err := m.Pick(card, "vf", "", vgpu.Use{}); !errors.Is(err, vgpu.ErrNoFunctions) {
		t.Errorf("%v", err)
	}
	// The first one makes them all, and takes them away again.
	first, undo, err := m.Create(t.Context(), card, "vf", "", vgpu.Use{})
	if vfs, _ := m.VFs(card); err != nil || len(vfs) != 16 || first.Function != vfs[0] {
		t.Errorf("%v %v", vfs, err)
	}
	if err := undo(t.Context()); err != nil {
		t.Error(err)
	}
	if vfs, _ := m.VFs(card); len(vfs) != 0 {
		t.Errorf("left: %v", vfs)
	}
	for _, n := range []int{4, 4, 2, 16, 0, 3} { // from one number to another goes by none
		if err := m.Resize(t.Context(), card, n, vgpu.Use{}); err != nil {
			t.Fatalf("%d: %v", n, err)
		}
		if vfs, total := m.VFs(card); len(vfs) != n || total != 16 {
			t.Errorf("%d: %v of %d", n, vfs, total)
		}
	}
	for _, n := range []int{-1, 17, 1 << 20} {
		if err := m.Resize(t.Context(), card, n, vgpu.Use{}); err == nil {
			t.Errorf("%d functions", n)
		}
	}
	vfs, _ := m.VFs(card)
	use := vgpu.Use{Held: []string{vfs[0].String()}, Scheduled: map[string]uint32{"vf": 1}}
	if p := list(t, m, card, use)["vf"]; p.Free != 1 || p.Max != 3 || p.Existing != 1 || p.Scheduled != 1 {
		t.Errorf("%+v", p)
	}
	i, _, err := m.Create(t.Context(), card, "vf", "", use)
	if err != nil || i.Function != vfs[1] || i.Profile != vgpu.VirtualFunction {
		t.Errorf("%+v, %v", i, err)
	}
	use.Scheduled["vf"] = 2
	if _, _, err := m.Create(t.Context(), card, "vf", "", use); !errors.Is(err, vgpu.ErrFull) {
		t.Errorf("what is scheduled was given away: %v", err)
	}
	if err := m.Resize(t.Context(), card, 4, use); !errors.Is(err, vgpu.ErrInUse) || !strings.Contains(err.Error(), vfs[0].String()) {
		t.Errorf("one is held: %v", err)
	}
	if err := m.Whole(card); !errors.Is(err, vgpu.ErrInUse) {
		t.Errorf("%v", err)
	}
	// One is with pciback.
	if fake.Driver(vfs[2]) != "" {
		_ = fake.Write(t.Context(), dir+vfs[2].String()+"/driver/unbind", vfs[2].String())
	}
	_ = fake.Write(t.Context(), dir+vfs[2].String()+"/driver_override", "pciback")
	_ = fake.Write(t.Context(), "sys/bus/pci/drivers_probe", vfs[2].String())
	if fake.Driver(vfs[2]) != "pciback" {
		t.Fatal("not bound")
	}
	if err := m.Resize(t.Context(), card, 0, vgpu.Use{}); !errors.Is(err, vgpu.ErrInUse) || !strings.Contains(err.Error(), "return it first") {
		t.Errorf("one is with pciback: %v", err)
	}
}

func TestResizeFails(t *testing.T) {
	for _, c := range []struct {
		name          string
		before, after int
		fail          []int // writes
		want          int
	}{
		{"none can be removed", 4, 2, []int{1}, 4},
		{"the new ones cannot be made", 4, 2, []int{2}, 4},
		{"nor the old ones", 4, 2, []int{2, 3}, 0},
		{"from none", 0, 2, []int{1}, 0},
	} {
		fake := machine(fmt.Sprint(c.before))
		m, card := manager(t, fake)
		for _, n := range c.fail {
			fake.FailWrite(n, syscall.ENOMEM)
		}
		err := m.Resize(t.Context(), card, c.after, vgpu.Use{})
		vfs, _ := m.VFs(card)
		if !errors.Is(err, syscall.ENOMEM) || len(vfs) != c.want {
			t.Errorf("%s: %d functions, %v; want %d", c.name, len(vfs), err, c.want)
		}
	}
}

func TestSwitchOfTheVendor(t *testing.T) {
	fake := vendorMachine("")
	var calls []int
	m, card := manager(t, fake, vgpu.WithSwitch(func(ctx context.Context, a pci.Address, n int) (bool, error) {
		calls = append(calls, n)
		switch n {
		case 3:
			return false, nil // the kernel's file will do
		case 4:
			return true, nil // it lies
		case 5:
			return false, errors.New("no licence")
		}
		return true, fake.Write(ctx, dir+a.String()+"/sriov_numvfs", fmt.Sprint(n))
	}))
	for _, n := range []int{16, 3} {
		if err := m.Resize(t.Context(), card, n, vgpu.Use{}); err != nil {
			t.Errorf("%d: %v", n, err)
		}
	}
	if err := m.Resize(t.Context(), card, 4, vgpu.Use{}); !errors.Is(err, vgpu.ErrReadBack) {
		t.Errorf("%v", err)
	}
	if err := m.Resize(t.Context(), card, 5, vgpu.Use{}); err == nil || !strings.Contains(err.Error(), "no licence") {
		t.Errorf("%v", err)
	}
	if vfs, _ := m.VFs(card); len(vfs) != 3 {
		t.Errorf("%d functions, %v", len(vfs), calls)
	}
}

func TestMIG(t *testing.T) {
	profiles := []vgpu.SliceProfile{{"1g.10gb", 10 * gib, 7}, {"1g.20gb", 20 * gib, 4}, {"2g.20gb", 20 * gib, 3}, {"3g.40gb", 40 * gib, 2}, {"4g.40gb", 40 * gib, 1}, {"7g.80gb", 80 * gib, 1}}
	for _, c := range []struct {
		name      string
		instances []string
		scheduled map[string]uint32
		want      []uint32
	}{
		{"empty", nil, nil, []uint32{7, 4, 3, 2, 1, 1}},
		{"one small", []string{"NVIDIA A100-SXM4-80GB MIG 1g.10gb"}, nil, []uint32{6, 3, 3, 1, 1, 0}},
		{"two halves", []string{"3g.40gb", "3g.40gb"}, nil, []uint32{0, 0, 0, 0, 0, 0}},
		{"a half and one scheduled", []string{"4g.40gb"}, map[string]uint32{"3g.40gb": 1}, []uint32{0, 0, 0, 0, 0, 0}},
		{"the whole", []string{"7g.80gb"}, nil, []uint32{0, 0, 0, 0, 0, 0}},
		{"more is scheduled than there is", nil, map[string]uint32{"7g.80gb": 1<<32 - 1}, []uint32{0, 0, 0, 0, 0, 0}},
		{"one that nobody knows", []string{"9g.1tb"}, nil, []uint32{0, 0, 0, 0, 0, 0}},
	} {
		for i, p := range vgpu.MIG(vgpu.Slices{Profiles: profiles, Instances: c.instances}, c.scheduled) {
			if p.Free != c.want[i] || p.Kind != vgpu.Slice || (p.Why == "") != (p.Free > 0) {
				t.Errorf("%s: %+v, want %d free", c.name, p, c.want[i])
			}
		}
	}
}

// Whatever is made, deleted and scheduled: what is free is never more than
// there is, what is free can be made, and what is not is refused.
func TestCapacityNeverLies(t *testing.T) {
	cat, err := catalog.Load()
	if err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		var fake *sysfstest.Machine
		if rapid.Bool().Draw(t, "mediated") {
			fake = mdevMachine()
		} else {
			fake = vendorMachine(fmt.Sprint(rapid.IntRange(1, 16).Draw(t, "functions")))
		}
		card := scan(t, fake)
		m := vgpu.New(fake, cat.Lookup)
		names := []string{"A10-24Q", "A10-12Q", "A10-8Q", "A10-4Q", "A10-9000X", "acme-1", "A10-8C", "none"}
		var undos []func(context.Context) error
		for range rapid.IntRange(1, 12).Draw(t, "steps") {
			use := vgpu.Use{Scheduled: map[string]uint32{}, Mixed: rapid.Bool().Draw(t, "mixed")}
			for range rapid.IntRange(0, 2).Draw(t, "scheduled") {
				use.Scheduled[rapid.SampledFrom(names).Draw(t, "what")] = rapid.Uint32Range(0, 4).Draw(t, "how many")
			}
			before := list(t, m, card, use)
			for _, p := range before {
				if p.Max != 0 && p.Free+p.Existing > p.Max || p.Free > 16 || (p.Free == 0) != (p.Why != "") {
					t.Fatalf("%+v with %+v", p, use)
				}
			}
			name := rapid.SampledFrom(names).Draw(t, "profile")
			if len(undos) > 0 && rapid.IntRange(0, 2).Draw(t, "undo") == 0 {
				i := rapid.IntRange(0, len(undos)-1).Draw(t, "which")
				if err := undos[i](context.Background()); err != nil {
					t.Fatal(err)
				}
				undos = slices.Delete(undos, i, i+1)
				continue
			}
			inst, undo, err := m.Create(context.Background(), card, name, "", use)
			p, known := before[name]
			switch {
			case !known && !errors.Is(err, vgpu.ErrProfile), known && p.Free == 0 && !errors.Is(err, vgpu.ErrFull), known && p.Free > 0 && err != nil:
				t.Fatalf("%s: %+v, and %v", name, p, err)
			case err == nil:
				undos = append(undos, undo)
				if after := list(t, m, card, use)[name]; after.Existing != p.Existing+1 || inst.Profile != name {
					t.Fatalf("%+v after %+v", after, p)
				}
			}
			all, err := m.Instances(card)
			if err != nil || len(all) != len(undos) {
				t.Fatalf("%d instances, %d were made, %v", len(all), len(undos), err)
			}
		}
		if v := fake.Violations(); len(v) > 0 {
			t.Fatal(v)
		}
	})
}

func TestParseCreatable(t *testing.T) {
	for _, c := range []struct {
		name, data string
		want       []vgpu.CreatableType
	}{
		{"as it is", "ID    : vGPU Name\n590   : NVIDIA A10-1B\n591   : NVIDIA A10-2Q\n", []vgpu.CreatableType{{590, "A10-1B"}, {591, "A10-2Q"}}},
		{"without titles", "1428 : NVIDIA H200X-141C\n1414 : NVIDIA H200X-1-18C\n", []vgpu.CreatableType{{1428, "H200X-141C"}, {1414, "H200X-1-18C"}}},
		{"names with blanks", "7: NVIDIA RTX 6000 Ada-48Q", []vgpu.CreatableType{{7, "RTX 6000 Ada-48Q"}}},
		{"nothing", "", nil},
		{"no types", "ID    : vGPU Name\n", nil},
		{"rubbish", "0 : none\n-1 : x\n99999999999 : x\n1 2 : x\n5 :\n6 : a\x1b[31m\n: :\n8 : " + strings.Repeat("x", 65), nil},
		{"twice", "5 : A\n5 : B\n6 : A\n", []vgpu.CreatableType{{5, "A"}}},
	} {
		if got := vgpu.ParseCreatable([]byte(c.data)); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func FuzzParseCreatable(f *testing.F) {
	f.Add([]byte("ID    : vGPU Name\n590   : NVIDIA A10-1B\n"))
	f.Add([]byte("7:NVIDIA GRID NVIDIA x:y\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		ids, names := map[uint32]bool{}, map[string]bool{}
		for _, c := range vgpu.ParseCreatable(data) {
			if c.ID == 0 || c.Name == "" || len(c.Name) > 64 || ids[c.ID] || names[c.Name] {
				t.Fatalf("%+v", c)
			}
			ids[c.ID], names[c.Name] = true, true
		}
	})
}

// After a restart the driver of a full card does not say any more what its
// types are called; who has the instances does.
func TestNamesFromHolders(t *testing.T) {
	fake := vendorMachine("2")
	m, card := manager(t, fake)
	i, _, err := m.Create(t.Context(), card, "A10-24Q", "", vgpu.Use{})
	if err != nil {
		t.Fatal(err)
	}
	anew, _ := manager(t, fake)
	use := vgpu.Use{Held: []string{i.ID}}
	if p := list(t, anew, card, use); p["A10-24Q"].Existing != 0 || p["type-590"].Existing != 1 {
		t.Errorf("%+v", p)
	}
	use.Profiles = map[string]string{i.ID: "A10-24Q"}
	if p := list(t, anew, card, use); p["A10-24Q"].Existing != 1 || !strings.Contains(p["A10-24Q"].Why, "1 is the most") {
		t.Errorf("%+v", p)
	}
}
