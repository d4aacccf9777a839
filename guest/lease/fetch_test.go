package lease

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/handover"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// taken is what a far executor was handed over: the name, and the connection.
type taken struct {
	name string
	conn net.Conn
}

// lent makes a lease whose far executor takes connections.
func lent(t *testing.T, m *Manager, id string) (*gpuctlv1.LendResponse, <-chan taken) {
	t.Helper()
	resp, err := m.Lend(testkit.Context(t), request(id))
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: m.leases[id].socket(), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	out := make(chan taken, 16)
	go func() {
		_ = handover.Serve(l, func(name string, f *os.File) {
			defer f.Close()
			if conn, err := net.FileConn(f); err == nil {
				out <- taken{name, conn}
			}
		})
	}()
	return resp, out
}

// short is a run folder whose sockets have short paths.
func short(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "gl")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func next(t *testing.T, c <-chan taken) taken {
	t.Helper()
	select {
	case x := <-c:
		t.Cleanup(func() { x.conn.Close() })
		return x
	case <-testkit.Context(t).Done():
		t.Fatal("nothing was handed over")
	}
	return taken{}
}

// refused connects with a preamble, and fails if that is handed over.
func refused(t *testing.T, what, addr string, p remote.Preamble, c <-chan taken) {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write(p.Append(nil)); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, conn) // it is closed
	select {
	case x := <-c:
		x.conn.Close()
		t.Errorf("%s: it was handed over as %s", what, x.name)
	default:
	}
}

func peerOf(b byte) []byte { return bytes.Repeat([]byte{b}, 32) }

// A fetch goes from one lease manager to another: the one is told whom to expect, and the
// other connects its far executor.
func TestFarExecutorOfAnotherHostIsConnected(t *testing.T) {
	l := &launcher{procs: map[int]*process{}}
	from, to := start(t, short(t), l), start(t, short(t), l)
	defer from.Close()
	defer to.Close()
	resp, asked := lent(t, from, "a")
	_, fetching := lent(t, to, "b")
	ctx := testkit.Context(t)
	allowed, err := from.AllowFetch(ctx, &gpuctlv1.AllowFetchRequest{Lease: "a", PeerCertSha256: peerOf(2)})
	if err != nil {
		t.Fatal(err)
	}
	req := &gpuctlv1.FetchRequest{Lease: "b", Addresses: []string{"127.0.0.1:1", resp.Addresses[0]}, Token: allowed.Token, PeerCertSha256: peerOf(1)}
	if err := to.Fetch(ctx, req); err != nil {
		t.Fatal(err)
	}
	f, a := next(t, fetching), next(t, asked)
	if want := remote.HandFetching(peerOf(1)); f.name != want {
		t.Errorf("it fetches as %s, not %s", f.name, want)
	}
	if want := remote.HandFetched(peerOf(2), allowed.Name); a.name != want {
		t.Errorf("it is asked as %s, not %s", a.name, want)
	}
	if _, err := f.conn.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	var b [1]byte
	if _, err := io.ReadFull(a.conn, b[:]); err != nil || b[0] != 'x' {
		t.Errorf("they are not at the two ends of one connection: %q, %v", b, err)
	}
	if ls := from.Leases(); ls[0].State != gpuctlv1.LeaseState_LEASE_STATE_OFFERED {
		t.Error("who fetches was taken for a carrier", ls)
	}
	// A second one with the same token: it was good once.
	refused(t, "a second fetcher", resp.Addresses[0], remote.Preamble{Role: remote.Fetch, Token: remote.Token(allowed.Token)}, asked)
}

func TestTokenOfAFetchIsGoodForNothingElse(t *testing.T) {
	m := start(t, short(t), &launcher{procs: map[int]*process{}})
	defer m.Close()
	resp, asked := lent(t, m, "a")
	ctx := testkit.Context(t)
	allow := func() remote.Token {
		t.Helper()
		r, err := m.AllowFetch(ctx, &gpuctlv1.AllowFetchRequest{Lease: "a", PeerCertSha256: peerOf(2)})
		if err != nil {
			t.Fatal(err)
		}
		return remote.Token(r.Token)
	}
	at := resp.Addresses[0]
	token := allow()
	for r := remote.Commands; r < remote.Fetch; r++ {
		refused(t, "a fetch's token as "+r.String(), at, remote.Preamble{Role: r, Token: token}, asked)
	}
	refused(t, "the carrier's token for a fetch", at, remote.Preamble{Role: remote.Fetch, Token: remote.Token(resp.Token)}, asked)
	refused(t, "another token", at, remote.Preamble{Role: remote.Fetch, Token: remote.Token{1}}, asked)
	refused(t, "no token", at, remote.Preamble{Role: remote.Fetch}, asked)
	first := allow()
	refused(t, "a token that was replaced", at, remote.Preamble{Role: remote.Fetch, Token: token}, asked)
	m.EndFetch("a")
	refused(t, "a token that was taken back", at, remote.Preamble{Role: remote.Fetch, Token: first}, asked)
	late := allow()
	m.mu.Lock()
	m.leases["a"].fetch.until = time.Now()
	m.mu.Unlock()
	refused(t, "a token that is too old", at, remote.Preamble{Role: remote.Fetch, Token: late}, asked)
	plain := allow()
	refused(t, "without TLS", at, remote.Preamble{Role: remote.Fetch, Plain: true, Token: plain}, asked)
}

func TestWhatIsNoFetchIsRefused(t *testing.T) {
	l := &launcher{procs: map[int]*process{}}
	m := start(t, short(t), l)
	defer m.Close()
	lent(t, m, "a")
	ctx := testkit.Context(t)
	plain := request("p")
	plain.Plain = true
	if _, err := m.Lend(ctx, plain); err != nil {
		t.Fatal(err)
	}
	for name, r := range map[string]*gpuctlv1.AllowFetchRequest{
		"no such lease":   {Lease: "x", PeerCertSha256: peerOf(1)},
		"no certificate":  {Lease: "a"},
		"one without TLS": {Lease: "p", PeerCertSha256: peerOf(1)},
	} {
		if _, err := m.AllowFetch(ctx, r); err == nil {
			t.Errorf("%s: it was allowed", name)
		}
	}
	token := make([]byte, remote.TokenSize)
	some := []string{"127.0.0.1:1"}
	for name, r := range map[string]*gpuctlv1.FetchRequest{
		"no such lease":   {Lease: "x", Addresses: some, Token: token, PeerCertSha256: peerOf(1)},
		"no certificate":  {Lease: "a", Addresses: some, Token: token},
		"no token":        {Lease: "a", Addresses: some, PeerCertSha256: peerOf(1)},
		"no address":      {Lease: "a", Token: token, PeerCertSha256: peerOf(1)},
		"many addresses":  {Lease: "a", Addresses: make([]string, mostAddresses+1), Token: token, PeerCertSha256: peerOf(1)},
		"one without TLS": {Lease: "p", Addresses: some, Token: token, PeerCertSha256: peerOf(1)},
	} {
		if err := m.Fetch(ctx, r); err == nil || connect.CodeOf(err) == connect.CodeUnavailable {
			t.Errorf("%s: %v", name, err)
		}
	}
	// An address where nobody is costs the fetch, and nothing else.
	err := m.Fetch(ctx, &gpuctlv1.FetchRequest{Lease: "a", Addresses: some, Token: token, PeerCertSha256: peerOf(1)})
	if connect.CodeOf(err) != connect.CodeUnavailable || strings.Contains(err.Error(), string(token)) {
		t.Errorf("an address that refuses: %v", err)
	}
	for _, p := range l.procs {
		p.Kill()
	}
	if _, err := m.AllowFetch(ctx, &gpuctlv1.AllowFetchRequest{Lease: "a", PeerCertSha256: peerOf(1)}); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("a lease that has ended: %v", err)
	}
}

// Who may fetch is in no file: after a restart nobody may.
func TestFetchIsForgottenWithGpuguest(t *testing.T) {
	dir, l := short(t), &launcher{procs: map[int]*process{}}
	m := start(t, dir, l)
	lent(t, m, "a")
	allowed, err := m.AllowFetch(testkit.Context(t), &gpuctlv1.AllowFetchRequest{Lease: "a", PeerCertSha256: peerOf(2)})
	if err != nil {
		t.Fatal(err)
	}
	m.Close()
	_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			if b, err := os.ReadFile(path); err != nil || bytes.Contains(b, allowed.Token) {
				t.Errorf("%s has the token: %v", path, err)
			}
		}
		return nil
	})
	m = start(t, dir, l)
	defer m.Close()
	if found, _ := m.find(remote.Preamble{Role: remote.Fetch, Token: remote.Token(allowed.Token)}); found != nil {
		t.Error("it may fetch after a restart")
	}
}

// A far executor that is still loading its runtime must be there before the other host is
// dialed: that one waits for some seconds only.
func TestOtherHostIsDialedWhenTheFarExecutorIsThere(t *testing.T) {
	m := start(t, short(t), &launcher{procs: map[int]*process{}})
	defer m.Close()
	if _, err := m.Lend(testkit.Context(t), request("a")); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(testkit.Context(t), 200*time.Millisecond)
	defer cancel()
	err = m.Fetch(ctx, &gpuctlv1.FetchRequest{Lease: "a", Addresses: []string{l.Addr().String()}, Token: make([]byte, remote.TokenSize), PeerCertSha256: peerOf(1)})
	if err == nil {
		t.Error("a far executor that is not there fetches")
	}
	_ = l.(*net.TCPListener).SetDeadline(time.Now())
	if conn, err := l.Accept(); err == nil {
		conn.Close()
		t.Error("the other host was dialed for nothing")
	}
}
