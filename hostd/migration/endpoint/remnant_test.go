package endpoint

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/virt/virttest"
	"github.com/gpuctl/gpuctl/migrate"
)

const lost = "0c9f1f5e-3a55-4c3d-8d2c-7c6a8f1a2b3c"

// elsewhere is another host that knows where a VM is.
type elsewhere struct {
	gpuctlv1connect.SiteServiceClient
	presence string
	err      error
}

func (e elsewhere) Where(context.Context, *connect.Request[gpuctlv1.SiteMachine]) (*connect.Response[gpuctlv1.SiteWhereResponse], error) {
	return connect.NewResponse(&gpuctlv1.SiteWhereResponse{Presence: e.presence}), e.err
}

// tokens opens a host's fence.
func tokens(t *testing.T, path string) *Fence {
	t.Helper()
	f, err := OpenFence(path, func() string { return "c" })
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// withHome returns the part of host h1 with the libvirtd v. home answers for every other host.
func withHome(f *Fence, v *virt.Client, home *elsewhere) *Local {
	return &Local{Fence: f, Whereabouts: Whereabouts{Name: "h1", Client: v, Log: slog.New(slog.DiscardHandler), Peer: func(string) (gpuctlv1connect.SiteServiceClient, error) { return *home, nil }}}
}

// A copy goes only where it is one: paused here, and running at home.
func TestClear(t *testing.T) {
	for name, c := range map[string]struct {
		driver  string
		here    func(*virttest.Server, string) // what is here; nil: it runs
		home    elsewhere
		cleared bool
		twice   bool
	}{
		"it is a copy":          {"xen", (*virttest.Server).Arrive, elsewhere{presence: "running"}, true, false},
		"it comes from there":   {"xen", (*virttest.Server).Arrive, elsewhere{presence: "moving"}, false, false},
		"it is the only one":    {"xen", (*virttest.Server).Arrive, elsewhere{presence: "absent"}, false, false},
		"it ended there":        {"xen", (*virttest.Server).Arrive, elsewhere{presence: "stopped"}, false, false},
		"home does not answer":  {"xen", (*virttest.Server).Arrive, elsewhere{err: connect.NewError(connect.CodeUnavailable, errors.New("no route"))}, false, false},
		"it runs in both":       {"xen", nil, elsewhere{presence: "running"}, false, true},
		"it runs in both, qemu": {"qemu", nil, elsewhere{presence: "running"}, false, true},
		"it never connected":    {"xen", (*virttest.Server).Prepare, elsewhere{presence: "running"}, true, false},
		"it may connect":        {"xen", (*virttest.Server).Prepare, elsewhere{presence: "moving"}, false, false},
		"qemu's end with their": {"qemu", (*virttest.Server).Arrive, elsewhere{presence: "running"}, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			s, v := libvirtd(t, c.driver)
			d := run(t, v)
			if c.here != nil {
				c.here(s, "web")
			}
			path := filepath.Join(t.TempDir(), "tokens.json")
			l := withHome(tokens(t, path), v, &c.home)
			cleared, err := l.Clear(ctx, lost, "h2")
			if cleared != c.cleared || errors.Is(err, ErrTwice) != c.twice || !c.twice && (err != nil) != (c.home.err != nil && c.driver == "xen") {
				t.Errorf("cleared: %v, %v", cleared, err)
			}
			if c.twice {
				// It is paused, and never taken for one that has not run, by the next
				// hostd either.
				l.Fence = tokens(t, path)
				if cleared, err := l.Clear(ctx, lost, "h2"); cleared || err != nil {
					t.Errorf("cleared: %v, %v", cleared, err)
				}
				if state, err := v.State(ctx, d); err != nil || state != virt.Paused {
					t.Errorf("the copy is %v, %v", state, err)
				}
				if err := l.Unpause(ctx, lost); err != nil || l.Fence.Halted(lost) {
					t.Errorf("%v, halted: %v", err, l.Fence.Halted(lost))
				}
			}
			_, err = v.LookupUUID(ctx, d.UUID)
			if gone := errors.Is(err, virt.ErrNotFound); gone != c.cleared {
				t.Errorf("it is gone: %v (%v)", gone, err)
			}
		})
	}
}

// A VM that is defined here and shut off is nobody's copy.
func TestADefinitionIsNotEnded(t *testing.T) {
	_, v := libvirtd(t, "xen")
	d := run(t, v)
	if err := v.Destroy(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	home := elsewhere{presence: "running"}
	l := withHome(tokens(t, filepath.Join(t.TempDir(), "tokens.json")), v, &home)
	if cleared, err := l.Clear(t.Context(), lost, "h2"); cleared || err != nil {
		t.Errorf("cleared: %v, %v", cleared, err)
	}
	if err := v.CancelArrival(t.Context(), d); !errors.Is(err, virt.ErrState) {
		t.Errorf("its arrival ends: %v", err)
	}
	if _, err := v.LookupUUID(t.Context(), d.UUID); err != nil {
		t.Errorf("it is gone: %v", err)
	}
}

// unlisted are domains of Xen.
type unlisted struct {
	id    uint16 // of the VM's domain that has never run; 0: there is none
	look  func()
	ended []uint16
}

func (u *unlisted) Unstarted(_ context.Context, uuid string) (uint16, bool, error) {
	if u.look != nil {
		u.look()
	}
	return u.id, u.id != 0 && uuid == lost, nil
}

func (u *unlisted) End(_ context.Context, id uint16) error {
	u.ended = append(u.ended, id)
	return nil
}

// A libvirtd that was killed while a VM arrived has left a domain that it does not know of when it
// comes back. The domain ends only if nothing arrives and the VM runs at home.
func TestClearEndsADomainThatLibvirtHasForgotten(t *testing.T) {
	away := elsewhere{err: connect.NewError(connect.CodeUnavailable, errors.New("no route"))}
	for name, c := range map[string]struct {
		id      uint16
		home    elsewhere
		arrives bool // while we look
		ended   bool
	}{
		"it runs at home":      {7, elsewhere{presence: "running"}, false, true},
		"it is the only one":   {7, elsewhere{presence: "absent"}, false, false},
		"it ended at home":     {7, elsewhere{presence: "stopped"}, false, false},
		"it comes from there":  {7, elsewhere{presence: "moving"}, false, false},
		"home does not answer": {7, away, false, false},
		"nothing is left":      {0, elsewhere{presence: "running"}, false, false},
		"it arrives just now":  {7, elsewhere{presence: "running"}, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			s, v := libvirtd(t, "xen")
			xen := &unlisted{id: c.id}
			if c.arrives {
				xen.look = func() { run(t, v); s.Arrive("web") }
			}
			l := withHome(tokens(t, filepath.Join(t.TempDir(), "tokens.json")), v, &c.home)
			l.Domains = xen
			cleared, err := l.Clear(t.Context(), lost, "h2")
			if cleared != c.ended || (err != nil) != (c.home.err != nil) || (len(xen.ended) == 1) != c.ended {
				t.Errorf("cleared: %v, %v; ended: %d", cleared, err, xen.ended)
			}
		})
	}
}

// An operator may pause one of two copies, and let it go on, before hostd does:
// it has run, and is not ended as one that never did.
func TestCopyThatTheOperatorPausedIsNotEnded(t *testing.T) {
	_, v := libvirtd(t, "xen")
	d := run(t, v)
	home := elsewhere{presence: "running"}
	l := withHome(tokens(t, filepath.Join(t.TempDir(), "tokens.json")), v, &home)
	stays := func(when string) {
		t.Helper()
		if cleared, err := l.Clear(t.Context(), lost, "h2"); cleared || err != nil && !errors.Is(err, ErrTwice) {
			t.Errorf("%s: cleared: %v, %v", when, cleared, err)
		}
		if _, err := v.LookupUUID(t.Context(), d.UUID); err != nil {
			t.Fatalf("%s: it is gone: %v", when, err)
		}
	}
	stays("it is paused")
	// The other one is looked at meanwhile.
	home.presence = "moving"
	if err := v.Resume(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	stays("it runs alone")
	if err := v.Suspend(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	home.presence = "running"
	stays("the other one goes on")

	// What the driver of a migration finds paused by somebody else is the same.
	if err := l.Fence.Halt(lost, false); err != nil {
		t.Fatal(err)
	}
	if err := l.Pause(t.Context(), lost); err != nil {
		t.Fatal(err)
	}
	stays("somebody was faster")
}

// A definition that a migration has left goes where the VM has another, and once: who defines
// the VM here after that wants it.
func TestDefinitionThatAMigrationHasLeftIsWithdrawn(t *testing.T) {
	for name, c := range map[string]struct {
		home    elsewhere
		runs    bool // here
		removed bool
	}{
		"it runs at home":        {elsewhere{presence: "running"}, false, true},
		"it is shut off at home": {elsewhere{presence: "stopped"}, false, true},
		"it is the only one":     {elsewhere{presence: "absent"}, false, false},
		"it moves":               {elsewhere{presence: "moving"}, false, false},
		"home does not answer":   {elsewhere{err: connect.NewError(connect.CodeUnavailable, errors.New("no route"))}, false, false},
		"it was started here":    {elsewhere{presence: "stopped"}, true, false},
		"it runs here and there": {elsewhere{presence: "running"}, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			_, v := libvirtd(t, "qemu")
			d := define(t, v)
			if c.runs {
				if _, err := v.Start(t.Context(), d); err != nil {
					t.Fatal(err)
				}
			}
			path := filepath.Join(t.TempDir(), "tokens.json")
			l := withHome(tokens(t, path), v, &c.home)
			if err := l.Fence.Admit(&gpuctlv1.SiteMachine{Uuid: lost, Token: 6}); err != nil {
				t.Fatal(err)
			}
			removed, err := l.Withdraw(t.Context(), lost, "h2", 7)
			if removed != c.removed || (err != nil) != (c.home.err != nil) {
				t.Errorf("removed: %v, %v", removed, err)
			}
			if _, err := v.LookupUUID(t.Context(), d.UUID); errors.Is(err, virt.ErrNotFound) != c.removed {
				t.Errorf("it is gone: %v", err)
			}
			if !c.removed {
				return
			}
			define(t, v)
			l.Fence = tokens(t, path) // of the next hostd
			if removed, err := l.Withdraw(t.Context(), lost, "h2", 7); removed || err != nil {
				t.Errorf("defined anew: %v, %v", removed, err)
			}
			if removed, err := l.Withdraw(t.Context(), lost, "h2", 8); !removed || err != nil {
				t.Errorf("of the next migration: %v, %v", removed, err)
			}
			define(t, v)
			if err := l.Fence.Admit(&gpuctlv1.SiteMachine{Uuid: lost, Token: 10}); err != nil {
				t.Fatal(err)
			}
			if removed, err := l.Withdraw(t.Context(), lost, "h2", 9); removed || !errors.Is(err, migrate.ErrStale) {
				t.Errorf("while the next one runs: %v, %v", removed, err)
			}
		})
	}
}

// What somebody else has removed is not looked for again.
func TestDefinitionThatIsGoneIsNotLookedFor(t *testing.T) {
	_, v := libvirtd(t, "qemu")
	home := elsewhere{presence: "running"}
	l := withHome(tokens(t, filepath.Join(t.TempDir(), "tokens.json")), v, &home)
	for range 2 {
		if removed, err := l.Withdraw(t.Context(), lost, "h2", 7); removed || err != nil {
			t.Errorf("removed: %v, %v", removed, err)
		}
		define(t, v)
	}
	if _, err := v.Lookup(t.Context(), "web"); err != nil {
		t.Errorf("it is gone: %v", err)
	}
}

// libvirt refuses to remove the definition of a VM with variables of its firmware, unless it is
// told that they stay. Such a VM would stay defined on the host that it has left.
func TestDefinitionOfAVMWithFirmwareVariablesIsRemoved(t *testing.T) {
	for _, driver := range []string{"xen", "qemu"} {
		_, v := libvirtd(t, driver)
		d, err := v.Define(t.Context(), fmt.Appendf(nil, "<domain type='%s'><name>web</name><uuid>%s</uuid><os><type>hvm</type><nvram>/var/lib/libvirt/qemu/nvram/web.fd</nvram></os></domain>", driver, lost))
		if err != nil {
			t.Fatal(err)
		}
		l := &Local{Whereabouts: Whereabouts{Name: "h1", Client: v, Log: slog.New(slog.DiscardHandler)}}
		err = l.Undefine(t.Context(), &gpuctlv1.SiteMachine{Uuid: lost})
		if _, gone := v.LookupUUID(t.Context(), d.UUID); err != nil || !errors.Is(gone, virt.ErrNotFound) {
			t.Errorf("%s: %v, and the definition: %v", driver, err, gone)
		}
	}
}

// A copy of a VM that runs twice is paused although nothing can be written on its host: both
// would write to the VM's disks. What could not be recorded is known as long as hostd runs.
func TestCopyIsPausedOnAHostWithAFullDisk(t *testing.T) {
	for name, pause := range map[string]func(*Local) error{
		"by the driver of its migration": func(l *Local) error { return l.Pause(t.Context(), lost) },
		"when it is found": func(l *Local) error {
			if _, err := l.Clear(t.Context(), lost, "h2"); !errors.Is(err, ErrTwice) {
				return fmt.Errorf("it is not told of: %w", err)
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, v := libvirtd(t, "xen")
			d := run(t, v)
			full := filepath.Join(t.TempDir(), "full", "tokens.json") // its folder is not there
			home := elsewhere{presence: "running"}
			l := withHome(tokens(t, full), v, &home)
			if err := pause(l); err != nil {
				t.Error(err)
			}
			if state, err := v.State(t.Context(), d); err != nil || state != virt.Paused {
				t.Errorf("it is %v, %v", state, err)
			}
			if cleared, err := l.Clear(t.Context(), lost, "h2"); cleared || err != nil {
				t.Errorf("cleared: %v, %v", cleared, err)
			}
			// There is room again.
			if err := os.Mkdir(filepath.Dir(full), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := l.Fence.Admit(&gpuctlv1.SiteMachine{Uuid: lost, Token: 7}); err != nil {
				t.Fatal(err)
			}
			if next, err := OpenFence(full, func() string { return "c" }); err != nil || !next.Halted(lost) {
				t.Errorf("the next hostd does not know it: %v", err)
			}
		})
	}
}
