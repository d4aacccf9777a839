package session

import (
	"encoding/binary"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/engine"
	"github.com/gpuctl/gpuctl/guest/handover"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// pair returns both ends of a unix stream. The first is a plain descriptor.
func pair(t testing.TB) (int, *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fds[1]), "application")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	return fds[0], c.(*net.UnixConn)
}

// lowest returns the lowest free descriptor. A leak of descriptors raises it.
func lowest(t testing.TB) int {
	t.Helper()
	fd, err := unix.Dup(0)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
	return fd
}

// FuzzGreeting sends a greeting as an application does, with up to 15 descriptors. A
// greeting that is accepted is of this process and this version. No descriptor that was
// sent stays open.
func FuzzGreeting(f *testing.F) {
	hello := make([]byte, 0, helloSize)
	for _, v := range []uint32{wire.HelloMagic, wire.Version, uint32(os.Getpid()), 0} {
		hello = binary.LittleEndian.AppendUint32(hello, v)
	}
	hello = append(hello, "token"...)
	hello = hello[:helloSize]
	f.Add(hello, uint8(1))
	f.Add(hello[:20], uint8(0))
	f.Add(append(hello, hello...), uint8(9))
	f.Fuzz(func(t *testing.T, in []byte, files uint8) {
		before := lowest(t)
		if len(in) == 0 {
			t.Skip()
		}
		app, conn := pair(t)
		fds := make([]int, files%16)
		for i := range fds {
			fds[i] = app
		}
		err := unix.Sendmsg(app, in[:min(len(in), 1024)], unix.UnixRights(fds...), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		// Shut down only the writing direction: descriptors in flight keep the socket open.
		if err := unix.Shutdown(app, unix.SHUT_WR); err != nil {
			t.Fatal(err)
		}
		cred, err := handover.Peer(conn)
		if err != nil {
			t.Fatal(err)
		}
		g, err := readGreeting(conn, cred)
		if err == nil {
			if g.pid != os.Getpid() || len(in) < helloSize {
				t.Fatalf("taken: %+v", g)
			}
			if len(g.token) > helloSize-16 {
				t.Fatalf("a token of %d bytes", len(g.token))
			}
		}
		conn.Close()
		unix.Close(app)
		if after := lowest(t); after != before {
			t.Fatalf("descriptor %d stays open", before)
		}
	})
}

// FuzzRecord reads a session.json. A record that is accepted is written as it was read, and
// has all of its parts.
func FuzzRecord(f *testing.F) {
	head := uint64(64)
	r := record{
		Version: recordVersion, ID: "s1", Claim: "c", PID: 7, Start: 8, Command: "x264 in out", StartedMS: 9, Device: marshal(&gpuctlv1.VirtualDevice{Name: "d"}),
		Generation: 2, Current: executorRecord{Generation: 1, PID: 5, Start: 6, Target: marshal(&gpuctlv1.Target{Gpu: "small"})},
		Connected: true, Away: &awayRecord{ID: "a", Size: 3, Digest: make([]byte, 32)},
		Op: &opRecord{Kind: kindCreate, Step: "start", Other: &executorRecord{Generation: 2}, Head: &head, File: "f"},
	}
	dir := f.TempDir()
	if err := r.write(dir); err != nil {
		f.Fatal(err)
	}
	seed, err := os.ReadFile(filepath.Join(dir, "session.json"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Add([]byte(`{"version":1,"op":null,"away":{},"current":{"target":{"gpu":1}}}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		if err := os.WriteFile(filepath.Join(dir, "session.json"), in, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := readRecord(dir)
		if err != nil {
			return
		}
		if r.device() == nil || r.Current.target() == nil {
			t.Fatal("no device or target")
		}
		_ = r.Away.proto()
		if err := r.write(dir); err != nil {
			t.Fatal(err)
		}
		again, err := readRecord(dir)
		if err != nil {
			t.Fatalf("what was taken is refused: %v", err)
		}
		x, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if y, err := json.Marshal(again); err != nil || string(x) != string(y) {
			t.Fatalf("%s\nagain\n%s (%v)", x, y, err)
		}
	})
}

// FuzzOffers reads an offers.json. Each offer is found by its token, and a change of the
// offers keeps the others.
func FuzzOffers(f *testing.F) {
	dir := f.TempDir()
	open := func() *Manager {
		return &Manager{cfg: Config{Dir: dir}, offers: engine.Offers{}}
	}
	m := open()
	if err := m.changeOffers(func(all engine.Offers) {
		all["t"] = &gpuctlv1.OfferRequest{Token: "t", Claim: "c", Target: &gpuctlv1.Target{Gpu: "small"}, Device: &gpuctlv1.VirtualDevice{Name: "d"}}
	}); err != nil {
		f.Fatal(err)
	}
	seed, err := os.ReadFile(filepath.Join(dir, engine.OffersName))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Add([]byte(`[{}, {"token":"a","target":{}}]`))
	f.Fuzz(func(t *testing.T, in []byte) {
		m := open()
		if err := os.WriteFile(filepath.Join(dir, engine.OffersName), in, 0o600); err != nil {
			t.Fatal(err)
		}
		if m.loadOffers() != nil {
			return
		}
		if err := m.withdraw("nobody's"); err != nil {
			t.Fatal(err)
		}
		again := open()
		if err := again.loadOffers(); err != nil {
			t.Fatalf("what was taken is refused: %v", err)
		}
		if len(again.offers) != len(m.offers) {
			t.Fatalf("%d offers of %d", len(again.offers), len(m.offers))
		}
		for token, o := range m.offers {
			if got, ok := again.offered(token); !ok || got == nil || o.GetToken() != token || !proto.Equal(o, got) {
				t.Fatalf("token %q: %v", token, got)
			}
		}
	})
}
