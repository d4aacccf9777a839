package vchan

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"
)

// ErrProtocol means that the other side violates the protocol. The connection has ended.
var ErrProtocol = errors.New("not the vchan protocol")

// The shared page (struct vchan_interface). "Left" is the ring from client to server.
const (
	pageSize  = 4096
	pageOrder = 12

	offLeft   = 0 // u32 consumed, u32 produced
	offRight  = 8
	offOrders = 16 // u16 left, u16 right
	offState  = 20 // u8 client alive, u8 server alive, u8 events that the server asks for, u8 those of the client
	offGrants = 24 // u32 of the left ring's pages, then of the right one's

	minOrder = 10
	maxOrder = 20
)

// Bits of the word at offState.
const (
	shiftClientLive, shiftServerLive     = 0, 8
	shiftServerWishes, shiftClientWishes = 16, 24

	gone, alive, expected = 0, 1, 2 // values of a side's liveness byte

	wishWritten = 1 << 0 // asks for an event when something was written
	wishRead    = 1 << 1 // asks for an event when something was read
	goodbye     = 1 << 7 // our extension, not in libxenvchan
)

// word returns a word of the page, which the other side may write at the same time.
func word(page []byte, offset int) *uint32 {
	return (*uint32)(unsafe.Pointer(&page[offset:][:4][0]))
}

// place is where a ring is: in the shared page at an offset, or in pages of its own.
type place struct {
	size   int // bytes, a power of two
	offset int
	pages  int
}

// ringOf returns the place of a ring. order is the logarithm of its size.
func ringOf(order uint32) (place, error) {
	switch {
	case order < minOrder || order > maxOrder:
		return place{}, fmt.Errorf("%w: a ring of order %d", ErrProtocol, order)
	case order < pageOrder:
		return place{size: 1 << order, offset: 1 << order}, nil // of 1 or 2 KiB, at that offset
	}
	return place{size: 1 << order, pages: 1 << (order - pageOrder)}, nil
}

// ringsOf returns the places of both rings, which must not overlap each other or the
// grants.
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

// readOrders reads the places of a page's rings.
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

// half is one ring, from the view of its reader or its writer.
type half struct {
	ring   []byte
	own    uint32  // our index; the copy in the page is never read back
	mine   *uint32 // in the page
	theirs *uint32
}

// ready returns how many bytes can be read.
func (h *half) ready() (int, error) {
	return h.check(atomic.LoadUint32(h.theirs) - h.own)
}

// space returns how many bytes can be written.
func (h *half) space() (int, error) {
	used, err := h.check(h.own - atomic.LoadUint32(h.theirs))
	return len(h.ring) - used, err
}

// check checks the difference of the indexes, which wrap around.
func (h *half) check(distance uint32) (int, error) {
	if uint64(distance) > uint64(len(h.ring)) {
		return 0, fmt.Errorf("%w: %d bytes in a ring of %d", ErrProtocol, distance, len(h.ring))
	}
	return int(distance), nil
}

// at returns the memory of n bytes from our index on, in two parts if it wraps around.
func (h *half) at(n int) (first, second []byte) {
	i := int(h.own) & (len(h.ring) - 1)
	first = h.ring[i:min(i+n, len(h.ring))]
	return first, h.ring[:n-len(first)]
}

// move advances our index by n bytes, and publishes it.
func (h *half) move(n int) {
	h.own += uint32(n)
	atomic.StoreUint32(h.mine, h.own)
}

// read copies up to n ready bytes out of the ring.
func (h *half) read(p []byte, n int) int {
	n = min(n, len(p))
	first, second := h.at(n)
	copy(p[copy(p, first):n], second)
	h.move(n)
	return n
}

// write copies up to n bytes into the ring.
func (h *half) write(p []byte, n int) int {
	n = min(n, len(p))
	first, second := h.at(n)
	copy(second, p[copy(first, p[:n]):n])
	h.move(n)
	return n
}
