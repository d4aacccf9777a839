package mediate

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

// watched is hardware whose loads and stores are watched.
type watched struct {
	Hardware
	loaded int
	stored func(on nvc0.Owner, at HostPA, n int)
}

func (w *watched) Load(on nvc0.Owner, at HostPA, p []byte) {
	w.loaded += len(p)
	w.Hardware.Load(on, at, p)
}

func (w *watched) Store(on nvc0.Owner, at HostPA, p []byte) {
	if w.stored != nil {
		w.stored(on, at, len(p))
	}
	w.Hardware.Store(on, at, p)
}

func watch(w *watched) rigOption {
	return func(c *Config) { w.Hardware, c.Hardware = c.Hardware, w }
}

// bindSpaces gives each of a VM's four channels a directory of its own, with a table of small pages
// each, and returns the address of the first directory. They are 64 KiB apart.
func bindSpaces(r *rig) (first uint64) {
	first = 0x100000
	for i := range uint64(4) {
		pd, inst := first+i<<16, 0x8000+i<<12
		r.poke(1, pd+8*i, uint64(nvc0.MakePDE(0, 0x200000, 0)))
		r.poke(1, inst+nvc0.InstDirectory, pd|1)
		r.poke(1, inst+nvc0.InstLimit, 1<<40-1)
		r.set(1, nvc0.RegChannel+8*uint32(i), nvc0.ChannelValid|uint32(inst>>12))
	}
	return first
}

// TestFlushOfAllSpacesIsBounded is P7 for several spaces: they share what an exit may look at.
func TestFlushOfAllSpacesIsBounded(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Work = 512 })
	v := r.add(1, Eager, func(q *Request) { q.Tables = 1024 })
	bindSpaces(r)
	if len(v.spaces) != 4 {
		t.Fatalf("%d spaces", len(v.spaces))
	}
	r.settle()
	before := v.Stats().Total()
	r.set(1, nvc0.RegTLBTrigger, 1<<31|nvc0.TLBAllSpaces)
	after := v.Stats().Total()
	if n := after.Entries - before.Entries; n > 512+chunk || after.Scans-before.Scans != 4 {
		t.Errorf("a flush looked at %d entries in %d scans", n, after.Scans-before.Scans)
	}
	r.settle()
	if n := v.Stats().Total().Entries - before.Entries; n < 4*nvc0.SmallEntries || v.unread() {
		t.Errorf("%d entries were looked at in the end", n)
	}
}

// TestDirectoryOfRefusedTablesIsReadOnce: its pages are not read again for each entry.
func TestDirectoryOfRefusedTablesIsReadOnce(t *testing.T) {
	w := &watched{}
	r := newRig(t, watch(w))
	v := r.add(1, Eager)
	pd := bindSpaces(r)
	for i := range uint64(nvc0.DirectoryLen) {
		r.poke(1, pd+8*i, uint64(nvc0.MakePDE(0, 0, 0))|1<<32|0xfffff<<36) // beyond the partition
	}
	r.settle()
	refused := r.refused(1, mmio.BadTable)
	r.set(1, nvc0.RegTLBSpace, uint32(pd>>8))
	w.loaded = 0
	r.set(1, nvc0.RegTLBTrigger, 1<<31)
	if n := r.refused(1, mmio.BadTable) - refused; n < nvc0.DirectoryLen/2 {
		t.Fatalf("%d tables were refused", n)
	}
	if most := 2 * nvc0.DirectorySize; w.loaded > most {
		t.Errorf("a flush read %d bytes of a directory of %d", w.loaded, nvc0.DirectorySize)
	}
	r.settle()
	if v.unread() {
		t.Error("the scan does not end")
	}
}

// TestScrubOfAVGPULetsOthersGoOn: another VM's access is done while one's memory is cleared.
func TestScrubOfAVGPULetsOthersGoOn(t *testing.T) {
	w := &watched{}
	r := newRig(t, watch(w))
	v := r.add(1, Lazy, func(q *Request) { q.Memory = 16 * mib })
	r.add(2, Lazy)
	for name, do := range map[string]func() error{
		"reset":   func() error { r.gpu.Reset(1); return nil },
		"destroy": func() error { return r.gpu.Destroy(1) },
	} {
		if r.gpu.vgpus[1] == nil {
			v = r.add(1, Lazy, func(q *Request) { q.Memory = 16 * mib })
		}
		var asks, done chan struct{}
		between := false
		w.stored = func(on nvc0.Owner, _ HostPA, n int) {
			switch {
			case on != v.owner || n != megabyte:
			case asks == nil:
				asks, done = make(chan struct{}), make(chan struct{})
				go func(asks, done chan struct{}) {
					close(asks)
					r.get(2, 0)
					close(done)
				}(asks, done)
			default:
				<-asks
				select {
				case <-done:
					between = true
				case <-time.After(2 * time.Millisecond): // who waits so long is next when the GPU is unlocked
				}
			}
		}
		if err := do(); err != nil {
			t.Fatal(err)
		}
		w.stored = nil
		<-done
		if !between {
			t.Errorf("%s: another VM's access waited to its end", name)
		}
	}
}

// TestVGPUThatIsBeingResetIsNotReached, nor made a second time.
func TestVGPUThatIsBeingResetIsNotReached(t *testing.T) {
	w := &watched{}
	r := newRig(t, watch(w))
	v := r.add(1, Lazy)
	r.poke(1, 0, secret)
	checked := false
	w.stored = func(on nvc0.Owner, _ HostPA, n int) {
		if on == v.owner && n == megabyte && !checked {
			checked = true
			r.gpu.mu.Unlock() // as it is between two pieces
			defer r.gpu.mu.Lock()
			if w := r.gpu.Read(mmio.Access{VM: 1, Size: 4, Offset: 0x700000}); w != 0xffffffff {
				t.Errorf("read %#x during a reset", w)
			}
			if _, err := r.gpu.Create(Request{VM: 1, Memory: mib, Channels: 1, Mode: Lazy, Tables: 64, Guest: r.guests[1]}); !errors.Is(err, ErrExists) {
				t.Errorf("made again during a reset: %v", err)
			}
		}
	}
	r.gpu.Reset(1)
	if w := r.peek(1, 0); !checked || w != 0 {
		t.Errorf("read %#x after a reset", w)
	}
}

// TestRecordIsNoLongerThanItsVGPUCanHave: what a state claims to have takes no memory before it
// was compared with what the VM may have.
func TestRecordIsNoLongerThanItsVGPUCanHave(t *testing.T) {
	for _, mode := range everyMode {
		r := newRig(t)
		head := binary.LittleEndian.AppendUint32([]byte(stateMagic), 32<<20)
		in := &endless{head: head}
		_, err := r.gpu.Restore(Request{VM: 1, Memory: mib, Channels: 2, Mode: mode, Tables: 64, Guest: &guest{bytes: make([]byte, 4096)}}, in)
		if !errors.Is(err, ErrState) || in.read > len(head) {
			t.Errorf("%s: %v, and %d bytes were read", mode, err, in.read)
		}
	}
	// A record of which each field is an array of as many of the smallest entries as there can be.
	small := append([]byte{0x9a, 0, 0, 0x7f, 0xff}, bytes.Repeat([]byte{0x80}, 0x7fff)...)
	text := append([]byte{0x8b, 0, 0, 0x60, 0xa0, 0x80, 0x80, 0, 0xf4, 0x80}, small...)
	text = append(text, 0x80)
	state := binary.LittleEndian.AppendUint32([]byte(stateMagic), uint32(len(text)))
	state = append(append(state, text...), 0xff, 0xff, 0xff, 0xff)
	if err := tryRestore(t, Para, reseal(append(state, make([]byte, 32)...))); !errors.Is(err, ErrState) {
		t.Errorf("entries without fields: %v", err)
	}
}

// endless is a stream that never ends.
type endless struct {
	head []byte
	read int
}

func (e *endless) Read(p []byte) (int, error) {
	n := copy(p, e.head[min(e.read, len(e.head)):])
	if n == 0 {
		n = len(p)
	}
	e.read += n
	return n, nil
}
