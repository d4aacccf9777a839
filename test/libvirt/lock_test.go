package libvirt_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/hostd/migration/endpoint"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/test/libvirt"
)

// locked is two hosts with virtlockd, with gpuctl's part of each.
type locked struct {
	*libvirt.Rig
	hosts [2]*libvirt.Host
	virt  [2]*virt.Client
	site  [2]*endpoint.Local
}

// lockers starts them.
func lockers(t *testing.T, kind libvirt.Locks) *locked {
	t.Helper()
	r, err := libvirt.StartLocked(kind, "hosta", "hostb")
	libvirt.Need(t, err)
	t.Cleanup(func() {
		for _, h := range r.Hosts {
			if t.Failed() {
				t.Logf("libvirtd of %s:\n%s", h.Name, h.Log())
			}
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	w := &locked{Rig: r, hosts: [2]*libvirt.Host(r.Hosts)}
	peers := map[string]gpuctlv1connect.SiteServiceClient{}
	patient := limits()
	patient.Change, patient.Query = 4*time.Minute, time.Minute
	for i, h := range w.hosts {
		w.virt[i] = client(t, h, patient)
		w.site[i] = &endpoint.Local{
			Whereabouts: endpoint.Whereabouts{
				Name: h.Name, Client: w.virt[i], Log: slog.New(slog.DiscardHandler),
				Peer: func(host string) (gpuctlv1connect.SiteServiceClient, error) { return peers[host], nil },
			},
			Locks: func() virt.Locks { return w.locks(i) }, Others: func() []string { return []string{w.hosts[1-i].Name} },
		}
		mux := http.NewServeMux()
		w.site[i].Handle(mux)
		server := httptest.NewServer(mux)
		t.Cleanup(server.Close)
		peers[h.Name] = gpuctlv1connect.NewSiteServiceClient(server.Client(), server.URL)
	}
	return w
}

// locks is the lock manager of a host.
func (w *locked) locks(host int) virt.Locks {
	return virt.Locks{Manager: "lockd", Folder: w.Leases(), Socket: w.hosts[host].LockSocket()}
}

// guest is a VM that runs on the first host, and is defined on both.
func (w *locked) guest(t *testing.T, number int) (d virt.Domain, disk string) {
	t.Helper()
	name := fmt.Sprintf("vm%d", number)
	xml, err := w.Guest(name, fmt.Sprintf("aaaaaaaa-0000-4000-8000-%012d", number), "")
	if err != nil {
		t.Fatal(err)
	}
	for i := range w.virt {
		if d, err = w.virt[1-i].Define(t.Context(), xml); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		for _, c := range w.virt {
			_ = c.Destroy(context.Background(), d)
		}
	})
	if _, err := w.virt[0].Start(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	counts(t, w.hosts[0], name, 1)
	return d, filepath.Join(w.Dir, name+".img")
}

// start starts a guest on a host as gpuctl does in a migration.
func (w *locked) start(ctx context.Context, host int, d virt.Domain) error {
	return w.site[host].Start(ctx, &gpuctlv1.SiteMachine{Uuid: d.UUID.String(), Name: d.Name}, "", false)
}

// refused checks the reason of an error, and that it says something.
func refused(t *testing.T, err error, code reason.Code, words ...string) {
	t.Helper()
	if !reason.Is(err, code) {
		t.Errorf("%s, not %s: %v", reason.Of(err).Code, code, err)
	}
	for _, text := range words {
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("it does not say %q: %v", text, err)
		}
	}
}

// holder is the host whose virtlockd has locked a disk; -1: none has.
func (w *locked) holder(t *testing.T, disk string) int {
	t.Helper()
	if dir := w.Leases(); dir != "" {
		hash := sha256.Sum256([]byte(disk))
		disk = filepath.Join(dir, hex.EncodeToString(hash[:]))
	}
	f, err := os.Open(disk)
	if errors.Is(err, os.ErrNotExist) {
		return -1
	}
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lock := unix.Flock_t{Type: unix.F_WRLCK, Len: 1}
	if err := unix.FcntlFlock(f.Fd(), unix.F_GETLK, &lock); err != nil {
		t.Fatal(err)
	}
	if lock.Type == unix.F_UNLCK {
		return -1
	}
	for i, h := range w.hosts {
		if pid, err := h.LockerPID(); err == nil && pid == int(lock.Pid) {
			return i
		}
	}
	t.Fatalf("process %d has locked %s, which is no virtlockd", lock.Pid, disk)
	return -1
}

// held checks which host has locked a disk, and that gpuctl sees whether one has.
func (w *locked) held(t *testing.T, disk string, by int) {
	t.Helper()
	if got := w.holder(t, disk); got != by {
		t.Errorf("%s is locked by host %d, not %d", disk, got, by)
	}
	if bare, err := w.locks(0).Unlocked(disk); err != nil || bare != (by < 0) {
		t.Errorf("gpuctl says that %s is not locked: %v, %v", disk, bare, err)
	}
}

func TestLockManager(t *testing.T) {
	for name, kind := range map[string]libvirt.Locks{"disks": libvirt.DiskLocks, "folder": libvirt.FolderLocks} {
		t.Run(name, func(t *testing.T) {
			w := lockers(t, kind)
			for _, step := range []struct {
				name string
				run  func(t *testing.T)
			}{
				{"runs once", w.runsOnce},
				{"handed over", w.isHandedOver},
				{"paused", w.isNotLockedWhilePaused},
				{"virtlockd renewed", w.survivesRenewal},
				{"virtlockd dead", w.isForgotten},
			} {
				if !t.Failed() {
					t.Run(step.name, step.run)
				}
			}
		})
	}
}

// A VM that runs on one host is not started on the other, and gpuctl says why.
func (w *locked) runsOnce(t *testing.T) {
	d, disk := w.guest(t, 1)
	w.held(t, disk, 0)
	refused(t, w.start(t.Context(), 1, d), reason.Locked, "VM vm1 does not run on host hostb, as host hosta has it", "gpuctl migrate vm1")
	w.held(t, disk, 0)
	if err := w.virt[0].Destroy(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	w.held(t, disk, -1)
	if err := w.start(t.Context(), 1, d); err != nil {
		t.Fatal(err)
	}
	w.held(t, disk, 1)
	refused(t, w.start(t.Context(), 0, d), reason.Locked, "VM vm1 does not run on host hosta, as host hostb has it")
}

// The source lets go of its locks before the destination runs the VM, there and back: both
// could not have them.
func (w *locked) isHandedOver(t *testing.T) {
	d, disk := w.guest(t, 2)
	for _, from := range []int{0, 1} {
		to := 1 - from
		w.held(t, disk, from)
		if err := w.virt[to].Undefine(t.Context(), d); err != nil {
			t.Fatal(err)
		}
		err := w.virt[from].Migrate(t.Context(), d, virt.Migration{Destination: w.hosts[to].URI(), Data: w.hosts[to].DataURI(), Persist: true, Unsafe: true})
		if err != nil {
			t.Fatal(err)
		}
		w.held(t, disk, to)
		if s, err := w.virt[to].State(t.Context(), d); err != nil || s != virt.Running {
			t.Errorf("%v, %v", s, err)
		}
		refused(t, w.start(t.Context(), from, d), reason.Locked, "as host "+w.hosts[to].Name+" has it")
	}
}

// A paused VM's disks are free: what was started meanwhile keeps it from going on.
func (w *locked) isNotLockedWhilePaused(t *testing.T) {
	d, disk := w.guest(t, 3)
	if err := w.virt[0].Suspend(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	w.held(t, disk, -1)
	if err := w.start(t.Context(), 1, d); err != nil {
		t.Fatal(err)
	}
	w.held(t, disk, 1)
	if err := w.virt[0].Resume(t.Context(), d); !errors.Is(err, virt.ErrLocked) {
		t.Errorf("%v", err)
	}
	if s, err := w.virt[0].State(t.Context(), d); err != nil || s != virt.Paused {
		t.Errorf("%v, %v", s, err)
	}
}

// virtlockd that replaces itself keeps its locks.
func (w *locked) survivesRenewal(t *testing.T) {
	d, disk := w.guest(t, 4)
	pid, err := w.hosts[0].LockerPID()
	if err != nil {
		t.Fatal(err)
	}
	at := func() string { // where its program is mapped
		maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
		if err != nil {
			t.Fatal(err)
		}
		where, _, _ := strings.Cut(string(maps), "-")
		return where
	}
	before := at()
	if err := w.hosts[0].RenewLocker(); err != nil {
		t.Fatal(err)
	}
	testkit.Until(t, "there is a new virtlockd", func() error { return testkit.Want(at() != before && at() != "", before) })
	w.held(t, disk, 0)
	refused(t, w.start(t.Context(), 1, d), reason.Locked, "as host hosta has it")
	if err := w.virt[0].Suspend(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	if err := w.virt[0].Resume(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	w.held(t, disk, 0)
}

// virtlockd that was killed has forgotten everything. VMs go on, without their locks; none is
// started or resumed before it is back, and with a folder of locks before libvirtd was
// started anew, too. To pause and to go on takes the locks again.
func (w *locked) isForgotten(t *testing.T) {
	a := w.hosts[0]
	d, disk := w.guest(t, 5)
	other, _ := w.guest(t, 6)
	if err := w.virt[0].Destroy(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	if err := a.KillLocker(); err != nil {
		t.Fatal(err)
	}
	n, err := a.Count("vm5")
	if err != nil {
		t.Fatal(err)
	}
	counts(t, a, "vm5", n+5)
	w.held(t, disk, -1)
	if err := w.locks(0).Serves(t.Context()); err == nil {
		t.Error("it answers")
	}
	refused(t, w.start(t.Context(), 0, other), reason.LockManagerDown, "VM vm6 does not run on host hosta", "virtlockd.socket")
	if err := w.virt[0].Suspend(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	if err := w.virt[0].Resume(t.Context(), d); !errors.Is(err, virt.ErrLockManager) {
		t.Errorf("%v", err)
	}
	if err := a.StartLocker(); err != nil {
		t.Fatal(err)
	}
	w.held(t, disk, -1)
	if w.Locks == libvirt.FolderLocks {
		refused(t, w.start(t.Context(), 0, other), reason.LockManagerDown, "VM vm6 does not run on host hosta", "restart libvirtd if file_lockspace_dir is set")
		if err := a.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := a.StartDaemon(); err != nil {
			t.Fatal(err)
		}
		ready(t, w.virt[0])
	}
	if err := w.virt[0].Resume(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	w.held(t, disk, 0)
	refused(t, w.start(t.Context(), 1, d), reason.Locked, "as host hosta has it")
	if err := w.start(t.Context(), 0, other); err != nil {
		t.Error(err)
	}
}
