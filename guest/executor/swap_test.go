package executor

import (
	"context"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/guest/cl"
	"github.com/gpuctl/gpuctl/guest/shm"
	"github.com/gpuctl/gpuctl/guest/wire"
)

func noProgress(string, uint64, uint64) {}

func swap(ctx context.Context, dir string, from, to *session, _ uint32) error {
	sock := filepath.Join(dir, "i")
	l, err := net.Listen("unix", sock)
	if err != nil {
		return err
	}
	defer l.Close()
	go to.serveImports(l)
	move := func(final bool) error {
		from.mu.Lock()
		b, err := from.graph(final).encode()
		from.mu.Unlock()
		if err != nil {
			return err
		}
		g, err := decodeGraph(b)
		if err != nil {
			return err
		}
		to.mu.Lock()
		err = to.restore(g, noProgress)
		to.mu.Unlock()
		if err != nil {
			return err
		}
		p, err := from.dialPeer(sock)
		if err != nil {
			return err
		}
		return from.export(ctx, sock, false, final, p, noProgress)
	}
	if err := move(false); err != nil {
		return err
	}
	if _, err := from.freeze(ctx, 10*time.Second); err != nil {
		return err
	}
	if err := move(true); err != nil {
		from.thaw()
		return err
	}
	from.ring.(*shm.Ring).SetOwner(to.cfg.Generation)
	to.activate()
	from.closed.Store(true)
	from.retire()
	from.host.end()
	return nil
}

func equal(t *testing.T, got []uint32, want uint32) {
	t.Helper()
	for i, v := range got {
		if v != want {
			t.Fatalf("element %d is %d, want %d", i, v, want)
		}
	}
}

func TestLaunchAndRead(t *testing.T) {
	c := newClient(t)
	c.executor(1).activate()
	ctx, q, k := c.setup(0)
	b := c.buffer(ctx, 4096)
	c.fill(q, b, 4096, 7)
	for range 100 {
		c.launch(q, k, b, 2, 1024, 0)
	}
	equal(t, c.read(q, b, 4096), 207)
	c.call(&wire.Finish{Queue: q})
}

// Nothing that waits for a user event reaches the device before its time, in
// whatever order the application goes on; and it survives a swap.
func TestHeldCommandsSurviveSwap(t *testing.T) {
	for _, swapped := range []bool{false, true} {
		c := newClient(t)
		s := c.executor(1)
		s.activate()
		ctx, q, k := c.setup(cl.QueueProfilingEnable)
		b := c.buffer(ctx, 4096)
		c.fill(q, b, 4096, 1)
		u, e := c.id(), c.id()
		c.post(&wire.CreateUserEvent{ID: u, Context: ctx})
		c.launch(q, k, b, 10, 1024, e, u)
		c.launch(q, k, b, 100, 1024, 0)
		c.post(&wire.Release{ID: k})
		finish := c.start(&wire.Finish{Queue: q})
		waiter := c.start(&wire.WaitEvents{Wait: []uint32{e}})
		c.post(&wire.Release{ID: b})
		b2 := c.buffer(ctx, 64) // the application goes on meanwhile
		_ = b2
		if c.answered(finish) || c.answered(waiter) {
			t.Fatal("a wait on a user event returned early")
		}
		if swapped {
			to := c.executor(2)
			c.swap(s, to)
			time.Sleep(20 * time.Millisecond)
			if c.answered(finish) {
				t.Fatal("finish returned over the swap")
			}
		}
		c.call(&wire.SetUserEvent{Event: u, Status: 0})
		if st, _ := c.answer(waiter); st != cl.Success {
			t.Fatal(st)
		}
		if st, _ := c.answer(finish); st != cl.Success {
			t.Fatal(st)
		}
		ts := numbers(c.call(&wire.EventProfiling{Event: e}))
		for i := 1; i < 4; i++ {
			if ts[i] < ts[i-1] {
				t.Fatalf("times go back: %v", ts)
			}
		}
	}
}

// A session keeps its contents, kernel arguments and timestamps over many swaps.
func TestSwapChain(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, q, k := c.setup(cl.QueueProfilingEnable)
	b := c.buffer(ctx, 1<<20)
	c.fill(q, b, 1<<20, 5)
	want := uint32(5)
	var last uint64
	for gen := uint32(2); gen < 6; gen++ {
		for range 10 {
			c.launch(q, k, b, 3, 1<<18, 0)
			want += 3
		}
		extra := c.buffer(ctx, 1<<16)
		c.fill(q, extra, 1<<16, gen)
		to := c.executor(gen)
		c.swap(s, to)
		s = to
		equal(t, c.read(q, extra, 1<<16), gen)
		if gen%2 == 0 {
			c.post(&wire.Release{ID: extra})
		}
		e := c.id()
		c.launch(q, k, b, 1, 1<<18, e)
		want++
		c.call(&wire.WaitEvents{Wait: []uint32{e}})
		ts := numbers(c.call(&wire.EventProfiling{Event: e}))
		if ts[0] < last {
			t.Fatalf("generation %d: queued at %d, before %d", gen, ts[0], last)
		}
		last = ts[3]
		equal(t, c.read(q, b, 1<<20), want)
	}
}
