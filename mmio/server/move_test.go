package server

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/mmiotest"
	"github.com/gpuctl/gpuctl/mmio/pciconf"
	"github.com/gpuctl/gpuctl/mmio/xen"
)

const owner = "8f9c9f2e-0000-4000-8000-000000000001"

func owned(id string, domain uint16) Part {
	p := partOf(id, domain)
	p.Owner = owner
	return p
}

// window writes or reads a word of a part's memory through PRAMIN.
func (f function) poke(w uint64) {
	f.Write(mmio.Access{BAR: 0, Size: 4, Offset: 0x1700, Data: 0x30})
	f.Write(mmio.Access{BAR: 0, Size: 8, Offset: 0x700100, Data: w})
}

func (f function) peek() uint64 { return f.Read(mmio.Access{BAR: 0, Size: 8, Offset: 0x700100}) }

// park parks a part and saves it.
func (r *rig) park(id string) (config, state []byte) {
	r.t.Helper()
	config, err := r.client.Park(r.t.Context(), id)
	if err != nil {
		r.t.Fatal(err)
	}
	var b bytes.Buffer
	if err := r.client.Save(r.t.Context(), id, &b); err != nil {
		r.t.Fatal(err)
	}
	return config, b.Bytes()
}

// await gives a domain a part that awaits its contents.
func (r *rig) await(p Part, config []byte) {
	r.t.Helper()
	p.Await, p.Config = true, config
	r.attach(p)
}

func (r *rig) seal(id string) string {
	for _, s := range r.list() {
		if s.ID == id {
			return s.Seal
		}
	}
	return ""
}

func (r *rig) state(id string) State {
	for _, s := range r.list() {
		if s.ID == id {
			return s.State
		}
	}
	return ""
}

// TestPartMovesToAnotherHost: the VM's function, memory and driver go on at the destination,
// where accesses wait until its contents are there.
func TestPartMovesToAnotherHost(t *testing.T) {
	home, away := newRig(t), newRig(t)
	home.start()
	away.start()
	d := home.xen.Domain(7, 1, 16)
	home.attach(owned("a", 7))
	f := plug(d, 0x1f)
	if err := mmiotest.Compute(f, 0, 1, 8, nil); err != nil {
		t.Fatal(err)
	}
	f.poke(0x1122334455667788)
	config, err := home.client.Park(t.Context(), "a")
	if err != nil || len(config) != pciconf.Size {
		t.Fatalf("parked: %v, %d bytes", err, len(config))
	}
	if v := f.peek(); v != 0x1122334455667788 || home.state("a") != Parked {
		t.Errorf("while it is parked, %s: read %#x", home.state("a"), v)
	}
	g := function{away.xen.Domain(9, 1, 16), 0x1f} // the firmware has run elsewhere
	away.await(owned("a", 9), config)
	if err := away.client.Resume(t.Context(), "a"); !errors.Is(err, ErrRefused) {
		t.Errorf("resumed without contents: %v", err)
	}
	got := make(chan uint64)
	go func() { got <- g.peek() }()
	testkit.Parked(t, "xentest.(*Domain).Ask", 1)
	home.park("a")
	old := home.seal("a")
	if err := home.client.Resume(t.Context(), "a"); err != nil { // nothing was given: it goes on at home
		t.Fatal(err)
	}
	_, state := home.park("a")
	if home.state("a") != Sealed {
		t.Errorf("saved, and it is %s", home.state("a"))
	}
	for range 2 {
		if err := away.client.Restore(t.Context(), "a", bytes.NewReader(state)); err != nil {
			t.Fatal(err)
		}
	}
	if err := home.client.Give(t.Context(), "a", old); !errors.Is(err, ErrRefused) || old == "" {
		t.Errorf("given with contents that were used here since: %v", err)
	}
	for range 2 {
		if err := home.client.Give(t.Context(), "a", away.seal("a")); err != nil {
			t.Fatal(err)
		}
	}
	if err := home.client.Resume(t.Context(), "a"); !errors.Is(err, ErrGiven) {
		t.Errorf("resumed what was given: %v", err)
	}
	if err := home.client.Save(t.Context(), "a", io.Discard); !errors.Is(err, ErrGiven) {
		t.Errorf("saved what was given: %v", err)
	}
	for range 2 {
		if err := away.client.Resume(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
	}
	if v := <-got; v != 0x1122334455667788 {
		t.Errorf("the access that has waited reads %#x", v)
	}
	if err := mmiotest.Compute(g, 0, 2, 8, nil); err != nil {
		t.Errorf("at the destination: %v", err)
	}
	if err := away.client.Restore(t.Context(), "a", bytes.NewReader(state)); !errors.Is(err, ErrRefused) {
		t.Errorf("restored while it works: %v", err)
	}
	home.detach("a")
	away.detach("a")
}

// TestCommandsOfAParkedPartRunAtTheDestination, and none of them before.
func TestCommandsOfAParkedPartRunAtTheDestination(t *testing.T) {
	home, away := newRig(t), newRig(t)
	home.start()
	away.start()
	d := home.xen.Domain(7, 1, 16)
	home.attach(owned("a", 7))
	f := plug(d, 0x1f)
	there := &moving{at: f}
	done, parked := make(chan error, 1), make(chan struct{})
	polls := 0
	go func() {
		done <- mmiotest.Compute(there, 0, 3, 8, func() { // called while the driver polls for a command
			if polls++; polls == 200 {
				close(parked)
			}
		})
	}()
	if _, err := home.client.Park(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	<-parked
	there.mu.Lock() // the VM is suspended, and goes on elsewhere
	config, state := home.park("a")
	there.at = function{away.xen.Domain(9, 1, 16), 0x1f}
	away.await(owned("a", 9), config)
	there.mu.Unlock()
	if err := away.client.Restore(t.Context(), "a", iotest.HalfReader(bytes.NewReader(state))); err != nil {
		t.Fatal(err)
	}
	if err := home.client.Give(t.Context(), "a", away.seal("a")); err != nil {
		t.Fatal(err)
	}
	if err := away.client.Resume(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("the driver: %v", err)
	}
	home.detach("a")
	away.detach("a")
}

// TestContentsOfAnotherAreRefused: another VM's, of another size, of BARs elsewhere, cut, damaged.
// The part awaits those that are right.
func TestContentsOfAnotherAreRefused(t *testing.T) {
	r := newRig(t)
	r.start()
	d := r.xen.Domain(7, 1, 16)
	r.attach(owned("a", 7))
	plug(d, 0x1f).poke(5)
	config, state := r.park("a")
	b := owned("b", 8)
	g := function{r.xen.Domain(8, 1, 16), 0x1f}
	r.await(b, config)
	head := func(change func(*header)) []byte {
		in := bytes.NewReader(state)
		h, err := decodeHeader(in)
		if err != nil {
			t.Fatal(err)
		}
		change(&h)
		var out bytes.Buffer
		if err := encodeHeader(&out, h); err != nil {
			t.Fatal(err)
		}
		rest, _ := io.ReadAll(in)
		return append(out.Bytes(), rest...)
	}
	damaged := bytes.Clone(state)
	damaged[len(damaged)-50] ^= 1
	for name, s := range map[string][]byte{
		"nothing":           nil,
		"of another VM":     head(func(h *header) { h.Owner = "another" }),
		"larger":            head(func(h *header) { h.Memory *= 2 }),
		"of other channels": head(func(h *header) { h.Channels++ }),
		"of another mode":   head(func(h *header) { h.Mode = "para" }),
		"of a later time":   head(func(h *header) { h.Version++ }),
		"with moved BARs":   head(func(h *header) { h.Config[0x13] ^= 0x10 }),
		"of another card":   head(func(h *header) { h.Config[0] ^= 1 }),
		"cut":               state[:len(state)-1],
		"cut to its header": state[:500],
		"damaged":           damaged,
	} {
		if err := r.client.Restore(t.Context(), "b", bytes.NewReader(s)); !errors.Is(err, ErrState) {
			t.Errorf("%s: %v", name, err)
		}
		if r.state("b") != Awaiting {
			t.Fatalf("%s: it is %s", name, r.state("b"))
		}
	}
	if err := r.client.Restore(t.Context(), "b", io.MultiReader(bytes.NewReader(state[:1000]), iotest.ErrReader(errors.New("the source is gone")))); err == nil {
		t.Error("contents of which the source was lost were restored")
	}
	if err := r.client.Restore(t.Context(), "b", bytes.NewReader(state)); err != nil {
		t.Fatal(err)
	}
	if err := r.client.Give(t.Context(), "a", r.seal("a")); err != nil {
		t.Fatal(err)
	}
	if err := r.client.Resume(t.Context(), "b"); err != nil {
		t.Fatal(err)
	}
	if v := g.peek(); v != 5 {
		t.Errorf("read %#x", v)
	}
	r.detach("a")
	r.detach("b")
}

// TestPartThatAwaitsIsEnded: what waits for contents that never come reads ones, when the part is
// taken back and when the process dies.
func TestPartThatAwaitsIsEnded(t *testing.T) {
	r := newRig(t)
	first := r.start()
	d := r.xen.Domain(7, 1, 16)
	r.attach(owned("a", 7))
	plug(d, 0x1f)
	config, _ := r.park("a")
	r.detach("a")
	for _, end := range []func(){
		func() { r.detach("b") },
		func() {
			first.of.Kill()
			first.stop()
			r.start()
		},
	} {
		g := function{r.xen.Domain(8, 1, 16), 0x1f}
		r.await(owned("b", 8), config)
		got := make(chan uint64)
		go func() { got <- g.peek() }()
		testkit.Parked(t, "xentest.(*Domain).Ask", 1)
		end()
		if v := <-got; v != ^uint64(0) {
			t.Errorf("read %#x", v)
		}
	}
	if l := r.list(); len(l) != 1 || l[0].Lost == "" {
		t.Errorf("parts %+v", l)
	}
	if err := r.client.Resume(t.Context(), "b"); !errors.Is(err, ErrRefused) {
		t.Errorf("resumed what is lost: %v", err)
	}
	r.detach("b")
}

// ending is a hypervisor whose domain ends when it is to have its interrupt pin set.
type ending struct {
	xen.Hypervisor
	ended atomic.Bool
}

func (e *ending) DeviceOp(domain uint16, op, more []byte) error {
	const level = 8
	if binary.LittleEndian.Uint32(op) == level {
		e.ended.Store(true)
	}
	if e.ended.Load() {
		return unix.ESRCH
	}
	return e.Hypervisor.DeviceOp(domain, op, more)
}

// TestDomainThatEndsAsItGetsAPartIsLetGo: a page of it that stays mapped would keep it, as a
// zombie with the VM's UUID. The hypervisor of the test says at its end what is mapped still.
func TestDomainThatEndsAsItGetsAPartIsLetGo(t *testing.T) {
	r := newRig(t)
	var hv *ending
	r.over = func(h xen.Hypervisor) xen.Hypervisor {
		hv = &ending{Hypervisor: h}
		return hv
	}
	r.start()
	d := r.xen.Domain(7, 1, 16)
	r.attach(owned("a", 7))
	plug(d, 0x1f)
	config, err := r.client.Park(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	r.xen.Domain(8, 1, 16)
	p := owned("b", 8)
	p.Await, p.Config = true, config
	if err := r.client.Attach(t.Context(), p); err == nil || !hv.ended.Load() {
		t.Errorf("a part for a domain that has ended: %v", err)
	}
	hv.ended.Store(false)
	r.detach("a")
}

// TestOneOperationOnAPartAtATime: while contents are sent, nothing else is done with the part, and
// others are.
func TestOneOperationOnAPartAtATime(t *testing.T) {
	r := newRig(t)
	r.start()
	d := r.xen.Domain(7, 1, 16)
	r.attach(owned("a", 7))
	f := plug(d, 0x1f)
	for i := range uint64(0x400) { // more than a socket has room for
		f.Write(mmio.Access{BAR: 0, Size: 4, Offset: 0x1700, Data: i >> 4})
		f.Write(mmio.Access{BAR: 0, Size: 8, Offset: 0x700000 + i&0xf<<12, Data: i + 1})
	}
	if _, err := r.client.Park(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	in, out := io.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- r.client.Save(ctx, "a", out) }()
	if _, err := io.ReadFull(in, make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{
		"detach": r.client.Detach(t.Context(), "a"), "give": r.client.Give(t.Context(), "a", r.seal("a")),
		"resume": r.client.Resume(t.Context(), "a"), "save": r.client.Save(t.Context(), "a", io.Discard),
	} {
		if !errors.Is(err, ErrAgain) { // not ErrRefused: what is refused is taken for lost
			t.Errorf("%s: %v", name, err)
		}
	}
	r.xen.Domain(8, 1, 16)
	r.attach(owned("b", 8))
	cancel()
	in.Close()
	if err := <-ended; err == nil {
		t.Error("contents that nobody has read were saved")
	}
	testkit.Until(t, "the part can be used again", func() error { return r.client.Resume(t.Context(), "a") })
	if v := f.Read(mmio.Access{BAR: 0, Size: 8, Offset: 0x700000}); v == 0 {
		t.Errorf("read %#x", v)
	}
	r.detach("a")
	r.detach("b")
}

func FuzzContents(f *testing.F) {
	var b bytes.Buffer
	h := header{Version: stateVersion, Owner: owner, Memory: 4 << 20, Channels: 32, Mode: "lazy", Config: make([]byte, pciconf.Size)}
	if err := encodeHeader(&b, h); err != nil {
		f.Fatal(err)
	}
	var framed bytes.Buffer
	w := &chunks{to: &framed}
	_, _ = w.Write(b.Bytes())
	_ = w.close()
	f.Add(framed.Bytes())
	f.Add(b.Bytes())
	f.Add(binary.LittleEndian.AppendUint32(nil, maxChunk+1))
	f.Add(append(binary.LittleEndian.AppendUint32(nil, 18), strings.Repeat("x", 18)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, from := range []io.Reader{bytes.NewReader(b), &unchunk{from: bytes.NewReader(b)}} {
			h, err := decodeHeader(from)
			if err != nil {
				if !errors.Is(err, ErrState) {
					t.Fatal(err)
				}
				continue
			}
			var again bytes.Buffer
			if err := encodeHeader(&again, h); err != nil {
				t.Fatal(err)
			}
			if o, err := decodeHeader(&again); err != nil || o.Owner != h.Owner || !bytes.Equal(o.Config, h.Config) {
				t.Fatalf("%+v became %+v, %v", h, o, err)
			}
		}
		n, err := io.Copy(io.Discard, &unchunk{from: bytes.NewReader(b)})
		if n > int64(len(b)) || err != nil && !errors.Is(err, ErrState) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("%d bytes, %v", n, err)
		}
	})
}

// moving is the function of a VM that moves: its accesses go where it is.
type moving struct {
	mu sync.Mutex
	at function
}

func (m *moving) Read(a mmio.Access) uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.at.Read(a)
}

func (m *moving) Write(a mmio.Access) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.at.Write(a)
}
