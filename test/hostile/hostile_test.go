package hostile

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
	"github.com/gpuctl/gpuctl/test/rig"
)

func TestMain(m *testing.M) {
	Main() // in a process that a test starts
	os.Exit(m.Run())
}

// start starts clients and ends them with the test. stop says what they did.
func start(t *testing.T, target Target, boundary string) (c *Clients, stop func() map[string]int64) {
	t.Helper()
	g := NewGroup()
	c, err := Start(g, target, boundary)
	stopped := false
	stop = func() map[string]int64 {
		stopped = true
		done, err := c.Stop()
		if err != nil {
			t.Error(err)
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
		return done
	}
	t.Cleanup(func() {
		if !stopped {
			stop()
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return c, stop
}

// listen is a socket in a folder that all users pass.
func listen(t *testing.T, name string) (net.Listener, Target) {
	t.Helper()
	dir := t.TempDir()
	if err := rig.Passable(dir); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, name)
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	return l, Target{Dir: dir}
}

func TestClientsOfApplicationsReachTheirSocket(t *testing.T) {
	l, target := listen(t, "app.sock")
	_, stop := start(t, target, "applications")
	greeted := make(chan struct{}, 1)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				b := make([]byte, 64)
				if _, err := io.ReadFull(c, b); err == nil && bytes.HasPrefix(b, binary.LittleEndian.AppendUint32(nil, wire.HelloMagic)) {
					select {
					case greeted <- struct{}{}:
					default:
					}
				}
			}()
		}
	}()
	<-greeted
	done := stop()
	if len(done) != len(applications()) {
		t.Errorf("%d kinds of clients: %v", len(done), done)
	}
}

// The flood of one user is refused and paced; another's call is answered.
func TestFloodOfTheLocalSocketIsRefusedAndOthersAreAnswered(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: the clients have to be another user")
	}
	inner, target := listen(t, "hostd.sock")
	refused := make(chan unixrpc.Peer, 1)
	l := unixrpc.Limit(inner, 0, 8, 64, nil, func(p unixrpc.Peer) {
		select {
		case refused <- p:
		default:
		}
	})
	server := unixrpc.Server(http.NotFoundHandler(), nil)
	ended := make(chan struct{})
	go func() { _ = server.Serve(l); close(ended) }()
	t.Cleanup(func() { server.Close(); <-ended })
	_, stop := start(t, target, "local")
	if p := <-refused; p.UID == 0 {
		t.Error("root was refused")
	}
	h := unixrpc.Client(target.hostd())
	defer h.CloseIdleConnections()
	res, err := h.Get("http://hostd/")
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	stop()
}

func TestNeighboursComputeAndAttackNothing(t *testing.T) {
	l, target := listen(t, "hostd.sock")
	target.Compute = map[string]float64{"local": 0.5}
	knocked := make(chan struct{})
	go func() {
		if _, err := l.Accept(); err == nil {
			close(knocked)
		}
	}()
	c, stop := start(t, target, "local")
	begin := time.Now()
	for c.Processor()["local"] < 0.8 { // seconds; the start of its process is part of it
		select {
		case <-knocked:
			t.Fatal("a neighbour knocks")
		case <-time.After(10 * time.Millisecond):
		}
	}
	took := time.Since(begin)
	had := c.Processor()["local"]
	// A tick of accounting, a piece, and what starting costs are above the share.
	if had > 0.5*took.Seconds()+0.3 {
		t.Errorf("%v s of a processor in %v", had, took)
	}
	if done := stop(); len(done) != 1 || done["local: neighbour"] == 0 {
		t.Errorf("done: %v", done)
	}
}

func TestHostileProcessesAreInAGroupThatIsIdle(t *testing.T) {
	l, target := listen(t, "app.sock")
	c, _ := start(t, target, "applications")
	g := NewGroup()
	defer g.Close()
	if !g.Idle() {
		t.Skip("no control groups for processors, or not root")
	}
	conn, err := l.Accept() // they are at work
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", c.processes[0].cmd.Process.Pid))
	if err != nil || !bytes.Contains(text, []byte("/gpuctl-hostile-")) {
		t.Errorf("groups of a client: %s (%v)", text, err)
	}
}
