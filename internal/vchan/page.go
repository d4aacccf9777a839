package vchan

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"
)

// ErrProtocol says that the other side does not keep to the protocol. The
// connection is over.
var ErrProtocol = errors.New("not the vchan protocol")

// The shared page, struct vchan_interface. "Left" is the ring from client to
// server.
const (
	pageSize  = 4096
	pageOrder = 12

	offLeft   = 0 // u32 consumed, u32 produced
	offRight  = 8
	offOrders = 16 // u16 left, u16 right
	offState  = 20 // u8 client alive, server alive, wishes of the server, of the client
	offGrants = 24 // u32 of the left ring's pages, then of the right one's

	minOrder = 10
	maxOrder = 20
)

// The word at offState.
const (
	shiftClientLive, shiftServerLive     = 0, 8
	shiftServerWishes, shiftClientWishes = 16, 24

	gone, alive, expected = 0, 1, 2 // a side's byte

	wishWritten = 1 << 0 // an event when something was written
	wishRead    = 1 << 1 // an event when something was read
	goodbye     = 1 << 7 // ours, not libxenvchan's
)

// word is a word of the page, which the other side writes at the same time.
func word(page []byte, offset int) *uint32 {
	return (*uint32)(unsafe.Pointer(&page[offset:][:4][0]))
}

// place says where a ring is: in the shared page at an offset, or in pages of
// its own.
type place struct {
	size   int // bytes, a power of two
	offset int
	pages  int
}

// ringOf says where a ring goes; order is the logarithm of its size.
func ringOf(order uint32) (place, error) {
	switch {
	case order < minOrder || order > maxOrder:
		return place{}, fmt.Errorf("%w: a ring of order %d", ErrProtocol, order)
	case order < pageOrder:
		return place{size: 1 << order, offset: 1 << order}, nil // of 1 or 2 KiB, at that offset
	}
	return place{size: 1 << order, pages: 1 << (order - pageOrder)}, nil
}

// ringsOf is ringOf for both, which must not overlap each other or the grants.
func ringsOf(leftOrder, rightOrder uint32) (left, right place, err error) {
	if left, err = ringOf(leftOrder); err != nil {
		return left, right, err
	}
	if right, err = ringOf(rightOrder); err != nil {
		return left, right, err
	}
	end := offGrants + 4*(left.pages+right.pages)
	for _, p := range []place{left, right} {
		if p.pages == 0 && (end > p.offset || left == right) {
			return left, right, fmt.Errorf("%w: rings of orders %d and %d overlap", ErrProtocol, leftOrder, rightOrder)
		}
	}
	return left, right, nil
}

// readOrders reads where the rings of a page are.
func readOrders(page []byte) (left, right place, err error) {
	orders := atomic.LoadUint32(word(page, offOrders))
	return ringsOf(orders&0xffff, orders>>16)
}

// readGrants reads the grants of both rings' pages.
func readGrants(page []byte, left, right place) (l, r []uint32) {
	all := make([]uint32, left.pages+right.pages)
	for i := range all {
		all[i] = atomic.LoadUint32(word(page, offGrants+4*i))
	}
	return all[:left.pages], all[left.pages:]
}

// half is one ring as its reader or writer has it.
type half struct {
	ring   []byte
	own    uint32  // our index; the page has a copy that is never read back
	mine   *uint32 // in the page
	theirs *uint32
}

// ready is how many bytes there are to read.
func (h *half) ready() (int, error) {
	return h.check(atomic.LoadUint32(h.theirs) - h.own)
}

// space is how many bytes there is room for.
func (h *half) space() (int, error) {
	used, err := h.check(h.own - atomic.LoadUint32(h.theirs))
	return len(h.ring) - used, err
}

// check is the distance between the indexes, which run over.
func (h *half) check(distance uint32) (int, error) {
	if uint64(distance) > uint64(len(h.ring)) {
		return 0, fmt.Errorf("%w: %d bytes in a ring of %d", ErrProtocol, distance, len(h.ring))
	}
	return int(distance), nil
}

// at splits n bytes from our index on where the ring ends.
func (h *half) at(n int) (first, second []byte) {
	i := int(h.own) & (len(h.ring) - 1)
	first = h.ring[i:min(i+n, len(h.ring))]
	return first, h.ring[:n-len(first)]
}

// move takes n bytes as read or written and tells the other side.
func (h *half) move(n int) {
	h.own += uint32(n)
	atomic.StoreUint32(h.mine, h.own)
}

// read copies at most the bytes that are ready, n, out of the ring.
func (h *half) read(p []byte, n int) int {
	n = min(n, len(p))
	first, second := h.at(n)
	copy(p[copy(p, first):n], second)
	h.move(n)
	return n
}

// write copies at most as many bytes as there is space for, n, into the ring.
func (h *half) write(p []byte, n int) int {
	n = min(n, len(p))
	first, second := h.at(n)
	copy(second, p[copy(first, p[:n]):n])
	h.move(n)
	return n
}
