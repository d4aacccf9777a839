package remote

import (
	"context"
	"crypto/tls"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/compress"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

func TestPaceIsThatOfAFullQueue(t *testing.T) {
	var p pace
	at := time.Unix(100, 0)
	p.full(1<<20, at)
	if p.Rate() != 0 || !p.measures() {
		t.Error("a rate without a stretch", p.Rate())
	}
	p.full(1<<20+1000, at.Add(time.Millisecond)) // too little to say
	if p.Rate() != 0 {
		t.Error("a rate of", p.Rate())
	}
	p.full(2<<20, at.Add(time.Second))
	if p.Rate() != 1<<20 {
		t.Errorf("%v bytes a second, not 1 MiB", p.Rate())
	}
	p.empty() // nothing was waited for: what follows is no part of the stretch
	p.full(9<<20, at.Add(time.Minute))
	p.full(9<<20+3<<20, at.Add(time.Minute+time.Second))
	if p.Rate() != 2<<20 {
		t.Errorf("%v bytes a second, not the mean of 1 and 3 MiB", p.Rate())
	}
	p.Forget()
	if p.Rate() != 0 || p.measures() {
		t.Error("it does not forget", p.Rate())
	}
}

// throttled passes connections on to an address, rate bytes a second of what the one that
// connects sends. It reads no more than it passes on.
func throttled(t *testing.T, to string, rate int) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			tcp, _ := in.(*net.TCPConn)
			_ = tcp.SetReadBuffer(64 << 10)
			out, err := net.Dial("tcp", to)
			if err != nil {
				in.Close()
				return
			}
			go func() { _, _ = io.Copy(in, out); in.Close() }()
			go func() {
				defer out.Close()
				const per = 5 * time.Millisecond
				tick := time.NewTicker(per)
				defer tick.Stop()
				for range tick.C {
					if _, err := io.CopyN(out, in, int64(rate)*int64(per)/int64(time.Second)); err != nil {
						return
					}
				}
			}()
		}
	}()
	return l.Addr().String()
}

// drained accepts connections and reads what comes, and compares it with pieces of text.
func drained(t *testing.T, a *Acceptor, text string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				p, err := ReadPreamble(conn)
				if err != nil {
					return
				}
				c, _, err := a.Accept(conn, p.Role)
				if err != nil {
					return
				}
				defer c.Close()
				if Answer(c, nil) != nil {
					return
				}
				b := make([]byte, len(text))
				for {
					if _, err := io.ReadFull(c, b); err != nil {
						return
					}
					if string(b) != text {
						t.Error("other bytes have come")
						return
					}
				}
			}()
		}
	}()
	return l.Addr().String()
}

const piece = 1 << 20

func regions() string { return strings.Repeat("a region that looks like others, ", piece/33+1)[:piece] }

// halves is a piece that becomes half as long, about as fast as most do.
func halves() string {
	b := []byte(regions())
	r := rand.New(rand.NewPCG(1, 2))
	for i := 0; i < len(b); i += 64 {
		for k := range 32 {
			b[i+k] = byte(r.Uint32())
		}
	}
	return string(b)
}

func TestSlowNetworkIsCompressed(t *testing.T) {
	d, a := ends(t)
	text := regions()
	d.Addresses = []string{throttled(t, drained(t, a, text), 1<<20)}
	d.Compress.Counts = &compress.Counts{}
	conn, err := d.Dial(testkit.Context(t), Bulk)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for n := &d.Compress.Counts.Long; n.Load() < 4*piece; {
		if _, err := conn.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
		if sent := d.Compress.Counts.Plain.Load(); sent > 256*piece {
			t.Fatalf("%d bytes were sent as they are, %d not", sent, n.Load())
		}
	}
	if s := d.Compress.Counts.Short.Load(); s > piece {
		t.Errorf("%d bytes were compressed to %d", d.Compress.Counts.Long.Load(), s)
	}
}

// On a machine without a free processor, the reader may be so slow that compressing pays even
// here: then it is tried again.
func TestLoopbackIsNotCompressed(t *testing.T) {
	d, a := ends(t)
	text := halves()
	d.Addresses = []string{drained(t, a, text)}
	for try := 0; ; try++ {
		d.Compress.Counts = &compress.Counts{}
		conn, err := d.Dial(testkit.Context(t), Bulk)
		if err != nil {
			t.Fatal(err)
		}
		for range 96 {
			if _, err := conn.Write([]byte(text)); err != nil {
				t.Fatal(err)
			}
		}
		c, ok := conn.(*compress.Conn)
		if !ok {
			t.Fatalf("the ends have not agreed: %T", conn)
		}
		link, speed := c.Rates()
		conn.Close()
		if d.Compress.Counts.Long.Load() == 0 {
			return
		}
		if try == 50 {
			t.Fatalf("loopback is slower than compressing, again and again: %v and %v bytes a second", link, speed)
		}
	}
}

// An end that knows nothing of compression gets what it always got, in both directions.
func TestEarlierEndsGetWhatTheyKnow(t *testing.T) {
	d, a := ends(t)
	for name, old := range map[string]func(cc, sc *tls.Config){
		"carrier":      func(cc, _ *tls.Config) { cc.NextProtos = nil },
		"far executor": func(_, sc *tls.Config) { sc.NextProtos = nil },
	} {
		cc, err := d.Own.config(d.Peer, Bulk)
		if err != nil {
			t.Fatal(err)
		}
		sc, err := a.Own.config(a.Peer, Bulk)
		if err != nil {
			t.Fatal(err)
		}
		old(cc, sc)
		near, far := pair(t, false)
		done := make(chan *sealed, 1)
		go func() {
			s, err := seal(context.Background(), far, sc, tls.Server)
			if err != nil {
				t.Error(err)
			}
			done <- s
		}()
		c, err := seal(t.Context(), near, cc, tls.Client)
		if err != nil {
			t.Fatal(err)
		}
		s := <-done
		if s == nil {
			return
		}
		always := Compress{Always: true}
		if conn := always.over(c, near); conn != net.Conn(c) {
			t.Errorf("an earlier %s: the carrier has %T", name, conn)
		}
		if conn := always.over(s, far); conn != net.Conn(s) {
			t.Errorf("an earlier %s: the far executor has %T", name, conn)
		}
	}
}
