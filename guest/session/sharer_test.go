package session

import (
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// lender has one far executor, or none yet.
type lender struct {
	Lender

	mu  sync.Mutex
	far Sharer
}

func (l *lender) Sharers() []Sharer {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.far.ID == "" {
		return nil
	}
	return []Sharer{l.far}
}

// farProcess is a far executor, as far as its process goes.
type farProcess struct{ done chan struct{} }

func (p *farProcess) PID() int              { return os.Getpid() }
func (p *farProcess) Start() uint64         { return 5 }
func (p *farProcess) Done() <-chan struct{} { return p.done }
func (p *farProcess) Exit() string          { return "killed" }
func (p *farProcess) Owns(*unix.Ucred) bool { return true }
func (p *farProcess) Kill()                 { close(p.done) }

// The session of another host that a GPU is lent to takes turns as those of this host do,
// and is ended where they would be.
func TestFarExecutorTakesTurnsBesideSessions(t *testing.T) {
	dir, err := os.MkdirTemp("", "gs")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	control := filepath.Join(dir, "c1")
	turns, err := net.Listen("unix", turnSocket(control, 1))
	if err != nil {
		t.Fatal(err)
	}
	defer turns.Close()
	proc := &farProcess{done: make(chan struct{})}
	m, err := New(Config{
		Dir: filepath.Join(dir, "run"), Launcher: newFakeLauncher(t), Logger: slog.New(slog.DiscardHandler),
		Lender: &lender{far: Sharer{ID: "l-1", Owner: "host:there", GPUs: []string{"one"}, Process: proc, Socket: control, Log: slog.New(slog.DiscardHandler)}},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	conn, err := turns.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	testkit.Until(t, "it has a seat", func() error {
		m.sharing.mu.Lock()
		defer m.sharing.mu.Unlock()
		for _, p := range m.sharing.places {
			if len(p.seats) == 1 {
				return nil
			}
		}
		return testkit.Want(false, len(m.sharing.places), "places")
	})
	_ = conn.SetWriteDeadline(time.Now().Add(time.Minute))
	if _, err := conn.Write(make([]byte, 4096)); err != nil { // no request is like that
		t.Fatal(err)
	}
	<-proc.done
}

// A host chooses the names of its leases. With that of a session here it must not get that session
// ended for what its own far executor does.
func TestALeaseWithTheNameOfASessionIsNotTakenForIt(t *testing.T) {
	l := &lender{}
	b := newBench(t, func(c *Config) { c.Lender = l })
	control := filepath.Join(t.TempDir(), "c1")
	turns, err := net.Listen("unix", turnSocket(control, 1))
	if err != nil {
		t.Fatal(err)
	}
	defer turns.Close()
	proc := &farProcess{done: make(chan struct{})}
	l.mu.Lock()
	l.far = Sharer{ID: b.id, Owner: "host:there", GPUs: []string{"gpu-2"}, Process: proc, Socket: control, Log: slog.New(slog.DiscardHandler)}
	l.mu.Unlock()
	conn, err := turns.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetWriteDeadline(time.Now().Add(time.Minute))
	if _, err := conn.Write(make([]byte, 4096)); err != nil { // no request is like that
		t.Fatal(err)
	}
	testkit.Until(t, "one of the two is ended", func() error {
		select {
		case <-proc.done:
			return nil
		default:
			return testkit.Want(b.session().GetState() != running)
		}
	})
	if s := b.session(); s.GetState() != running {
		t.Errorf("the session is %v: %s", s.GetState(), s.GetMessage())
	}
}
