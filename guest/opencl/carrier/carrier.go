package carrier

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/handover"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/compress"
	"github.com/gpuctl/gpuctl/internal/link"
)

// Descriptors that a carrier inherits, as an executor does.
const (
	fdRing = 3 + iota
	fdArena
	fdState
)

// DefaultOutage is how long the connection may be broken before the session is lost.
const DefaultOutage = 5 * time.Minute

// Config has the settings of one carrier.
type Config struct {
	Generation   uint32
	Socket       string // control: ExecutorService
	ImportSocket string // contents from the executor that served the session before
	FileSocket   string // files that gpuguest sends
	Relay        string // where connections through this VM's host are made; empty: not in a VM
	RDMA         string // where connections over RDMA are made; empty: none are
	Remote       *gpuctlv1.Remote
	Logger       *slog.Logger
}

// errHostile is returned for what no correct peer sends.
var errHostile = errors.New("malformed message of the far host")

// errProtocol is returned when the application breaks the protocol.
var errProtocol = errors.New("malformed request of the application")

// carrier is the state of one carrier.
type carrier struct {
	cfg    Config
	log    *slog.Logger
	ring   *shm.Ring
	region *shm.Region // of the ring
	arena  *shm.Region
	split  uint64
	state  *os.File
	locks  int // an open file description of the ring, for the locks of the parts and of the executor
	dialer *remote.Dialer
	outage time.Duration

	ctx    context.Context // ends with the carrier
	cancel context.CancelCauseFunc

	commands, bulk *link.Stream
	chunks         [remote.ChunkStreams]*link.Stream
	widening       sync.Once       // makes their connections
	outbox         outbox          // what handlers of frames have to send
	control        *http.Transport // of calls to the far executor
	far            gpuctlv1connect.ExecutorServiceClient
	files          handed
	saving         saving
	stop           chan struct{} // closed by Retire
	once           sync.Once

	active, frozen, prepared atomic.Bool
	freezesAfter             atomic.Bool // the far executor knows FreezeRequest.after
	mapped                   atomic.Bool // when it was frozen last, the application had something mapped
	gate                     gate
	unsure                   atomic.Uint64                                     // freeze that the far executor may have done, or may still get; 0: none
	imports, exports         kept                                              // connections for contents to and from the far executor
	broken                   [remote.Chunks + remote.ChunkStreams]atomic.Int64 // by stream: UnixNano when its connection broke; 0: it is connected

	mu       sync.Mutex
	changed  *sync.Cond
	mappings map[mapKey]remote.Mapping
	seed     maphash.Seed
	shown    map[mapKey]*shown         // of the mappings whose content comes
	late     []remote.Block            // of a frozen session: unmapped, but the application may still write
	unmapped map[remote.Block]struct{} // that the application may have written, since the copy of contents that runs has begun; nil: none runs
	awaits   map[uint64][]*shown       // by the arena offset at which they begin
	awaited  int                       // in awaits
	sums     int                       // in shown
	current  *shown                    // the one that is being shown
	named    bool                      // the far executor names what it shows, so awaits is not needed
	reads    map[uint32][2]uint64      // staged reads under way: range by completion word
	synced   map[*link.Stream]uint64
	syncs    uint64
	marked   uint64 // the last mark on the stream of commands
	lastPeer string // of the last export
	lanes    [wire.LaneCount]lane
	joined   []*link.Stream                 // those of chunks whose connections were made
	placing  [1 + remote.ChunkStreams]*lane // by stream, that of bulk transfers first: the lane of the chunk that is being read
	watching sync.WaitGroup                 // of lanes
	punches  []span                         // memory to give back when the part's owner has ended
	storing  span                           // where contents are being read to
	showing  span                           // where a block is being read to

	callbacks chan [3]uint32
	cbCame    atomic.Uint64 // callbacks of the far executor
	cbTaken   atomic.Uint64 // of them, those in the application's ring
	printed   uint64        // bytes that the far executor has printed
	rest      []byte        // of them, what the application's ring had no room for yet
	tellTaken chan struct{}
	callers   map[uint64]struct{} // slots of calls whose thread moves chunks
}

type mapKey struct{ mem, id uint32 }

type span struct{ off, size uint64 }

// around returns the range from a block's first byte to its last one, with the gaps between its rows.
func around(b *remote.Block) span { return span{b.At, b.End() - b.At} }

func (s span) meets(o span) bool { return s.off < o.off+o.size && o.off < s.off+s.size }

// Main runs a carrier until it retires, the connection is lost for too long, or ctx ends.
func Main(ctx context.Context, cfg Config) error {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	// The threads that read and write must not wait for each other.
	runtime.GOMAXPROCS(max(8, runtime.NumCPU()+1))
	c, err := open(ctx, cfg, fdRing, fdArena, fdState)
	if err != nil {
		return err
	}
	defer c.cancel(nil)
	return c.run()
}

func open(ctx context.Context, cfg Config, ringFD, arenaFD, stateFD int) (*carrier, error) {
	c := &carrier{
		cfg: cfg, log: cfg.Logger, state: os.NewFile(uintptr(stateFD), "state"), stop: make(chan struct{}),
		callers: map[uint64]struct{}{}, mappings: map[mapKey]remote.Mapping{}, seed: maphash.MakeSeed(), shown: map[mapKey]*shown{}, awaits: map[uint64][]*shown{}, reads: map[uint32][2]uint64{}, synced: map[*link.Stream]uint64{},
		callbacks: make(chan [3]uint32, wire.CbCount), tellTaken: make(chan struct{}, 1),
	}
	c.changed = sync.NewCond(&c.mu)
	c.ctx, c.cancel = context.WithCancelCause(ctx)
	var err error
	if c.region, err = shm.Open(ringFD, wire.RingMem); err != nil {
		return nil, fmt.Errorf("ring: %w", err)
	}
	if c.ring, err = shm.NewRing(c.region); err != nil {
		return nil, fmt.Errorf("ring: %w", err)
	}
	if err := c.ring.Check(); err != nil {
		return nil, fmt.Errorf("ring: %w", err)
	}
	size, split, err := c.ring.Arena()
	if err != nil {
		return nil, fmt.Errorf("ring: %w", err)
	}
	c.split = split
	if c.partSize() == 0 {
		return nil, fmt.Errorf("arena of %d bytes, split at %d: its parts have no room: %w", size, split, errProtocol)
	}
	if c.arena, err = shm.Open(arenaFD, int64(size)); err != nil {
		return nil, fmt.Errorf("arena: %w", err)
	}
	part, err := c.takePart(ringFD)
	if err != nil {
		return nil, err
	}
	if err := c.target(cfg.Remote, remote.Hello{ArenaSize: size, ArenaSplit: split, Part: part, Generation: cfg.Generation, Now: monotonic()}); err != nil {
		return nil, err
	}
	c.streams()
	c.gate.init()
	c.outbox.init()
	return c, nil
}

// takePart locks a part of the arena. The far executor allocates in the same part of its own.
func (c *carrier) takePart(ringFD int) (uint32, error) {
	var err error
	if c.locks, err = shm.Reopen(ringFD); err != nil {
		return 0, fmt.Errorf("arena: %w", err)
	}
	for n := range uint32(wire.ArenaParts) {
		if err = shm.LockByte(c.locks, wire.LockPart+int64(n)); err == nil {
			return n, nil
		}
	}
	return 0, fmt.Errorf("every part of the session's memory belongs to an executor that has not ended: %w", err)
}

// target reads from the configuration where the far executor is.
func (c *carrier) target(r *gpuctlv1.Remote, h remote.Hello) error {
	if len(r.GetAddresses()) == 0 || len(r.GetToken()) != remote.TokenSize {
		return fmt.Errorf("the lease has %d addresses and a token of %d bytes", len(r.GetAddresses()), len(r.GetToken()))
	}
	_, _ = rand.Read(h.Carrier[:]) // never fails
	c.dialer = &remote.Dialer{
		Addresses: r.Addresses, Relay: c.cfg.Relay, RDMA: c.cfg.RDMA, Token: remote.Token(r.Token), Plain: r.Plain, Peer: r.PeerCertSha256,
		Own: remote.Identity{Certificate: r.Certificate, Key: r.PrivateKey}, Hello: h,
		Compress: remote.Compress{Always: r.CompressAlways, Counts: &compress.Counts{}},
	}
	if c.cfg.RDMA != "" {
		c.dialer.Addresses = remote.WithRDMA(r.Addresses)
	}
	c.control = newControl(c.dialer)
	c.outage = DefaultOutage
	if r.OutageMs > 0 {
		c.outage = time.Duration(r.OutageMs) * time.Millisecond
	}
	return nil
}

// newControl makes the connections for calls to the far executor.
func newControl(d *remote.Dialer) *http.Transport {
	return &http.Transport{
		DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return d.Dial(ctx, remote.Control) },
		DisableCompression:     true,
		MaxIdleConnsPerHost:    keptControl,
		MaxResponseHeaderBytes: mostAnswerHeader,
	}
}

func monotonic() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t)
	return t.Nano()
}

func (c *carrier) streams() {
	stream := func(r remote.Role, place func(uint16, []byte, int) ([]byte, error)) *link.Stream {
		return link.New(link.Options{ID: c.dialer.Hello.Stream(r), MaxHead: remote.MaxHead, MaxBody: remote.MaxBody, Place: place})
	}
	c.commands, c.bulk = stream(remote.Commands, c.placeCommand), stream(remote.Bulk, c.placeBulk)
	for i := range c.chunks {
		c.chunks[i] = stream(remote.Chunks+remote.Role(i), func(kind uint16, head []byte, n int) ([]byte, error) {
			return c.placeChunk(1+i, kind, head, n)
		})
	}
}

// run connects, serves, and returns why the carrier has ended.
func (c *carrier) run() error {
	first := make(chan error, 2)
	go c.keep(remote.Commands, c.commands, c.command, first)
	go c.keep(remote.Bulk, c.bulk, c.bulkFrame, first)
	for range 2 {
		if err := <-first; err != nil {
			return fmt.Errorf("far executor: %w", err)
		}
	}
	imports, err := handover.Listen(c.cfg.ImportSocket)
	if err != nil {
		return err
	}
	defer imports.Close()
	files, err := handover.Listen(c.cfg.FileSocket)
	if err != nil {
		return err
	}
	defer files.Close()
	control, err := handover.Listen(c.cfg.Socket)
	if err != nil {
		return err
	}
	c.far = gpuctlv1connect.NewExecutorServiceClient(&http.Client{Transport: c.control}, "http://far", acceptNothing(), connect.WithReadMaxBytes(mostAnswer))
	mux := http.NewServeMux()
	mux.Handle(gpuctlv1connect.NewExecutorServiceHandler(&controller{c: c}))
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	defer context.AfterFunc(c.ctx, func() { c.mu.Lock(); c.changed.Broadcast(); c.mu.Unlock() })()
	go c.serveImports(imports)
	go c.files.serve(files)
	go c.outbox.run(c.ctx)
	go c.lead()
	go c.pushCallbacks()
	go c.reportTaken()
	go c.takeOver()
	go c.guard()
	done := make(chan error, 1)
	go func() { done <- srv.Serve(control) }()
	select {
	case err = <-done:
	case <-c.ctx.Done():
		if err = context.Cause(c.ctx); errors.Is(err, context.Canceled) {
			err = nil
		}
	case <-c.stop:
		sctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = srv.Shutdown(sctx) // the reply to Retire is still sent
	}
	return err
}

// lose ends the carrier, and so the session that it serves.
func (c *carrier) lose(err error) {
	if c.ctx.Err() == nil && c.ring.Owner() == c.cfg.Generation && c.active.Load() {
		c.log.Error("session ended", "err", err)
	}
	c.cancel(err)
}

// Limits of what the far host answers: gpuguest takes no more of an executor.
const (
	mostAnswerHeader = 64 << 10
	mostAnswer       = 64 << 20 // a session's objects, with the sources of its programs

	keptControl = 8 // connections for calls, which are not made anew while the application stands still
)

// How soon a connection is made again.
const (
	firstRetry = 20 * time.Millisecond
	lastRetry  = 2 * time.Second

	startPatience = 10 * time.Second // with the first connection
	// loadPatience is the same with a far host that takes the connection and does not answer
	// yet: its far executor loads a runtime. gpuguest waits a little longer for an executor.
	loadPatience = 150 * time.Second
)

// patience returns for how long the first connection is tried, after it has failed with err.
func patience(err error) time.Duration {
	switch {
	case errors.Is(err, remote.ErrRefused):
		return 0
	case errors.Is(err, remote.ErrSilent):
		return loadPatience
	}
	return startPatience
}

// keep keeps a stream connected until the carrier's end. The first attempt's result goes to
// first.
func (c *carrier) keep(role remote.Role, st *link.Stream, handle func(link.Frame) error, first chan<- error) {
	began, start := false, time.Now()
	var broken time.Time
	for pause := firstRetry; c.ctx.Err() == nil; {
		conn, err := c.dialer.Dial(c.ctx, role)
		again := func() {
			select {
			case <-c.ctx.Done():
			case <-time.After(pause):
			}
			pause = min(2*pause, lastRetry)
		}
		switch {
		case !began && err != nil && time.Since(start) < patience(err):
			again()
			continue
		case !began:
			first <- err
			if err != nil {
				return
			}
			began = true
		case errors.Is(err, remote.ErrRefused):
			c.lose(fmt.Errorf("far executor: %w", err))
			return
		case err != nil:
			if time.Since(broken) > c.outage {
				c.lose(fmt.Errorf("no connection to the far host for %v: %w", c.outage, err))
				return
			}
			again()
			continue
		}
		if !broken.IsZero() {
			c.log.Info("connected again", "stream", role, "after", time.Since(broken).Round(time.Millisecond))
		}
		pause = firstRetry
		c.broken[role].Store(0)
		err = st.Serve(c.ctx, conn, handle)
		broken = time.Now()
		c.broken[role].Store(broken.UnixNano())
		// They lead the same way. One that ended in silence would keep the next call until that gives up.
		c.control.CloseIdleConnections()
		if serr := st.Err(); serr != nil {
			c.lose(fmt.Errorf("far executor: %w", serr))
			return
		}
		if c.ctx.Err() == nil {
			c.log.Warn("connection broken", "stream", role, "err", err)
		}
		select { // the far end may refuse at once for a while
		case <-c.ctx.Done():
		case <-time.After(firstRetry):
		}
	}
}

// outbox sends frames for those who must not wait for a stream: its own handlers.
type outbox struct {
	mu   sync.Mutex
	todo []func(context.Context)
	bell chan struct{}
}

// mostOutbox bounds what the far host can make a carrier keep.
const mostOutbox = 1 << 16

func (o *outbox) init() { o.bell = make(chan struct{}, 1) }

func (o *outbox) add(f func(context.Context)) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.todo) >= mostOutbox {
		return fmt.Errorf("%d answers wait: %w", len(o.todo), errHostile)
	}
	o.todo = append(o.todo, f)
	select {
	case o.bell <- struct{}{}:
	default:
	}
	return nil
}

func (o *outbox) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-o.bell:
		}
		o.mu.Lock()
		todo := o.todo
		o.todo = nil
		o.mu.Unlock()
		for _, f := range todo {
			f(ctx)
		}
	}
}

// post is send for what another frame of the same sender follows.
func (c *carrier) post(st *link.Stream, kind uint16, head, body []byte) error {
	return st.Post(c.ctx, link.Frame{Kind: kind, Head: head, Body: body})
}

func (c *carrier) send(st *link.Stream, kind uint16, head, body []byte, done func()) error {
	return st.Send(c.ctx, link.Frame{Kind: kind, Head: head, Body: body}, done)
}
