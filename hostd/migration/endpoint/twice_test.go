package endpoint

import (
	"fmt"
	"log/slog"
	"testing"

	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/virt/virttest"
	"github.com/gpuctl/gpuctl/migrate"
)

// libvirt lets a VM go on at its source when the destination's last answer is
// lost, although it runs there. Hosts say so, and pausing one of them is undone.
func TestVMRunsTwiceWhereTheLastAnswerIsLost(t *testing.T) {
	for _, driver := range []string{"xen", "qemu"} {
		t.Run(driver, func(t *testing.T) {
			var hosts []*Local
			var servers []*virttest.Server
			for _, name := range []string{"h1", "h2"} {
				s := virttest.Start(t, driver)
				v, err := virt.Open(driver+":///system", virt.WithSocket(s.Socket()))
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = v.Close() })
				if err := v.Ready(t.Context()); err != nil {
					t.Fatal(err)
				}
				servers, hosts = append(servers, s), append(hosts, &Local{Name: name, Client: v, Log: slog.New(slog.DiscardHandler)})
			}
			a, b := hosts[0], hosts[1]
			uri := driver + "+tcp://h2/system"
			servers[0].Peer(uri, servers[1])
			d, err := a.Client.Define(t.Context(), fmt.Appendf(nil, "<domain type='%s'><name>web</name><uuid>%s</uuid></domain>", driver, lost))
			if err == nil {
				_, err = a.Client.Start(t.Context(), d)
			}
			if err != nil {
				t.Fatal(err)
			}
			servers[0].LoseAnswer()
			if err := a.Client.Migrate(t.Context(), d, virt.Migration{Destination: uri}); err == nil {
				t.Error("the answer came")
			}
			is := func(l *Local, want migrate.Presence) {
				t.Helper()
				if p, err := l.Where(t.Context(), lost); err != nil || p != want {
					t.Errorf("on %s it is %v, %v, not %v", l.Name, p, err, want)
				}
			}
			is(a, migrate.Running)
			is(b, migrate.Running)
			for range 2 { // steps may be repeated
				if err := b.Pause(t.Context(), lost); err != nil {
					t.Fatal(err)
				}
				is(b, migrate.Moving)
			}
			is(a, migrate.Running)
			for range 2 {
				if err := b.Unpause(t.Context(), lost); err != nil {
					t.Fatal(err)
				}
				is(b, migrate.Running)
			}
		})
	}
}

// A destination that dies early leaves the source with a VM that was never suspended. Xen
// refuses to resume it, and then libvirt calls it paused although it runs. That is no
// migration that still goes on.
func TestVMThatLibvirtLeavesPausedIsNotMoving(t *testing.T) {
	s := virttest.Start(t, "xen")
	v, err := virt.Open("xen:///system", virt.WithSocket(s.Socket()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = v.Close() })
	if err := v.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	l := &Local{Name: "h1", Client: v, Log: slog.New(slog.DiscardHandler)}
	d, err := v.Define(t.Context(), fmt.Appendf(nil, "<domain type='xen'><name>web</name><uuid>%s</uuid></domain>", lost))
	if err == nil {
		_, err = v.Start(t.Context(), d)
	}
	if err != nil {
		t.Fatal(err)
	}
	s.Leave("web")
	if p, err := l.Where(t.Context(), lost); err != nil || p != migrate.Running {
		t.Errorf("left paused: %v, %v", p, err)
	}
	s.Next("domjobinfo", virttest.Fault{Code: 39, Message: "unknown procedure: 298"})
	if p, err := l.Where(t.Context(), lost); err == nil {
		t.Errorf("left paused, and it is not known whether a job runs: %v", p)
	}
}
