package executor

import (
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// session is the executor's state of one application.
type session struct {
	cfg   Config
	log   *slog.Logger
	ring  transport
	far   *farEnd // nil: the application is on this host
	ahead int64   // ns by which the clock of the application's host is ahead of this host's
	out   *output // nil: the standard output of this process does not belong to the session
	arena *shm.Region
	split uint64 // where the client's part of the arena begins
	state *os.File
	host  hostMemory

	mu       sync.Mutex
	objs     []any          // by id
	serials  []uint64       // by id: which object has that id, and from what it was created
	ghosts   map[uint32]any // released objects that are still used, by ids that no client can choose
	samplers []cl.Sampler   // released; commands may still use them
	ghostID  uint32
	leaving  []*clContext // released; commands still use them
	redo     *parkedCall  // the parked call that is run now
	devices  []*device    // root devices
	parked   []*parkedCall
	moving   []*parkedCall        // bulk transfers that run
	lanes    [wire.LaneCount]bool // used by them
	watches  []*watch
	replies  map[uint32][]byte // what did not fit into a slot, by token
	token    uint32

	platf      cl.Platform
	quirk      quirk
	limits     *limits
	info       []byte // the answer to session_info; the same for the whole session
	memory     uint64 // bytes of existing memory objects
	unified    bool   // the device computes in the host memory that it is given
	usage      usage
	clock      clock
	profiled   bool // the application has asked for times of events
	xfer       transfers
	pins       pins
	exportedTo string
	window     uint64 // memory through which contents pass
	windowSize uint64 // bytes; 0: there is none
	windows    uint64 // how many there have been
	peerWindow peerWindow
	handed     handed
	stateTo    *stateFile
	stateName  string
	swept      bool // our part of the arena was swept, which needs the ranges of existing objects
	sent       bool // all contents have left in a stream
	prepared   bool // prepared with a final graph
	once       sync.Once

	active         atomic.Bool
	gate           atomic.Bool
	gateWanted     bool          // close the gate when the device is idle
	gated          chan struct{} // closed when the gate is closed
	gatedAt        time.Time
	closed         atomic.Bool
	leader         atomic.Bool
	patience       patience // of the leader
	naps           naps     // of the leader
	standby        atomic.Int32
	inflight       atomic.Int32
	builds         atomic.Int32 // programs that are being built
	frozen         bool
	freezes        uint64 // how many freezes there were
	doing          atomic.Pointer[activity]
	calls          uint64
	serial         uint64
	cache          *programCache
	included       included
	built          time.Time // when a program was built last
	unkept         []*unkept
	storing        *unkept // the one that is kept now
	keeping        bool
	watchWake      chan struct{}
	cbMu           sync.Mutex
	cbs            [][3]uint32
	cbPushing      bool // some that were in cbs are not in the ring yet
	cbWake         chan struct{}
	stop           chan struct{}
	req            requests
	wait           []cl.Event
	answer         []byte         // data for the blocking call that is enqueued now
	own            cl.Event       // of a launch whose event nobody but its turn needs
	turns          []*deviceTurns // by device
	sharing        atomic.Bool    // some device's commands are launched in turns
	seed           maphash.Seed
	bulkSlot       uint16 // of the call that is enqueued now
	off, glob, loc [3]uint64
}

// usage is the most that the session has used.
type usage struct {
	LargestAlloc     uint64
	LargestWorkGroup uint64
	WorkItems        [3]uint64
	LocalMemory      uint64
	Launches         uint64
}

// errHostile is returned for requests that no honest client sends.
var errHostile = errors.New("malformed request")

// lookup returns the object with that id and type; nil if there is none.
func lookup[T any](s *session, id uint32) *T {
	o, _ := s.object(id).(*T)
	return o
}

// object returns the object with that id; nil if there is none.
func (s *session) object(id uint32) any {
	if s.redo != nil {
		if x, ok := s.redo.alias[id]; ok {
			id = x
		}
	}
	if id > wire.MaxID {
		return s.ghosts[id]
	}
	if int64(id) < int64(len(s.objs)) {
		return s.objs[id]
	}
	return nil
}

// put registers a new object. The client chooses the ids. An id that is used is an error.
func (s *session) put(id uint32, o any) error {
	if id < wire.FirstID || id > wire.MaxID {
		return fmt.Errorf("object id %d: %w", id, errHostile)
	}
	s.grow(id)
	if s.objs[id] != nil {
		return fmt.Errorf("object id %d is taken: %w", id, errHostile)
	}
	s.objs[id] = o
	s.serial++
	s.serials[id] = s.serial
	return nil
}

func (s *session) grow(id uint32) {
	if int(id) >= len(s.objs) {
		n := make([]any, max(int(id)+1, 2*len(s.objs), 1024))
		copy(n, s.objs)
		s.objs = n
		sn := make([]uint64, len(n))
		copy(sn, s.serials)
		s.serials = sn
	}
}

// reply answers a call. A posted request gets no answer.
func (s *session) reply(slot uint16, st cl.Status, data []byte) {
	if slot == wire.NoSlot {
		return
	}
	token := uint32(0)
	total := uint64(len(data))
	if len(data) > slotData {
		s.token++
		if s.token == 0 {
			s.token++
		}
		token = s.token
		if len(s.replies) >= 4096 { // a client that never fetches them
			clear(s.replies)
		}
		s.replies[token] = data
		data = data[:slotData]
	}
	if err := s.ring.Reply(slot, int32(st), data, token, total); err != nil {
		s.log.Warn("reply", "slot", slot, "err", err)
	}
}

const slotData = wire.SlotSize - wire.SlotData

// arenaRange checks that these bytes are in the client's part of the arena.
func (s *session) arenaRange(off, n uint64) (unsafe.Pointer, bool) {
	if n == 0 || off >= s.arena.Size() || n > s.arena.Size()-off {
		return nil, false
	}
	return s.arena.Pointer(off), true
}

func (s *session) arenaBytes(off, n uint64) []byte {
	return s.arena.Bytes()[off : off+n : off+n]
}
