package executor

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// carrierHello is how a carrier begins on a connection for contents that go home.
func carrierHello(stays bool) []byte {
	b := binary.LittleEndian.AppendUint32(nil, importMagic)
	b = append(b, 0, 0, 1, 0)
	if stays {
		b[helloStays] = 1
	}
	return b
}

// takeHome takes an export of one piece as a carrier does, and returns how many bytes the piece had. first
// says that nothing was sent on the connection before.
func takeHome(conn net.Conn, first, stays bool) (n uint64, err error) {
	word := func() (v uint64) {
		var b [8]byte
		if _, rerr := io.ReadFull(conn, b[:]); err == nil {
			err = rerr
		}
		return binary.LittleEndian.Uint64(b[:])
	}
	if first && word() != sizesMark {
		return 0, errors.Join(err, errHostile)
	}
	if word() != 1 {
		return 0, errors.Join(err, errHostile)
	}
	for range 4 {
		word()
	}
	n = word()
	if err != nil {
		return 0, err
	}
	if _, err := io.CopyN(io.Discard, conn, int64(n)); err != nil {
		return 0, err
	}
	if _, err := conn.Write(make([]byte, 4)); err != nil {
		return 0, err
	}
	if !stays {
		return n, nil
	}
	if word() != endMark {
		return 0, errors.Join(err, errHostile)
	}
	return n, nil
}

// Exports through a carrier use the connection that it has kept, if there is one, and only what
// has changed since the last one is sent.
func TestContentsGoHomeOverOneConnection(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	discrete(s)
	s.activate()
	ctx, q, k := c.setup(0)
	a, b := c.buffer(ctx, 1<<20), c.buffer(ctx, 4096)
	for _, m := range []uint32{a, b} {
		c.fill(q, m, 4096, 7)
	}
	c.call(&wire.Finish{Queue: q})
	s.mu.Lock()
	lookup[mem](s, b).known = b // a target has it
	s.mu.Unlock()
	f := testFarEnd(t)
	export := func(peer string, final bool) error {
		return f.exportHome(testkit.Context(t), s, &gpuctlv1.ExportRequest{Peer: peer, Final: final}, noProgress)
	}
	begin := time.Now()
	if err := export(remote.ExportKept, false); !errors.Is(err, ErrState) || time.Since(begin) > remote.GreetTimeout/2 {
		t.Errorf("without any connection, after %v: %v", time.Since(begin), err)
	}
	offer := func(stays bool) net.Conn {
		near, far := connected(t)
		f.home.offer(remote.ExportPeer, far)
		if _, err := near.Write(carrierHello(stays)); err != nil {
			t.Fatal(err)
		}
		return near
	}
	round := func(conn net.Conn, peer string, first, stays bool) {
		t.Helper()
		c.launch(q, k, b, 2, 1024, 0)
		c.call(&wire.Finish{Queue: q})
		done := make(chan error, 1)
		go func() { done <- export(peer, false) }()
		n, err := takeHome(conn, first, stays)
		if err := errors.Join(err, <-done); err != nil || n != 4096 {
			t.Fatalf("%d bytes: %v", n, err)
		}
	}
	closed := func(conn net.Conn) {
		t.Helper()
		if n, err := conn.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
			t.Errorf("%d bytes, %v, on a connection that is of no use any more", n, err)
		}
	}
	conn := offer(true)
	round(conn, remote.ExportPeer, true, true)
	round(conn, remote.ExportKept, false, true)
	round(conn, remote.ExportKept, false, true)
	other := offer(true) // the carrier has another target
	closed(conn)
	round(other, remote.ExportPeer, true, true)
	// A request for a new connection does not take the one that was used.
	early, cancel := context.WithCancel(t.Context())
	cancel()
	if err := f.exportHome(early, s, &gpuctlv1.ExportRequest{Peer: remote.ExportPeer}, noProgress); !errors.Is(err, context.Canceled) {
		t.Errorf("another connection was to come: %v", err)
	}
	f.dropOutlets()
	closed(other)
	if err := export(remote.ExportKept, false); !errors.Is(err, ErrState) {
		t.Errorf("after the connection was dropped: %v", err)
	}
	old := offer(false) // a carrier of an earlier version
	round(old, remote.ExportPeer, true, false)
	closed(old)
	if err := export("elsewhere", false); !errors.Is(err, ErrState) {
		t.Errorf("to nobody: %v", err)
	}
}

// A freeze waits until all has come that the carrier had sent before, on each stream that it was
// asked on.
func TestFreezeOfAFarExecutorWaitsForTheCarriersQuestion(t *testing.T) {
	f := testFarEnd(t)
	ask := func(give func(uint16, []byte, []byte) error, n uint64) {
		t.Helper()
		if err := give(remote.KindSync, remote.Words(n), nil); err != nil {
			t.Fatal(err)
		}
	}
	ask(f.giveCommand, 3)
	ask(f.giveBulk, 2)
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if on, err := f.awaitAsked(short, 3, 2); err == nil {
		t.Errorf("%d streams, and one of them has an earlier question only", len(on))
	}
	done := make(chan error, 1)
	go func() {
		on, err := f.awaitAsked(testkit.Context(t), 3, 2)
		if err == nil && len(on) != 2 {
			err = errors.New("it is to answer on each stream")
		}
		done <- err
	}()
	ask(f.giveBulk, 4) // a later one
	if err := <-done; err != nil {
		t.Error(err)
	}
	if on, err := (*farEnd)(nil).awaitAsked(t.Context(), 0, 0); on != nil || err != nil {
		t.Error(on, err)
	}
}
