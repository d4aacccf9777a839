package executor

import (
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/portable"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// device is a device of the session, or a sub-device.
type device struct {
	id     uint32
	parent *device
	part   []uint64 // the partition properties that created it, with the final 0
	index  int      // its index among the sub-devices
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

// busy reports whether a command may still run.
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

// queue is a command queue. Its commands are parked while one of them waits for something
// that only the application can do.
type queue struct {
	id        uint32
	ctx       *clContext
	dev       *device
	props     uint64
	vendor    cl.Queue
	held      int       // commands of this queue in session.parked
	fence     int       // of these, barriers, which delay everything after them
	bulk      int       // bulk transfers in progress
	pends     []pending // staged transfers whose completion word is to be set
	failed    cl.Status // error of a posted command, reported once
	barrier   cl.Event  // the last one that an out-of-order queue has got
	users     int
	dead      bool
	seq, idle uint64 // commands that were enqueued, and how many of them are known to have ended
	kernel    string // the kernel that was launched last
	launched  time.Time
}

func (q *queue) busy() bool { return q.seq != q.idle }

// take returns the result of a call that waits, with the error of an earlier command that
// nobody has waited for.
func (q *queue) take(st cl.Status) cl.Status {
	if st == cl.Success && q.failed != cl.Success {
		st, q.failed = q.failed, cl.Success
	}
	return st
}

// setBarrier takes over a reference of the event of the last barrier.
func (q *queue) setBarrier(e cl.Event) {
	if q.barrier != 0 {
		cl.ReleaseEvent(q.barrier)
	}
	q.barrier = e
}

func (q *queue) inOrder() bool { return q.props&cl.QueueOutOfOrderExecModeEnable == 0 }

// pending is a staged transfer that the vendor has not ended yet.
type pending struct {
	ev   cl.Event
	pend uint32
	keep *runtime.Pinner // of memory from which the vendor reads
	show remote.Block    // for a client on another host: what the command has written
	of   *mem            // the object and the mapping that are shown so
	mp   *mapping
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
	parent *mem   // of a sub-buffer: its buffer; of an image: the buffer that it was created from
	origin uint64 // of a sub-buffer
	format cl.ImageFormat
	desc   cl.ImageDesc // without its buffer
	elem   uint64       // bytes in one pixel
	vendor cl.Mem

	// Host memory in the arena: the content itself if the device computes there (unified),
	// otherwise a shadow, which shows mapped regions.
	arena    uint64
	hasArena bool
	unified  bool
	extra    []span // further ranges, which mappings from before a swap use

	wasMapped bool
	mapFailed atomic.Bool // a map command has failed, of which a carrier was told as if it had not
	pinTried  bool        // the driver was asked to pin the shadow

	dirty    []bool // for each dirtyChunk bytes: differs from the last export
	known    uint32 // its id in the last graph or export, under which the receiver has it
	maps     map[uint32]*mapping
	users    int    // parked commands that use it
	subs     []*mem // sub-buffers
	inArena  bool   // its content is in the arena, where an earlier executor has computed
	dead     bool   // released by the application; kept for its users
	gone     bool   // dropped: nothing uses it any more
	ghost    uint32 // its id after the release
	callback uint32 // called when it is dropped
}

// dirtyChunk is the unit in bytes in which written memory is recorded, for commands that
// name the bytes that they write. A kernel marks a whole object.
const dirtyChunk = 16 << 20

type mapping struct {
	ID     uint32
	Flags  uint64
	At     uint64 // where the application has it: an offset in the arena
	Offset uint64 // of buffers
	Size   uint64
	Origin [3]uint64 // of images
	Region [3]uint64
	vendor unsafe.Pointer // of a unified buffer, which is mapped by the vendor, too
	unseen bool           // a client on another host has not been shown it yet
	told   bool           // its carrier knows of it, and will not see the request to unmap it
	sent   *event         // of the transfer that wrote its content to the device, if one did
	reads  cl.Event       // what reads its content, if the application does not wait for that in the call; 0: it has ended
}

type sampler struct {
	id                     uint32
	ctx                    *clContext
	normalized, addr, filt uint32
	vendor                 cl.Sampler
	users                  int
	dead                   bool
}

// program has what is needed to create it again on any device.
type program struct {
	id       uint32
	ctx      *clContext
	content  portable.Program        // source or IL, or the programs that were linked
	spec     []portable.SpecConstant // of the next build
	vendor   cl.Program
	devices  []*device
	built    map[uint32]*build // by device id
	building bool
	dead     bool         // released; a build or a kernel may still use it
	ghost    uint32       // its id after the release
	desc     *description // of the last build
	told     told
	recalled bool   // created from the vendor's binary
	loaded   bool   // from a container: an empty option string means the options in the container
	kernels  int    // kernel objects that were created from it
	exact    bool   // arguments declared const are never written, as far as its text and the logs of its builds say
	checked  *check // whether its compiler warns of none either; nil: it was not asked
}

// told is whether the application may read the arguments of a program's kernels. The first
// runtime decides that for the whole session.
type told uint8

const (
	toldUnknown told = iota
	toldYes
	toldNo
)

// build is the result of the last build for one device.
type build struct {
	Status  int32 // CL_BUILD_*
	Options string
	Log     string
	Type    uint32 // CL_PROGRAM_BINARY_TYPE_*
}

type kernel struct {
	id       uint32
	prog     *program
	name     string
	vendor   cl.Kernel
	text     []argument // its arguments as the compiler describes them
	info     []argInfo
	args     []arg
	writes   []*mem // what a launch with the present arguments may write
	stale    bool   // writes must be computed again
	believed bool   // const was believed for them
	refused  int    // arguments that have to be set again
	local    uint64 // bytes of local arguments
	group    uint64 // the largest work-group that was launched
}

type argInfo struct {
	kind  uint32 // wire.Arg*
	flags uint32
}

const (
	argConst      = 1 << iota // what it points to is const
	argReadOnly               // of an image
	argWriteOnly              // of an image
	argConstSpace             // constant address space
)

type arg struct {
	set     bool
	refused bool // the runtime has another one, which the application has replaced: it has to be set again
	kind    uint32
	size    uint64
	object  uint32
	to      any // the object that the id refers to: a *mem, a *sampler, or nil
	value   []byte
}

type eventState uint8

const (
	eventVendor  eventState = iota // enqueued at the vendor
	eventPending                   // a parked command, a user event or a bulk transfer
	eventDone                      // the final status is known
)

type event struct {
	id     uint32
	ctx    *clContext
	q      *queue
	state  eventState
	user   bool
	vendor cl.Event
	status int32
	times  [5]uint64 // queued, submit, start, end, complete; nanoseconds of session time
	timed  bool
	users  int // parked requests that wait for it
	dead   bool
	ghost  uint32 // its id after the release
}

// call is one request as it was received.
type call struct {
	op   wire.Op
	slot uint16
	body []byte
}
