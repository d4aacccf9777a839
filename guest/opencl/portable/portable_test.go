package portable

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "write the golden file anew")

func sample() *Program {
	object := Program{
		Kind: Object, Source: []byte("#include \"a.h\"\nkernel void f(global int *p) { *p = A; }\n"), Options: "-DB=1 -cl-std=CL1.2",
		Headers: []Header{{Name: "a.h", Program: Program{Kind: Source, Source: []byte("#define A 1\n")}}},
	}
	return &Program{
		Kind: Executable, LinkOptions: "-cl-fast-relaxed-math",
		Inputs: []Program{object, {
			Kind: IL, IL: []byte{3, 2, 0x23, 7}, SpecConstants: []SpecConstant{{ID: 7, Value: []byte{1, 0, 0, 0}}},
		}},
		Kernels: []string{"f", "g"},
	}
}

func marshal(t testing.TB, p *Program) []byte {
	t.Helper()
	b, err := p.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Containers that applications have stored must stay readable.
func TestGolden(t *testing.T) {
	golden := filepath.Join("testdata", "executable.v1")
	b := marshal(t, sample())
	if *update {
		if err := os.WriteFile(golden, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b, want) {
		t.Error("the encoding has changed: it needs a new version")
	}
	p, err := Unmarshal(want)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(sample(), p); d != "" {
		t.Error(d)
	}
}

func programs(depth int) *rapid.Generator[Program] {
	return rapid.Custom(func(t *rapid.T) Program {
		blob := rapid.SliceOfN(rapid.Byte(), 0, 40)
		text := rapid.StringOfN(rapid.RuneFrom([]rune("aB -=ö\n")), 0, 20, -1)
		p := Program{
			Kind:   rapid.SampledFrom([]Kind{Source, IL, Object, Library, Executable}).Draw(t, "kind"),
			Source: blob.Draw(t, "source"), IL: blob.Draw(t, "il"),
			Options: text.Draw(t, "options"), LinkOptions: text.Draw(t, "link options"),
			Kernels: rapid.SliceOfN(text, 0, 3).Draw(t, "kernels"),
		}
		for range rapid.IntRange(0, 2).Draw(t, "constants") {
			p.SpecConstants = append(p.SpecConstants, SpecConstant{rapid.Uint32().Draw(t, "id"), blob.Draw(t, "value")})
		}
		if depth > 0 {
			p.Inputs = rapid.SliceOfN(programs(depth-1), 0, 2).Draw(t, "inputs")
			for range rapid.IntRange(0, 2).Draw(t, "headers") {
				p.Headers = append(p.Headers, Header{text.Draw(t, "name"), programs(depth-1).Draw(t, "header")})
			}
		}
		return p
	})
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := programs(2).Draw(t, "program")
		b, err := p.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		got, err := Unmarshal(b)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(&p, got, cmpopts.EquateEmpty()); d != "" {
			t.Fatal(d)
		}
		again, err := got.Marshal()
		if err != nil || !bytes.Equal(again, b) {
			t.Fatalf("second encoding differs, %v", err)
		}
	})
}

// Any damage is detected.
func TestDamage(t *testing.T) {
	b := marshal(t, sample())
	for i := range b {
		bad := bytes.Clone(b)
		bad[i] ^= 1
		want := ErrCorrupt
		switch {
		case i < 8:
			want = ErrNotPortable
		case i < 12:
			want = ErrVersion
		}
		if _, err := Unmarshal(bad); !errors.Is(err, want) {
			t.Fatalf("byte %d flipped: %v, want %v", i, err, want)
		}
	}
	for n := range b {
		want := ErrCorrupt
		if n < 8 {
			want = ErrNotPortable
		}
		if _, err := Unmarshal(b[:n]); !errors.Is(err, want) {
			t.Fatalf("cut to %d bytes: %v, want %v", n, err, want)
		}
	}
	if _, err := Unmarshal(append(b, 0)); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a byte more: %v", err)
	}
	if _, err := Unmarshal([]byte("\x7fELF and so on, long enough to have a header of some kind or other")); !errors.Is(err, ErrNotPortable) {
		t.Errorf("foreign: %v", err)
	}
}

// seal adds a correct header to a payload.
func seal(payload []byte) []byte {
	b := append(make([]byte, header), payload...)
	copy(b, magic)
	binary.LittleEndian.PutUint32(b[8:], version)
	binary.LittleEndian.PutUint64(b[16:], uint64(len(payload)))
	sum := checksum(b)
	copy(b[prefix:], sum[:])
	return b
}

func TestLimits(t *testing.T) {
	nest := func(n int) *Program {
		p := Program{Kind: Object}
		for range n {
			p = Program{Kind: Library, Inputs: []Program{p}}
		}
		return &p
	}
	if _, err := Unmarshal(marshal(t, nest(MaxDepth-1))); err != nil {
		t.Errorf("deepest: %v", err)
	}
	for name, c := range map[string]struct {
		p    *Program
		want error
	}{
		"deep":   {nest(MaxDepth), ErrLimit},
		"many":   {&Program{Kind: Library, Inputs: make([]Program, MaxPrograms)}, ErrInvalid},
		"large":  {&Program{Kind: Source, Source: make([]byte, MaxSize)}, ErrLimit},
		"kind":   {&Program{}, ErrInvalid},
		"NUL":    {&Program{Kind: Source, Options: "a\x00b"}, ErrInvalid},
		"header": {&Program{Kind: Object, Headers: []Header{{Name: "\x00", Program: Program{Kind: Source}}}}, ErrInvalid},
	} {
		if _, err := c.p.Marshal(); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	many := &Program{Kind: Library}
	for range MaxPrograms {
		many.Inputs = append(many.Inputs, Program{Kind: Object})
	}
	if _, err := many.Marshal(); !errors.Is(err, ErrLimit) {
		t.Errorf("many: %v", err)
	}
	// What Marshal refuses, Unmarshal refuses too.
	le := binary.LittleEndian
	leaf := append(le.AppendUint32(nil, uint32(Object)), make([]byte, minProgram-4)...)
	payload := append(le.AppendUint32(nil, uint32(Library)), make([]byte, 5*4)...)
	payload = le.AppendUint32(payload, MaxPrograms)
	payload = append(payload, bytes.Repeat(leaf, MaxPrograms)...)
	payload = append(payload, make([]byte, 8)...)
	if _, err := Unmarshal(seal(payload)); !errors.Is(err, ErrLimit) {
		t.Errorf("many: %v", err)
	}
	deep := []byte{}
	for range 2 * MaxDepth {
		deep = append(le.AppendUint32(deep, uint32(Library)), make([]byte, 5*4)...)
		deep = le.AppendUint32(deep, 1)
	}
	if _, err := Unmarshal(seal(append(deep, make([]byte, 4096)...))); !errors.Is(err, ErrLimit) {
		t.Errorf("deep: %v", err)
	}
}

// What Unmarshal accepts is canonical.
func FuzzUnmarshal(f *testing.F) {
	f.Add(marshal(f, sample())[header:])
	f.Add(marshal(f, &Program{Kind: Source, Source: []byte("x")})[header:])
	f.Fuzz(func(t *testing.T, payload []byte) {
		Unmarshal(payload)
		b := seal(payload)
		p, err := Unmarshal(b)
		if err != nil {
			return
		}
		again, err := p.Marshal()
		if err != nil || !bytes.Equal(again, b) {
			t.Fatalf("encodes differently, %v", err)
		}
	})
}
