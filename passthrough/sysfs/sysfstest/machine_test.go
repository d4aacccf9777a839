package sysfstest_test

import (
	"context"
	"errors"
	"io/fs"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
	"github.com/gpuctl/gpuctl/passthrough/sysfs/sysfstest"
)

const (
	gpu   = "0000:65:00.0"
	audio = "0000:65:00.1"
	pf    = "0000:05:00.0"
	vf    = "0000:05:00.4"
)

func at(t testing.TB, s string) pci.Address {
	t.Helper()
	a, err := pci.ParseAddress(s)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// functions are two cards: one of four functions below a port that isolates,
// one with virtual functions.
func functions() []pcitest.Function {
	all := []pcitest.Function{
		pcitest.Port("0000:00:01.0", "", 1, pci.PortRoot, pcitest.FullACS()),
		pcitest.Port("0000:00:02.0", "", 2, pci.PortRoot, pcitest.FullACS()),
	}
	all = append(all, pcitest.NVIDIACard("0000:65:00", "0000:00:01.0", 3, 0)...)
	return append(all, pcitest.SRIOVAccelerator("0000:05", "0000:00:02.0", 4, 1, 4, 0)...)
}

func machine() *sysfstest.Machine { return sysfstest.New().Add(functions()...) }

// What a scan sees of the machine is what it sees of the same functions in a
// folder.
func TestMachineLooksLikeSysfs(t *testing.T) {
	amd := pcitest.AMDCard("0000:01", "0000:02", "0000:03", "", 9, pcitest.FullACS())
	vfs := pcitest.SRIOVAccelerator("0000:07", "", 20, 1, 4, 3)
	tree := pcitest.New(t).Add(functions()...).Add(amd...).Add(vfs...)
	want, err := pci.Scan(tree.FS())
	if err != nil {
		t.Fatal(err)
	}
	got, err := pci.Scan(machine().Add(amd...).Add(vfs...))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got); d != "" || len(got) != 4 {
		t.Errorf("%d cards: %s", len(got), d)
	}
}

// do is one write and what becomes of it.
type do struct {
	name, data string
	want       error
}

func dev(a, file string) string    { return "sys/bus/pci/devices/" + a + "/" + file }
func drv(name, file string) string { return "sys/bus/pci/drivers/" + name + "/" + file }

const probe = "sys/bus/pci/drivers_probe"

// kernelRules are the cases of TestKernelKeepsItsRules.
var kernelRules = []struct {
	name   string
	setup  func(m *sysfstest.Machine)
	do     []do
	driver map[string]string
	vanish []string
}{
	{name: "unbind twice", do: []do{
		{drv("nvidia", "unbind"), gpu, nil},
		{drv("nvidia", "unbind"), gpu, syscall.ENODEV},
	}, driver: map[string]string{gpu: ""}},
	{name: "unbind from another driver", do: []do{{drv("nvidia", "unbind"), audio, syscall.ENODEV}}, driver: map[string]string{audio: "snd_hda_intel"}},
	{name: "bind what is bound", do: []do{{drv("nvidia", "bind"), gpu, syscall.EBUSY}}},
	{name: "bind what does not match", do: []do{
		{drv("snd_hda_intel", "unbind"), audio, nil},
		{drv("nvidia", "bind"), audio, syscall.ENODEV},
		{drv("snd_hda_intel", "bind"), audio, nil},
	}, driver: map[string]string{audio: "snd_hda_intel"}},
	{name: "override needs a probe", do: []do{
		{dev(gpu, "driver_override"), "vfio-pci", nil},
		{drv("nvidia", "unbind"), gpu, nil},
	}, driver: map[string]string{gpu: ""}},
	{name: "override and probe", do: []do{
		{dev(gpu, "driver_override"), "vfio-pci\n", nil},
		{drv("nvidia", "unbind"), gpu + "\n", nil},
		{drv("nvidia", "bind"), gpu, syscall.ENODEV},
		{probe, gpu, nil},
	}, driver: map[string]string{gpu: "vfio-pci"}},
	{name: "vfio-pci matches only by override", do: []do{
		{drv("snd_hda_intel", "unbind"), audio, nil},
		{drv("vfio-pci", "bind"), audio, syscall.ENODEV},
		{drv("vfio-pci", "new_id"), "10de 10f8", nil},
	}, driver: map[string]string{audio: "vfio-pci"}},
	{name: "an override of a driver that is not there", do: []do{
		{dev(gpu, "driver_override"), "nouveau", nil},
		{drv("nvidia", "unbind"), gpu, nil},
		{probe, gpu, nil},
	}, driver: map[string]string{gpu: ""}},
	{name: "probe of nothing", do: []do{{probe, "0000:99:00.0", syscall.ENODEV}}},
	{name: "override too long", do: []do{{dev(gpu, "driver_override"), strings.Repeat("x", 4095), syscall.EINVAL}}},
	{name: "a refused probe is quiet but for bind", setup: func(m *sysfstest.Machine) {
		a, _ := pci.ParseAddress(gpu)
		m.RefuseProbe("nvidia", a, syscall.ENODEV)
	}, do: []do{
		{drv("nvidia", "unbind"), gpu, nil},
		{probe, gpu, nil},
		{drv("nvidia", "bind"), gpu, syscall.ENODEV},
	}, driver: map[string]string{gpu: ""}},
	{name: "pciback wants a slot", do: []do{
		{drv("nvidia", "unbind"), gpu, nil},
		{drv("pciback", "bind"), gpu, syscall.ENODEV},
		{drv("pciback", "new_slot"), gpu, nil},
		{drv("pciback", "bind"), gpu, nil},
	}, driver: map[string]string{gpu: "pciback"}},
	{name: "a slot stays when the driver has gone", do: []do{
		{dev(gpu, "driver_override"), "pciback", nil},
		{drv("nvidia", "unbind"), gpu, nil},
		{probe, gpu, nil},
		{drv("pciback", "unbind"), gpu, nil},
		{dev(gpu, "driver_override"), "\n", nil},
		{drv("pciback", "bind"), gpu, nil},
		{drv("pciback", "remove_slot"), gpu, nil},
		{drv("pciback", "remove_slot"), gpu, syscall.ENOENT},
	}, driver: map[string]string{gpu: "pciback"}},
	{name: "bad slots", do: []do{{drv("pciback", "new_slot"), "gpu", syscall.EINVAL}, {drv("pciback", "remove_slot"), "gpu", syscall.EINVAL}}},
	{name: "files that are only read, or only written to", do: []do{
		{dev(gpu, "vendor"), "1", syscall.EACCES}, {dev(gpu, "power"), "1", syscall.EISDIR}, {dev(gpu, "nothing"), "1", fs.ErrNotExist}, {"/sys", "1", fs.ErrInvalid},
	}},
	{name: "virtual functions come and go at once", do: []do{
		{dev(pf, "sriov_numvfs"), "5", syscall.ERANGE},
		{dev(pf, "sriov_numvfs"), "many", syscall.EINVAL},
		{dev(pf, "sriov_numvfs"), "2", nil},
		{dev(pf, "sriov_numvfs"), "2", nil},
		{dev(pf, "sriov_numvfs"), "3", syscall.EBUSY},
		{dev(pf, "sriov_numvfs"), "0", nil},
		{dev(pf, "sriov_numvfs"), "4", nil},
	}, driver: map[string]string{vf: "nvidia"}},
	{name: "no virtual functions without a driver", do: []do{
		{drv("nvidia", "unbind"), pf, nil},
		{dev(pf, "sriov_numvfs"), "1", syscall.ENOENT},
	}},
	{name: "virtual functions without drivers", do: []do{
		{dev(pf, "sriov_drivers_autoprobe"), "0", nil},
		{dev(pf, "sriov_numvfs"), "1", nil},
		{drv("nvidia", "bind"), vf, syscall.ENODEV},
		{dev(vf, "driver_override"), "vfio-pci", nil},
		{probe, vf, nil},
	}, driver: map[string]string{vf: "vfio-pci"}},
	{name: "what pciback has stays", do: []do{
		{dev(pf, "sriov_numvfs"), "1", nil},
		{drv("nvidia", "unbind"), vf, nil},
		{dev(vf, "driver_override"), "pciback", nil},
		{probe, vf, nil},
		{dev(pf, "sriov_numvfs"), "0", syscall.EPERM},
	}, driver: map[string]string{vf: "pciback"}},
	{name: "a physical function takes its virtual ones along", do: []do{
		{dev(pf, "sriov_numvfs"), "1", nil},
		{drv("nvidia", "unbind"), pf, nil},
	}, vanish: []string{vf}},
	{name: "resets", do: []do{
		{dev(gpu, "reset"), "0", syscall.EINVAL},
		{dev(gpu, "reset"), "1", syscall.ENOTTY}, // not alone on its bus
		{dev(pf, "reset"), "1", nil},
		{dev(pf, "reset_method"), "flr pm", syscall.EINVAL},
		{dev(pf, "reset_method"), "", nil},
		{dev(pf, "reset"), "1", syscall.ENOTTY},
		{dev(pf, "reset_method"), "default", nil},
		{dev(pf, "reset_method"), "bus", nil},
		{dev(pf, "reset"), "1", nil},
	}},
	{name: "remove and rescan", do: []do{
		{dev(gpu, "driver_override"), "vfio-pci", nil},
		{dev(gpu, "remove"), "x", syscall.EINVAL},
		{dev(gpu, "remove"), "1", nil},
		{dev(gpu, "remove"), "1", fs.ErrNotExist},
		{probe, gpu, syscall.ENODEV},
		{"sys/bus/pci/rescan", "1", nil},
	}, driver: map[string]string{gpu: "nvidia"}},
	{name: "a bridge takes all below along", do: []do{{dev("0000:00:01.0", "remove"), "1", nil}}, vanish: []string{gpu, audio}},
	{name: "without autoprobe", do: []do{
		{"sys/bus/pci/drivers_autoprobe", "0", nil},
		{dev(gpu, "remove"), "1", nil},
		{"sys/bus/pci/rescan", "1", nil},
	}, driver: map[string]string{gpu: ""}},
	{name: "mediated devices", setup: mdevs, do: []do{
		{dev(pf, "mdev_supported_types/nvidia-22/create"), "no", syscall.EINVAL},
		{dev(pf, "mdev_supported_types/nvidia-22/create"), uuid(1), nil},
		{dev(pf, "mdev_supported_types/nvidia-22/create"), uuid(1), syscall.EEXIST},
		{dev(pf, "mdev_supported_types/nvidia-23/create"), uuid(2), syscall.EUSERS},
		{dev(pf, "mdev_supported_types/nvidia-22/create"), uuid(2), nil},
		{dev(pf, "mdev_supported_types/nvidia-22/create"), uuid(3), syscall.EUSERS},
		{"sys/bus/mdev/devices/" + uuid(1) + "/remove", "1", nil},
		{"sys/bus/mdev/devices/" + uuid(1) + "/remove", "1", fs.ErrNotExist},
		{"sys/bus/mdev/devices/" + uuid(2) + "/remove", "1", nil},
		{dev(pf, "mdev_supported_types/nvidia-23/create"), uuid(2), nil},
		{drv("nvidia", "unbind"), pf, nil},
		{dev(pf, "mdev_supported_types/nvidia-23/create"), uuid(3), fs.ErrNotExist},
	}},
	{name: "vGPUs of the vendor's framework", setup: func(m *sysfstest.Machine) {
		a, _ := pci.ParseAddress(pf)
		m.AddVGPUTypes(a, sysfstest.VGPUType{ID: 588, Name: "NVIDIA L40-1B", Instances: 2}, sysfstest.VGPUType{ID: 600, Name: "NVIDIA L40-48Q", Instances: 1})
	}, do: []do{
		{dev(pf, "sriov_numvfs"), "3", nil},
		{dev(vf, "nvidia/current_vgpu_type"), "x", syscall.EINVAL},
		{dev(vf, "nvidia/current_vgpu_type"), "1", syscall.EINVAL},
		{dev(vf, "nvidia/current_vgpu_type"), "588", nil},
		{dev(vf, "nvidia/current_vgpu_type"), "600", syscall.EBUSY},
		{dev("0000:05:00.5", "nvidia/current_vgpu_type"), "600", syscall.EIO},
		{dev("0000:05:00.5", "nvidia/current_vgpu_type"), "588", nil},
		{dev("0000:05:00.6", "nvidia/current_vgpu_type"), "588", syscall.EIO},
		{dev(vf, "nvidia/current_vgpu_type"), "0", nil},
		{dev("0000:05:00.6", "nvidia/current_vgpu_type"), "588", nil},
	}},
}

func TestKernelKeepsItsRules(t *testing.T) {
	for _, c := range kernelRules {
		t.Run(c.name, func(t *testing.T) {
			m := machine()
			m.Load(sysfstest.VFIOPCI())
			m.Load(sysfstest.Pciback())
			if c.setup != nil {
				c.setup(m)
			}
			for _, d := range c.do {
				if err := m.Write(t.Context(), d.name, d.data); !errors.Is(err, d.want) {
					t.Errorf("%.40q to %s: %v, want %v", d.data, d.name, err, d.want)
				}
			}
			for a, want := range c.driver {
				if got := m.Driver(at(t, a)); got != want {
					t.Errorf("%s has driver %q, want %q", a, got, want)
				}
				target, err := m.ReadLink(dev(a, "driver"))
				if want != "" && (err != nil || !strings.HasSuffix(target, "/"+want)) || want == "" && err == nil {
					t.Errorf("%s: link to %q, %v", a, target, err)
				}
			}
			for _, a := range c.vanish {
				if _, err := m.Lstat("sys/bus/pci/devices/" + a); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("%s is still there: %v", a, err)
				}
			}
			if v := m.Violations(); len(v) > 0 {
				t.Errorf("violations: %q", v)
			}
		})
	}
}

func mdevs(m *sysfstest.Machine) {
	a, _ := pci.ParseAddress(pf)
	m.AddMdevTypes(a,
		sysfstest.MdevType{ID: "nvidia-22", Name: "GRID M60-0Q", API: "vfio-pci", Instances: 2},
		sysfstest.MdevType{ID: "nvidia-23", Name: "GRID M60-1Q", API: "vfio-pci", Instances: 1})
}

func uuid(n int) string { return "11111111-2222-3333-4444-00000000000" + string(rune('0'+n)) }

func TestMachineNoticesWhatMustNotBe(t *testing.T) {
	a := at(t, gpu)
	m := machine()
	m.Load(sysfstest.Pciback())
	if err := m.Give(a, "vm1"); err == nil {
		t.Error("a device with its native driver was given away")
	}
	for _, d := range []do{{dev(gpu, "driver_override"), "pciback", nil}, {drv("nvidia", "unbind"), gpu, nil}, {"sys/bus/pci/drivers_probe", gpu, nil}} {
		if err := m.Write(t.Context(), d.name, d.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Give(a, "vm1"); err != nil {
		t.Fatal(err)
	}
	if err := m.Give(a, "vm2"); err == nil {
		t.Error("one device, two guests")
	}
	if err := m.Write(t.Context(), drv("pciback", "unbind"), gpu); err != nil {
		t.Fatal(err)
	}
	if v := m.Violations(); len(v) != 1 || v[0] != "0000:65:00.0 was unbound from pciback while vm1 had it" {
		t.Errorf("violations: %q", v)
	}
}

func TestFaults(t *testing.T) {
	m := machine()
	override := dev(gpu, "driver_override")
	m.FailWrite(2, syscall.EIO)
	for i, want := range []error{nil, syscall.EIO, nil} {
		if err := m.Write(t.Context(), override, string(rune('a'+i))); !errors.Is(err, want) {
			t.Errorf("write %d: %v, want %v", i, err, want)
		}
	}
	m.CrashBefore(1)
	if err := m.Write(t.Context(), override, "d"); !errors.Is(err, sysfstest.ErrCrashed) {
		t.Error(err)
	}
	if _, err := m.ReadFile(override); !errors.Is(err, sysfstest.ErrCrashed) || !m.Crashed() {
		t.Errorf("a dead process reads: %v", err)
	}
	m.Restart()
	if got := m.Override(at(t, gpu)); got != "c" {
		t.Errorf("override %q", got)
	}
	m.CrashAfter(1)
	if err := m.Write(t.Context(), override, "e"); !errors.Is(err, sysfstest.ErrCrashed) {
		t.Error(err)
	}
	if err := m.Step("journal"); !errors.Is(err, sysfstest.ErrCrashed) {
		t.Error(err)
	}
	m.Restart()
	if got := m.Override(at(t, gpu)); got != "e" {
		t.Errorf("override %q", got)
	}
	if err := m.Step("journal"); err != nil || len(m.Writes()) != 5 {
		t.Errorf("%v; %q", err, m.Writes())
	}
}

// A hung write keeps its device locked, and ends when the kernel lets it.
func TestHungWrite(t *testing.T) {
	m := machine()
	release := m.HangWrite(1)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := m.Write(ctx, drv("nvidia", "unbind"), gpu); !errors.Is(err, sysfs.ErrStuck) {
		t.Fatal(err)
	}
	if m.Driver(at(t, gpu)) != "nvidia" {
		t.Error("a hung write had its effect")
	}
	if err := m.Write(t.Context(), drv("snd_hda_intel", "unbind"), audio); err != nil {
		t.Errorf("another device: %v", err)
	}
	done := make(chan error)
	go func() { done <- m.Write(t.Context(), dev(gpu, "driver_override"), "x") }()
	testkit.Parked(t, "sysfstest.(*Machine).Write", 1)
	release()
	release()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if m.Driver(at(t, gpu)) != "" || m.Override(at(t, gpu)) != "x" {
		t.Errorf("driver %q, override %q", m.Driver(at(t, gpu)), m.Override(at(t, gpu)))
	}
}

func TestVFIOWaitsForItsUser(t *testing.T) {
	m := machine()
	m.Load(sysfstest.VFIOPCI())
	for _, d := range []do{{dev(pf, "driver_override"), "vfio-pci", nil}, {drv("nvidia", "unbind"), pf, nil}, {"sys/bus/pci/drivers_probe", pf, nil}} {
		if err := m.Write(t.Context(), d.name, d.data); err != nil {
			t.Fatal(err)
		}
	}
	m.Run(42, "qemu-system-x86", "/dev/vfio/vfio", "/dev/vfio/4")
	if target, err := m.ReadLink("proc/42/fd/4"); err != nil || target != "/dev/vfio/4" {
		t.Errorf("%q, %v", target, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := m.Write(ctx, drv("vfio-pci", "unbind"), pf); !errors.Is(err, sysfs.ErrStuck) {
		t.Fatal(err)
	}
	m.Exit(42)
	if got := m.Driver(at(t, pf)); got != "" {
		t.Errorf("still bound to %s", got)
	}
}

func TestFallingOffTheBus(t *testing.T) {
	m := machine()
	a := at(t, gpu)
	dead := func() bool {
		data, err := m.ReadFile(dev(gpu, "config"))
		if err != nil {
			t.Fatal(err)
		}
		return pci.ParseConfig(data).Dead
	}
	power := func() {
		for i := range 4 {
			f := a
			f.Function = uint8(i)
			if d := m.Driver(f); d != "" {
				if err := m.Write(t.Context(), drv(d, "unbind"), f.String()); err != nil {
					t.Fatal(err)
				}
			}
			if err := m.Write(t.Context(), dev(f.String(), "power/control"), "auto"); err != nil {
				t.Fatal(err)
			}
		}
	}
	m.FallOff(a, "d3cold")
	if !dead() {
		t.Error("it answers")
	}
	if err := m.Write(t.Context(), dev(gpu, "reset"), "1"); !errors.Is(err, syscall.ENOTTY) || !dead() {
		t.Errorf("reset: %v", err)
	}
	power()
	if state, _ := m.ReadFile(dev(gpu, "power_state")); string(state) != "D3hot\n" || !dead() {
		t.Errorf("without power control: %s", state)
	}
	m.PowersOff(a)
	power()
	if state, _ := m.ReadFile(dev(gpu, "power_state")); string(state) != "D3cold\n" || dead() {
		t.Errorf("with power control: %s", state)
	}
	if err := m.Write(t.Context(), dev(gpu, "power/control"), "on"); err != nil {
		t.Fatal(err)
	}
	if got := m.Resets(a); len(got) != 1 || got[0] != "d3cold" {
		t.Errorf("resets: %q", got)
	}
	m.OnReset(at(t, pf), "flr", sysfstest.Outcome{Kills: true})
	if err := m.Write(t.Context(), dev(pf, "reset"), "1"); err != nil {
		t.Fatal(err)
	}
	if data, _ := m.ReadFile(dev(pf, "config")); !pci.ParseConfig(data).Dead {
		t.Error("it survived")
	}
}

func TestReboot(t *testing.T) {
	m := machine()
	m.Load(sysfstest.Pciback())
	before, _ := m.ReadFile("proc/sys/kernel/random/boot_id")
	for _, d := range []do{
		{dev(gpu, "driver_override"), "pciback", nil},
		{drv("nvidia", "unbind"), gpu, nil},
		{"sys/bus/pci/drivers_probe", gpu, nil},
		{dev(pf, "sriov_numvfs"), "2", nil},
	} {
		if err := m.Write(t.Context(), d.name, d.data); err != nil {
			t.Fatal(err)
		}
	}
	if len(m.Slots()) != 1 {
		t.Errorf("slots %v", m.Slots())
	}
	m.Reboot()
	after, _ := m.ReadFile("proc/sys/kernel/random/boot_id")
	if m.Driver(at(t, gpu)) != "nvidia" || m.Override(at(t, gpu)) != "" || len(m.Slots()) != 0 || string(before) == string(after) {
		t.Errorf("driver %q, override %q, slots %v", m.Driver(at(t, gpu)), m.Override(at(t, gpu)), m.Slots())
	}
	if _, err := m.Lstat("sys/bus/pci/devices/" + vf); !errors.Is(err, fs.ErrNotExist) {
		t.Error("virtual functions outlived a reboot")
	}
	if v := m.Violations(); len(v) > 0 {
		t.Errorf("violations: %q", v)
	}
}
