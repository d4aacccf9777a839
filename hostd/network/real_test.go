package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
)

// realCard is the interface whose card TestRealCard may change: nothing on the
// machine must need it.
const realCard = "GPUCTL_TEST_NIC"

// TestRealCard makes virtual functions of a card that is really there and sets
// them up by its driver: that of an interface that is named, or one that the
// kernel's netdevsim plays. It runs as root on any machine, compiled
// (go test -c), and takes back what it did.
func TestRealCard(t *testing.T) {
	name := os.Getenv(realCard)
	if name == "" {
		t.Skip("say in " + realCard + " which interface's card may be changed")
	}
	l, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(l); err != nil { // some drivers set rates only then
		t.Fatal(err)
	}
	h, err := Open(sysfs.Dir("/"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	testkit.Until(t, name+" has a carrier", func() error {
		n, err := h.NIC(t.Context(), name)
		return testkit.Want(err == nil && n.Carrier, n, err)
	})
	n, err := h.NIC(t.Context(), name)
	if err != nil || !n.SRIOV || n.Most < 3 || n.Address == "" || n.Driver == "" {
		t.Fatalf("%+v, %v", n, err)
	}
	exercise(t, h, name, true)
	// A function whose interface is needed stays, with all others.
	resize(t, h, name, 3)
	t.Cleanup(func() { resize(t, h, name, 0) })
	n, err = h.NIC(t.Context(), name)
	if err != nil || n.Functions[2].Interface == "" {
		t.Fatalf("is the driver of its virtual functions loaded? %+v, %v", n, err)
	}
	all, err := h.NICs(t.Context())
	if err != nil || slices.ContainsFunc(all, func(o NIC) bool { return o.Name == n.Functions[2].Interface }) || !slices.ContainsFunc(all, func(o NIC) bool { return o.Name == name }) {
		t.Errorf("%+v, %v", all, err)
	}
	vf, err := netlink.LinkByName(n.Functions[2].Interface)
	if err != nil {
		t.Fatal(err)
	}
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "gpuctl-test"}}
	if err := netlink.LinkAdd(bridge); err != nil {
		t.Fatal(err)
	}
	refused := func(use string, begin, end func() error) {
		t.Helper()
		if err := begin(); err != nil {
			t.Fatalf("%s: %v", use, err)
		}
		if err := h.Resize(t.Context(), name, 1); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), "number 2 of "+name) {
			t.Errorf("%s: %v", use, err)
		} else {
			t.Log(err)
		}
		if err := end(); err != nil {
			t.Fatalf("%s: %v", use, err)
		}
	}
	refused("a bridge", func() error { return netlink.LinkSetMaster(vf, bridge) }, func() error {
		return errors.Join(netlink.LinkSetNoMaster(vf), netlink.LinkDel(bridge))
	})
	address, err := netlink.ParseAddr("192.0.2.1/24")
	if err != nil {
		t.Fatal(err)
	}
	refused("an address", func() error { return netlink.AddrAdd(vf, address) }, func() error { return netlink.AddrDel(vf, address) })
	elsewhere := newNamespace(t)
	refused("a container", func() error { return netlink.LinkSetNsFd(vf, elsewhere.fd) }, func() error {
		here, err := unix.Open("/proc/self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(here)
		elsewhere.do(func() error { return netlink.LinkSetNsFd(vf, here) })
		return nil
	})
	resize(t, h, name, 1)
}

// TestSimulatedCard is the same with what netdevsim can play: a card without an
// address on a bus, whose functions are nothing but settings.
func TestSimulatedCard(t *testing.T) {
	const bus = "/sys/bus/netdevsim"
	if _, err := os.Stat(bus); err != nil {
		t.Skip("the kernel has no netdevsim (modprobe netdevsim)")
	}
	space := newNamespace(t)
	id := strconv.Itoa(os.Getpid())
	control := func(file, text string) error { return os.WriteFile(filepath.Join(bus, file), []byte(text), 0) }
	space.do(func() error { return control("new_device", id+" 1") })
	t.Cleanup(func() {
		if err := control("del_device", id); err != nil {
			t.Error(err)
		}
	})
	root := sysfsOf(t, space)
	var h *Host
	space.do(func() (err error) { h, err = Open(sysfs.Dir(root)); return err })
	t.Cleanup(h.Close)
	found, err := os.ReadDir(filepath.Join(root, classNet))
	found = slices.DeleteFunc(found, func(e os.DirEntry) bool { return e.Name() == "lo" })
	if err != nil || len(found) == 0 {
		t.Fatalf("%v, %v", found, err)
	}
	exercise(t, h, found[0].Name(), false)
}

// sysfsOf is a folder with a sys that shows the interfaces of a namespace: it is
// mounted there, and nowhere to be seen.
func sysfsOf(t *testing.T, space namespace) (root string) {
	t.Helper()
	root = t.TempDir()
	space.do(func() error {
		files, err := unix.Fsopen("sysfs", unix.FSOPEN_CLOEXEC)
		if err != nil {
			return fmt.Errorf("sysfs: %w", err)
		}
		defer unix.Close(files)
		if err := unix.FsconfigCreate(files); err != nil {
			return fmt.Errorf("sysfs: %w", err)
		}
		fd, err := unix.Fsmount(files, unix.FSMOUNT_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("sysfs: %w", err)
		}
		t.Cleanup(func() { _ = unix.Close(fd) })
		return os.Symlink(fmt.Sprintf("/proc/self/fd/%d", fd), filepath.Join(root, "sys"))
	})
	return root
}

func resize(t *testing.T, h *Host, name string, n int) {
	t.Helper()
	if err := h.Resize(context.WithoutCancel(t.Context()), name, n); err != nil {
		t.Errorf("%d virtual functions of %s: %v", n, name, err)
	}
}

// exercise makes functions and sets them up. What a driver cannot do it must
// refuse, and nothing else changes.
func exercise(t *testing.T, h *Host, name string, addressed bool) {
	t.Helper()
	for _, n := range []int{2, 3, 0, 3} {
		resize(t, h, name, n)
		now, err := h.NIC(t.Context(), name)
		if err != nil || len(now.Functions) != n {
			t.Fatalf("%d functions: %+v, %v", n, now, err)
		}
		for _, f := range now.Functions {
			if (f.Address != "") != addressed {
				t.Errorf("%+v", f)
			}
		}
	}
	defer resize(t, h, name, 0)
	before, err := h.VFs(t.Context(), name)
	if err != nil || len(before) != 3 {
		t.Fatalf("%+v, %v", before, err)
	}
	want := before[1]
	want.MAC, want.VLAN, want.QoS, want.MaxRate = net.HardwareAddr{2, 0, 0, 0xaa, 0, 1}, 10, 3, 100
	if err := h.ChangeVF(t.Context(), name, 1, Change{MAC: want.MAC.String(), VLAN: new(10), QoS: new(3), MaxRate: new(100)}); err != nil {
		t.Fatal(err)
	}
	able := 0
	for _, c := range []Change{
		{SpoofCheck: new(!want.SpoofCheck)}, {Trust: new(!want.Trust)}, {MinRate: new(50)}, {LinkState: "disable"}, {LinkState: "enable"}, {VLAN: new(0)}, {MaxRate: new(0), MinRate: new(0)},
	} {
		err := h.ChangeVF(t.Context(), name, 1, c)
		switch {
		case err == nil:
			able++
			if want, err = c.Of(name, want); err != nil {
				t.Fatal(err)
			}
		case errors.Is(err, syscall.EOPNOTSUPP), errors.Is(err, syscall.EINVAL), errors.Is(err, ErrReadBack):
			t.Log(err)
		default:
			t.Error(err)
		}
		now, err := h.VFs(t.Context(), name)
		if err != nil || len(now) != 3 || len(now[1].Differences(want)) > 0 {
			t.Fatalf("%+v: %+v, %v", c, now, err)
		}
		if len(now[0].Differences(before[0])) > 0 || len(now[2].Differences(before[2])) > 0 {
			t.Errorf("others changed: %+v", now)
		}
	}
	if able < 3 {
		t.Errorf("the driver can do %d of the settings", able)
	}
	if err := h.ChangeVF(t.Context(), name, 3, Change{VLAN: new(1)}); !errors.Is(err, ErrNoVF) {
		t.Error(err)
	}
}
