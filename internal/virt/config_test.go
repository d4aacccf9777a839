package virt

import (
	"crypto/sha256"
	"encoding/hex"
	"net"
	"os"
	"path/filepath"
	"testing"
	"testing/fstest"

	"golang.org/x/sys/unix"
)

func TestLockManager(t *testing.T) {
	for text, want := range map[string]string{
		"":                                    "",
		"#lock_manager = \"lockd\"\n":         "",
		"lock_manager = \"lockd\"\n":          "lockd",
		"  lock_manager='sanlock' # shared\n": "sanlock",
		"lock_manager = \"nop\"\n":            "",
		"lock_manager_x = \"lockd\"\nautoballoon = \"auto\"\n": "",
	} {
		for driver, path := range map[Driver]string{Xen: "etc/libvirt/libxl.conf", QEMU: "etc/libvirt/qemu.conf"} {
			if got := LocksOf(fstest.MapFS{path: {Data: []byte(text)}}, driver).Manager; got != want {
				t.Errorf("%s %q: %q, not %q", driver, text, got, want)
			}
		}
	}
	if got := LocksOf(fstest.MapFS{}, Xen); got.Manager != "" {
		t.Error(got)
	}
}

// lockd is the configuration of a host with virtlockd.
func lockd(plugin string) Locks {
	return LocksOf(fstest.MapFS{
		"etc/libvirt/qemu.conf":       {Data: []byte("lock_manager = \"lockd\"\n")},
		"etc/libvirt/qemu-lockd.conf": {Data: []byte(plugin)},
	}, QEMU)
}

// hold locks a file's first byte, as virtlockd does, until the test ends or it is let go.
func hold(t *testing.T, path string, kind int16) (let func()) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: kind, Len: 1}); err != nil {
		t.Fatal(err)
	}
	return func() { _ = f.Close() }
}

func TestDiskThatIsNotLockedIsSeen(t *testing.T) {
	dir := t.TempDir()
	disk := filepath.Join(dir, "disk")
	hash := sha256.Sum256([]byte(disk))
	if err := os.WriteFile(disk, make([]byte, 512), 0o600); err != nil {
		t.Fatal(err)
	}
	leases := t.TempDir()
	for name, c := range map[string]struct{ plugin, file string }{
		"the disk itself":    {"", disk},
		"a file of a folder": {"file_lockspace_dir = \"" + leases + "\"\n", filepath.Join(leases, hex.EncodeToString(hash[:]))},
	} {
		l := lockd(c.plugin)
		is := func(want bool) {
			t.Helper()
			if got, err := l.Unlocked(disk); err != nil || got != want {
				t.Errorf("%s: unlocked %v, %v, not %v", name, got, err, want)
			}
		}
		is(true)
		for _, kind := range []int16{unix.F_WRLCK, unix.F_RDLCK} { // and of a disk that several VMs have
			let := hold(t, c.file, kind)
			is(false)
			is(false) // to look does not take it away
			let()
			is(true)
		}
	}
	for name, l := range map[string]Locks{
		"no manager": LocksOf(fstest.MapFS{}, QEMU), "leases by hand": lockd("auto_disk_leases = 0\n"),
		"by UUID of the volume": lockd("lvm_lockspace_dir = \"/leases\"\n"),
	} {
		if bare, err := l.Unlocked(disk); bare || err != nil {
			t.Errorf("%s: %v, %v", name, bare, err)
		}
	}
	if bare, err := lockd("").Unlocked("/dev/null"); bare || err != nil {
		t.Errorf("a device: %v, %v", bare, err)
	}
	if _, err := lockd("").Unlocked(filepath.Join(dir, "none")); err == nil {
		t.Error("a disk that is not there is not locked")
	}
}

func TestLockManagerThatDoesNotAnswer(t *testing.T) {
	l := lockd("")
	if l.Socket != "/run/libvirt/virtlockd-sock" {
		t.Error(l.Socket)
	}
	l.Socket = filepath.Join(t.TempDir(), "sock")
	if err := l.Serves(t.Context()); err == nil {
		t.Error("there is none, and it answers")
	}
	listener, err := net.Listen("unix", l.Socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if err := l.Serves(t.Context()); err != nil {
		t.Error(err)
	}
	for _, other := range []Locks{{}, {Manager: "sanlock"}} {
		if err := other.Serves(t.Context()); err != nil {
			t.Error(err)
		}
	}
}
