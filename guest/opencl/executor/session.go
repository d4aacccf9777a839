package executor

import (
	"errors"
	"fmt"
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

// session is the executor's side of one application.
type session struct {
	cfg    Config
	log    *slog.Logger
	ring   transport
	out    *output // nil: this process's standard output is not the session's
	ringFD int     // for the locks that say who is alive
	arena  *shm.Region
	split  uint64 // where the client's part of the arena begins
	state  *os.File
	host   hostMemory

	mu      sync.Mutex
	objs    []any          // by id
	serials []uint64       // by id: which object of that id, and how it was built
	ghosts  map[uint32]any // released objects that parked calls still use, by ids no client can choose
	ghostID uint32
	redo    *parkedCall // the parked call that is being run now
	devices []*device   // roots
	parked  []*parkedCall
	moving  []*parkedCall        // bulk transfers that run
	lanes   [wire.LaneCount]bool // taken by them
	watches []*watch
	replies map[uint32][]byte // what did not fit into a slot, by token
	token   uint32

	platf      cl.Platform
	quirk      quirk
	limits     *limits
	info       []byte // session_info's answer; stays for the whole session
	memory     uint64 // bytes of live memory objects
	unified    bool   // the device computes in host memory it is given
	usage      usage
	clock      clock
	profiled   bool // the application asks for times of events
	xfer       transfers
	pins       pins
	exportedTo string
	window     uint64 // contents pass through here
	windowSize uint64 // bytes; 0: there is none
	windows    uint64 // that there have been
	peerWindow peerWindow
	handed     handed
	stateTo    *stateFile
	stateName  string
	swept      bool // our part of the arena, once it was known what live objects have there
	sent       bool // all contents have left by a stream
	prepared   bool // prepared with a final graph
	once       sync.Once

	active         atomic.Bool
	gate           atomic.Bool
	gateWanted     bool          // close the gate when the device is idle next
	gated          chan struct{} // closed when it is
	gatedAt        time.Time
	closed         atomic.Bool
	leader         atomic.Bool
	patience       patience // the leader's
	naps           naps     // the leader's
	standby        atomic.Int32
	inflight       atomic.Int32
	frozen         bool
	freezes        uint64 // how often it was
	doing          atomic.Pointer[activity]
	calls          uint64
	serial         uint64
	cache          *programCache
	built          time.Time // when a program was built last
	unkept         []*unkept
	storing        *unkept // the one that is being kept
	keeping        bool
	watchWake      chan struct{}
	cbMu           sync.Mutex
	cbs            [][3]uint32
	cbWake         chan struct{}
	stop           chan struct{}
	req            requests
	wait           []cl.Event
	answer         []byte // data of the blocking call that is being enqueued
	bulkSlot       uint16 // of the call that is being enqueued
	off, glob, loc [3]uint64
}

// usage is what the session has used at most.
type usage struct {
	LargestAlloc     uint64
	LargestWorkGroup uint64
	WorkItems        [3]uint64
	LocalMemory      uint64
	Launches         uint64
}

// errHostile marks requests that no honest client sends.
var errHostile = errors.New("malformed request")

// lookup returns the live object with that id and type.
func lookup[T any](s *session, id uint32) *T {
	if s.redo != nil {
		if x, ok := s.redo.alias[id]; ok {
			id = x
		}
	}
	if id > wire.MaxID {
		o, _ := s.ghosts[id].(*T)
		return o
	}
	if int64(id) < int64(len(s.objs)) {
		if o, ok := s.objs[id].(*T); ok {
			return o
		}
	}
	return nil
}

// put registers a new object. The client chooses ids; a taken one is an error.
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

// reply answers a call; a posted request has nobody to answer.
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
		if len(s.replies) >= 4096 { // a client that never fetches
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

// arenaRange checks that the client may name these bytes of the arena.
func (s *session) arenaRange(off, n uint64) (unsafe.Pointer, bool) {
	if n == 0 || off >= s.arena.Size() || n > s.arena.Size()-off {
		return nil, false
	}
	return s.arena.Pointer(off), true
}

func (s *session) arenaBytes(off, n uint64) []byte {
	return s.arena.Bytes()[off : off+n : off+n]
}
