package xen

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/lab"
	"github.com/gpuctl/gpuctl/lab/labtest"
)

// shared is the folder that both hosts have: the disks, and what virtlockd locks for them.
const shared = "/srv/shared"

// sharedDisk is a disk that a VM can write to, on whichever host it is.
const sharedDisk = "<disk type='file' device='disk'><driver name='qemu' type='raw'/>" +
	"<source file='" + shared + "/web.img'/><target dev='xvdg' bus='xen'/></disk>\n"

// lockManagers has the hosts share a folder by NFS and sets up libvirt's lock manager as
// docs/operations.md says, until the test ends.
func lockManagers(ctx context.Context, t *testing.T, l *lab.Lab) {
	t.Helper()
	server, client := l.Hosts()[0], l.Hosts()[1]
	must := func(h *lab.Host, command string) {
		t.Helper()
		if out, err := h.Run(ctx, "set -e; "+command); err != nil {
			t.Fatalf("%s: %s", h.Name, said(out, err))
		}
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
		defer cancel()
		for _, h := range []*lab.Host{client, server} {
			out, err := h.Run(ctx, "virsh -q destroy web; rm -f /etc/libvirt/libxl.conf /etc/libvirt/libxl-lockd.conf; systemctl stop virtlockd.socket virtlockd; "+
				"umount -l "+shared+"; systemctl stop nfs-server; systemctl restart libvirtd")
			if err != nil {
				t.Errorf("%s: %s", h.Name, said(out, err))
			}
		}
	})
	must(server, fmt.Sprintf(`mkdir -p %[1]s/locks /etc/nfs.conf.d; truncate -s 16M %[1]s/web.img
printf '[nfsd]\ngrace-time=10\nlease-time=10\n' > /etc/nfs.conf.d/lab.conf
echo '%[1]s *(rw,no_root_squash,no_subtree_check,fsid=1)' > /etc/exports
systemctl start nfs-server`, shared))
	must(client, fmt.Sprintf("mkdir -p %[1]s; mountpoint -q %[1]s || mount -t nfs4 %[2]s:%[1]s %[1]s", shared, server.Address))
	for _, h := range l.Hosts() {
		must(h, fmt.Sprintf(`echo 'lock_manager = "lockd"' > /etc/libvirt/libxl.conf
echo 'file_lockspace_dir = "%s/locks"' > /etc/libvirt/libxl-lockd.conf
systemctl start virtlockd.socket; systemctl restart libvirtd`, shared))
	}
}

// TestMigrateLocked moves a VM with its GPU between hosts that have virtlockd: its disk is
// locked where it is, so that it does not start on the other host. When virtlockd was killed,
// plans say that the disk is locked no more, the VM goes on, and its move locks it again.
func TestMigrateLocked(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	l := labtest.Start(t)
	lockManagers(ctx, t, l)
	v := newTraveller(ctx, t, l, small, sharedDisk)
	const notLocked = "has not locked " + shared + "/web.img"
	plan := func(want, never string) {
		t.Helper()
		testkit.Until(t, "the plan of "+v.at.gpu(), func() error {
			out, _ := v.at.host.gpuctl(ctx, "migrate", "web", "--to", v.next(leg{"migrate", bochs}).gpu(), "--plan")
			return testkit.Want(strings.Contains(out, want) && (never == "" || !strings.Contains(out, never)), out)
		})
	}
	once := func() {
		t.Helper()
		plan("Steps of the best", notLocked)
		other := v.other(v.at.host)
		other.put(ctx, &v.guest.Guest, same) // of the same name, UUID and disk
		other.vetoed(ctx, "is locked", "create", "/run/gpuctl-lab/web.xml")
		out := other.run(ctx, "xl list; virsh -q list --all --name")
		if strings.Contains(out, "web") {
			t.Errorf("%s has something of the VM: %s", other.Name, out)
		}
	}
	move := func(l leg) {
		t.Helper()
		to := v.next(l)
		if !v.ended(ctx, v.over(ctx, v.begin(ctx, l, to)), to) {
			t.Error("it was not moved")
		}
	}
	r := rough{t}
	r.step("its disk is locked where it starts", once)
	r.step("to the other host", func() { move(leg{"migrate", bochs}); once() })
	r.step("virtlockd killed", func() {
		h := v.at.host
		h.run(ctx, "systemctl kill -s KILL virtlockd")
		plan(notLocked, "")
		h.run(ctx, "systemctl restart libvirtd") // as docs/operations.md says
		h.mustVirsh(ctx, "suspend", "web")
		h.mustVirsh(ctx, "resume", "web")
		plan(notLocked, "") // with qemu it would be locked now
	})
	r.step("and back", func() { move(leg{"migrate", virtio}); once() })
	r.step("the right result", func() { v.arrive(ctx) })
}
