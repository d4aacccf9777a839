package channel

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/xenstore/xenstoretest"
)

// rogue is a guest that keeps to the frames and to nothing above them. It
// hands out its link for each connection.
func rogue(t *testing.T, behave func(*link)) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	over := make(chan struct{})
	t.Cleanup(func() {
		l.Close()
		<-over
	})
	go func() {
		defer close(over)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			p := newPort(conn)
			quiet, wrote, behaved := make(chan struct{}), make(chan struct{}), make(chan struct{})
			begun := false
			go func() {
				defer close(wrote)
				_ = p.write(fromGuest, quiet)
			}()
			_ = p.read(fromGuest, func(f *frame) {
				if f.kind == kindOpen && !begun {
					begun = true
					p.use(newLink(f.conn, fromGuest, 1, p.poke))
					p.poke()
					go func() {
						defer close(behaved)
						behave(p.current())
					}()
				} else if l := p.current(); l != nil && l.conn == f.conn {
					l.handle(time.Now(), f)
				}
			})
			conn.Close()
			if begun {
				p.current().fail(errHungUp)
				<-behaved
			}
			close(quiet)
			<-wrote
		}
	}()
	return path
}

func muxFrame(kind byte, flags uint16, stream, length uint32) []byte {
	b := binary.BigEndian.AppendUint16([]byte{0, kind}, flags)
	b = binary.BigEndian.AppendUint32(b, stream)
	return binary.BigEndian.AppendUint32(b, length)
}

func TestRogueGuest(t *testing.T) {
	const syn, fin, rst = 1, 4, 8
	for _, c := range []struct {
		name  string
		ends  bool // the connection may
		frame func(i int) []byte
	}{
		{"pings", false, func(i int) []byte { return muxFrame(2, syn, 0, uint32(i)) }},
		{"answers to pings", false, func(i int) []byte { return muxFrame(2, 2, 0, uint32(i)) }},
		{"streams", true, func(i int) []byte { return muxFrame(1, syn, uint32(2*i+2), 0) }},
		{"streams of the host's numbers", true, func(i int) []byte { return muxFrame(1, syn, uint32(2*i+1), 0) }},
		{"data of no stream", false, func(i int) []byte { return append(muxFrame(0, 0, uint32(i), 4), "data"...) }},
		{"ends of no stream", false, func(i int) []byte { return muxFrame(1, fin|rst, uint32(i), 0) }},
		{"windows", false, func(i int) []byte { return muxFrame(1, 0, uint32(i), 0xffffffff) }},
		{"too much data", true, func(int) []byte { return append(muxFrame(0, syn, 2, 0xffffffff), "data"...) }},
		{"garbage", true, func(int) []byte { return []byte("garbage in place of a frame") }},
	} {
		t.Run(c.name, func(t *testing.T) {
			const times = 20000
			sent := make(chan struct{}, 100)
			path := rogue(t, func(l *link) {
				for i := range times {
					if _, err := l.Write(c.frame(i)); err != nil {
						break
					}
				}
				select {
				case sent <- struct{}{}:
				default:
				}
				// It never reads: what the host sends piles up on its side.
				<-l.done
			})
			client, err := Open(path, WithWait(time.Second))
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			before := runtime.NumGoroutine()
			var began, now runtime.MemStats
			runtime.ReadMemStats(&began)
			most := 0
			for done := false; !done; {
				select {
				case <-sent:
					done = true
				case <-time.After(time.Millisecond):
				case <-t.Context().Done():
					return
				}
				most = max(most, runtime.NumGoroutine())
			}
			if more := most - before; more > 40 {
				t.Errorf("%d goroutines more", more)
			}
			runtime.GC()
			runtime.ReadMemStats(&now)
			if more := int64(now.HeapAlloc) - int64(began.HeapAlloc); more > 8<<20 {
				t.Errorf("%d bytes more", more)
			}
			if s := client.State(); !c.ends && s.Connections > 1 {
				t.Errorf("state %+v", s)
			}
			// A request to it ends when its time is over.
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, BaseURL, nil)
			if err != nil {
				t.Fatal(err)
			}
			asked := time.Now()
			resp, err := client.HTTP().Do(req)
			if err == nil {
				resp.Body.Close()
				t.Error("it has an answer")
			}
			if took := time.Since(asked); took > 3*time.Second {
				t.Errorf("the request took %v", took)
			}
		})
	}
}

// Numbers of a connection that is not ours, or that cannot be, mean nothing.
func TestLinkDoubts(t *testing.T) {
	now := time.Now()
	l := newLink(7, fromHost, 0, func() {})
	l.handle(now, &frame{kind: kindData, from: fromGuest, conn: 7, payload: []byte("early")})
	if len(l.in) > 0 {
		t.Error("data before the connection is open")
	}
	l.handle(now, &frame{kind: kindOpened, from: fromGuest, conn: 7, payload: []byte("short")})
	if l.opened {
		t.Error("opened by a short answer")
	}
	instance := binary.BigEndian.AppendUint64(nil, 3)
	l.handle(now, &frame{kind: kindOpened, from: fromGuest, conn: 7, payload: instance})
	l.handle(now, &frame{kind: kindAck, from: fromGuest, conn: 7, ack: 99})
	l.handle(now, &frame{kind: kindAck, from: fromGuest, conn: 7, ack: 0xffffff00})
	if l.una != 0 || l.err != nil {
		t.Error("an acknowledgement of what was never sent")
	}
	for i := range 100 { // nobody reads
		l.handle(now, &frame{kind: kindData, from: fromGuest, conn: 7, seq: uint32(i), payload: make([]byte, maxPayload)})
	}
	if len(l.in) != maxUnread || l.expect != maxUnread/maxPayload {
		t.Errorf("%d bytes kept, %d segments taken", len(l.in), l.expect)
	}
	l.handle(now, &frame{kind: kindOpened, from: fromGuest, conn: 7, payload: binary.BigEndian.AppendUint64(nil, 4)})
	if !errors.Is(l.err, errRestarted) {
		t.Errorf("another agent goes on with it: %v", l.err)
	}
}

func FuzzSieve(f *testing.F) {
	f.Add(append(muxFrame(2, 1, 0, 7), append(muxFrame(0, 0, 1, 4), "data"...)...))
	f.Add(muxFrame(0, 0, 1, 0xffffffff))
	f.Fuzz(func(t *testing.T, data []byte) {
		l := newLink(7, fromHost, 0, func() {})
		l.opened, l.in = true, append([]byte(nil), data...)
		l.failLocked(io.EOF)
		got, err := io.ReadAll(&sieve{r: l})
		if len(got) > len(data) {
			t.Fatal("more came out than went in")
		}
		if err != nil && !errors.Is(err, errOpens) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatal(err)
		}
		for at := 0; at+muxHeader <= len(got); {
			if got[at+1] == muxPing {
				t.Fatal("a ping came through")
			}
			if binary.BigEndian.Uint16(got[at+2:])&muxSYN != 0 {
				t.Fatal("a stream came through")
			}
			n := 0
			if got[at+1] == muxData {
				n = int(binary.BigEndian.Uint32(got[at+8:]))
			}
			at += muxHeader + n
		}
	})
}

func TestFind(t *testing.T) {
	root := t.TempDir()
	p := Port{Root: root}
	if _, err := p.Find(t.Context()); !errors.Is(err, ErrNoPort) {
		t.Errorf("in no VM: %v", err)
	}
	store := xenstoretest.New(t)
	store.Introduce(7)
	store.Set("/local/domain/7/device/console/2/name", "org.example.other", "/local/domain/7/device/console/x/name", Name)
	if err := os.MkdirAll(filepath.Join(root, "dev/xen"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(store.PathOf(7), filepath.Join(root, "dev/xen/xenbus")); err != nil {
		t.Fatal(err)
	}
	if path, err := p.Find(t.Context()); !errors.Is(err, ErrNoPort) {
		t.Errorf("another channel: %s, %v", path, err)
	}
	store.Set("/local/domain/7/device/console/3/name", Name)
	if path, err := p.Find(t.Context()); err != nil || path != filepath.Join(root, "dev/hvc3") {
		t.Errorf("PV console: %s, %v", path, err)
	}
	if path, err := (Port{Root: root, Name: "org.example.other"}).Find(t.Context()); err != nil || path != filepath.Join(root, "dev/hvc2") {
		t.Errorf("another name: %s, %v", path, err)
	}
	port := filepath.Join(root, "sys/class/virtio-ports/vport2p1")
	if err := os.MkdirAll(port, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(port, "name"), []byte(Name+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if path, err := p.Find(t.Context()); err != nil || path != filepath.Join(root, "dev/vport2p1") {
		t.Errorf("virtio-serial: %s, %v", path, err)
	}
	if _, err := p.Open(t.Context()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("open what is not there: %v", err)
	}
}
