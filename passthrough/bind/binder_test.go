package bind_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuctl/gpuctl/passthrough/bind"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
	"github.com/gpuctl/gpuctl/passthrough/sysfs/sysfstest"
)

const (
	gpu = "0000:65:00.0" // of a card of four functions
	amd = "0000:03:00.0" // of one of two, behind its own switch
	pf  = "0000:05:00.0" // with virtual functions
)

var (
	gpuCard = card(gpu, 4)
	amdCard = card(amd, 2)
)

func TestTakeAndReturn(t *testing.T) {
	for _, c := range []struct{ driver, bound string }{
		{bind.XenPciback, "pciback"}, {"xen_pciback", "pciback"}, {"pciback", "pciback"}, {bind.VFIOPCI, "vfio-pci"}, {"vfio_pci", "vfio-pci"},
	} {
		t.Run(c.driver, func(t *testing.T) {
			r := newRig(t)
			before := places(r.machine)
			r.must(r.Take(t.Context(), gpuCard, c.driver))
			r.at(c.bound, gpuCard)
			writes := len(r.machine.Writes())
			r.must(r.Take(t.Context(), gpuCard, c.driver))
			if n := len(r.machine.Writes()); n != writes {
				t.Errorf("the second take wrote: %q", r.machine.Writes()[writes:])
			}
			r.restart()
			got, err := r.Recover(t.Context())
			r.must(err)
			for _, g := range got {
				if g.Outcome != bind.Kept || g.Driver != c.bound {
					t.Errorf("%+v", g)
				}
			}
			r.must(r.Return(t.Context(), gpuCard))
			r.same(before)
			if left := r.journal.Records(); len(left) > 0 {
				t.Errorf("left: %+v", left)
			}
			r.must(r.Return(t.Context(), gpuCard))
			// pciback was loaded first and would take by its list what it had.
			r.must(r.machine.Write(t.Context(), "sys/bus/pci/drivers/nvidia/unbind", gpu))
			r.must(r.machine.Write(t.Context(), "sys/bus/pci/drivers_probe", gpu))
			r.same(before)
			r.sound()
		})
	}
}

// What a function had is what it gets: an override, no driver, pciback.
func TestReturnToWhereItWas(t *testing.T) {
	r := newRig(t)
	write := func(name, data string) { r.must(r.machine.Write(t.Context(), name, data)) }
	write("sys/bus/pci/devices/"+gpu+"/driver_override", "nvidia")
	write("sys/bus/pci/drivers/xhci_hcd/unbind", "0000:65:00.2")
	write("sys/bus/pci/drivers/amdgpu/unbind", amd)
	write("sys/bus/pci/drivers/pciback/new_slot", amd)
	write("sys/bus/pci/drivers_probe", amd)
	before := places(r.machine)
	r.must(r.Take(t.Context(), append(slices.Clone(gpuCard), amdCard...), bind.XenPciback))
	r.at("pciback", gpuCard)
	r.at("pciback", amdCard)
	r.must(r.Return(t.Context(), gpuCard))
	r.must(r.Return(t.Context(), amdCard))
	r.same(before)
	r.sound()
}

// Taken again, for another driver, a function still returns to its first.
func TestTakeAgain(t *testing.T) {
	r := newRig(t)
	before := places(r.machine)
	r.must(r.Take(t.Context(), gpuCard, bind.XenPciback))
	r.must(r.Take(t.Context(), gpuCard, bind.VFIOPCI))
	r.at("vfio-pci", gpuCard)
	held := places(r.machine)
	// Back to pciback, but one refuses: all stay where they were.
	r.machine.RefuseProbe("pciback", gpuCard[2], syscall.ENOMEM)
	if err := r.Take(t.Context(), gpuCard, bind.XenPciback); !errors.Is(err, bind.ErrRefused) || !errors.Is(err, syscall.ENOMEM) {
		t.Errorf("got %v", err)
	}
	r.at("vfio-pci", gpuCard)
	r.same(held)
	r.must(r.Return(t.Context(), gpuCard))
	r.same(before)
}

func TestAuto(t *testing.T) {
	r := newRig(t)
	main := at(pf)
	if err := r.Take(t.Context(), list(pf), bind.Auto); err != nil {
		t.Fatal(err)
	}
	r.at("vfio-pci", list(pf)) // no modules.alias
	r.must(r.Return(t.Context(), list(pf)))

	r.machine.File("proc/sys/kernel/osrelease", "6.1.0-49-amd64\n")
	r.machine.File("lib/modules/6.1.0-49-amd64/modules.alias", strings.Join([]string{
		"# Aliases extracted from modules themselves.",
		"alias pci:v000010DEd*sv*sd*bc03sc02i* nvidia",
		"alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci",
		"alias vfio_pci:v000010DEd*sv*sd*bc*sc*i* some_vfio_pci",
		"alias vfio_pci:v000010DEd00002236sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci",
		"alias vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i* mlx5_vfio_pci",
		"alias vfio_pci:v[ broken", "",
	}, "\n"))
	err := r.Take(t.Context(), list(pf), bind.Auto)
	if want := "nvgrace_gpu_vfio_pci: driver is not loaded: modprobe nvgrace_gpu_vfio_pci"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	r.machine.Load(sysfstest.Driver{
		Name: "nvgrace_gpu_vfio_pci", VFIO: true, OverrideOnly: true, IDs: []sysfstest.ID{{Vendor: 0x10de, Device: 0x2236}},
	})
	r.must(r.Take(t.Context(), list(pf), bind.Auto))
	r.at("nvgrace_gpu_vfio_pci", list(pf))
	r.must(r.Return(t.Context(), list(pf)))

	r.machine.File("proc/xen/capabilities", "control_d\n")
	r.must(r.Take(t.Context(), list(pf), bind.Auto))
	r.at("pciback", list(pf))
	if rec, ok := r.journal.Record(main); !ok || rec.Native != "nvidia" || rec.Driver != "pciback" || rec.Phase != bind.Held {
		t.Errorf("record %+v", rec)
	}
}

func TestVirtualFunctions(t *testing.T) {
	r := newRig(t)
	r.must(r.machine.Write(t.Context(), "sys/bus/pci/devices/"+pf+"/sriov_numvfs", "3"))
	before := places(r.machine)
	vfs := list("0000:05:00.4", "0000:05:00.6")
	r.must(r.Take(t.Context(), vfs, bind.VFIOPCI))
	r.at("vfio-pci", vfs)
	r.at("nvidia", list(pf, "0000:05:00.5"))
	r.must(r.Return(t.Context(), vfs[:1]))
	r.at("vfio-pci", vfs[1:])
	r.must(r.Return(t.Context(), vfs))
	r.same(before)
}

func hold(pid int, comm string, files ...string) func(*rig) {
	return func(r *rig) { r.machine.Run(pid, comm, files...) }
}

// refusals are the cases of TestRefusals.
var refusals = []struct {
	name   string
	setup  func(r *rig)
	take   []pci.Address
	driver string
	is     error
	want   string
}{
	{
		name: "nothing there", take: list("0000:99:00.0"), is: bind.ErrNotFound,
		want: "0000:99:00.0: no such PCI function: lspci -D lists what there is",
	},
	{
		name: "half a card", take: gpuCard[:1], is: bind.ErrPartial,
		want: "a card is given away whole: 0000:65:00.1 belongs to the card of 0000:65:00.0 too; name all of its functions",
	},
	{
		name: "a bridge", take: list("0000:00:01.0"), is: bind.ErrBridge,
		want: "0000:00:01.0: a bridge cannot be given away; name the functions of the card behind it",
	},
	{
		name: "no module", setup: func(r *rig) { r.machine.Unload("pciback") }, is: bind.ErrNoDriver,
		want: "pciback: driver is not loaded: modprobe xen-pciback",
	},
	{
		name: "no variant", driver: "mlx5_vfio_pci", is: bind.ErrNoDriver,
		want: "mlx5_vfio_pci: driver is not loaded: modprobe mlx5_vfio_pci",
	},
	{
		name: "not a name", driver: "../../etc", want: `"../../etc" cannot be the name of a driver`,
	},
	{
		name: "no IOMMU", driver: bind.VFIOPCI, is: bind.ErrNoIOMMU, take: list("0000:99:00.0"),
		setup: func(r *rig) {
			r.machine.Add(pcitest.Function{Address: "0000:99:00.0", Vendor: 0x10de, Device: 1, Class: pci.Class3D << 8, IOMMUGroup: -1, NUMANode: -1})
		},
		want: "0000:99:00.0: no IOMMU group, and vfio-pci wants one: turn the IOMMU on in the firmware and with intel_iommu=on or amd_iommu=on; in a Xen dom0 take xen-pciback",
	},
	{
		name: "dead", setup: func(r *rig) { r.machine.FallOff(at(gpu)) }, is: bind.ErrDead,
		want: "0000:65:00.0: device does not answer, its configuration space reads all ones: reset it first, or power the host off and on",
	},
	{
		name: "a render node", setup: hold(812, "python3", "/dev/null", "/dev/dri/renderD128", "/dev/dri/renderD128"), is: bind.ErrInUse,
		want: "in use: 0000:65:00.0: python3 (pid 812) has /dev/dri/renderD128 open",
	},
	{
		name: "nvidia0", setup: func(r *rig) {
			r.machine.File("proc/driver/nvidia/gpus/"+gpu+"/information", "Model: \t\t A6000\nDevice Minor: \t 0\n")
			r.machine.Run(812, "train", "/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia1")
		}, is: bind.ErrInUse,
		want: "in use: 0000:65:00.0: train (pid 812) has /dev/nvidia0 open",
	},
	{
		name: "an nvidia that does not say which", setup: hold(812, "train", "/dev/nvidiactl", "/dev/nvidia7"), is: bind.ErrInUse,
		want: "in use: 0000:65:00.0: train (pid 812) has /dev/nvidia7 open",
	},
	{
		name: "kfd", take: amdCard, setup: hold(9, "hip", "/dev/kfd"), is: bind.ErrInUse,
		want: "in use: 0000:03:00.0: hip (pid 9) has /dev/kfd open",
	},
	{
		name: "vfio", setup: func(r *rig) {
			r.must(r.Take(r.t.Context(), gpuCard, bind.VFIOPCI))
			r.machine.Run(77, "qemu-system-x86", "/dev/vfio/vfio", "/dev/vfio/10")
		}, is: bind.ErrInUse,
		want: "in use: 0000:65:00.0: qemu-system-x86 (pid 77) has /dev/vfio/10 open; 0000:65:00.1: qemu-system-x86 (pid 77) has /dev/vfio/10 open; " +
			"0000:65:00.2: qemu-system-x86 (pid 77) has /dev/vfio/10 open; 0000:65:00.3: qemu-system-x86 (pid 77) has /dev/vfio/10 open",
	},
	{
		name: "a mapped BAR", setup: hold(5, "dcgm", "/sys/devices/pci0000:00/0000:00:01.0/0000:65:00.0/resource0"), is: bind.ErrInUse,
		want: "in use: 0000:65:00.0: dcgm (pid 5) has /sys/devices/pci0000:00/0000:00:01.0/0000:65:00.0/resource0 open",
	},
	{
		name: "a process with a name to fool terminals", setup: hold(5, "x\x1b[2Jy", "/dev/dri/renderD128"), is: bind.ErrInUse,
		want: "in use: 0000:65:00.0: x?[2Jy (pid 5) has /dev/dri/renderD128 open",
	},
	{
		name: "boot display", setup: func(r *rig) {
			r.machine.File("sys/bus/pci/devices/"+gpu+"/boot_vga", "1\n")
		}, is: bind.ErrInUse,
		want: "in use: 0000:65:00.0: the host's boot display is on it",
	},
	{
		name: "framebuffer console", setup: func(r *rig) {
			r.machine.File("sys/bus/pci/devices/"+gpu+"/graphics/fb0/uevent", "DEVNAME=fb0\n")
			r.machine.File("sys/class/vtconsole/vtcon1/name", "(M) frame buffer device\n")
			r.machine.File("sys/class/vtconsole/vtcon1/bind", "1\n")
		}, is: bind.ErrInUse,
		want: "in use: 0000:65:00.0: the framebuffer console vtcon1 is on it",
	},
	{
		name: "a disk on its USB port", setup: func(r *rig) {
			disk := "../../devices/pci0000:00/0000:00:01.0/0000:65:00.2/usb3/3-1/block/sdb"
			r.machine.Link("sys/dev/block/8:17", disk+"/sdb1")
			r.machine.Link("sys/class/block/sdb2", disk+"/sdb2")
			r.machine.File("proc/1/mountinfo", "36 35 8:1 / / rw - ext4 /dev/sda1 rw\n40 35 8:17 / /mnt/backup rw - ext4 /dev/sdb1 rw\nshort\n")
			r.machine.File("proc/swaps", "Filename\tType\tSize\tUsed\tPriority\n/dev/sdb2 partition 1 0 -2\n")
		}, is: bind.ErrInUse,
		want: "in use: 0000:65:00.2: /mnt/backup is mounted from it; 0000:65:00.2: the host swaps to /dev/sdb2",
	},
	{
		name: "a disk behind a mapper", setup: func(r *rig) {
			r.machine.Link("sys/dev/block/253:0", "../../devices/virtual/block/dm-0")
			r.machine.File("sys/devices/virtual/block/dm-0/slaves/sdb1/x", "")
			r.machine.Link("sys/class/block/sdb1", "../../devices/pci0000:00/0000:00:01.0/0000:65:00.2/usb3/3-1/block/sdb/sdb1")
			r.machine.File("proc/1/mountinfo", "40 35 253:0 / /data rw - ext4 /dev/mapper/data rw\n")
		}, is: bind.ErrInUse,
		want: "in use: 0000:65:00.2: /data is mounted from it",
	},
	{
		name: "an interface that is up", setup: func(r *rig) {
			r.machine.File("sys/bus/pci/devices/"+gpu+"/net/eth7/operstate", "up\n")
		}, is: bind.ErrInUse,
		want: "in use: 0000:65:00.0: network interface eth7 is up",
	},
	{
		name: "virtual functions are out", take: list(pf), setup: func(r *rig) {
			r.must(r.machine.Write(r.t.Context(), "sys/bus/pci/devices/"+pf+"/sriov_numvfs", "3"))
		}, is: bind.ErrInUse,
		want: "in use: 0000:05:00.0: its 3 virtual functions are out; write 0 to /sys/bus/pci/devices/0000:05:00.0/sriov_numvfs",
	},
	{
		name: "mediated devices", take: list(pf), setup: func(r *rig) {
			r.machine.AddMdevTypes(at(pf), sysfstest.MdevType{ID: "nvidia-22", Instances: 1})
			r.must(r.machine.Write(r.t.Context(), "sys/bus/pci/devices/"+pf+"/mdev_supported_types/nvidia-22/create", "11111111-2222-3333-4444-555555555555"))
		}, is: bind.ErrInUse,
		want: "in use: 0000:05:00.0: it carries 1 mediated devices; remove them",
	},
	{
		name: "a vGPU of the vendor's framework", take: list("0000:05:00.4"), setup: func(r *rig) {
			r.machine.AddVGPUTypes(at(pf), sysfstest.VGPUType{ID: 588, Name: "NVIDIA L40-1B", Instances: 2})
			r.must(r.machine.Write(r.t.Context(), "sys/bus/pci/devices/"+pf+"/sriov_numvfs", "1"))
			r.must(r.machine.Write(r.t.Context(), "sys/bus/pci/devices/0000:05:00.4/nvidia/current_vgpu_type", "588"))
		}, is: bind.ErrInUse,
		want: "in use: 0000:05:00.4: it carries a vGPU of type 588; write 0 to /sys/bus/pci/devices/0000:05:00.4/nvidia/current_vgpu_type",
	},
	{
		name: "a guest", driver: bind.VFIOPCI, setup: func(r *rig) {
			r.must(r.Take(r.t.Context(), gpuCard, bind.XenPciback))
			r.must(r.machine.Give(gpuCard[1], "vm7"))
		}, is: bind.ErrInUse,
		want: "in use: 0000:65:00.1: guest vm7 has it",
	},
	{
		name: "a crowd", setup: func(r *rig) {
			for pid := range 10 {
				r.machine.Run(100+pid, "p", "/dev/dri/renderD128")
			}
		}, is: bind.ErrInUse,
		want: "in use: " + strings.Join(slices.Collect(func(yield func(string) bool) {
			for pid := range 8 {
				yield(fmt.Sprintf("0000:65:00.0: p (pid %d) has /dev/dri/renderD128 open", 100+pid))
			}
		}), "; ") + "; and 2 more",
	},
	{
		name: "somebody else bound it meanwhile", setup: func(r *rig) {
			r.must(r.Take(r.t.Context(), gpuCard, bind.XenPciback))
			r.must(r.machine.Write(r.t.Context(), "sys/bus/pci/devices/"+gpu+"/driver_override", "vfio-pci"))
			r.must(r.machine.Write(r.t.Context(), "sys/bus/pci/drivers/pciback/unbind", gpu))
			r.must(r.machine.Write(r.t.Context(), "sys/bus/pci/drivers_probe", gpu))
		}, is: bind.ErrForeign,
		want: "0000:65:00.0: somebody else has bound it to vfio-pci, and it was taken for pciback: unbind it, or bind it to pciback again",
	},
	{
		name: "the driver refuses", setup: func(r *rig) { r.machine.RefuseProbe("pciback", gpuCard[3], syscall.EBUSY) }, is: bind.ErrRefused,
		want: "give 0000:65:00.3 to pciback: 0000:65:00.3: the driver did not take it: pciback write sys/bus/pci/drivers/pciback/bind: device or resource busy; see what the kernel logs",
	},
}

func TestRefusals(t *testing.T) {
	for _, c := range refusals {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			if c.setup != nil {
				c.setup(r)
			}
			if c.take == nil {
				c.take = gpuCard
			}
			if c.driver == "" {
				c.driver = bind.XenPciback
			}
			before, records := places(r.machine), r.journal.Records()
			err := r.Take(t.Context(), c.take, c.driver)
			if err == nil || err.Error() != c.want || (c.is != nil && !errors.Is(err, c.is)) {
				t.Errorf("got  %v\nwant %s (%v)", err, c.want, c.is)
			}
			r.same(before)
			if d := cmp.Diff(records, r.journal.Records()); d != "" {
				t.Errorf("the journal is not as before: %s", d)
			}
			r.sound()
		})
	}
}

// Return does not tear a device from who has it, nor half a card.
// Who reads which addresses a card has does not use it: lspci does, and hostd whenever it looks for cards.
func TestReaderOfTheTableOfAddressesIsNoUser(t *testing.T) {
	r := newRig(t)
	hold(507, "hostd", "/sys/devices/pci0000:00/0000:00:01.0/0000:65:00.0/resource")(r)
	users, err := r.Users(t.Context(), gpuCard)
	if err != nil || len(users) != 0 {
		t.Errorf("%v, %v", users, err)
	}
	hold(508, "dcgm", "/sys/devices/pci0000:00/0000:00:01.0/0000:65:00.0/resource1_wc")(r)
	if users, err = r.Users(t.Context(), gpuCard); err != nil || len(users) != 1 || users[0].PID != 508 {
		t.Errorf("%v, %v", users, err)
	}
}

func TestReturnRefuses(t *testing.T) {
	r := newRig(t)
	r.must(r.Take(t.Context(), gpuCard, bind.XenPciback))
	held := places(r.machine)
	r.must(r.machine.Give(at(gpu), "vm7"))
	for want, functions := range map[string][]pci.Address{
		"in use: 0000:65:00.0: guest vm7 has it": gpuCard,
		"a card is given away whole: 0000:65:00.0 belongs to the card of 0000:65:00.1 too; name all of its functions": gpuCard[1:],
	} {
		if err := r.Return(t.Context(), functions); err == nil || err.Error() != want {
			t.Errorf("got %v, want %s", err, want)
		}
	}
	r.same(held)
	r.sound()
}

// The caller's libraries let go before anything is looked at, and get their
// devices back whatever came of it.
func TestRelease(t *testing.T) {
	var r *rig
	var log []string
	refuse := error(nil)
	r = newRig(t, bind.WithRelease(func(_ context.Context, functions []pci.Address) (func(), error) {
		if refuse != nil {
			return nil, refuse
		}
		log = append(log, fmt.Sprint("release ", len(functions), " ", r.machine.Driver(at(gpu))))
		r.machine.Exit(1) // its own handles
		return func() { log = append(log, "resume "+r.machine.Driver(at(gpu))) }, nil
	}))
	r.machine.Run(1, "hostd", "/dev/dri/renderD128")
	r.must(r.Take(t.Context(), gpuCard, bind.XenPciback))
	r.must(r.Take(t.Context(), gpuCard, bind.XenPciback))
	r.must(r.Return(t.Context(), gpuCard))
	r.machine.Run(2, "other", "/dev/dri/renderD128")
	if err := r.Take(t.Context(), gpuCard, bind.XenPciback); !errors.Is(err, bind.ErrInUse) {
		t.Error(err)
	}
	want := []string{"release 4 nvidia", "resume pciback", "release 4 pciback", "resume nvidia", "release 4 nvidia", "resume nvidia"}
	if d := cmp.Diff(want, log); d != "" {
		t.Error(d)
	}
	refuse = errors.New("NVML hangs")
	if err := r.Take(t.Context(), gpuCard, bind.XenPciback); !errors.Is(err, refuse) {
		t.Error(err)
	}
	r.at("nvidia", list(gpu))
}

func TestEndOfContext(t *testing.T) {
	r := newRig(t)
	before := places(r.machine)
	ctx, cancel := context.WithCancel(t.Context())
	n := 0
	r.journal.SetStep(func(string) error {
		if n++; n == 1 {
			cancel() // when the first record is written
		}
		return nil
	})
	if err := r.Take(ctx, gpuCard, bind.XenPciback); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	r.same(before)
	if err := r.Take(ctx, gpuCard, bind.XenPciback); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	r.same(before)
}

// Callers at the same time take turns; whoever is last, all returns.
func TestCallersAtTheSameTime(t *testing.T) {
	r := newRig(t)
	before := places(r.machine)
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for range 5 {
				card, driver := gpuCard, bind.XenPciback
				if i%2 == 1 {
					card = amdCard
				}
				if i%3 == 1 {
					driver = bind.VFIOPCI
				}
				if err := r.Take(t.Context(), card, driver); err != nil {
					t.Error(err)
				}
				if _, err := r.Users(t.Context(), card); err != nil {
					t.Error(err)
				}
				if err := r.Return(t.Context(), card); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	r.same(before)
	r.sound()
}
