package uevent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func message(fields ...string) []byte { return []byte(strings.Join(fields, "\x00") + "\x00") }

func bind() []byte {
	return message("bind@/devices/pci0000:00/0000:00:01.0/0000:65:00.0", "ACTION=bind", "DEVPATH=/devices/pci0000:00/0000:00:01.0/0000:65:00.0",
		"SUBSYSTEM=pci", "DRIVER=vfio-pci", "PCI_CLASS=30000", "PCI_ID=10DE:1EB1", "PCI_SUBSYS_ID=1028:129F", "PCI_SLOT_NAME=0000:65:00.0",
		"MODALIAS=pci:v000010DEd00001EB1sv00001028sd0000129Fbc03sc00i00", "SEQNUM=4711")
}

func TestParse(t *testing.T) {
	got, err := Parse(bind())
	want := Event{
		Action: Bind, Sequence: 4711, Subsystem: "pci", Path: "/devices/pci0000:00/0000:00:01.0/0000:65:00.0",
		Address: pci.Address{Bus: 0x65}, Driver: "vfio-pci", VendorID: 0x10de, DeviceID: 0x1eb1, SubVendorID: 0x1028, SubDeviceID: 0x129f, Class: 0x030000,
	}
	if d := cmp.Diff(want, got); d != "" || err != nil || !got.device() {
		t.Error(err, d)
	}
	for name, m := range map[string][]byte{
		"nothing":             nil,
		"no end":              []byte("add@/devices/x\x00SUBSYSTEM=pci"),
		"no path":             message("add", "SUBSYSTEM=pci"),
		"another action":      message("add@/devices/x", "ACTION=remove", "SUBSYSTEM=pci"),
		"another path":        message("add@/devices/x", "DEVPATH=/devices/y", "SUBSYSTEM=pci"),
		"no subsystem":        message("add@/devices/x", "ACTION=add"),
		"no variable":         message("add@/devices/x", "SUBSYSTEM=pci", "PCI_ID"),
		"no ids":              message("add@/devices/x", "SUBSYSTEM=pci", "PCI_ID=10DE"),
		"no address":          message("add@/devices/x", "SUBSYSTEM=pci", "PCI_SLOT_NAME=65:00"),
		"a class of 32 bits":  message("add@/devices/x", "SUBSYSTEM=pci", "PCI_CLASS=01030000"),
		"no number":           message("add@/devices/x", "SUBSYSTEM=pci", "SEQNUM=-1"),
		"a message of udev's": append([]byte("libudev\x00\xfe\xed\xca\xfe"), message("add@/devices/x")...),
		"more than there is":  message("add@/devices/" + strings.Repeat("x", maxMessage)),
	} {
		if e, err := Parse(m); !errors.Is(err, ErrMessage) {
			t.Errorf("%s: %+v, %v", name, e, err)
		}
	}
	for name, m := range map[string][]byte{
		"a driver":         message("add@/bus/pci/drivers/vfio-pci", "SUBSYSTEM=drivers"),
		"a bus":            message("add@/devices/pci0000:00/pci_bus/0000:00", "SUBSYSTEM=pci_bus"),
		"another of pci's": message("add@/module/x", "SUBSYSTEM=pci"),
	} {
		if e, err := Parse(m); err != nil || e.device() {
			t.Errorf("%s: %+v, %v", name, e, err)
		}
	}
	first, err := Parse(message("add@/devices/pci0000:00/0000:00:00.0", "SUBSYSTEM=pci", "PCI_SLOT_NAME=0000:00:00.0"))
	if err != nil || !first.device() {
		t.Errorf("the first device of all: %+v, %v", first, err)
	}
}

func listen(t *testing.T, opts ...Option) *Listener {
	t.Helper()
	l, err := Listen(opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func next(t *testing.T, l *Listener) Event {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	e, err := l.Next(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// trigger makes the kernel tell that one of this machine's devices has changed.
func trigger(t *testing.T) (pci.Address, func()) {
	t.Helper()
	devices, _ := filepath.Glob("/sys/bus/pci/devices/*/uevent")
	for _, name := range devices {
		a, err := pci.ParseAddress(filepath.Base(filepath.Dir(name)))
		if err == nil && os.WriteFile(name, []byte("change"), 0) == nil {
			return a, func() {
				if err := os.WriteFile(name, []byte("change"), 0); err != nil {
					t.Error(err)
				}
			}
		}
	}
	t.Skip("no PCI device of this machine can be made to tell of a change")
	return pci.Address{}, nil
}

func TestTheKernelIsHeard(t *testing.T) {
	a, change := trigger(t)
	l := listen(t)
	change()
	change()
	first := next(t, l)
	for first.Address != a { // something else may happen
		first = next(t, l)
	}
	second := next(t, l)
	if first.Action != Change || first.Subsystem != "pci" || !strings.HasSuffix(first.Path, a.String()) || first.VendorID == 0 || second.Sequence <= first.Sequence {
		t.Errorf("got %+v and %+v", first, second)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if e, err := l.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %+v, %v", e, err)
	}
	change() // it goes on after a call that was given up
	if e := next(t, l); e.Address != a {
		t.Errorf("got %+v", e)
	}
}

// When the kernel has no room for an event, the listener's owner hears of it, and
// later of what comes later.
func TestOverrun(t *testing.T) {
	a, change := trigger(t)
	l := listen(t, WithBuffer(1))
	for range 50 {
		change()
	}
	lost, changes := 0, 0
	for range 51 {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		e, err := l.Next(ctx)
		cancel()
		if err != nil {
			break
		}
		if e.Action == Lost {
			lost++
		} else if e.Address == a {
			changes++
		}
	}
	if lost == 0 || changes >= 50 {
		t.Errorf("%d of 50 events came, and %d times some were lost", changes, lost)
	}
	change()
	if e := next(t, l); e.Address != a {
		t.Errorf("afterwards: %+v", e)
	}
}

// Who is not the kernel is not heard, whatever it says.
func TestOthersAreNotHeard(t *testing.T) {
	l := listen(t)
	var to *unix.SockaddrNetlink
	if err := l.raw.Control(func(fd uintptr) {
		if sa, err := unix.Getsockname(int(fd)); err == nil {
			to, _ = sa.(*unix.SockaddrNetlink)
		}
	}); err != nil || to == nil {
		t.Fatal(err)
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Sendto(fd, bind(), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Pid: to.Pid}); err != nil {
		t.Skipf("messages cannot be forged here: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if e, err := l.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a forged event was heard: %+v, %v", e, err)
	}
}

func TestClose(t *testing.T) {
	l := listen(t)
	errs := make(chan error)
	go func() {
		_, err := l.Next(t.Context())
		errs <- err
	}()
	testkit.Parked(t, "uevent.(*Listener).Next", 1)
	l.Close()
	if err := <-errs; !errors.Is(err, os.ErrClosed) {
		t.Errorf("got %v", err)
	}
	if _, err := l.Next(t.Context()); !errors.Is(err, os.ErrClosed) {
		t.Errorf("got %v", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(bind())
	f.Add(message("remove@/devices/pci0000:00/0000:00:02.0", "SUBSYSTEM=pci", "PCI_SLOT_NAME=0000:00:02.0", "SEQNUM=18446744073709551615"))
	f.Add([]byte("libudev\x00"))
	f.Add([]byte("@/\x00=\x00"))
	f.Fuzz(func(t *testing.T, data []byte) {
		e, err := Parse(data)
		if err != nil {
			if e != (Event{}) {
				t.Fatalf("%q: an event with an error", data)
			}
			return
		}
		if e.Subsystem == "" || !strings.HasPrefix(string(data), fmt.Sprintf("%s@%s\x00", e.Action, e.Path)) {
			t.Fatalf("%q became %+v", data, e)
		}
		e.device()
	})
}
