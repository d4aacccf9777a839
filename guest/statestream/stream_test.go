package statestream

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// chunks returns the chunks of a state of n bytes, and its bytes.
func chunks(t testing.TB, n int, id string) (all []*gpuctlv1.StateChunk, data []byte) {
	t.Helper()
	r := rand.New(rand.NewPCG(uint64(n), 1))
	data = make([]byte, n)
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	w := NewWriter(func(c *gpuctlv1.StateChunk) error { all = append(all, proto.CloneOf(c)); return nil })
	for rest := data; len(rest) > 0; {
		k := min(1+r.IntN(3*ChunkSize/2), len(rest))
		if m, err := w.Write(rest[:k]); m != k || err != nil {
			t.Fatal(m, err)
		}
		rest = rest[k:]
	}
	mark, err := w.End(id)
	if err != nil || mark.Size != uint64(n) || mark.ID != id {
		t.Fatal(mark, err)
	}
	return all, data
}

func from(all []*gpuctlv1.StateChunk) func() (*gpuctlv1.StateChunk, error) {
	return func() (*gpuctlv1.StateChunk, error) {
		if len(all) == 0 {
			return nil, io.EOF
		}
		c := all[0]
		all = all[1:]
		return c, nil
	}
}

func TestWhole(t *testing.T) {
	for _, n := range []int{0, 1, ChunkSize - 1, ChunkSize, ChunkSize + 1, 5*ChunkSize + 17} {
		all, data := chunks(t, n, "x")
		r := NewReader(from(all))
		got, err := io.ReadAll(r)
		if err != nil || !bytes.Equal(got, data) || r.Mark().ID != "x" || r.Mark().Size != uint64(n) {
			t.Errorf("%d: %d bytes, %v, %v", n, len(got), r.Mark(), err)
		}
	}
}

// A stream that differs from what was sent is never read to its end.
func TestDamaged(t *testing.T) {
	other, _ := chunks(t, 3*ChunkSize+5, "y")
	for name, c := range map[string]struct {
		do   func(all []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk
		want error
	}{
		"no mark":   {func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk { return a[:len(a)-1] }, ErrTruncated},
		"nothing":   {func([]*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk { return nil }, ErrTruncated},
		"cut short": {func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk { return slices.Delete(a, 2, 3) }, ErrCorrupt},
		"twice":     {func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk { return slices.Insert(a, 1, a[0]) }, ErrCorrupt},
		"reordered": {func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk { a[0], a[1] = a[1], a[0]; return a }, ErrCorrupt},
		"one bit":   {func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk { a[1].Data[77] ^= 4; return a }, ErrCorrupt},
		"other mark": {func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk {
			return append(a[:len(a)-1], other[len(other)-1])
		}, ErrCorrupt},
		"empty chunk": {func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk {
			return slices.Insert(a, 1, &gpuctlv1.StateChunk{})
		}, ErrCorrupt},
		"large chunk": {func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk {
			a[0].Data = append(a[0].Data, 1)
			return a
		}, ErrCorrupt},
		"mark with data": {func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk { a[len(a)-1].Data = []byte{1}; return a }, ErrCorrupt},
		"short digest": {func(a []*gpuctlv1.StateChunk) []*gpuctlv1.StateChunk {
			a[len(a)-1].Mark.Digest = a[len(a)-1].Mark.Digest[:31]
			return a
		}, ErrCorrupt},
	} {
		all, _ := chunks(t, 3*ChunkSize+4, "x")
		if _, err := io.ReadAll(NewReader(from(c.do(all)))); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	check := NewCheck()
	all, _ := chunks(t, 10, "x")
	for _, c := range all {
		if _, err := check.Take(c); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := check.Take(all[0]); !errors.Is(err, ErrCorrupt) {
		t.Errorf("more after the end: %v", err)
	}
}

func TestSendFails(t *testing.T) {
	broken := errors.New("broken")
	w := NewWriter(func(*gpuctlv1.StateChunk) error { return broken })
	if _, err := w.Write(make([]byte, 3*ChunkSize)); !errors.Is(err, broken) {
		t.Error(err)
	}
	if _, err := w.End(""); !errors.Is(err, broken) {
		t.Error(err)
	}
}

// FuzzReader reads arbitrary chunks. Only what a Writer makes is read to its end without an
// error.
func FuzzReader(f *testing.F) {
	all, _ := chunks(f, 300, "x")
	var seed []byte
	for _, c := range all {
		b, err := proto.Marshal(c)
		if err != nil {
			f.Fatal(err)
		}
		seed = append(append(seed, byte(len(b)>>16), byte(len(b)>>8), byte(len(b))), b...)
	}
	f.Add(seed)
	f.Add([]byte{0, 0, 0})
	f.Fuzz(func(t *testing.T, in []byte) {
		var all []*gpuctlv1.StateChunk
		for len(in) >= 3 {
			n := min(int(in[0])<<16|int(in[1])<<8|int(in[2]), len(in)-3)
			c := &gpuctlv1.StateChunk{}
			if proto.Unmarshal(in[3:3+n], c) == nil {
				all = append(all, c)
			}
			in = in[3+n:]
		}
		r := NewReader(from(all))
		got, err := io.ReadAll(r)
		if err != nil {
			return
		}
		again := Mark{ID: r.Mark().ID, Size: uint64(len(got))}
		w := NewWriter(func(*gpuctlv1.StateChunk) error { return nil })
		_, _ = w.Write(got)
		if again, _ = w.End(again.ID); again != r.Mark() {
			t.Errorf("%v read as whole, and it is %v", r.Mark(), again)
		}
	})
}

// BenchmarkPass does what a process does to each chunk that it passes on.
func BenchmarkPass(b *testing.B) {
	data := make([]byte, ChunkSize)
	b.SetBytes(ChunkSize)
	check := NewCheck()
	w := NewWriter(func(c *gpuctlv1.StateChunk) error { _, err := check.Take(c); return err })
	for b.Loop() {
		if _, err := w.Write(data); err != nil {
			b.Fatal(err)
		}
	}
}
