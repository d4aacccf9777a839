package carrier

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// gate keeps the reader of the ring from reading.
type gate struct {
	mu      sync.Mutex
	changed *sync.Cond
	closed  atomic.Bool
	parked  bool // the reader waits, and has sent everything
}

func (g *gate) init() {
	g.changed = sync.NewCond(&g.mu)
	g.closed.Store(true)
}

// open lets the reader go on.
func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed.Store(false)
	g.changed.Broadcast()
}

// pass is called by the reader when it has sent everything. It waits while the gate is
// closed.
func (g *gate) pass(over func() bool) {
	if !g.closed.Load() {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.parked = true
	g.changed.Broadcast()
	for g.closed.Load() && !over() {
		g.changed.Wait()
	}
	g.parked = false
}

// close keeps the reader from reading, and waits until it has sent everything.
func (g *gate) close(wake func(), over func() bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed.Store(true)
	for !g.parked && !over() {
		g.mu.Unlock()
		wake()
		g.mu.Lock()
		if !g.parked {
			t := time.AfterFunc(time.Millisecond, func() { g.mu.Lock(); g.changed.Broadcast(); g.mu.Unlock() })
			g.changed.Wait()
			t.Stop()
		}
	}
}

func (c *carrier) over() bool { return c.ctx.Err() != nil }

// Limits of the reader.
const (
	mostBatch = 15 << 10 // bytes of requests in one frame: so many the link copies
	idleSpins = 2000
	fewSpins  = 4 * spinStep
	firstNap  = 50 * time.Microsecond
	mostNaps  = 3
	spinStep  = 16
)

// batch is what the reader sends next.
type batch struct {
	b   []byte
	req [256]wire.Request // reused for decoding
}

func (t *batch) decode(rec shm.Record) (wire.Request, error) {
	if int(rec.Op) >= len(t.req) {
		return nil, fmt.Errorf("%s: %w", rec.Op, wire.ErrUnknownOp)
	}
	if t.req[rec.Op] == nil {
		t.req[rec.Op] = wire.New(rec.Op)
	}
	m := t.req[rec.Op]
	if m == nil {
		return nil, fmt.Errorf("%s: %w", rec.Op, wire.ErrUnknownOp)
	}
	return m, m.Decode(rec.Body)
}

// lead reads requests and sends them. Requests that are there together go together; nobody
// waits for more.
func (c *carrier) lead() {
	runtime.LockOSThread()
	buf := make([]byte, wire.MaxRequest)
	t := &batch{b: make([]byte, 0, mostBatch+wire.MaxRequest)}
	spins, spun := idleSpins, 0
	posted, naps := false, 0
	if runtime.NumCPU() <= 2 { // the application, or who reads the answer, needs the processor
		spins = fewSpins
	}
	for !c.over() {
		if len(t.b) == 0 && c.gate.closed.Load() {
			c.gate.pass(c.over)
			continue
		}
		rec, ok, err := shm.Record{}, false, error(nil)
		if !c.gate.closed.Load() {
			rec, ok, err = c.ring.Next(buf)
		}
		if ok && err == nil {
			err = c.take(t, rec)
			c.ring.Advance()
			spun, naps = 0, 0
			posted = rec.Slot == wire.NoSlot && rec.Op != wire.OpFlush
			if err == nil && len(t.b) < mostBatch {
				continue
			}
		}
		switch {
		case err != nil:
		case len(t.b) > 0:
			err = c.flush(t)
		case posted && naps < mostNaps:
			// More may be posted: it goes together, without a wake-up for each.
			c.ring.Nap(firstNap << naps)
			naps++
		case spun < spins:
			for i := 0; i < spinStep && c.ring.Empty(); i++ {
				shm.Spin(1)
			}
			spun += spinStep
			continue
		default:
			c.ring.Sleep(100 * time.Millisecond)
			spun = 0
			posted = false
		}
		if err != nil && !c.over() {
			c.lose(fmt.Errorf("%w: %w", errProtocol, err))
		}
	}
	c.gate.pass(c.over)
}

// flush sends the batch.
func (c *carrier) flush(t *batch) error {
	if len(t.b) == 0 {
		return nil
	}
	err := c.send(c.commands, remote.KindRecords, nil, t.body(), nil)
	t.b = t.b[:0]
	return err
}

// put is flush for a batch that another one follows.
func (c *carrier) put(t *batch) error {
	if len(t.b) == 0 {
		return nil
	}
	err := c.post(c.commands, remote.KindRecords, nil, t.body())
	t.b = t.b[:0]
	return err
}

func (t *batch) body() []byte {
	if len(t.b) > mostBatch { // the link does not copy it
		return append([]byte(nil), t.b...)
	}
	return t.b
}

// take adds a request to the batch. What the far executor will read in the arena is sent
// before it.
func (c *carrier) take(t *batch, rec shm.Record) error {
	var blocks remote.Block
	var had *shown
	switch rec.Op {
	case wire.OpWriteBuffer, wire.OpWriteBufferRect, wire.OpWriteImage, wire.OpCreateBuffer, wire.OpCreateImage,
		wire.OpCreateProgramSource, wire.OpCreateProgramIL, wire.OpCreateProgramBinary:
		m, err := t.decode(rec)
		if err != nil {
			return err
		}
		if off, n, ok := remote.Staged(m); ok && c.maySend(span{off, n}) {
			blocks = remote.Range(off, n)
		}
	case wire.OpReadBuffer, wire.OpReadBufferRect, wire.OpReadImage:
		m, err := t.decode(rec)
		if err != nil {
			return err
		}
		if off, n, pend, ok := remote.Reads(m); ok && off < c.arena.Size() && n <= c.arena.Size()-off {
			c.mu.Lock()
			c.expect(rec.Slot, pend, off, n)
			c.mu.Unlock()
		}
	case wire.OpUnmap:
		m, err := t.decode(rec)
		if err != nil {
			return err
		}
		u, _ := m.(*wire.Unmap)
		c.mu.Lock()
		k := mapKey{u.Mem, u.Map}
		if x, ok := c.mappings[k]; ok {
			delete(c.mappings, k)
			if x.Writes && !c.comes(&x.Block) {
				blocks = x.Block
			}
			had = c.forget(k)
			c.keepUnmapped(x, had)
		}
		c.mu.Unlock()
	}
	if blocks.Row != 0 {
		// The request itself follows in the next batch, and with it all this goes.
		if err := c.put(t); err != nil {
			return err
		}
		if err := c.sendWritten(blocks, had); err != nil {
			return err
		}
	}
	t.b = shm.AppendRecord(t.b, rec)
	return nil
}

// maySend reports whether what a request is to write is sent with it. In a mapped region it is not
// if that is still to be shown: what is here then is older than what the far executor has.
func (c *carrier) maySend(x span) bool {
	if x.off >= c.split {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.isHidden(x) {
		return false
	}
	c.differs(x, nil)
	return true
}

// sendBlock sends what the client has in a block of the arena. A frame must follow: small
// blocks wait for it.
func (c *carrier) sendBlock(x remote.Block) error {
	if err := x.Check(c.arena.Size()); err != nil {
		return err
	}
	return x.Split(1<<20, func(x remote.Block) error {
		return c.post(c.commands, remote.KindBlock, x.Append(nil), x.Bytes(c.arena.Bytes()))
	})
}

// expect records that a staged read may come back. Reads without a completion word are
// recorded under the reply slot. The caller holds c.mu.
func (c *carrier) expect(slot uint16, pend uint32, off, n uint64) {
	switch {
	case pend != 0 && pend < wire.PendCount:
		c.reads[pend] = [2]uint64{off, n}
	case slot != wire.NoSlot:
		c.reads[slotKey(slot)] = [2]uint64{off, n}
	}
}

// comes reports whether a read that the application does not wait for brings data to a region
// which it had mapped. The library sends such a region by a write of its own, when it is here.
// What is here now is older, and would overwrite what the read has brought to the far
// executor's arena. The caller holds c.mu.
func (c *carrier) comes(x *remote.Block) bool {
	for k, r := range c.reads {
		if k < wire.PendCount && (span{r[0], r[1]}).meets(around(x)) {
			return true
		}
	}
	return false
}

func slotKey(slot uint16) uint32 { return wire.PendCount + uint32(slot) }
