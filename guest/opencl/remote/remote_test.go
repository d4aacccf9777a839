package remote

import (
	"bytes"
	"errors"
	"net"
	"strings"
	"testing"

	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

const parts = wire.ArenaParts

func hello() Hello {
	return Hello{Carrier: [16]byte{1, 2}, ArenaSize: 128 << 30, ArenaSplit: 64 << 30, Part: 2, Generation: 7, Now: 99}
}

// ends are a carrier's and a far executor's identities, each with the other's hash.
func ends(t *testing.T) (*Dialer, *Acceptor) {
	t.Helper()
	a, err := NewIdentity("carrier")
	if err != nil {
		t.Fatal(err)
	}
	b, err := NewIdentity("far")
	if err != nil {
		t.Fatal(err)
	}
	return &Dialer{Token: Token{5}, Own: a, Peer: b.Hash(), Hello: hello()}, &Acceptor{Own: b, Peer: a.Hash(), Parts: parts}
}

// serve accepts one connection as a far host does, and returns what it has found.
func serve(t *testing.T, a *Acceptor, answer error) (addr string, result <-chan error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l.Addr().String(), serveOn(t, l, a, answer)
}

// serveOn does so at a listener, which ends with the test.
func serveOn(t *testing.T, l net.Listener, a *Acceptor, answer error) (result <-chan error) {
	t.Helper()
	t.Cleanup(func() { l.Close() })
	out := make(chan error, 1)
	go func() {
		conn, err := l.Accept()
		if err != nil {
			out <- err
			return
		}
		defer conn.Close()
		p, err := ReadPreamble(conn)
		if err == nil && (p.Role != Bulk || p.Token != Token{5}) {
			err = ErrPreamble
		}
		var h Hello
		if err == nil {
			conn, h, err = a.Accept(conn, p.Role)
		}
		if err == nil && h != hello() {
			err = ErrFrame
		}
		if err == nil {
			err = Answer(conn, answer)
		}
		if err == nil {
			_, err = conn.Write([]byte("x"))
		}
		out <- err
	}()
	return out
}

func TestConnectionIsMadeWithBothCertificates(t *testing.T) {
	for _, plain := range []bool{false, true} {
		d, a := ends(t)
		d.Plain, a.Plain = plain, plain
		addr, result := serve(t, a, nil)
		d.Addresses = []string{"127.0.0.1:1", addr} // nobody is at the first
		conn, err := d.Dial(testkit.Context(t), Bulk)
		if err != nil {
			t.Fatal(err)
		}
		var b [1]byte
		if _, err := conn.Read(b[:]); err != nil || b[0] != 'x' {
			t.Error(b, err)
		}
		conn.Close()
		if err := <-result; err != nil {
			t.Error(err)
		}
	}
}

func TestOtherCertificateIsRefused(t *testing.T) {
	for name, change := range map[string]func(d *Dialer, a *Acceptor, x Identity){
		"the carrier's":      func(d *Dialer, _ *Acceptor, x Identity) { d.Own = x },
		"the far executor's": func(_ *Dialer, a *Acceptor, x Identity) { a.Own = x },
		"a key without its certificate": func(d *Dialer, _ *Acceptor, x Identity) {
			d.Own.Key = x.Key
		},
	} {
		d, a := ends(t)
		x, err := NewIdentity("other")
		if err != nil {
			t.Fatal(err)
		}
		change(d, a, x)
		addr, result := serve(t, a, nil)
		d.Addresses = []string{addr}
		conn, err := d.Dial(testkit.Context(t), Bulk)
		if err == nil {
			conn.Close()
			t.Errorf("%s: it was connected", name)
		}
		if err := <-result; err == nil {
			t.Errorf("%s: it was accepted", name)
		}
	}
}

func TestRefusalIsFinalAndHasItsReason(t *testing.T) {
	d, a := ends(t)
	addr, _ := serve(t, a, errors.New("the lease has ended"))
	d.Addresses = []string{addr}
	_, err := d.Dial(testkit.Context(t), Bulk)
	if !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "the lease has ended") {
		t.Error(err)
	}
}

func TestPlainAndTLSDoNotMix(t *testing.T) {
	d, a := ends(t)
	a.Plain = true
	addr, result := serve(t, a, nil)
	d.Addresses = []string{addr}
	if conn, err := d.Dial(testkit.Context(t), Bulk); err == nil {
		conn.Close()
		t.Error("connected")
	}
	if err := <-result; err == nil {
		t.Error("accepted")
	}
}

func TestBlocksRoundTrip(t *testing.T) {
	mem := make([]byte, 4096)
	for i := range mem {
		mem[i] = byte(i * 7)
	}
	for _, x := range []Block{
		Range(5, 100),
		{At: 3, Row: 10, Rows: 4, Slices: 3, RowPitch: 20, SlicePitch: 200},
		{At: 0, Row: 8, Rows: 4, Slices: 2, RowPitch: 8, SlicePitch: 32},
		{At: 7, Row: 1000, Rows: 2, Slices: 1, RowPitch: 1500},
	} {
		out := make([]byte, len(mem))
		if err := x.Split(64, func(p Block) error {
			if err := p.Check(uint64(len(mem))); err != nil {
				return err
			}
			y, err := ParseBlock(p.Append(nil), uint64(len(mem)))
			if err != nil {
				return err
			}
			if y.Size() > 64 {
				t.Errorf("%+v: a part of %d bytes", x, y.Size())
			}
			y.Store(out, y.Bytes(mem))
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		want := make([]byte, len(mem))
		x.Store(want, x.Bytes(mem))
		if !bytes.Equal(out, want) {
			t.Errorf("%+v: another content", x)
		}
		if n := bytes.Count(want, []byte{0}); n == len(mem) {
			t.Error("nothing was stored")
		}
	}
}

// A client and both ends must agree on the chunks of a transfer.
func TestCutCoversATransfer(t *testing.T) {
	for _, c := range []Cut{
		{100, 100, 100}, {5 << 20, 5 << 20, 5 << 20}, {3 << 20, 9 << 20, 18 << 20}, {1000, 7000, 70000}, {1 << 20, 1 << 20, 9 << 20}, {1, 3 << 20, 6 << 20},
	} {
		p := NewPosition(c, 0)
		var sum uint64
		for i := uint32(0); !p.Last(); i++ {
			at, n, ok := p.Chunk(i)
			if !ok || at != sum || n == 0 || n > wire.LaneChunk {
				t.Fatalf("%+v: chunk %d: %d bytes at %d, %v", c, i, n, at, ok)
			}
			if again, _, ok := p.Chunk(i); !ok || again != at {
				t.Fatalf("%+v: chunk %d is elsewhere the second time", c, i)
			}
			if _, _, ok := p.Chunk(i + 1 + wire.LaneAhead); ok {
				t.Fatalf("%+v: chunk %d is far ahead", c, i+1+wire.LaneAhead)
			}
			sum += n
		}
		if sum != c.Total {
			t.Errorf("%+v: %d bytes", c, sum)
		}
	}
}

func TestArrivedCountsThoseBeforeWhichNoneIsMissing(t *testing.T) {
	var a Arrived
	for _, x := range []struct {
		i, count uint32
		ok       bool
	}{{1, 0, true}, {1, 0, false}, {63, 0, true}, {64, 0, false}, {0, 2, true}, {0, 2, false}, {65, 2, true}, {66, 2, false}} {
		if ok := a.Add(x.i); ok != x.ok || a.Count() != x.count || ok && !a.Has(x.i) {
			t.Errorf("%d: %v, %d", x.i, ok, a.Count())
		}
	}
	for i := uint32(2); i < 63; i++ {
		a.Add(i)
	}
	if a.Count() != 64 || a.Has(64) || !a.Has(65) {
		t.Errorf("%d have arrived", a.Count())
	}
}

func FuzzPreamble(f *testing.F) {
	f.Add(Preamble{Commands, true, Token{1}}.Append(nil))
	f.Add(Preamble{State, false, Token{2}}.Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := ParsePreamble(b)
		if err == nil && !bytes.Equal(p.Append(nil), b) {
			t.Errorf("%x becomes %x", b, p.Append(nil))
		}
	})
}

func FuzzHello(f *testing.F) {
	f.Add(hello().Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := ParseHello(b, parts)
		if err == nil && (!bytes.Equal(h.Append(nil), b) || h.ArenaSize > maxArena || h.ArenaSplit >= h.ArenaSize || h.Part >= parts) {
			t.Errorf("%x is %+v", b, h)
		}
	})
}

func FuzzBlock(f *testing.F) {
	f.Add(Range(0, 4096).Append(nil))
	f.Add(Block{At: 3, Row: 10, Rows: 4, Slices: 3, RowPitch: 20, SlicePitch: 200}.Append(nil))
	f.Add(Block{At: 3, Row: 10, Rows: 1 << 60, Slices: 3, RowPitch: 1 << 60, SlicePitch: 1 << 61}.Append(nil))
	mem := make([]byte, 1<<14)
	f.Fuzz(func(t *testing.T, b []byte) {
		x, err := ParseBlock(b, uint64(len(mem)))
		if err != nil {
			return
		}
		if x.End() > uint64(len(mem)) || x.Size() > uint64(len(mem)) || x.Size() == 0 {
			t.Fatalf("%+v", x)
		}
		x.Store(mem, x.Bytes(mem))
	})
}

func FuzzMapping(f *testing.F) {
	f.Add(Mapping{Mem: 70, ID: 3, Writes: true, Block: Range(0, 100)}.Append(nil))
	f.Add(Mapping{Mem: 70, ID: 3, Writes: true, Comes: true, Block: Range(0, 100)}.Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := ParseMapping(b, 1<<20)
		if err == nil && m.Block.End() > 1<<20 {
			t.Errorf("%+v", m)
		}
	})
}

func FuzzLaneStart(f *testing.F) {
	f.Add(LaneStart{Lane: 1, Run: 2, Word: 3, Write: true, From: 0, Cut: Cut{10, 100, 1000}, Limit: 4, After: 9}.Append(nil))
	f.Add(LaneStart{Lane: 3, Run: 1, Word: 3, From: 1 << 20, Cut: Cut{1 << 30, 1 << 30, 1 << 30}, Limit: 8}.Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := ParseLaneStart(b)
		if err != nil {
			return
		}
		p := NewPosition(l.Cut, l.From)
		for i := range uint32(64) {
			at, n, ok := p.Chunk(i)
			if ok && (n == 0 || n > wire.LaneChunk || at+n > l.Cut.Total) {
				t.Fatalf("%+v: chunk %d: %d bytes at %d", l, i, n, at)
			}
		}
	})
}

func FuzzReply(f *testing.F) {
	f.Add(Reply{Slot: 3, Err: -5, Token: 9, Total: 100}.Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := ParseReply(b)
		if err == nil && (r.Slot >= wire.SlotCount || !bytes.Equal(r.Append(nil), b)) {
			t.Errorf("%x is %+v", b, r)
		}
	})
}
