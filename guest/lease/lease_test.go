package lease

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/engine"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/session"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// process is a far executor that does nothing.
type process struct {
	done  chan struct{}
	pid   int
	stuck bool // in its driver: a signal does not end it
}

func (p *process) PID() int              { return p.pid }
func (p *process) Start() uint64         { return 5 }
func (p *process) Done() <-chan struct{} { return p.done }
func (p *process) Exit() string          { return "killed by the test" }
func (p *process) Owns(*unix.Ucred) bool { return true }
func (p *process) Kill() {
	if p.stuck {
		return
	}
	select {
	case <-p.done:
	default:
		close(p.done)
	}
}

// launcher starts such processes.
type launcher struct {
	session.Launcher
	procs map[int]*process
	fail  error
	blind error // of Adopt
}

func (l *launcher) Launch(_ context.Context, _ session.Spec, journal func(session.Process) error) (session.Process, error) {
	p := &process{done: make(chan struct{}), pid: 100 + len(l.procs)}
	if err := journal(p); err != nil {
		return nil, err
	}
	if l.fail != nil {
		return nil, l.fail
	}
	l.procs[p.pid] = p
	return p, nil
}

func (l *launcher) Adopt(pid int, _ uint64, _ string) (session.Process, error) {
	if l.blind != nil {
		return nil, l.blind
	}
	if p := l.procs[pid]; p != nil {
		return p, nil
	}
	return nil, session.ErrGone
}

func (l *launcher) Forget(string) error { return nil }

func start(t *testing.T, dir string, l *launcher) *Manager {
	t.Helper()
	m, err := New(Config{Dir: dir, Launcher: l, Logger: slog.New(slog.DiscardHandler), Listen: []string{"127.0.0.1:0"}, Most: 2})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func request(id string) *gpuctlv1.LendRequest {
	return &gpuctlv1.LendRequest{Lease: id, Runtime: &gpuctlv1.Runtime{Library: "/lib.so"}, PeerCertSha256: make([]byte, 32)}
}

func TestLeasesSurviveGpuguest(t *testing.T) {
	dir, l := t.TempDir(), &launcher{procs: map[int]*process{}}
	ctx := testkit.Context(t)
	m := start(t, dir, l)
	first, err := m.Lend(ctx, request("a"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := New(Config{Dir: dir, Launcher: l, Logger: slog.New(slog.DiscardHandler)}); !errors.Is(err, engine.ErrLocked) {
		t.Errorf("a second one: %v", err)
	}
	// One that was being made when gpuguest ended.
	if err := os.Mkdir(filepath.Join(dir, leasesName, "l-half"), 0o711); err != nil {
		t.Fatal(err)
	}
	m.Close()
	m = start(t, dir, l)
	defer m.Close()
	again, err := m.Lend(ctx, request("a"))
	if err != nil || string(again.Token) != string(first.Token) || string(again.CertSha256) != string(first.CertSha256) || len(again.Token) != remote.TokenSize {
		t.Error("another lease", err)
	}
	if ls := m.Leases(); len(ls) != 1 || ls[0].State != gpuctlv1.LeaseState_LEASE_STATE_USED {
		t.Error(ls)
	}
	if _, err := os.Stat(filepath.Join(dir, leasesName, "l-half")); err == nil {
		t.Error("half a lease is left")
	}
	for _, p := range l.procs {
		p.Kill()
	}
	if ls := m.Leases(); len(ls) != 1 || ls[0].State != gpuctlv1.LeaseState_LEASE_STATE_ENDED || !strings.Contains(ls[0].Message, "killed by the test") {
		t.Error(ls)
	}
	for range 2 {
		if err := m.EndLease(ctx, "a"); err != nil {
			t.Error(err)
		}
	}
	if left, _ := os.ReadDir(filepath.Join(dir, leasesName)); len(left) != 0 || len(m.Leases()) != 0 {
		t.Error(left)
	}
}

// A killed far executor may stay in its driver, with its GPU. Its lease must not be said to
// be over meanwhile.
func TestALeaseIsOverOnlyAfterItsFarExecutor(t *testing.T) {
	l := &launcher{procs: map[int]*process{}}
	m := start(t, t.TempDir(), l)
	defer m.Close()
	if _, err := m.Lend(testkit.Context(t), request("a")); err != nil {
		t.Fatal(err)
	}
	p := l.procs[100]
	p.stuck = true
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := m.EndLease(ctx, "a"); err == nil || len(m.Leases()) != 1 {
		t.Errorf("it is over, and its far executor runs: %v, %v", err, m.Leases())
	}
	p.stuck = false
	p.Kill()
	if err := m.EndLease(testkit.Context(t), "a"); err != nil || len(m.Leases()) != 0 {
		t.Error(err, m.Leases())
	}
}

// A far executor of which nobody can say whether it runs is not one that has ended.
func TestAFarExecutorThatCannotBeLookedAtIsNotForgotten(t *testing.T) {
	dir, l := t.TempDir(), &launcher{procs: map[int]*process{}}
	m := start(t, dir, l)
	if _, err := m.Lend(testkit.Context(t), request("a")); err != nil {
		t.Fatal(err)
	}
	m.Close()
	l.blind = unix.EMFILE
	if m, err := New(Config{Dir: dir, Launcher: l, Logger: slog.New(slog.DiscardHandler)}); !errors.Is(err, unix.EMFILE) {
		t.Errorf("it was given up: %v", err)
		if m != nil {
			m.Close()
		}
	}
	l.blind = nil
	record := filepath.Join(dir, leasesName, "l-a", recordName)
	if err := os.Rename(record, record+".x"); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(record, 0o700); err != nil { // it can't be read
		t.Fatal(err)
	}
	if m, err := New(Config{Dir: dir, Launcher: l, Logger: slog.New(slog.DiscardHandler)}); err == nil {
		t.Error("it was given up")
		m.Close()
	}
	if err := errors.Join(os.Remove(record), os.Rename(record+".x", record)); err != nil {
		t.Fatal(err)
	}
	m = start(t, dir, l)
	defer m.Close()
	if ls := m.Leases(); len(ls) != 1 || ls[0].State != gpuctlv1.LeaseState_LEASE_STATE_USED {
		t.Error(ls)
	}
}

// Who has a token must not make gpuguest keep descriptors without end, while the far executor
// loads its runtime.
func TestConnectionsThatWaitForAFarExecutorAreBounded(t *testing.T) {
	m := start(t, t.TempDir(), &launcher{procs: map[int]*process{}})
	resp, err := m.Lend(testkit.Context(t), request("a"))
	if err != nil {
		t.Fatal(err)
	}
	b := remote.Preamble{Role: remote.Commands, Token: remote.Token(resp.Token)}.Append(nil)
	closed := make(chan struct{}, 64)
	var conns []net.Conn
	for range 2 * mostHanding {
		conn, err := net.Dial("tcp", resp.Addresses[0])
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
		if _, err := conn.Write(b); err != nil {
			t.Fatal(err)
		}
		go func() {
			_, _ = io.Copy(io.Discard, conn)
			closed <- struct{}{}
		}()
	}
	for range mostHanding { // the others wait for the socket that the far executor does not make
		select {
		case <-closed:
		case <-testkit.Context(t).Done():
			t.Fatal("all of them wait")
		}
	}
	m.Close()
	for _, c := range conns {
		c.Close()
	}
}

func TestLendRefuses(t *testing.T) {
	l := &launcher{procs: map[int]*process{}}
	m := start(t, t.TempDir(), l)
	defer m.Close()
	for name, change := range map[string]func(*gpuctlv1.LendRequest){
		"no id":          func(r *gpuctlv1.LendRequest) { r.Lease = "" },
		"a path":         func(r *gpuctlv1.LendRequest) { r.Lease = "../x" },
		"a long id":      func(r *gpuctlv1.LendRequest) { r.Lease = strings.Repeat("a", 33) },
		"no library":     func(r *gpuctlv1.LendRequest) { r.Runtime = nil },
		"a remote GPU":   func(r *gpuctlv1.LendRequest) { r.Runtime.Remote = &gpuctlv1.Remote{} },
		"no certificate": func(r *gpuctlv1.LendRequest) { r.PeerCertSha256 = nil },
	} {
		r := request("a")
		change(r)
		if _, err := m.Lend(testkit.Context(t), r); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
	l.fail = errors.New("no such library")
	if _, err := m.Lend(testkit.Context(t), request("a")); !errors.Is(err, l.fail) || len(m.Leases()) != 0 {
		t.Error("a lease without an executor", err)
	}
	l.fail = nil
	for _, id := range []string{"a", "b"} {
		if _, err := m.Lend(testkit.Context(t), request(id)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := m.Lend(testkit.Context(t), request("c")); err == nil {
		t.Error("more leases than are allowed")
	}
	other := request("a")
	other.Plain = true
	if _, err := m.Lend(testkit.Context(t), other); err == nil {
		t.Error("another request got the lease")
	}
}

// Each session of a claim has a lease, and its user begins as many as he likes.
func TestOneClaimDoesNotTakeEveryLease(t *testing.T) {
	m, err := New(Config{Dir: t.TempDir(), Launcher: &launcher{procs: map[int]*process{}}, Logger: slog.New(slog.DiscardHandler), Most: 8})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for i, c := range []struct {
		claim string
		want  bool
	}{
		{"greedy", true},
		{"greedy", true},
		{"greedy", true},
		{"greedy", true},
		{"greedy", false},
		{"honest", true},
		{"greedy", false},
		{"other", true},
		{"honest", true},
		{"honest", false},
		{"last", true},
		{"late", false},
	} {
		r := request(fmt.Sprint("l-", i))
		r.Claim = c.claim
		if _, err := m.Lend(testkit.Context(t), r); (err == nil) != c.want {
			t.Errorf("lease %d, of %s: %v", i, c.claim, err)
		}
	}
}

// Connections that name no lease, or name it in another way than was agreed on, are closed.
func TestStrangersAreRefused(t *testing.T) {
	m := start(t, t.TempDir(), &launcher{procs: map[int]*process{}})
	defer m.Close()
	resp, err := m.Lend(testkit.Context(t), request("a"))
	if err != nil {
		t.Fatal(err)
	}
	right := remote.Token(resp.Token)
	for name, b := range map[string][]byte{
		"another token":         remote.Preamble{Role: remote.Commands, Token: remote.Token{1}}.Append(nil),
		"the token without TLS": remote.Preamble{Role: remote.Commands, Plain: true, Token: right}.Append(nil),
		"no such role":          remote.Preamble{Role: 99, Token: right}.Append(nil),
		"something else":        []byte("GET / HTTP/1.1\r\nHost: localhost\r\nAccept: everything\r\n\r\n"),
	} {
		conn, err := net.Dial("tcp", resp.Addresses[0])
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write(b); err != nil {
			t.Fatal(err)
		}
		if n, _ := io.Copy(io.Discard, conn); n != 0 {
			t.Errorf("%s: an answer of %d bytes", name, n)
		}
		conn.Close()
	}
	if ls := m.Leases(); len(ls) != 1 || ls[0].State != gpuctlv1.LeaseState_LEASE_STATE_OFFERED {
		t.Error(ls)
	}
}
