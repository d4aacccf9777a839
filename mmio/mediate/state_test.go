package mediate

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/fxamacker/cbor/v2"

	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/guestdriver"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

// save pauses and saves VM 1.
func (r *rig) save() []byte {
	r.t.Helper()
	if err := r.gpu.Pause(1); err != nil {
		r.t.Fatalf("%v", err)
	}
	var b bytes.Buffer
	for range 1 << 20 {
		err := r.gpu.Save(1, &b)
		if err == nil {
			return b.Bytes()
		}
		if !errors.Is(err, ErrBusy) {
			r.t.Fatalf("%v", err)
		}
		r.tick()
	}
	r.t.Fatalf("never at rest")
	return nil
}

// moving is a device whose rig changes under the driver.
type moving struct{ r *rig }

func (m *moving) Read(a mmio.Access) uint64 { return m.r.router.Read(a) }
func (m *moving) Write(a mmio.Access)       { m.r.router.Write(a) }

// moved restores VM 1 in another rig, where other VMs were before, so that all
// addresses of the hardware are others.
func moved(t fataler, r *rig, mode Mode, state []byte) *rig {
	t.Helper()
	to := newRig(t)
	to.add(8, Eager)
	to.open(8)
	to.add(9, Lazy, func(q *Request) { q.Memory, q.Channels = 2*mib, 7 })
	q := Request{VM: 1, Name: "vm1", Memory: 4 * mib, Channels: 4, Mode: mode, Tables: 256, Guest: r.guests[1]}
	v, err := to.gpu.Restore(q, bytes.NewReader(state))
	if err != nil {
		t.Fatalf("restore: %v", err)
	}
	to.guests[1] = r.guests[1]
	if err := to.router.Attach(1, to.gpu, to.gpu.Function(), v.Stats()); err != nil {
		t.Fatalf("%v", err)
	}
	to.clock = 7 * sec
	if err := to.gpu.Resume(1); err != nil {
		t.Fatalf("resume: %v", err)
	}
	return to
}

// TestMovedVGPUGoesOnWithWhatItHad is P11: commands that were waiting run on the destination,
// the driver goes on there, and its results are right.
func TestMovedVGPUGoesOnWithWhatItHad(t *testing.T) {
	for _, mode := range everyMode {
		t.Run(string(mode), func(t *testing.T) {
			r := newRig(t)
			r.add(2, Eager)
			v := r.add(1, mode)
			m := &moving{r}
			d := r.open(1, func(o *guestdriver.Options) {
				o.Device = m
				o.Idle = func() { m.r.tick() }
			})
			work(t, d, 3)
			a, err := d.Alloc(4096)
			if err != nil {
				t.Fatal(err)
			}
			for i := range uint32(3) { // one runs, two wait
				if err := d.LaunchNext(nvc0.KernelFill, a, a, a, 40+i, 64); err != nil {
					t.Fatal(err)
				}
			}
			if len(v.ready)+len(v.waiting) == 0 {
				t.Fatal("nothing waits")
			}
			before := r.get(1, 0x2100)
			m.r = moved(t, r, mode, r.save())
			if err := r.gpu.Destroy(1); err != nil {
				t.Fatal(err)
			}
			if w := m.r.get(1, 0x2100); w != before {
				t.Errorf("PFIFO_INTR is %#x, was %#x", w, before)
			}
			if err := d.Wait(); err != nil {
				t.Fatal(err)
			}
			if w := d.Read(a, 2); w[0] != 42 || w[1] != 43 {
				t.Errorf("the waiting commands left %v", w)
			}
			work(t, d, 9)
			second := moved(t, m.r, mode, m.r.save()) // and once more
			m.r = second
			work(t, d, 11)
			if err := d.Close(); err != nil {
				t.Fatal(err)
			}
			if n := second.hw.Violations() + r.hw.Violations(); n != 0 {
				t.Errorf("%d violations", n)
			}
		})
	}
}

// TestSavedStateSaysNothingOfTheHost: the same VM elsewhere on a GPU has the same state.
func TestSavedStateSaysNothingOfTheHost(t *testing.T) {
	var states [2][]byte
	for i := range states {
		r := newRig(t)
		if i == 1 {
			r.add(5, Eager)
			r.add(6, Lazy)
		}
		r.add(1, Para)
		d := r.open(1)
		work(t, d, 3)
		r.settle()
		r.gpu.vgpus[1].epoch = r.clock
		states[i] = r.save()
	}
	if !bytes.Equal(states[0], states[1]) {
		t.Error("they differ")
	}
}

func TestPausedVGPURunsNothingAndLosesNothing(t *testing.T) {
	r, a, _ := stage(t, Lazy)
	d := r.open(1)
	r.settle()
	if err := r.gpu.Save(1, &bytes.Buffer{}); !errors.Is(err, ErrBusy) {
		t.Errorf("saved while it runs: %v", err)
	}
	if err := r.gpu.Pause(1); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		if err := d.Submit(0); err != nil {
			t.Fatal(err)
		}
	}
	work(t, r.open(2), 3)
	if r.settle(); len(a.waiting) != 5 || d.Done() {
		t.Errorf("%d of 5 commands wait", len(a.waiting))
	}
	if err := r.gpu.Resume(1); err != nil {
		t.Fatal(err)
	}
	if err := d.Wait(); err != nil {
		t.Fatal(err)
	}
}

// saved is a small state to change.
func saved(t fataler, mode Mode) ([]byte, *rig) {
	r := newRig(t)
	r.add(1, mode, func(q *Request) { q.Memory = 2 * mib })
	d := r.open(1)
	if err := d.Wait(); err != nil {
		t.Fatalf("%v", err)
	}
	return r.save(), r
}

// reseal gives a changed state the sum that it needs to be looked at.
func reseal(state []byte) []byte {
	if len(state) < sha256.Size {
		return state
	}
	body := state[:len(state)-sha256.Size]
	sum := sha256.Sum256(body)
	return append(append([]byte(nil), body...), sum[:]...)
}

// beside returns a GPU, as small as it can be, with a VM that has a secret.
func beside(t fataler) *rig {
	r := newRigOf(t, 8*mib, 4*mib)
	r.add(2, Eager, func(q *Request) { q.Memory = 2 * mib })
	r.poke(2, 0, secret)
	return r
}

// tryRestore restores hostile bytes beside a VM with a secret.
func tryRestore(t fataler, mode Mode, state []byte) error {
	r := beside(t)
	err := r.tryRestore(mode, state)
	unharmed(t, r)
	return err
}

// tryRestore restores hostile bytes, lets the VM go on if it can, and ends it. Nothing of it is left.
func (r *rig) tryRestore(mode Mode, state []byte) error {
	r.t.Helper()
	before, channels, tables := r.gpu.Free()
	q := Request{VM: 1, Name: "vm1", Memory: 2 * mib, Channels: 4, Mode: mode, Tables: 256, Guest: &guest{bytes: make([]byte, mib)}}
	_, err := r.gpu.Restore(q, bytes.NewReader(state))
	if err == nil {
		if err := r.gpu.Resume(1); err != nil {
			r.t.Errorf("%v", err)
		}
		for range 200 {
			r.tick()
		}
		r.sound()
		if err := r.gpu.Destroy(1); err != nil {
			r.t.Errorf("%v", err)
		}
	} else if !errors.Is(err, ErrState) {
		r.t.Errorf("%v", err)
	}
	if b, c, f := r.gpu.Free(); b != before || c != channels || f != tables {
		r.t.Errorf("%d bytes, %d channels and %d frames are free, were %d, %d and %d", b, c, f, before, channels, tables)
	}
	if w := r.peek(2, 0); w != secret {
		r.t.Errorf("the other VM's memory is %#x", w)
	}
	return err
}

func TestChangedStateIsRefused(t *testing.T) {
	state, _ := saved(t, Para)
	if err := tryRestore(t, Para, state); err != nil {
		t.Fatal(err)
	}
	page := append([]byte{3, 0, 0, 0}, make([]byte, nvc0.PageSize)...)
	twice := append(append(append([]byte(nil), state[:len(state)-36]...), page...), page...)
	for name, s := range map[string][]byte{
		"a page twice":  reseal(append(append(twice, 0xff, 0xff, 0xff, 0xff), make([]byte, 32)...)),
		"nothing":       nil,
		"another magic": append([]byte("x"), state[1:]...),
		"cut":           state[:len(state)-1],
		"half":          state[:len(state)/2],
		"another sum":   append(append([]byte(nil), state[:len(state)-1]...), state[len(state)-1]^1),
		"a changed bit": append(append(append([]byte(nil), state[:len(state)-100]...), state[len(state)-100]^1), state[len(state)-99:]...),
		"a huge record": append([]byte(stateMagic), 0xff, 0xff, 0xff, 0xff),
	} {
		if err := tryRestore(t, Para, s); !errors.Is(err, ErrState) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := tryRestore(t, Eager, state); !errors.Is(err, ErrState) {
		t.Errorf("another mode: %v", err)
	}
}

// TestHostileRecordIsRefused changes a record in ways that only somebody who makes sums can.
func TestHostileRecordIsRefused(t *testing.T) {
	_, r := saved(t, Para)
	v := r.gpu.vgpus[1]
	for name, change := range map[string]func(*record){
		"no such register":           func(r *record) { r.Plain[255] = []uint32{1} },
		"a longer register":          func(r *record) { r.Plain[9] = append(r.Plain[9], 1) },
		"too few values":             func(r *record) { r.Values = r.Values[1:] },
		"no faults":                  func(r *record) { r.Faults = nil },
		"a window elsewhere":         func(r *record) { r.Values[0] = 1 << 24 },
		"BAR1 elsewhere":             func(r *record) { r.Values[1] = 2 << 28 },
		"fewer channels":             func(r *record) { r.Chans = r.Chans[1:] },
		"an instance elsewhere":      func(r *record) { r.Chans[0].Value = 1<<31 | 0x0fffffff },
		"a short USERD page":         func(r *record) { r.Chans[0].Userd = r.Chans[0].Userd[1:] },
		"a channel's space":          func(r *record) { r.Chans[0].Space = 99 },
		"a command of no channel":    func(r *record) { r.Queue = append(r.Queue, [2]uint32{4, 0}) },
		"very many commands":         func(r *record) { r.Queue = make([][2]uint32, 5000) },
		"a directory's entry":        func(r *record) { r.Spaces[0].Tables[0].Index = nvc0.DirectoryLen },
		"a directory's entry below":  func(r *record) { r.Spaces[0].Tables[0].Index = -1 },
		"a table's size":             func(r *record) { r.Spaces[0].Tables[0].Size = 4 },
		"a longer table":             func(r *record) { r.Spaces[1].Tables[0].Small = append(r.Spaces[1].Tables[0].Small, 0) },
		"a foreign page":             func(r *record) { r.Spaces[1].Tables[0].Small[0] = uint64(nvc0.MakePTE(2*mib, 0, false)) },
		"a foreign large page":       func(r *record) { r.Spaces[0].Tables[0].Large[0] = uint64(nvc0.MakePTE(2*mib, 0, false)) },
		"the same space twice":       func(r *record) { r.Spaces = append(r.Spaces, r.Spaces[0]) },
		"more tables than the quota": func(r *record) { many(r) },
	} {
		rec := v.record()
		rec.Faults = append([]uint32(nil), rec.Faults...)
		change(&rec)
		if err := tryRestore(t, Para, encode(rec)); !errors.Is(err, ErrState) {
			t.Errorf("%s: %v", name, err)
		}
	}
	rec := v.record()
	rec.Chans[0].Position.Context.Subchannel = 77 // what is as wide as the hardware's is cut
	rec.Chans[0].Position.Context.Increments = 200
	rec.Chans[0].Position.Get = 0xffffffff
	if err := tryRestore(t, Para, encode(rec)); err != nil {
		t.Error(err)
	}
}

func many(r *record) {
	for i := range 200 {
		r.Spaces = append(r.Spaces, spaceRecord{Number: uint32(100 + i), Tables: []tableRecord{{Index: 1, Small: make([]uint64, nvc0.SmallEntries)}}})
	}
}

// encode is a state with a record and no memory.
func encode(r record) []byte {
	text, err := cbor.Marshal(r)
	if err != nil {
		panic(err)
	}
	state := binary.LittleEndian.AppendUint32([]byte(stateMagic), uint32(len(text)))
	state = binary.LittleEndian.AppendUint32(append(state, text...), endOfPages)
	return reseal(append(state, make([]byte, sha256.Size)...))
}

// FuzzRestore takes one mode for each input: a state of another mode is refused early. A GPU
// serves 256 inputs, as making it takes longer than all else.
func FuzzRestore(f *testing.F) {
	for i, mode := range everyMode {
		state, r := saved(f, mode)
		f.Add(uint8(i), state)
		f.Add(uint8(i), encode(r.gpu.vgpus[1].record()))
	}
	var r *rig
	inputs := 0
	f.Fuzz(func(t *testing.T, mode uint8, state []byte) {
		if inputs%256 == 0 {
			r = beside(t)
		}
		inputs++
		r.t = t
		_ = r.tryRestore(everyMode[int(mode)%len(everyMode)], reseal(state))
		if inputs%256 == 0 {
			unharmed(t, r)
		}
	})
}
