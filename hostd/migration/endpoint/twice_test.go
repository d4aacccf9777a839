package endpoint

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/virt/virttest"
	"github.com/gpuctl/gpuctl/internal/vm"
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
				s, v := libvirtd(t, driver)
				servers, hosts = append(servers, s), append(hosts, &Local{Whereabouts: Whereabouts{Name: name, Client: v, Log: slog.New(slog.DiscardHandler)}})
			}
			a, b := hosts[0], hosts[1]
			uri := driver + "+tcp://h2/system"
			servers[0].Peer(uri, servers[1])
			d := run(t, a.Client)
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

// A qemu that libvirt has left paused for a migration that is over does not move: its lock
// manager, or the lack of one, kept it from going on. One that arrives is something else.
func TestVMThatLibvirtKeepsPausedIsKept(t *testing.T) {
	s, v := libvirtd(t, "qemu")
	l := &Local{Whereabouts: Whereabouts{Name: "h1", Client: v, Log: slog.New(slog.DiscardHandler)}}
	run(t, v)
	s.Leave("web")
	remote := &Remote{Host: "h1", Service: served{s: &Service{l}}}
	for _, where := range []func() (migrate.Presence, error){
		func() (migrate.Presence, error) { return l.Where(t.Context(), lost) },
		func() (migrate.Presence, error) { return remote.Where(t.Context(), vm.VM{UUID: lost}) },
	} {
		if p, err := where(); err != nil || p != migrate.Kept {
			t.Errorf("%v, %v", p, err)
		}
		s.Next("domjobinfo", virttest.Fault{Code: 55, Message: "Requested operation is not valid: migration statistics are available only on the source host"})
		if p, err := where(); err != nil || p != migrate.Moving {
			t.Errorf("one that arrives: %v, %v", p, err)
		}
	}
}

// served is a host whose answers come without a network.
type served struct {
	gpuctlv1connect.SiteServiceClient
	s *Service
}

func (s served) Where(ctx context.Context, r *connect.Request[gpuctlv1.SiteMachine]) (*connect.Response[gpuctlv1.SiteWhereResponse], error) {
	return s.s.Where(ctx, r)
}

// A destination that dies early leaves the source with a VM that was never suspended. Xen
// refuses to resume it, and then libvirt calls it paused although it runs. That is no
// migration that still goes on.
func TestVMThatLibvirtLeavesPausedIsNotMoving(t *testing.T) {
	s, v := libvirtd(t, "xen")
	l := &Local{Whereabouts: Whereabouts{Name: "h1", Client: v, Log: slog.New(slog.DiscardHandler)}}
	run(t, v)
	s.Leave("web")
	if p, err := l.Where(t.Context(), lost); err != nil || p != migrate.Running {
		t.Errorf("left paused: %v, %v", p, err)
	}
	s.Next("domjobinfo", virttest.Fault{Code: 39, Message: "unknown procedure: 298"})
	if p, err := l.Where(t.Context(), lost); err == nil {
		t.Errorf("left paused, and it is not known whether a job runs: %v", p)
	}
}

// A driver that is replaced while its host still asks libvirt about the VM does not send the VM any
// more, and the next one does not take the VM for one that stays.
func TestVMIsNotSentByADriverThatWasReplacedMeanwhile(t *testing.T) {
	s, v := libvirtd(t, "qemu")
	peer, _ := libvirtd(t, "qemu")
	s.Peer("qemu+tcp://h2/system", peer)
	run(t, v)
	fence, err := OpenFence(filepath.Join(t.TempDir(), "tokens.json"), func() string { return "c" })
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	l := &Local{
		Whereabouts: Whereabouts{Name: "h1", Client: v, Log: log}, Fence: fence, Guests: NewGuests(GuestsConfig{Log: log}),
		URI: func(string) (string, string, error) { return "qemu+tcp://h2/system", "", nil },
	}
	sv := &Service{l}
	s.Next("is persistent", virttest.Fault{Do: true, Delay: time.Second})
	first := &gpuctlv1.SiteMachine{Uuid: lost, Name: "web", Migration: "m-1", Token: 7}
	over := make(chan error, 1)
	go func() {
		over <- sv.step(first, func() error { return l.Move(t.Context(), first, "h2", func(uint64, uint64, string) {}) })
	}()
	testkit.Until(t, "libvirt is asked", func() error { return testkit.Want(slices.Contains(s.Calls(), "is persistent"), s.Calls()) })
	second := &Remote{Host: "h1", Migration: "m-1", Token: 8, Service: served{s: sv}}
	if p, err := second.Where(t.Context(), vm.VM{UUID: lost}); err != nil || p != migrate.Moving {
		t.Errorf("it is %v, %v", p, err)
	}
	if err := <-over; !errors.Is(err, migrate.ErrStale) {
		t.Errorf("it was sent: %v", err)
	}
	if p, err := second.Where(t.Context(), vm.VM{UUID: lost}); err != nil || p != migrate.Running {
		t.Errorf("it is %v, %v", p, err)
	}
}

// Nor does such a driver start a VM, which the next one may start on the other host, or destroy
// one, which that may have started again.
func TestVMIsNotSwitchedByADriverThatWasReplacedMeanwhile(t *testing.T) {
	for _, start := range []bool{true, false} {
		s, v := libvirtd(t, "qemu")
		d := define(t, v)
		if !start {
			if _, err := v.Start(t.Context(), d); err != nil {
				t.Fatal(err)
			}
			if err := v.Suspend(t.Context(), d); err != nil { // so it does not shut down by itself
				t.Fatal(err)
			}
		}
		fence, err := OpenFence(filepath.Join(t.TempDir(), "tokens.json"), func() string { return "c" })
		if err != nil {
			t.Fatal(err)
		}
		log := slog.New(slog.DiscardHandler)
		l := &Local{Whereabouts: Whereabouts{Name: "h1", Client: v, Log: log}, Fence: fence, Guests: NewGuests(GuestsConfig{Log: log})}
		sv := &Service{l}
		before := len(s.Calls())
		s.Next("domstate", virttest.Fault{Do: true, Delay: time.Second})
		first := &gpuctlv1.SiteMachine{Uuid: lost, Name: "web", Migration: "m-1", Token: 7}
		over := make(chan error, 1)
		go func() {
			over <- sv.step(first, func() error {
				if start {
					return l.Start(t.Context(), first, "", false)
				}
				return l.Stop(t.Context(), first, "")
			})
		}()
		testkit.Until(t, "libvirt is asked", func() error {
			return testkit.Want(slices.Contains(s.Calls()[before:], "domstate"), s.Calls())
		})
		next := &gpuctlv1.SiteMachine{Uuid: lost, Name: "web", Migration: "m-1", Token: 8}
		if err := sv.step(next, func() error { return l.Undefine(t.Context(), next) }); !errors.Is(err, migrate.ErrUnreachable) {
			t.Errorf("start %v: the next driver is not told to wait: %v", start, err)
		}
		err = <-over
		state, lost := v.State(t.Context(), d)
		if !errors.Is(err, migrate.ErrStale) || lost != nil || state.Active() == start {
			t.Errorf("start %v: %v; it is %s, %v", start, err, state, lost)
		}
		if err := sv.step(next, func() error { return l.Stop(t.Context(), next, "") }); err != nil {
			t.Errorf("start %v: the next driver: %v", start, err)
		}
	}
}

// A VM that is moved cold has its definition at its old host until all is done. When that host boots
// meanwhile, as after a power failure, the VM may run on the other one.
func TestStoppedVMIsNotStartedByTheBootOfItsHost(t *testing.T) {
	_, v := libvirtd(t, "qemu")
	d := run(t, v)
	if err := errors.Join(v.SetAutostart(t.Context(), d, true), v.Suspend(t.Context(), d)); err != nil {
		t.Fatal(err)
	}
	file, log := filepath.Join(t.TempDir(), "tokens.json"), slog.New(slog.DiscardHandler)
	m := &gpuctlv1.SiteMachine{Uuid: lost, Name: "web", Migration: "m-1", Token: 7}
	host := func() *Local { // as it is after a start of hostd
		fence, err := OpenFence(file, func() string { return "c" })
		if err != nil {
			t.Fatal(err)
		}
		return &Local{Whereabouts: Whereabouts{Name: "h1", Client: v, Log: log}, Fence: fence, Guests: NewGuests(GuestsConfig{Log: log})}
	}
	boots := func(what string, want bool) {
		t.Helper()
		if on, err := v.Autostart(t.Context(), d); err != nil || on != want {
			t.Fatalf("%s: autostart %v, %v", what, on, err)
		}
	}
	for range 2 { // a driver repeats a call of which it has no answer
		if err := host().Stop(t.Context(), m, ""); err != nil {
			t.Fatal(err)
		}
		boots("stopped", false)
	}
	for range 2 {
		if err := host().Start(t.Context(), m, "", false); err != nil {
			t.Fatal(err)
		}
		boots("taken back", true)
	}
	if err := v.SetAutostart(t.Context(), d, false); err != nil {
		t.Fatal(err)
	}
	for _, do := range []func(*Local) error{
		func(l *Local) error { return v.Suspend(t.Context(), d) },
		func(l *Local) error { return l.Stop(t.Context(), m, "") },
		func(l *Local) error { return l.Start(t.Context(), m, "", false) },
	} {
		if err := do(host()); err != nil {
			t.Fatal(err)
		}
		boots("of one that had none", false)
	}
	if err := errors.Join(v.SetAutostart(t.Context(), d, true), v.Suspend(t.Context(), d), host().Stop(t.Context(), m, ""), host().Undefine(t.Context(), m)); err != nil {
		t.Fatal(err)
	}
	define(t, v) // it has come again, by another way
	if err := host().Start(t.Context(), m, "", false); err != nil {
		t.Fatal(err)
	}
	boots("with another definition", false)
}
