package carrier

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"sync"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/handover"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
)

// The form of contents between executors: see export.go and import.go of package executor.
const (
	greeting     = 0x49525847
	greetingSize = 8
	helloUnified = 4
	helloWindow  = 5
	helloSizes   = 6
	helloStays   = 7 // the connection may be used for several exports
	sizesMark    = ^uint64(0)
	endMark      = ^uint64(0) - 1
	pieceSize    = 40 // with the size in bytes
	mostPieces   = 4096
)

// serveImports takes contents from the executor that serves the session now, which is on this
// host, and sends them to the far executor.
func (c *carrier) serveImports(l net.Listener) {
	for {
		conn, err := handover.Accept(l.Accept)
		if err != nil {
			return
		}
		if err := c.importFrom(conn); err != nil {
			c.log.Error("import", "err", err)
		}
		conn.Close()
	}
}

// importFrom takes the contents of one export.
func (c *carrier) importFrom(conn net.Conn) (err error) {
	far := c.imports.take()
	if far == nil {
		if far, err = c.dialImport(); err != nil {
			return err
		}
	}
	defer func() { far.settle(&c.imports, err == nil && far.hello[helloStays] != 0) }()
	hello := far.hello
	hello[helloUnified] = 0 // the far executor's arena is another one
	hello[helloSizes], hello[helloStays] = 1, 0
	if _, err := conn.Write(hello[:]); err != nil {
		return err
	}
	if mark, err := word(conn); err != nil || mark != sizesMark {
		if errors.Is(err, io.EOF) {
			return nil
		}
		return fmt.Errorf("the source does not say how long its contents are: it is of an earlier version: %w", errors.Join(err, errState))
	}
	stop := context.AfterFunc(c.ctx, func() { far.Close(); conn.Close() })
	defer stop()
	taken := c.passTaken(far, conn)
	err = c.passTo(conn, true, func(head, pieces []byte) error {
		if err := c.passBatch(far.Conn, head, pieces, true); err != nil || len(pieces) == 0 {
			return err
		}
		return taken.expect()
	})
	return errors.Join(err, taken.end())
}

// dialImport connects to the far executor for contents that go there.
func (c *carrier) dialImport() (*contentsConn, error) {
	conn, err := c.dialer.DialBundle(c.ctx, remote.Import)
	if err != nil {
		return nil, err
	}
	far := newContentsConn(conn)
	_ = far.SetReadDeadline(time.Now().Add(remote.GreetTimeout))
	if _, err := io.ReadFull(far.from, far.hello[:]); err != nil {
		far.Close()
		return nil, err
	}
	_ = far.SetReadDeadline(time.Time{})
	return far, nil
}

func word(r io.Reader) (uint64, error) {
	var b [8]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint64(b[:]), nil
}

// passBatch passes a batch on. out says that its bytes are in the arena, and are to be sent.
func (c *carrier) passBatch(to io.Writer, head, pieces []byte, out bool) error {
	p := remote.NewParcel(append(head, pieces...))
	for ; out && len(pieces) > 0; pieces = pieces[pieceSize:] {
		at, n := place(pieces)
		p.Add(c.arena.Bytes()[at : at+n])
	}
	return p.Send(to)
}

// place returns where the bytes of the first piece are.
func place(b []byte) (at, n uint64) {
	return binary.LittleEndian.Uint64(b[24:]), binary.LittleEndian.Uint64(b[32:])
}

// passTo reads batches and gives each to f. A batch without pieces names the source's window.
// out says that the bytes are in the arena; otherwise they follow each batch, and are stored in the
// arena. Contents end with their connection, or with errEnd where that stays.
func (c *carrier) passTo(from io.Reader, out bool, f func(head, pieces []byte) error) error {
	for {
		n, err := word(from)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if n == endMark && !out {
			return errEnd
		}
		head := binary.LittleEndian.AppendUint64(nil, n)
		if n == 0 {
			var window [24]byte
			if _, err := io.ReadFull(from, window[:]); err != nil {
				return err
			}
			if err := f(append(head, window[:]...), nil); err != nil {
				return err
			}
			continue
		}
		if n > mostPieces {
			return fmt.Errorf("batch of %d pieces: %w", n, errHostile)
		}
		pieces := make([]byte, n*pieceSize)
		if _, err := io.ReadFull(from, pieces); err != nil {
			return err
		}
		for rest := pieces; len(rest) > 0; rest = rest[pieceSize:] {
			at, size := place(rest)
			if size == 0 || at >= c.split || size > c.split-at {
				return fmt.Errorf("%d bytes at %#x: %w", size, at, errHostile)
			}
			if out {
				continue
			}
			if err := c.store(from, at, size); err != nil {
				return err
			}
		}
		if err := f(head, pieces); err != nil {
			return err
		}
	}
}

// store reads bytes into the arena, but not over what the application has mapped: that is the
// newest there is. The same holds for what was shown of a region so far. Contents that are copied
// while the session runs come on a connection of their own, so they may be older than that.
func (c *carrier) store(from io.Reader, at, size uint64) error {
	const step = 4 << 20
	end := at + size
	for at < end {
		n := min(end-at, step)
		b, err := c.arena.Range(at, n)
		if err != nil {
			return err
		}
		if c.beginStore(span{at, n}) {
			_, err = io.ReadFull(from, b)
			c.endStore()
		} else {
			tmp := make([]byte, n)
			if _, err = io.ReadFull(from, tmp); err == nil {
				c.storeAround(at, tmp)
			}
		}
		if err != nil {
			return err
		}
		at += n
	}
	return nil
}

// beginStore reports whether bytes may be read to a place at once, as nothing that is newer is
// there. Until endStore nothing will be, either: who brings that waits.
func (c *carrier) beginStore(x span) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.awaitShown(x)
	touches := false
	c.eachNewer(func(b *remote.Block, end uint64) { touches = touches || x.meets(span{b.At, end - b.At}) })
	if touches {
		return false
	}
	c.storing = x
	return true
}

func (c *carrier) endStore() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.storing = span{}
	c.changed.Broadcast()
}

// awaitStored waits until no older bytes are being read to a block. The caller holds c.mu.
func (c *carrier) awaitStored(b *remote.Block) {
	for c.storing.meets(around(b)) && !c.over() {
		c.changed.Wait()
	}
}

// awaitShown waits until no block of the far executor is being read to a place. The caller
// holds c.mu.
func (c *carrier) awaitShown(x span) {
	for c.showing.meets(x) && !c.over() {
		c.changed.Wait()
	}
}

// eachNewer calls f with each region whose newest content the application has, or may have, up
// to an offset in the arena. The caller holds c.mu.
func (c *carrier) eachNewer(f func(x *remote.Block, end uint64)) {
	for k, m := range c.mappings {
		switch s := c.shown[k]; {
		case s == nil || !s.hidden():
			f(&m.Block, m.Block.End())
		case s.got > 0:
			f(&m.Block, s.at)
		}
	}
	for i := range c.late {
		f(&c.late[i], c.late[i].End())
	}
	for x := range c.unmapped {
		f(&x, x.End())
	}
}

// beginCopy begins a copy of contents while the session runs. What is unmapped until its end was
// perhaps written, is perhaps still to be sent from where it is, and is copied again later.
func (c *carrier) beginCopy() (end func() error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unmapped = map[remote.Block]struct{}{}
	return func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		n := len(c.unmapped)
		c.unmapped = nil
		if n >= mostShown {
			return connect.NewError(connect.CodeAborted, fmt.Errorf("the application has unmapped %d regions while contents were copied: too many to go around", n))
		}
		return nil
	}
}

// keepUnmapped keeps contents that are being copied from a region that was unmapped just now. The
// caller holds c.mu.
func (c *carrier) keepUnmapped(m remote.Mapping, s *shown) {
	if c.unmapped != nil && m.Writes && (s == nil || !s.hidden()) && len(c.unmapped) < mostShown {
		c.unmapped[m.Block] = struct{}{}
	}
}

// freeUnmapped lets contents go to memory that was given back: the copy that runs may use it for others.
// One that has too many regions fails, and keeps them. The caller holds c.mu.
func (c *carrier) freeUnmapped(x span) {
	if len(c.unmapped) < mostShown {
		maps.DeleteFunc(c.unmapped, func(b remote.Block, _ struct{}) bool { return x.meets(around(&b)) })
	}
}

// keepLate records regions that the application may still write though it has asked to unmap
// them.
func (c *carrier) keepLate(late []remote.Block) error {
	for i := range late {
		if err := late[i].Check(c.split); err != nil {
			return err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.late = late
	return nil
}

// storeAround stores bytes where nothing newer is.
func (c *carrier) storeAround(at uint64, b []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.awaitShown(span{at, uint64(len(b))})
	keep := make([]bool, len(b))
	c.eachNewer(func(x *remote.Block, end uint64) {
		for z := range x.Slices {
			for y := range x.Rows {
				lo := x.At + z*x.SlicePitch + y*x.RowPitch
				hi := min(lo+x.Row, end, at+uint64(len(b)))
				for p := max(lo, at); p < hi; p++ {
					keep[p-at] = true
				}
			}
		}
	})
	mem := c.arena.Bytes()[at:]
	for i, k := range keep {
		if !k {
			mem[i] = b[i]
		}
	}
}

// export makes the far executor send its contents to the target of a swap, through this host.
// They pass through the arena, at the places that the far executor chooses in the part that
// it has with this carrier.
func (c *carrier) export(ctx context.Context, r *gpuctlv1.ExportRequest, out sender[gpuctlv1.Progress]) error {
	other := c.exportedTo(r.Peer)
	err := c.exportHome(ctx, r.Peer, &gpuctlv1.ExportRequest{Final: r.Final, All: r.All || other}, out)
	if err != nil {
		c.exportedTo("")
	}
	return err
}

// exportStraight makes the far executor send its contents to the far executor that fetches
// them. What the application has mapped comes through this host at the end: what it has
// written there is in the session's arena, and the far executor does not have it yet.
func (c *carrier) exportStraight(ctx context.Context, r *gpuctlv1.ExportRequest, out sender[gpuctlv1.Progress]) error {
	other := c.exportedTo("fetch:" + r.Fetch)
	sum := &adding{to: out, straight: true}
	req := &gpuctlv1.ExportRequest{Fetch: r.Fetch, Final: r.Final, All: r.All || other}
	err := relay(ctx, connect.NewRequest(req), sum, c.far.Export)
	if err == nil && r.Final && c.mapped.Load() {
		sum.next()
		err = c.exportHome(ctx, r.Peer, &gpuctlv1.ExportRequest{Final: true, Mapped: true}, sum)
	}
	if err != nil {
		c.exportedTo("")
	}
	return err
}

// adding adds up the progress of several exports.
type adding struct {
	to       sender[gpuctlv1.Progress]
	straight bool
	done     uint64 // of the one that runs
	before   uint64 // of those before it, all of them straight
}

// next begins with an export that is not straight.
func (a *adding) next() { a.before, a.straight = a.done, false }

// Send implements sender.
func (a *adding) Send(p *gpuctlv1.Progress) error {
	a.done = p.BytesDone
	p.BytesStraight = a.before
	if a.straight {
		p.BytesStraight = a.done
	}
	p.BytesDone, p.BytesTotal = p.BytesDone+a.before, p.BytesTotal+a.before
	return a.to.Send(p)
}

// exportHome passes on what the far executor sends for a request.
func (c *carrier) exportHome(ctx context.Context, peer string, req *gpuctlv1.ExportRequest, out sender[gpuctlv1.Progress]) (err error) {
	if !req.Final {
		end := c.beginCopy()
		defer func() { err = cmp.Or(err, end()) }()
	}
	target, err := (&net.Dialer{Timeout: remote.GreetTimeout}).DialContext(ctx, "unix", peer)
	if err != nil {
		return connect.NewError(connect.CodeInternal, fmt.Errorf("reach the target executor: %w", err))
	}
	defer target.Close()
	defer context.AfterFunc(ctx, func() { target.Close() })()
	var hello [greetingSize]byte
	_ = target.SetReadDeadline(time.Now().Add(remote.TargetTimeout)) // it may be another carrier
	if _, err := io.ReadFull(target, hello[:]); err != nil || binary.LittleEndian.Uint32(hello[:]) != greeting {
		return connect.NewError(connect.CodeInternal, fmt.Errorf("target executor at %s does not greet: %w", peer, errors.Join(err, errState)))
	}
	_ = target.SetReadDeadline(time.Time{})
	sizes := hello[helloSizes] != 0 // the target is another carrier
	far, err := c.exportWay(ctx, hello, req)
	if err != nil {
		return connect.NewError(connect.CodeAborted, err)
	}
	stays := false
	defer func() { far.settle(&c.exports, err == nil && stays) }()
	stop := context.AfterFunc(ctx, func() { far.Close(); target.Close() })
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer target.Close()
	passed, over := make(chan error, 1), make(chan struct{})
	wg.Go(func() {
		_, _ = io.Copy(far, target) // what was taken
		select {
		case <-over:
		default: // the target is gone, which the far executor would learn when it has waited for a minute
			far.Close()
		}
	})
	wg.Go(func() {
		err := c.passExport(far, target, sizes)
		close(over)
		stays = errors.Is(err, errEnd)
		if err != nil && !stays {
			far.Close()
			passed <- err
		}
		close(passed)
	})
	err = relay(ctx, connect.NewRequest(req), out, c.far.Export)
	if err == nil {
		return <-passed
	}
	far.Close()
	target.Close()
	if perr := <-passed; perr != nil {
		err = fmt.Errorf("%w (%w)", err, perr)
	}
	return err
}

// exportWay returns the connection for an export: the one of the last export to the same target,
// if it has stayed, or a new one. The request names it.
func (c *carrier) exportWay(ctx context.Context, hello [greetingSize]byte, req *gpuctlv1.ExportRequest) (*contentsConn, error) {
	if far := c.exports.take(); far != nil {
		req.Peer = remote.ExportKept
		return far, nil
	}
	req.Peer = remote.ExportPeer
	conn, err := c.dialer.DialBundle(ctx, remote.Export)
	if err != nil {
		return nil, err
	}
	hello[helloUnified], hello[helloSizes], hello[helloStays] = 0, 1, 1
	if _, err := conn.Write(hello[:]); err != nil {
		conn.Close()
		return nil, err
	}
	return newContentsConn(conn), nil
}

// exportedTo records to which target contents were exported last, and reports whether it was
// another one: the far executor knows all of them by one name.
func (c *carrier) exportedTo(peer string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	other := c.lastPeer != peer
	c.lastPeer = peer
	if other {
		c.exports.drop() // its receiver is another one
	}
	return other
}

func (c *carrier) passExport(far *contentsConn, target io.Writer, sizes bool) error {
	if !far.begun {
		if mark, err := word(far.from); err != nil || mark != sizesMark {
			return fmt.Errorf("the far executor does not begin as it should: %w", errors.Join(err, errHostile))
		}
		far.begun = true
	}
	if sizes {
		if _, err := target.Write(binary.LittleEndian.AppendUint64(nil, sizesMark)); err != nil {
			return err
		}
		return c.passTo(far.from, false, func(head, pieces []byte) error { return c.passBatch(target, head, pieces, false) })
	}
	return c.passTo(far.from, false, func(head, pieces []byte) error {
		b := head
		for ; len(pieces) > 0; pieces = pieces[pieceSize:] {
			b = append(b, pieces[:pieceSize-8]...)
		}
		_, err := target.Write(b)
		return err
	})
}
