package executor

import (
	"runtime"
	"time"
	"unsafe"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/portable"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// device is one device of the session, or a part of one.
type device struct {
	id     uint32
	parent *device
	part   []uint64 // partition properties that made it, with the final 0
	index  int      // place among the parts
	vendor cl.Device
}

type clContext struct {
	id          uint32
	devices     []*device
	queues      []*queue
	vendor      cl.Context
	zombies     []uint64 // host memory of released buffers that commands may still use
	zombieBytes uint64
}

// busy reports whether a command may still be running.
func (c *clContext) busy() bool {
	for _, q := range c.queues {
		if q.busy() {
			return true
		}
	}
	return false
}

func (c *clContext) has(d *device) bool {
	for _, x := range c.devices {
		if x == d {
			return true
		}
	}
	return false
}

// queue is a command queue. Commands are held back on it while something that
// only the application can do stands before them.
type queue struct {
	id        uint32
	ctx       *clContext
	dev       *device
	props     uint64
	vendor    cl.Queue
	held      int       // commands of this queue in session.parked
	fence     int       // of them barriers, which hold everything behind them
	bulk      int       // bulk transfers in progress
	pends     []pending // staged transfers whose completion word is to be set
	failed    cl.Status // error of a posted command, reported once
	users     int
	dead      bool
	seq, idle uint64 // commands enqueued, and how many of them are known to be over
	kernel    string // that was launched last
	launched  time.Time
}

func (q *queue) busy() bool { return q.seq != q.idle }

func (q *queue) inOrder() bool { return q.props&cl.QueueOutOfOrderExecModeEnable == 0 }

// pending is a staged transfer that the vendor still works on.
type pending struct {
	ev   cl.Event
	pend uint32
	keep *runtime.Pinner // of memory the vendor reads from
}

type memKind uint8

const (
	memBuffer memKind = iota
	memSub
	memImage
)

// mem is a memory object.
type mem struct {
	id     uint32
	ctx    *clContext
	kind   memKind
	flags  uint64
	size   uint64 // bytes
	parent *mem   // of a sub-buffer, or the buffer an image is made from
	origin uint64 // of a sub-buffer
	format cl.ImageFormat
	desc   cl.ImageDesc // without the buffer
	elem   uint64       // bytes of one pixel
	vendor cl.Mem

	// Host memory in the arena: the content itself when the device computes
	// there (unified), otherwise a shadow for mapped regions.
	arena    uint64
	hasArena bool
	unified  bool
	extra    []span // further ranges that mappings from before a swap show

	wasMapped bool
	pinTried  bool // the driver was asked to pin the shadow

	dirty    []bool // per dirtyChunk bytes: differs from what was last exported
	known    uint32 // its id in the last graph or export: what a receiver has it by
	maps     map[uint32]*mapping
	users    int    // commands held back that use it
	subs     []*mem // sub-buffers
	inArena  bool   // its content is in the arena, from an executor that computed there
	dead     bool   // released by the application, kept for its users
	gone     bool   // dropped: nobody has it any more
	ghost    uint32 // its id since then
	callback uint32 // to deliver when it is gone
}

// dirtyChunk is the grain of dirty tracking for commands that say which bytes
// they write. Kernels dirty a whole object.
const dirtyChunk = 16 << 20

type mapping struct {
	ID     uint32
	Flags  uint64
	At     uint64 // where the application sees it: an offset of the arena
	Offset uint64 // buffers
	Size   uint64
	Origin [3]uint64 // images
	Region [3]uint64
	vendor unsafe.Pointer // of a unified buffer, mapped at the vendor's too
}

type sampler struct {
	id                     uint32
	ctx                    *clContext
	normalized, addr, filt uint32
	vendor                 cl.Sampler
	users                  int
	dead                   bool
}

// program knows how it came to be, so that it can be made again anywhere.
type program struct {
	id       uint32
	ctx      *clContext
	content  portable.Program // source or IL, or what was linked
	spec     []portable.SpecConstant
	vendor   cl.Program
	devices  []*device
	built    map[uint32]*build // by device id
	building bool
	dead     bool         // released; a build of it may go on, or a kernel live
	ghost    uint32       // its id since then
	desc     *description // of the last build
	told     told
	recalled bool // made of the vendor's binary
	loaded   bool // from a container: an empty option string means the container's
	kernels  int  // kernel objects made from it
	exact    bool // arguments declared const are never written
}

// told reports whether the application may know a program's arguments, which is
// the first runtime's to decide and then stays.
type told uint8

const (
	toldUnknown told = iota
	toldYes
	toldNo
)

// build is the outcome of the last build for one device.
type build struct {
	Status  int32 // CL_BUILD_*
	Options string
	Log     string
	Type    uint32 // CL_PROGRAM_BINARY_TYPE_*
}

type kernel struct {
	id     uint32
	prog   *program
	name   string
	vendor cl.Kernel
	text   []argument // what the compiler says of its arguments
	info   []argInfo
	args   []arg
	writes []*mem // what a launch may write, by the arguments now set
	stale  bool   // writes must be computed anew
	local  uint64 // bytes of local arguments
	group  uint64 // largest work-group asked for
}

type argInfo struct {
	kind  uint32 // wire.Arg*
	flags uint32
}

const (
	argConst      = 1 << iota // pointee const
	argReadOnly               // image
	argWriteOnly              // image
	argConstSpace             // constant address space
)

type arg struct {
	set    bool
	kind   uint32
	size   uint64
	object uint32
	to     any // that object: a *mem, a *sampler, or nil
	value  []byte
}

type eventState uint8

const (
	eventVendor  eventState = iota // the vendor has it
	eventPending                   // held back, or a user event, or a bulk transfer
	eventDone                      // final status known
)

type event struct {
	id     uint32
	ctx    *clContext
	q      *queue
	state  eventState
	user   bool
	vendor cl.Event
	status int32
	times  [5]uint64 // queued, submit, start, end, complete; ns, session time
	timed  bool
	users  int // parked requests that wait for it
	dead   bool
}

// call is one request as it came.
type call struct {
	op   wire.Op
	slot uint16
	body []byte
}
