package main

type constant struct{ name, value, doc string }

// consts is the layout of the shared memory and the small enumerations.
// Offsets are in bytes from the start of the ring memfd.
var consts = []constant{
	{"MAGIC", "0x31525847", "GXR1"},
	{"VERSION", "2", "of the protocol; both sides must agree"},

	{"HDR_MAGIC", "0x00", "u32"},
	{"HDR_VERSION", "0x04", "u32"},
	{"HDR_RING_SIZE", "0x08", "u64, power of two"},
	{"HDR_ARENA_SIZE", "0x10", "u64"},
	{"HDR_ARENA_SPLIT", "0x18", "u64: executor's part below, client's part from here on"},
	{"HDR_SLOTS", "0x20", "u32"},
	{"HDR_PENDS", "0x24", "u32"},
	{"HDR_OWNER", "0x40", "u32, generation of the executor that may read the ring"},
	{"HDR_STATE", "0x44", "u32, STATE_*; also a futex"},
	{"HDR_SERVING", "0x48", "u32, generation of the executor that last began to serve: stored before it does anything"},
	{"HDR_SLEEP", "0x80", "u32, 1 while nobody reads the ring; doorbell futex"},
	{"HDR_NAP", "0x84", "u32, 1 while the reader sleeps for a moment and looks again by itself; futex"},
	{"HDR_TAIL", "0xc0", "u64, bytes ever produced"},
	{"HDR_HEAD", "0x100", "u64, bytes ever consumed"},
	{"HDR_SPACE", "0x108", "u32, set by a client that waits for room; futex"},
	{"HDR_CB_TAIL", "0x140", "u32, callbacks ever produced; futex"},
	{"HDR_CB_HEAD", "0x180", "u32, callbacks ever consumed; futex"},
	{"HDR_OUT_TAIL", "0x1c0", "u32, bytes ever printed"},
	{"HDR_OUT_HEAD", "0x200", "u32, bytes of them ever taken by the client; futex"},
	{"HDR_SIZE", "0x1000", "bytes of the header"},

	{"CB_OFF", "0x1000", "callback ring"},
	{"CB_COUNT", "1024", "entries of 16 bytes: u32 token, i32 status, u32 kind, u32 zero"},
	{"PEND_OFF", "0x8000", "completion words, u32 each"},
	{"PEND_COUNT", "8192", "word 0 is not used"},
	{"SLOT_OFF", "0x10000", "reply slots"},
	{"SLOT_COUNT", "256", ""},
	{"SLOT_SIZE", "4096", "64 bytes of header, then data"},
	{"RING_OFF", "0x110000", "request ring"},
	{"RING_SIZE", "0x100000", "bytes"},
	{"OUT_OFF", "0x210000", "what kernels print, a ring of bytes"},
	{"OUT_SIZE", "0x100000", "bytes, power of two"},
	{"RING_MEM", "0x310000", "bytes of the whole ring memfd"},
	{"MAX_REQUEST", "0x8000", "bytes of the largest request, header included"},
	{"MAX_INLINE", "0x1000", "bytes of the largest inline content"},

	{"SLOT_STATE", "0", "u32, SLOT_*; futex"},
	{"SLOT_ERR", "4", "i32, the OpenCL error"},
	{"SLOT_LEN", "8", "u32, bytes of data in the slot"},
	{"SLOT_TOKEN", "12", "u32, for fetch when total > len, else 0"},
	{"SLOT_TOTAL", "16", "u64, bytes of the whole reply"},
	{"SLOT_PHASE", "24", "u32, PHASE_*; futex"},
	{"SLOT_PRODUCED", "28", "u32, chunks filled; futex"},
	{"SLOT_CONSUMED", "32", "u32, chunks emptied, or 1 when the direct copy is done; futex"},
	{"SLOT_DIRECT", "40", "u64, arena offset of the direct copy"},
	{"SLOT_DATA", "64", ""},

	{"NO_SLOT", "0xffff", "slot number of a posted request"},
	{"SLOT_FREE", "0", ""},
	{"SLOT_PENDING", "1", "the client spins"},
	{"SLOT_ASLEEP", "2", "the client waits on the futex: wake it"},
	{"SLOT_DONE", "3", ""},

	{"PHASE_NONE", "0", ""},
	{"PHASE_DIRECT", "1", "copy at SLOT_DIRECT in the arena, then set SLOT_CONSUMED"},
	{"PHASE_STREAM", "2", "stream through the chunks"},

	{"PEND_FREE", "0", ""},
	{"PEND_BUSY", "1", "set by the client before it posts"},
	{"PEND_DONE", "2", "set by the executor"},
	{"PEND_FAILED", "3", "set by the executor: the command did not run"},

	{"STATE_RUNNING", "1", "an executor owns the session"},
	{"STATE_SUSPENDED", "2", "no executor, the state is safe: wait"},
	{"STATE_LOST", "3", "the executor died: CL_DEVICE_NOT_AVAILABLE"},

	{"DATA_NONE", "0", ""},
	{"DATA_INLINE", "1", "in the request"},
	{"DATA_STAGED", "2", "at stage_off in the arena"},
	{"DATA_BULK", "3", "blocking, in phases; the slot says which"},

	{"ARG_PLAIN", "0", "by value"},
	{"ARG_MEM", "1", "global or constant pointer, object 0 for NULL"},
	{"ARG_LOCAL", "2", "size only"},
	{"ARG_IMAGE", "3", ""},
	{"ARG_SAMPLER", "4", ""},
	{"ARG_OTHER", "5", "pipe, queue or pointer we cannot serve"},

	{"CB_EVENT", "1", "token's event callback, status is the event's"},
	{"CB_BUILD", "2", "token's build is over"},
	{"CB_DESTROYED", "3", "token's memory object is gone"},

	{"FIRST_ID", "64", "smallest id a client may choose; below it are the devices, from 1"},
	{"MAX_ID", "0xffffff", "largest"},

	{"LOCK_MANAGER", "0", "byte of the ring memfd that a live gpuguest locks (OFD)"},
	{"LOCK_EXECUTOR", "1", "byte that the executor which owns the session locks (OFD)"},

	{"LOCK_PART", "16", "first of ARENA_PARTS bytes: that of a part of the arena is locked by the executor that has it (OFD)"},
	{"ARENA_PARTS", "4", "equal parts of [0, arena_split), one for each living executor"},
	{"HELLO_MAGIC", "0x48425847", "GXBH, first word of a client's greeting"},
}
