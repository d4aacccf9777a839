package xen

import (
	"encoding/binary"
	"sync/atomic"
	"unsafe"
)

// Operations on device models: xen/include/public/hvm/dm_op.h. A buffer has the number,
// four unused bytes, and what opBody has.
const (
	opCreate    = 1
	opMap       = 3
	opUnmap     = 4
	opState     = 5
	opDestroy   = 6
	opINTxLevel = 8
	opModified  = 11 // with a second buffer: the first frame, their number, and 4 unused bytes
	opInjectMSI = 14
	opVCPUs     = 20

	opSize = 64
	opBody = 8

	rangeMemory = 1
	rangePCI    = 2

	resourceIOReq = 0 // XENMEM_resource_ioreq_server
	firstIOReq    = 1 // frame 0 is for buffered requests
)

// Requests: xen/include/public/hvm/ioreq.h.
const (
	slotSize     = 32
	slotsPerPage = pageSize / slotSize
	pageSize     = 4096

	offAddr  = 0
	offData  = 8
	offCount = 16
	offSize  = 20
	offPort  = 24
	offWord  = 28

	stateNone     = 0
	stateReady    = 1
	stateInWork   = 2
	stateAnswered = 3

	kindCopy       = 1 // an access to memory
	kindConfig     = 2
	kindTimeOffset = 7
	kindInvalidate = 8
)

// word is bytes 28 to 31 of a request.
type word uint32

func (w word) state() uint32      { return uint32(w) >> 16 & 0xf }
func (w word) pointer() bool      { return w>>20&1 != 0 }
func (w word) read() bool         { return w>>21&1 != 0 }
func (w word) backwards() bool    { return w>>22&1 != 0 }
func (w word) kind() uint8        { return uint8(w >> 24) }
func (w word) with(s uint32) word { return w&^0xf0000 | word(s)<<16 }
func at(slot []byte) *uint32      { return (*uint32)(unsafe.Pointer(&slot[offWord])) }
func load(slot []byte) word       { return word(atomic.LoadUint32(at(slot))) }
func store(slot []byte, w word)   { atomic.StoreUint32(at(slot), uint32(w)) }
func swap(slot []byte, o, n word) bool {
	return atomic.CompareAndSwapUint32(at(slot), uint32(o), uint32(n))
}

// request is a request, copied out of the page.
type request struct {
	addr, data  uint64
	count, size uint32
	word        word
}

func read(slot []byte, w word) request {
	le := binary.LittleEndian
	return request{le.Uint64(slot[offAddr:]), le.Uint64(slot[offData:]), le.Uint32(slot[offCount:]), le.Uint32(slot[offSize:]), w}
}

// op makes the buffer of an operation.
func op(number uint32, fill func(body []byte)) []byte {
	b := make([]byte, opSize)
	binary.LittleEndian.PutUint32(b, number)
	if fill != nil {
		fill(b[opBody:])
	}
	return b
}

func opServer(number uint32, id uint16, enabled bool) []byte {
	return op(number, func(b []byte) {
		binary.LittleEndian.PutUint16(b, id)
		if enabled {
			b[2] = 1
		}
	})
}

func opRange(number uint32, id uint16, kind uint32, start, end uint64) []byte {
	return op(number, func(b []byte) {
		le := binary.LittleEndian
		le.PutUint16(b, id)
		le.PutUint32(b[4:], kind)
		le.PutUint64(b[8:], start)
		le.PutUint64(b[16:], end)
	})
}
