package endpoint

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/virt/virttest"
)

// Why libvirt's lock manager keeps a VM from starting is told by a reason, with the host
// that has it.
func TestStartThatTheLockManagerRefusesHasAReason(t *testing.T) {
	s, v := libvirtd(t, "qemu")
	define(t, v)
	locked := virttest.Fault{Code: 87, From: 51, Message: "resource busy: Lockspace resource '/disk' is locked"}
	dead := virttest.Fault{Code: 38, Message: "Failed to connect socket to '/run/libvirt/virtlockd-sock': Connection refused"}
	unreachable := elsewhere{err: connect.NewError(connect.CodeUnavailable, errors.New("no route"))}
	for name, c := range map[string]struct {
		fault  virttest.Fault
		others map[string]elsewhere
		code   reason.Code
		object string
		says   []string
	}{
		"it runs elsewhere":   {locked, map[string]elsewhere{"h2": {presence: "absent"}, "h3": {presence: "running"}}, reason.Locked, "web", []string{"VM web does not run on host h1, as host h3 has it", "/disk", "virsh destroy web"}},
		"somebody is silent":  {locked, map[string]elsewhere{"h2": unreachable, "h3": {presence: "stopped"}}, reason.Locked, "web", []string{"see whether it runs on host h2, which did not answer"}},
		"nobody says that":    {locked, map[string]elsewhere{"h2": {presence: "absent"}}, reason.Locked, "web", []string{"no host of the cluster says that it runs there"}},
		"there are no others": {locked, nil, reason.Locked, "web", []string{"which other VM"}},
		"virtlockd is dead":   {dead, nil, reason.LockManagerDown, "h1", []string{"VM web does not run on host h1", "systemctl start virtlockd.socket", "restart libvirtd"}},
	} {
		l := &Local{Whereabouts: Whereabouts{Name: "h1", Client: v, Log: slog.New(slog.DiscardHandler)}}
		l.Others = func() (names []string) {
			for host := range c.others {
				names = append(names, host)
			}
			return names
		}
		l.Peer = func(host string) (gpuctlv1connect.SiteServiceClient, error) { return c.others[host], nil }
		s.Next("start", c.fault)
		err := toConnect(l.Start(t.Context(), &gpuctlv1.SiteMachine{Uuid: lost, Name: "web"}, "", false))
		r := reason.Of(err)
		if r.Code != c.code || r.Object != c.object || r.Next == "" {
			t.Errorf("%s: %+v of %v", name, r, err)
		}
		for _, words := range c.says {
			if err == nil || !strings.Contains(err.Error(), words) {
				t.Errorf("%s: it does not say %q: %v", name, words, err)
			}
		}
	}
}

func TestFactsSayWhatTheLockManagerDoes(t *testing.T) {
	dir := t.TempDir()
	disk := filepath.Join(dir, "disk")
	if err := os.WriteFile(disk, make([]byte, 512), 0o600); err != nil {
		t.Fatal(err)
	}
	locks := virt.Locks{Manager: "lockd", Socket: filepath.Join(dir, "sock")}
	l := &Local{Whereabouts: Whereabouts{Name: "h1", Log: slog.New(slog.DiscardHandler)}, Locks: func() virt.Locks { return locks }}
	if name, why := l.lockManager(t.Context()); name != "lockd" || !strings.Contains(why, "lockd: ") {
		t.Errorf("%q, %q", name, why)
	}
	listener, err := net.Listen("unix", locks.Socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if name, why := l.lockManager(t.Context()); name != "lockd" || why != "" {
		t.Errorf("%q, %q", name, why)
	}
	disks := []*gpuctlv1.SiteDisk{{Path: disk}, {Path: "/boot/vmlinuz", ReadOnly: true}, {Path: filepath.Join(dir, "gone")}}
	if got := l.unlocked(disks); len(got) != 1 || got[0] != disk {
		t.Errorf("%v", got)
	}
}
