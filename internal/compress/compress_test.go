package compress

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"
)

// stored is a connection of which everything that is written can be read.
type stored struct {
	net.Conn
	bytes.Buffer
}

func (s *stored) Read(b []byte) (int, error)  { return s.Buffer.Read(b) }
func (s *stored) Write(b []byte) (int, error) { return s.Buffer.Write(b) }

// metered is a connection of a known rate.
type metered struct {
	rate      float64
	forgotten int
}

func (m *metered) Rate() float64 { return m.rate }
func (m *metered) Forget()       { m.forgotten++ }

func text(n int) []byte {
	return []byte(strings.Repeat("a region that looks like others, ", n/33+1)[:n])
}

func noise(n int) []byte {
	r := rand.New(rand.NewPCG(1, 2))
	b := make([]byte, n)
	for i := 0; i+8 <= n; i += 8 {
		binary.LittleEndian.PutUint64(b[i:], r.Uint64())
	}
	return b
}

func TestWhatIsWrittenIsRead(t *testing.T) {
	for _, always := range []bool{false, true} {
		var s stored
		c := New(&s, Options{Always: always, Meter: &metered{rate: 1e6}})
		var want []byte
		v := net.Buffers{[]byte("head"), text(100), nil, text(3<<20 + 5), noise(1<<20 + 1), []byte("x"), text(20 << 10)}
		for _, b := range v {
			want = append(want, b...)
		}
		n, err := c.WriteBuffers(&v)
		if err != nil || n != int64(len(want)) {
			t.Fatal(n, err)
		}
		if _, err := c.Write(text(9)); err != nil {
			t.Fatal(err)
		}
		want = append(want, text(9)...)
		if s.Len() > len(want)/2 {
			t.Errorf("%d bytes are on the way, of %d", s.Len(), len(want))
		}
		got, err := io.ReadAll(c)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("always %v: read %d bytes of %d, or others: %v", always, len(got), len(want), err)
		}
	}
}

// Who writes a piece while it is sent changes its bytes, and no more: a sum of the bytes before
// would not be that of the bytes after.
func TestCopyIsCompressed(t *testing.T) {
	c := New(&stored{}, Options{Always: true})
	b := text(1 << 20)
	if _, err := c.Write(b); err != nil {
		t.Fatal(err)
	}
	if &c.short.long[0] == &b[0] || !bytes.Equal(c.short.long, b) {
		t.Error("what is compressed is not a copy")
	}
}

func TestFastConnectionIsNotCompressed(t *testing.T) {
	var n Counts
	for _, m := range []*metered{{rate: 0}, {rate: 1e15}} {
		c := New(&stored{}, Options{Meter: m, Counts: &n})
		for range 3 * mostSlow / 2 { // the speed is measured anew in between
			if _, err := c.Write(text(64 << 10)); err != nil {
				t.Fatal(err)
			}
		}
		if _, speed := c.Rates(); m.rate == 0 && c.short != nil {
			t.Error("there is a compressor that nobody needs", speed)
		}
	}
	if long, plain := n.Long.Load(), n.Plain.Load(); long != 0 || plain != 2*(3*mostSlow/2)*64<<10 {
		t.Errorf("%d bytes compressed, %d not", long, plain)
	}
}

func TestSlowConnectionIsCompressed(t *testing.T) {
	var n Counts
	c := New(&stored{}, Options{Meter: &metered{rate: 1e5}, Counts: &n})
	for range 10 {
		if _, err := c.Write(text(1 << 20)); err != nil {
			t.Fatal(err)
		}
	}
	if n.Long.Load() != 10<<20 || n.Short.Load() > 1<<20 {
		t.Errorf("of %d bytes, %d were compressed to %d", 10<<20, n.Long.Load(), n.Short.Load())
	}
}

func TestNoiseIsSentAsItIsAndHardlyLookedAt(t *testing.T) {
	looked := 0
	j := judge{meter: &metered{rate: 1e5}, now: time.Now, left: mostTrust}
	z, err := newShortener()
	if err != nil {
		t.Fatal(err)
	}
	try := func(b ...[]byte) []byte {
		for _, x := range b {
			looked += len(x)
		}
		return z.shorten(b...)
	}
	const pieces = 200
	b := noise(1 << 20)
	for range pieces {
		if j.wants(b, try) {
			t.Fatal("noise is to be compressed")
		}
	}
	if looked == 0 || looked > pieces<<20/256 {
		t.Errorf("%d bytes of %d were compressed for nothing", looked, pieces<<20)
	}
	// What comes then is looked at soon.
	n := 0
	for b = text(1 << 20); !j.wants(b, try); n++ {
		if n > mostSkip {
			t.Fatal("what can be compressed is not looked at")
		}
	}
}

func TestConnectionIsMeasuredAnew(t *testing.T) {
	m := &metered{rate: 1e5}
	c := New(&stored{}, Options{Meter: m})
	for range 2 * mostTrust >> 20 {
		if _, err := c.Write(text(1 << 20)); err != nil {
			t.Fatal(err)
		}
	}
	if m.forgotten != 2 {
		t.Errorf("measured anew %d times", m.forgotten)
	}
}

func TestWorth(t *testing.T) {
	for _, x := range []struct {
		link, speed, ratio float64
		on, want           bool
	}{
		{100, 400, 2, false, true},
		{100, 400, 1.2, false, false},
		{100, 400, 1.5, false, false}, // 0.92: not by a tenth,
		{100, 400, 1.5, true, true},   // but as it is done already
		{1000, 400, 100, true, false},
		{100, 400, 0.99, true, false},
	} {
		if got := worth(x.link, x.speed, x.ratio, x.on); got != x.want {
			t.Errorf("%+v: %v", x, got)
		}
	}
}

// packet returns a compressed packet that says what it is told to.
func packet(t testing.TB, b []byte, long int) []byte {
	z, err := newShortener()
	if err != nil {
		t.Fatal(err)
	}
	short := z.shorten(b)
	return append(header(nil, len(short), long), short...)
}

func TestHostilePacketsAreRefused(t *testing.T) {
	good := packet(t, text(1000), 1000)
	two := packet(t, text(1000), 1000)
	two = append(two, two[headerSize:]...)
	binary.LittleEndian.PutUint32(two, uint32(len(two)-headerSize))
	flipped := bytes.Clone(good)
	flipped[len(flipped)-1] ^= 1 // of the sum
	skipped := append(header(nil, 8, 1000), 0x50, 0x2a, 0x4d, 0x18, 0, 0, 0, 0)
	for what, b := range map[string][]byte{
		"no bytes":                   header(nil, 0, 0),
		"a size that overflows":      header(nil, -1, 0),
		"more than may be":           packet(t, text(2<<20), 2<<20),
		"not shorter":                header(nil, 1000, 1000),
		"expands to less":            packet(t, text(1000), 1001),
		"expands to more":            packet(t, text(1000), 999),
		"another frame behind it":    two,
		"a wrong sum":                flipped,
		"a frame that is to be left": skipped,
		"no frame":                   append(header(nil, 9, 1000), "no frame!"...),
	} {
		c := New(&stored{Buffer: *bytes.NewBuffer(b)}, Options{})
		if n, err := c.Read(make([]byte, 10)); !errors.Is(err, ErrPacket) || n != 0 {
			t.Errorf("%s: %d, %v", what, n, err)
		}
	}
	for n := 1; n < len(good); n++ {
		c := New(&stored{Buffer: *bytes.NewBuffer(good[:n])}, Options{})
		if _, err := c.Read(make([]byte, 10)); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%d bytes of %d: %v", n, len(good), err)
		}
	}
}

// FuzzRead: what a connection brings is read, or refused, and takes no more memory than a
// packet may.
func FuzzRead(f *testing.F) {
	f.Add(packet(f, text(5000), 5000))
	f.Add(append(header(nil, 3, 0), "abc"...))
	f.Add(append(packet(f, noise(64), 64), packet(f, text(1<<20), 1<<20)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := New(&stored{Buffer: *bytes.NewBuffer(b)}, Options{})
		buf := make([]byte, 64<<10)
		for {
			n, err := c.Read(buf)
			if n > len(buf) {
				t.Fatal(n)
			}
			if err == nil {
				continue
			}
			if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, ErrPacket) {
				t.Fatal(err)
			}
			break
		}
		if cap(c.packet) > mostLong {
			t.Errorf("%d bytes of memory for a packet", cap(c.packet))
		}
		if c.expand != nil && cap(c.expand.out) > mostLong {
			t.Errorf("%d bytes of memory for what it expands to", cap(c.expand.out))
		}
	})
}

// FuzzRoundTrip: what is written is read.
func FuzzRoundTrip(f *testing.F) {
	f.Add([]byte("0123456789"), uint16(3), uint32(70000), true)
	f.Add(noise(100), uint16(1), uint32(1), false)
	f.Fuzz(func(t *testing.T, seed []byte, cut uint16, size uint32, always bool) {
		if len(seed) == 0 {
			return
		}
		want := bytes.Repeat(seed, int(size%(2<<20))/len(seed)+1)
		var s stored
		c := New(&s, Options{Always: always, Meter: &metered{rate: 1}})
		var v net.Buffers
		for b := want; len(b) > 0; {
			n := min(len(b), 1+int(cut)*len(v)*7)
			v, b = append(v, b[:n]), b[n:]
		}
		if _, err := c.WriteBuffers(&v); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(c)
		if err != nil || !bytes.Equal(got, want) {
			t.Fatalf("read %d bytes of %d, or others: %v", len(got), len(want), err)
		}
	})
}
