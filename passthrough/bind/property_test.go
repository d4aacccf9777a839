package bind_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/gpuctl/gpuctl/passthrough/bind"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
)

// world is a machine, the process that binds, guests, and bad luck.
type world struct {
	*rig
	t       *rapid.T
	ctx     context.Context
	cards   [][]pci.Address
	initial map[string]where
	native  map[pci.Address]where
	release []func() // of hung writes
	refused []refusal
}

type refusal struct {
	driver string
	a      pci.Address
}

// Whatever happens, in whatever order: no function has two owners, none is
// torn from a guest, a take is whole or nothing, the journal knows where every
// function that is away belongs, and in the end all are there.
func TestAnySequence(t *testing.T) {
	top := fastDir(t)
	rapid.Check(t, func(rt *rapid.T) { anySequence(t.Context(), rt, top) })
}

func anySequence(ctx context.Context, t *rapid.T, top string) {
	dir, err := os.MkdirTemp(top, "")
	if err != nil {
		t.Fatal(err)
	}
	w := &world{
		rig:   &rig{t: t, machine: newMachine(), dir: dir, options: []bind.Option{bind.WithPatience(time.Minute, time.Millisecond)}},
		t:     t,
		ctx:   ctx,
		cards: [][]pci.Address{gpuCard, amdCard, list(pf)},
	}
	w.machine.Hasty()
	w.start()
	defer func() { w.journal.Close() }()
	w.initial = places(w.machine)
	w.native = map[pci.Address]where{}
	for _, c := range w.cards {
		for _, a := range c {
			w.native[a] = w.initial[a.String()]
		}
	}
	t.Repeat(map[string]func(*rapid.T){
		"take":     w.take,
		"return":   w.giveBack,
		"crash":    w.crash,
		"fail":     w.fail,
		"hang":     w.hang,
		"release":  func(*rapid.T) { w.letGo() },
		"refuse":   w.refuse,
		"allow":    func(*rapid.T) { w.allow() },
		"guest":    w.guest,
		"shutdown": w.shutdown,
		"recover":  func(*rapid.T) { w.recover() },
		"reboot":   w.reboot,
		"replug":   w.replug,
		"":         func(*rapid.T) { w.check() },
	})
	w.end()
}

func (w *world) card(t *rapid.T) []pci.Address {
	return rapid.SampledFrom(w.cards).Draw(t, "card")
}

func (w *world) take(t *rapid.T) {
	card := w.card(t)
	if rapid.Bool().Draw(t, "two") {
		card = append(slices.Clone(card), w.card(t)...)
	}
	driver := rapid.SampledFrom([]string{bind.XenPciback, bind.VFIOPCI}).Draw(t, "driver")
	before := places(w.machine)
	err := w.Take(w.ctx, card, driver)
	if w.machine.Crashed() {
		w.after()
		return
	}
	if err == nil {
		bound := map[string]string{bind.XenPciback: "pciback", bind.VFIOPCI: "vfio-pci"}[driver]
		for _, a := range card {
			if r, ok := w.journal.Record(a); w.machine.Driver(a) != bound || w.machine.Override(a) != bound || !ok || r.Phase != bind.Held || r.Driver != bound {
				t.Fatalf("%s is taken and bound to %q: %+v", a, w.machine.Driver(a), r)
			}
		}
		return
	}
	t.Logf("take: %v", err)
	// What could not be undone says so in the journal.
	if slices.ContainsFunc(w.journal.Records(), func(r bind.Record) bool { return r.Phase == bind.Taking }) {
		return
	}
	for _, a := range card {
		was, now := before[a.String()], where{w.machine.Driver(a), w.machine.Override(a)}
		// An override that was lost while its driver stayed is set again.
		if now != was && now != (where{was.Driver, was.Driver}) {
			t.Fatalf("%s was at %+v, and after a take that failed is at %+v: %v", a, was, now, err)
		}
	}
}

func (w *world) giveBack(t *rapid.T) {
	card := w.card(t)
	err := w.Return(w.ctx, card)
	if w.machine.Crashed() {
		w.after()
		return
	}
	for _, a := range card {
		r, ok := w.journal.Record(a)
		if err == nil && ok {
			t.Fatalf("%s is returned and recorded: %+v", a, r)
		}
	}
	if err != nil {
		t.Logf("return: %v", err)
	}
}

func (w *world) crash(t *rapid.T) {
	n := rapid.IntRange(1, 16).Draw(t, "write")
	if rapid.Bool().Draw(t, "before") {
		w.machine.CrashBefore(n)
	} else {
		w.machine.CrashAfter(n)
	}
}

func (w *world) fail(t *rapid.T) {
	w.machine.FailWrite(rapid.IntRange(1, 16).Draw(t, "write"), rapid.SampledFrom([]error{syscall.EIO, syscall.ENODEV, syscall.EBUSY, syscall.ENOMEM}).Draw(t, "error"))
}

func (w *world) hang(t *rapid.T) {
	w.release = append(w.release, w.machine.HangWrite(rapid.IntRange(1, 16).Draw(t, "write")))
}

func (w *world) letGo() {
	for _, f := range w.release {
		f()
	}
	w.release = nil
}

func (w *world) refuse(t *rapid.T) {
	r := refusal{
		rapid.SampledFrom([]string{"pciback", "vfio-pci", "nvidia", "amdgpu", "snd_hda_intel"}).Draw(t, "driver"),
		rapid.SampledFrom(w.card(t)).Draw(t, "function"),
	}
	w.machine.RefuseProbe(r.driver, r.a, syscall.ENXIO)
	w.refused = append(w.refused, r)
}

func (w *world) allow() {
	for _, r := range w.refused {
		w.machine.RefuseProbe(r.driver, r.a, nil)
	}
	w.refused = nil
}

// guest starts a guest with a card that is held for it.
func (w *world) guest(t *rapid.T) {
	card := w.card(t)
	for _, a := range card {
		if r, ok := w.journal.Record(a); !ok || r.Phase != bind.Held || w.machine.Driver(a) != r.Driver || w.machine.Guest(a) != "" {
			return
		}
	}
	for _, a := range card {
		if err := w.machine.Give(a, "vm"); err != nil {
			t.Fatal(err)
		}
	}
}

func (w *world) shutdown(t *rapid.T) {
	for _, a := range w.card(t) {
		w.machine.TakeBack(a)
	}
}

// after is what follows a crash. A process does not end, and with it its lock
// of the journal, before the kernel returns from its writes.
func (w *world) after() {
	w.letGo()
	w.restart()
	w.recover()
}

func (w *world) recover() {
	calm := w.calm()
	got, err := w.Recover(w.ctx)
	if w.machine.Crashed() {
		w.after()
		return
	}
	for _, g := range got {
		r, ok := w.journal.Record(g.Function)
		switch g.Outcome {
		case bind.Kept, bind.Failed, bind.Missing:
			if !ok {
				w.t.Fatalf("%+v, and no record", g)
			}
		default:
			if ok && r.Phase != bind.Held {
				w.t.Fatalf("%+v, and %+v", g, r)
			}
		}
	}
	if err != nil && calm {
		w.t.Fatalf("nothing is in the way, and yet: %v", err)
	}
	for _, c := range w.cards {
		held := 0
		for _, a := range c {
			if r, ok := w.journal.Record(a); ok && r.Phase == bind.Held && r.Driver == w.machine.Driver(a) {
				held++
			}
		}
		if err == nil && held != 0 && held != len(c) {
			w.t.Fatalf("a card has two owners: %v", got)
		}
	}
}

// calm says that nothing is in the way of anything.
func (w *world) calm() bool {
	return len(w.release)+len(w.refused) == 0 && w.machine.Faults() == 0 && !slices.ContainsFunc(w.cards, func(c []pci.Address) bool {
		return slices.ContainsFunc(c, func(a pci.Address) bool { return w.machine.Guest(a) != "" })
	})
}

func (w *world) reboot(*rapid.T) {
	w.allow()
	w.letGo()
	w.machine.Reboot()
	w.after()
}

// replug pulls a card that no guest has and puts it back.
func (w *world) replug(t *rapid.T) {
	card := w.card(t)
	if slices.ContainsFunc(card, func(a pci.Address) bool { return w.machine.Guest(a) != "" }) {
		return
	}
	w.allow()
	w.letGo()
	for _, a := range card {
		w.machine.Unplug(a)
	}
	for _, a := range card {
		w.machine.Plug(a)
	}
}

func (w *world) check() {
	if w.machine.Crashed() {
		w.after()
	}
	w.sound()
	for _, c := range w.cards {
		for _, a := range c {
			now := where{w.machine.Driver(a), w.machine.Override(a)}
			r, ok := w.journal.Record(a)
			native := w.native[a]
			if ok && (r.Native != native.Driver || r.Override != native.Override || r.Slot) {
				w.t.Fatalf("%s belongs to %+v, and the journal says %+v", a, native, r)
			}
			if !ok && now != native {
				w.t.Fatalf("%s is at %+v, belongs to %+v, and nobody knows", a, now, native)
			}
		}
	}
}

// end lets go of everything: all returns to where it was.
func (w *world) end() {
	w.allow()
	w.letGo()
	w.machine.Restart() // no more faults
	for _, c := range w.cards {
		for _, a := range c {
			w.machine.TakeBack(a)
		}
	}
	w.recover()
	for _, c := range w.cards {
		if err := w.Return(w.ctx, c); err != nil && !errors.Is(err, sysfs.ErrStuck) {
			w.t.Fatal(err)
		}
	}
	w.same(w.initial)
	if left := w.journal.Records(); len(left) > 0 {
		w.t.Fatalf("left %+v", left)
	}
	w.sound()
}
