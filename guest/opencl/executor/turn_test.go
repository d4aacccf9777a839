package executor

import (
	"fmt"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/guest/turn"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

func socketPair(t testing.TB) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = c.(*net.UnixConn)
	}
	return ends[0], ends[1]
}

// desk is an arbiter, and a session at it that does what the test says.
type desk struct {
	t testing.TB
	*turn.Arbiter
	ours  []*session // of this process
	other *net.UnixConn
	epoch uint32
	n     uint64
	got   chan turn.Frame
}

func newDesk(t testing.TB) *desk {
	t.Helper()
	a, err := turn.New("g", turn.DefaultConfig())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Close)
	return &desk{t: t, Arbiter: a}
}

// seats gives an executor of this process its seat.
func (d *desk) seats(s *session, name string) *turn.Seat {
	d.t.Helper()
	theirs, ours := socketPair(d.t)
	d.ours = append(d.ours, s)
	go s.readTurns(theirs)
	seat, err := d.Join(turn.Member{Session: name, Owner: name, Weight: 100}, 0, ours)
	if err != nil {
		d.t.Fatal(err)
	}
	return seat
}

// another lets the test play a session.
func (d *desk) another() {
	d.t.Helper()
	theirs, ours := socketPair(d.t)
	d.other, d.got = theirs, make(chan turn.Frame, 10000)
	go func() {
		defer close(d.got)
		var b [turn.FrameSize]byte
		for {
			if n, err := theirs.Read(b[:]); err != nil || n != len(b) {
				return
			}
			if f, err := turn.Decode(&b); err == nil {
				d.got <- f
			}
		}
	}()
	if _, err := d.Join(turn.Member{Session: "other", Owner: "other", Weight: 100}, 0, ours); err != nil {
		d.t.Fatal(err)
	}
	f := d.until(turn.Share)
	d.epoch = f.Epoch
	d.send(turn.Frame{Kind: turn.End})
}

func (d *desk) send(f turn.Frame) {
	d.t.Helper()
	f.Epoch, f.Number = d.epoch, d.n
	b := f.Encode()
	if _, err := d.other.Write(b[:]); err != nil {
		d.t.Fatal(err)
	}
}

func (d *desk) until(k turn.Kind) turn.Frame {
	d.t.Helper()
	for f := range d.got {
		if f.Kind == k {
			return f
		}
	}
	d.t.Fatalf("no %s comes", k)
	return turn.Frame{}
}

// takes has the other session take the GPU. What it was kept idle for knows that.
func (d *desk) takes() {
	d.t.Helper()
	d.n++
	d.send(turn.Frame{Kind: turn.Ask})
	d.until(turn.Grant)
	for _, s := range d.ours {
		testkit.Until(d.t, "nothing is offered", func() error {
			s.mu.Lock()
			defer s.mu.Unlock()
			return testkit.Want(s.turns[0].offer == 0, s.turns[0].offer)
		})
	}
}

func (d *desk) ends() { d.t.Helper(); d.send(turn.Frame{Kind: turn.End}) }

// waiting waits until a seat is at a point, which it says by itself.
func (d *desk) waiting(seat *turn.Seat, what string, is func(turn.Use) bool) {
	d.t.Helper()
	testkit.Until(d.t, what, func() error {
		u := seat.Use()
		return testkit.Want(is(u), u)
	})
}

func isShared(u turn.Use) bool  { return u.Shared && !u.Waiting && u.Keeps == 0 }
func isWaiting(u turn.Use) bool { return u.Waiting }

// Sessions that share a device launch in turns, and their results are those that they have alone: out
// of order and in order, with events, user events and transfers between the commands.
func TestSessionsThatTakeTurnsComputeAsAlone(t *testing.T) {
	d := newDesk(t)
	var all [3]*client
	var seats []*turn.Seat
	for i := range all {
		all[i] = newClient(t)
		s := all[i].executor(1)
		s.activate()
		seats = append(seats, d.seats(s, fmt.Sprint(i)))
	}
	d.waiting(seats[0], "they take turns", func(u turn.Use) bool { return u.Shared })
	var wg sync.WaitGroup
	for i, c := range all {
		wg.Go(func() {
			props := uint64(0)
			if i == 1 {
				props = cl.QueueOutOfOrderExecModeEnable
			}
			ctx, q, k := c.setup(props)
			b, b2 := c.buffer(ctx, 4096), c.buffer(ctx, 4096)
			c.fill(q, b, 4096, 7)
			c.post(&wire.Barrier{Queue: q})
			want := uint32(7)
			for round := range 30 {
				u, e := c.id(), c.id()
				c.post(&wire.CreateUserEvent{ID: u, Context: ctx})
				c.launch(q, k, b, 2, 1024, e, u) // waits for the application
				c.post(&wire.Barrier{Queue: q})
				for range 5 {
					c.launch(q, k, b, 3, 1024, 0)
					c.post(&wire.Barrier{Queue: q})
				}
				want += 17
				c.post(&wire.SetUserEvent{Event: u})
				if round%10 == 0 {
					c.post(&wire.CopyBuffer{Queue: q, Src: b, Dst: b2, Size: 4096})
					c.post(&wire.Barrier{Queue: q})
					c.call(&wire.WaitEvents{Wait: []uint32{e}})
					got := c.read(q, b2, 4096)
					if got[0] != want || got[1023] != want {
						t.Errorf("session %d, round %d: %d, want %d", i, round, got[0], want)
					}
				}
				c.post(&wire.Release{ID: e})
				c.post(&wire.Release{ID: u})
			}
			c.call(&wire.Finish{Queue: q})
			if got := c.read(q, b, 4096); got[0] != want || got[1023] != want {
				t.Errorf("session %d: %d, want %d", i, got[0], want)
			}
		})
	}
	wg.Wait()
	for i, s := range seats {
		d.waiting(s, fmt.Sprintf("session %d had turns", i), func(u turn.Use) bool { return u.Turns >= 5 && u.Busy > 0 })
	}
}

// While another session has the GPU, nothing is launched; a freeze does not wait for it, the
// session asks for nothing while it is frozen, and its commands run on the next executor.
func TestSessionThatWaitsForItsTurnIsFrozenAndSwapped(t *testing.T) {
	d := newDesk(t)
	c := newClient(t)
	a := c.executor(1)
	a.activate()
	ctx, q, k := c.setup(0)
	b := c.buffer(ctx, 4096)
	c.fill(q, b, 4096, 1)
	seat := d.takesTurns(a)
	d.takes()
	c.launch(q, k, b, 10, 1024, 0)
	e := c.id()
	c.launch(q, k, b, 100, 1024, e)
	d.waiting(seat, "it waits", isWaiting)
	if n := eventStatus(c, e); n != cl.Queued {
		t.Errorf("the command that waits is %d", n)
	}
	if _, err := a.freeze(t.Context(), 10*time.Second); err != nil {
		t.Fatal(err)
	}
	d.waiting(seat, "it asks for nothing", isShared)
	a.thaw()
	d.waiting(seat, "it asks again", isWaiting)
	next := c.executor(2)
	c.swap(a, next)
	d.ends()
	slot := c.start(&wire.Finish{Queue: q})
	seat.Leave()
	there := d.seats(next, "a")
	if st, _ := c.answer(slot); st != cl.Success {
		t.Fatal(st)
	}
	equal(t, c.read(q, b, 4096), 111)
	_ = there
}

func eventStatus(c *client, e uint32) int32 {
	b := c.call(&wire.EventStatus{Event: e})
	return int32(b[0]) | int32(b[1])<<8 | int32(b[2])<<16 | int32(b[3])<<24
}

// ones makes a session with a buffer of ones.
func (d *desk) ones() (c *client, a *session, q, k, b uint32) {
	c = newClient(d.t)
	a = c.executor(1)
	a.activate()
	ctx, q, k := c.setup(0)
	b = c.buffer(ctx, 4096)
	c.fill(q, b, 4096, 1)
	c.call(&wire.Finish{Queue: q})
	return c, a, q, k, b
}

// takesTurns has the session share the GPU with another one.
func (d *desk) takesTurns(a *session) *turn.Seat {
	d.t.Helper()
	seat := d.seats(a, "a")
	d.another()
	d.waiting(seat, "it takes turns", isShared)
	return seat
}

// A turn that is granted while the session is being frozen is given back.
func TestFreezeHoldsNoTurn(t *testing.T) {
	d := newDesk(t)
	c, a, q, k, b := d.ones()
	seat := d.takesTurns(a)
	for range 20 {
		d.takes()
		c.launch(q, k, b, 1, 1024, 0)
		d.waiting(seat, "it waits", isWaiting)
		ended := make(chan struct{})
		go func() { defer close(ended); d.ends() }() // at the same time
		if _, err := a.freeze(t.Context(), 10*time.Second); err != nil {
			t.Fatal(err)
		}
		<-ended
		d.takes() // the frozen session does not keep it
		d.ends()
		a.thaw()
		c.call(&wire.Finish{Queue: q})
	}
	equal(t, c.read(q, b, 4096), 21)
}

// When gpuguest ends, its sessions go on, with what had waited.
func TestSessionIsFreeWithoutArbiter(t *testing.T) {
	d := newDesk(t)
	c := newClient(t)
	a := c.executor(1)
	a.activate()
	ctx, q, k := c.setup(0)
	b := c.buffer(ctx, 4096)
	c.fill(q, b, 4096, 1)
	seat := d.takesTurns(a)
	d.takes()
	for range 300 { // more than a turn has
		c.launch(q, k, b, 1, 1024, 0)
	}
	d.waiting(seat, "it waits", isWaiting)
	d.Close()
	c.call(&wire.Finish{Queue: q})
	equal(t, c.read(q, b, 4096), 301)
	if a.sharing.Load() {
		t.Error("it takes turns of nobody")
	}
	// The next gpuguest's arbiter takes it over.
	next := newDesk(t)
	seat = next.seats(a, "a")
	next.another()
	next.waiting(seat, "it takes turns again", isShared)
	c.launch(q, k, b, 1, 1024, 0)
	c.call(&wire.Finish{Queue: q})
	equal(t, c.read(q, b, 4096), 302)
	next.waiting(seat, "its turn is over", func(u turn.Use) bool { return u.Turns > 0 })
}

// What an arbiter must not send changes nothing.
func TestArbiterThatMakesNoSenseIsNotListenedTo(t *testing.T) {
	c := newClient(t)
	a := c.executor(1)
	a.activate()
	ctx, q, k := c.setup(0)
	b := c.buffer(ctx, 4096)
	c.fill(q, b, 4096, 1)
	for _, frames := range [][]turn.Frame{
		{{Kind: turn.Share, Epoch: 1}},
		{{Kind: turn.Hello, Number: 1}},
		{{Kind: turn.Hello, Number: 1 << 63}},
		{{Kind: turn.Hello}, {Kind: turn.Grant, Number: 4}, {Kind: turn.Lapse}, {Kind: turn.Ask}, {Kind: turn.Free, Epoch: 7}},
		{{Kind: turn.Hello}, {Kind: turn.Share, Epoch: 3}, {Kind: turn.Grant, Epoch: 3, Number: 9}, {Kind: 77}},
	} {
		theirs, ours := socketPair(t)
		done := make(chan struct{})
		go func() { defer close(done); a.readTurns(theirs) }()
		for _, f := range frames {
			x := f.Encode()
			_, _ = ours.Write(x[:])
		}
		_ = ours.CloseWrite()
		<-done
		ours.Close()
		c.launch(q, k, b, 1, 1024, 0)
		c.call(&wire.Finish{Queue: q})
	}
	equal(t, c.read(q, b, 4096), 6)
}

// A session that is being frozen launches nothing any more, also when it gets the GPU for itself
// meanwhile: what it would launch is in no graph, and would still run when the contents are read.
func TestSessionThatIsSetFreeDuringAFreezeLaunchesNothing(t *testing.T) {
	d := newDesk(t)
	c, a, q, k, b := d.ones()
	d.takesTurns(a)
	d.takes()
	c.launch(q, k, b, 10, 1024, 0)
	e := c.id()
	c.launch(q, k, b, 100, 1024, e)
	if n := eventStatus(c, e); n != cl.Queued {
		t.Fatalf("the command that waits is %d", n)
	}
	a.cbMu.Lock()
	a.cbPushing = true // the freeze waits at its end
	a.cbMu.Unlock()
	frozen := make(chan error, 1)
	go func() {
		_, err := a.freeze(t.Context(), 10*time.Second)
		frozen <- err
	}()
	testkit.Until(t, "the gate is closed", func() error { return testkit.Want(a.gate.Load(), "open") })
	d.other.Close()
	testkit.Until(t, "it has the GPU for itself", func() error { return testkit.Want(!a.sharing.Load(), "shared") })
	a.cbMu.Lock()
	a.cbPushing = false
	a.cbMu.Unlock()
	if err := <-frozen; err != nil {
		t.Fatal(err)
	}
	a.mu.Lock()
	left := len(a.parked)
	a.mu.Unlock()
	if left != 2 {
		t.Errorf("%d commands are parked in the frozen session, not 2", left)
	}
	a.thaw()
	c.call(&wire.Finish{Queue: q})
	equal(t, c.read(q, b, 4096), 111)
}

// An executor that has no descriptor left for a moment takes turns and contents afterwards as before: an
// arbiter that nobody answers would take it for one that keeps the GPU, and end its session.
func TestExecutorThatCouldNotAcceptTakesTurnsAndContentsLater(t *testing.T) {
	d := newDesk(t)
	_, a, _, _, _ := d.ones()
	for name, serve := range map[string]func(*net.UnixListener){
		"turns":    a.serveTurns,
		"contents": func(l *net.UnixListener) { a.serveImports(l) },
	} {
		l, end := testkit.OutlastsAccept(t, name, serve)
		conn, err := net.DialUnix("unix", nil, l.Addr().(*net.UnixAddr))
		if err != nil {
			t.Fatal(err)
		}
		if name == "turns" {
			seat, err := d.Join(turn.Member{Session: "a", Owner: "a", Weight: 100}, 0, conn)
			if err != nil {
				t.Fatal(err)
			}
			d.another()
			d.waiting(seat, "it takes turns", isShared)
		} else {
			_ = conn.SetReadDeadline(time.Now().Add(time.Second))
			if _, err := conn.Read(make([]byte, 1)); err != nil {
				t.Errorf("nobody greets who brings contents: %v", err)
			}
			conn.Close()
		}
		end()
	}
}
