package session

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// fakeConn is a connection that records only that it was closed.
type fakeConn struct{ closed bool }

func (c *fakeConn) Close() error {
	c.closed = true
	return nil
}

func TestSilentConnectionsTakeNoPlaceOfOtherUsers(t *testing.T) {
	d := newDoor(t.Context(), time.Hour)
	honest := &fakeConn{}
	d.enter(2, honest)
	var many []*fakeConn
	for range 4000 {
		c := &fakeConn{}
		many = append(many, c)
		d.enter(1, c)
	}
	for i, c := range many {
		if c.closed != (i < len(many)-silentPerUser) {
			t.Fatalf("connection %d of %d: closed %v", i, len(many), c.closed)
		}
	}
	for u := range uint32(2 * silentAll) { // of as many users, too
		d.enter(100+u, &fakeConn{})
	}
	if d.all > silentAll {
		t.Errorf("%d silent connections at once", d.all)
	}
	if honest.closed && d.leave(2, honest) {
		t.Error("a closed connection is let in")
	}
	if d.leave(1, many[0]) {
		t.Error("a connection that gave way is let in")
	}
}

func TestUserWithFewConnectionsKeepsThem(t *testing.T) {
	d := newDoor(t.Context(), time.Hour)
	honest := &fakeConn{}
	d.enter(2, honest)
	for u := range uint32(silentAll) { // all places are taken, and more connections come
		for range 1 + u%silentPerUser {
			d.enter(100+u%40, &fakeConn{})
		}
	}
	if honest.closed || !d.leave(2, honest) {
		t.Error("the only connection of a user gave way to others that have more")
	}
}

func TestOneUserDoesNotTakeEveryTurn(t *testing.T) {
	d := newDoor(t.Context(), time.Hour)
	release := make(chan struct{})
	var begun, over sync.WaitGroup
	begun.Add(turnsPerUser)
	for range turnsPerUser + 10 {
		over.Go(func() {
			_ = d.turn(1, func() error {
				select {
				case <-release: // one of those that waited
				default:
					begun.Done()
					<-release
				}
				return nil
			})
		})
	}
	begun.Wait()
	want := errors.New("made")
	if err := d.turn(2, func() error { return want }); !errors.Is(err, want) {
		t.Error(err)
	}
	close(release)
	over.Wait()
	if len(d.turns)+len(d.queue)+d.busy != 0 {
		t.Errorf("left: %v %v %d", d.turns, d.queue, d.busy)
	}
}

// The time for a greeting is an hour. So an honest program of the same user gets a place
// only because older silent connections are closed.
func TestSilentConnectionsDoNotDelayHonestProgram(t *testing.T) {
	b := newBench(t)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(b.dir, "door"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() { _ = b.m.serveApps(l, newDoor(b.m.ctx, time.Hour)) }()
	var silent []net.Conn
	for range 400 {
		c, err := net.Dial("unix", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		silent = append(silent, c)
	}
	// The oldest of them are closed, and see it.
	if n, err := silent[0].Read(make([]byte, 1)); err == nil {
		t.Error(n, "bytes for a silent connection")
	}
	if status, text := b.connectTo(l.Addr().String(), "tok"); status != 0 {
		t.Errorf("greeting: %d %s", status, text)
	}
}

// An application has nothing to say after its greeting. If it talks without end, reading that must
// not take a processor of gpuguest, whose time is no user's.
func TestApplicationThatTalksWithoutEndIsReadAtAPace(t *testing.T) {
	b := newBench(t)
	if err := b.conn.SetWriteDeadline(time.Now().Add(time.Second)); err != nil {
		t.Fatal(err)
	}
	said := 0
	for {
		n, err := b.conn.Write(make([]byte, 64<<10))
		said += n
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if said > 4<<20 {
		t.Errorf("%d bytes were read in a second", said)
	}
	b.conn.Close()
	testkit.Until(t, "its session has ended", func() error { return testkit.Want(len(b.m.list()) == 0, b.m.list()) })
}

// An application can keep who reads its command line waiting for as long as it runs. Its session
// begins without, and takes no other's turn.
func TestApplicationThatCannotBeReadTakesNoTurnForEver(t *testing.T) {
	m := &Manager{}
	pid := testkit.Unreadable(t)
	known := make(chan string, 1)
	go func() {
		command, _ := m.programOf(greeting{uid: 65533, pid: pid}, "s-1")
		known <- command
	}()
	select {
	case command := <-known:
		if command != "" {
			t.Errorf("it has the command line %q", command)
		}
	case <-time.After(20 * time.Second):
		t.Error("its session waits")
	}
}
