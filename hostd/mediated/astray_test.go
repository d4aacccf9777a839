package mediated

import (
	"errors"
	"testing"

	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/mmio/server"
)

// TestVMThatRanWithoutItsPart, before hostd could give it to its domain: whatever it was then, what
// the VM wrote there is lost. No host goes on with contents from before, also not at home, and the
// operator is told.
func TestVMThatRanWithoutItsPart(t *testing.T) {
	for name, now := range map[string]Domain{
		"and runs":           {ID: 9, HVM: true, Ran: true},
		"and is paused":      {ID: 9, Paused: true, HVM: true, Ran: true},
		"in one with a part": {ID: 11, Paused: true, HVM: true},
	} {
		t.Run(name, func(t *testing.T) {
			home, away, _ := pair(t, 5)
			home.parks(t, away)
			home.leaves()
			away.xen.Domain(now.ID, 1, 16)
			if !now.Ran { // the domain that got the part is gone, and another ran
				away.domains[web.UUID] = now
				if err := away.k.Reconcile(t.Context()); err != nil {
					t.Fatal(err)
				}
				now = Domain{ID: 12, HVM: true, Ran: true}
			}
			home.vm.astray = true
			away.domains[web.UUID] = now
			away.restart()
			if err := away.k.TakeParts(t.Context(), web, "m-1", far{home}); !errors.Is(err, cards.ErrRefused) || !saidIn(away.events, "PartLost") {
				t.Errorf("taken: %v, events %v", err, away.events)
			}
			// Home again, as the undo does it, and hostd is killed in between.
			for range 2 {
				away.parks(t, home)
				home.restart()
				away.restart()
			}
			away.leaves()
			home.domains[web.UUID] = Domain{ID: 8, Paused: true, HVM: true}
			if err := home.k.Reconcile(t.Context()); err != nil {
				t.Fatal(err)
			}
			home.domains[web.UUID] = Domain{ID: 8, HVM: true, Ran: true}
			if err := home.k.TakeParts(t.Context(), web, "m-1", far{away}); err != nil {
				t.Errorf("at home: %v", err)
			}
			if err := away.k.DropParts(t.Context(), web, "m-1"); err != nil {
				t.Error(err)
			}
			if !saidIn(home.events, "PartLost") || home.parts() != 0 || away.parts() != 0 {
				t.Errorf("events %v, %d and %d parts", home.events, home.parts(), away.parts())
			}
			startsAnew(t, home)
		})
	}
}

// TestVMThatIsStartedAnewElsewhere, by --force-cold, has an empty part there, and none where it was;
// and when that is undone, as before.
func TestVMThatIsStartedAnewElsewhere(t *testing.T) {
	renew := func(t *testing.T) (home, away *host) {
		home, away, _ = pair(t, 5)
		home.leaves() // it was ended
		for range 2 { // hostd is killed in between
			if parts := home.parks(t, away); len(parts) != 1 || !parts[0].GetAnew() || home.parts() != 0 {
				t.Fatalf("%v, %d parts at home", parts, home.parts())
			}
			home.restart()
			away.restart()
		}
		d := away.arrives(9)
		for i, b := range bars {
			if b != 0 {
				d.SetConfig(0, lastSlot, 0x10+4*i, 4, b)
			}
		}
		d.SetConfig(0, lastSlot, 4, 2, 6)
		d.Store(0, bars[0]+0x1700, 4, 0x30)
		if v := peek(d); !away.served() || v != 0 {
			t.Fatalf("it is served: %v, and reads %#x", away.served(), v)
		}
		return home, away
	}
	t.Run("done", func(t *testing.T) {
		home, away := renew(t)
		if err := home.k.DropParts(t.Context(), web, "m-1"); err != nil || len(home.k.Held()) != 0 {
			t.Errorf("%v, claims at home %v", err, home.k.Held())
		}
		away.ended["m-1"] = true
		if err := away.k.Reconcile(t.Context()); err != nil {
			t.Fatal(err)
		}
		if a := away.k.of(func(*assignment) bool { return true })[0]; a.moving() || a.Anew || a.Phase != attached || a.Weight != 3 {
			t.Errorf("afterwards %+v", a)
		}
	})
	t.Run("undone", func(t *testing.T) {
		home, away := renew(t)
		away.leaves()
		if err := away.k.Reconcile(t.Context()); err != nil { // before its driver says so
			t.Fatal(err)
		}
		if err := away.k.DropParts(t.Context(), web, "m-1"); err != nil || len(away.k.Held()) != 0 || away.parts() != 0 {
			t.Errorf("%v, claims %v, %d parts", err, away.k.Held(), away.parts())
		}
		if home.arrives(8); !home.served() {
			t.Error("at home it has no part")
		}
		startsAnew(t, home)
	})
	t.Run("ended without a word", func(t *testing.T) {
		home, away := renew(t)
		home.ended["m-1"], away.ended["m-1"] = false, true
		for _, h := range []*host{home, away} {
			if err := h.k.Reconcile(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if len(home.k.Held()) != 0 || !away.served() {
			t.Errorf("claims at home %v, served %v", home.k.Held(), away.served())
		}
	})
}

// startsAnew ends the migration and the VM at home. Its next start has a part that works.
func startsAnew(t *testing.T, home *host) {
	t.Helper()
	home.ended["m-1"] = true
	home.vm.astray = false
	_ = home.k.Reconcile(t.Context())
	home.leaves()
	_ = home.k.Reconcile(t.Context())
	home.arrives(20)
	if !home.served() || len(home.k.Held()) != 1 {
		t.Errorf("the next start: served %v, claims %v, %+v", home.served(), home.k.Held(), home.k.of(func(*assignment) bool { return true }))
	}
}

// TestVMThatComesHomeUnexpected has no part there. Its contents stay what they were at the
// destination, so nobody goes on with those that home kept.
func TestVMThatComesHomeUnexpected(t *testing.T) {
	for _, told := range []bool{false, true} {
		home, away, _ := pair(t, 5)
		moves(t, home, away, 9)
		parts, err := away.k.ParkParts(t.Context(), web, "m-1")
		if err == nil && told {
			err = home.k.ExpectParts(t.Context(), web, "m-1", parts)
		}
		if err != nil {
			t.Fatal(err)
		}
		away.leaves()
		home.restart()
		home.domains[web.UUID] = Domain{ID: 8, HVM: true, Ran: true} // its hostd was dead
		home.vm.astray = true
		if err := home.k.TakeParts(t.Context(), web, "m-1", far{away}); err != nil {
			t.Errorf("told %v: %v", told, err)
		}
		if !saidIn(home.events, "PartLost") || home.served() {
			t.Errorf("told %v: events %v, served %v", told, home.events, home.served())
		}
		if err := away.k.DropParts(t.Context(), web, "m-1"); err != nil {
			t.Error(err)
		}
		startsAnew(t, home)
	}
}

// TestVMDoesNotRunBeforeItsPartIsThere: libvirt's hook is answered when the part is there, and
// refused if it cannot be. A VM that runs is left alone.
func TestVMDoesNotRunBeforeItsPartIsThere(t *testing.T) {
	home, away, _ := pair(t, 5)
	if err := home.k.Arrived(t.Context(), web); err != nil {
		t.Errorf("a VM that has started: %v", err)
	}
	home.parks(t, away)
	if d := away.k.pause(nil); d != away.k.Soon {
		t.Errorf("a VM is to come, and its host looks again in %v", d)
	}
	d := away.xen.Bare(9, 1, 16)
	away.domains[web.UUID] = Domain{ID: 9, Paused: true, HVM: true}
	if err := away.k.Reconcile(t.Context()); !errors.Is(err, server.ErrEarly) {
		t.Errorf("while the domain is made: %v", err)
	}
	if err := away.k.Arrived(t.Context(), web); !errors.Is(err, cards.ErrRefused) || away.parts() != 0 {
		t.Errorf("it may run without its part: %v, %d parts", err, away.parts())
	}
	d.Make()
	if err := away.k.Arrived(t.Context(), web); err != nil || away.parts() != 1 {
		t.Errorf("its part is not there: %v, %d parts", err, away.parts())
	}
	away.runs(9)
	home.leaves()
	if err := away.k.TakeParts(t.Context(), web, "m-1", far{home}); err != nil || home.vm.astray {
		t.Errorf("taken: %v", err)
	}
	if err := away.k.Arrived(t.Context(), web); err != nil {
		t.Errorf("a VM that runs: %v", err)
	}
}

// TestProcessThatDiesWhileItsVMWaits has answered accesses with ones, so the contents that the
// other host still has are not the VM's any more.
func TestProcessThatDiesWhileItsVMWaits(t *testing.T) {
	home, away, _ := pair(t, 5)
	home.parks(t, away)
	away.arrives(9)
	home.leaves()
	away.dies()
	home.vm.astray = true
	if err := away.k.TakeParts(t.Context(), web, "m-1", far{home}); !errors.Is(err, cards.ErrRefused) {
		t.Errorf("taken: %v", err)
	}
	parts, err := away.k.ParkParts(t.Context(), web, "m-1")
	if err != nil || !parts[0].GetLost() {
		t.Fatalf("parked: %v, %v", parts, err)
	}
	if err := home.k.ExpectParts(t.Context(), web, "m-1", parts); err != nil || !saidIn(home.events, "PartLost") {
		t.Errorf("expected at home: %v, %v", err, home.events)
	}
	away.leaves()
}
