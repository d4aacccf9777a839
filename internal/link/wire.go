package link

import (
	"encoding/binary"
	"fmt"
)

// ID names a stream. Both ends have the same; an end that was started anew has another.
type ID [16]byte

// All integers are little-endian.
const (
	magic   = 0x4b4e4c47 // "GLNK"
	version = 1

	// A connection begins with a hello from each end: u32 magic, u16 version, u16 zero, the
	// id, u64 number of the frame that is expected next.
	helloSize = 32

	// A frame begins with a header: u64 number, u64 the last number that was taken from the
	// other end, u16 kind, u16 zero, u32 length of the head, u32 length of the body, u32
	// zero. Number 0 is a frame without head and body that only acknowledges.
	headerSize = 32
)

func newHello(id ID, expected uint64) []byte {
	b := binary.LittleEndian.AppendUint32(nil, magic)
	b = binary.LittleEndian.AppendUint32(b, version)
	b = append(b, id[:]...)
	return binary.LittleEndian.AppendUint64(b, expected)
}

func parseHello(b []byte, id ID) (expected uint64, err error) {
	switch {
	case binary.LittleEndian.Uint32(b) != magic:
		return 0, fmt.Errorf("the peer does not speak this protocol: %w", ErrProtocol)
	case binary.LittleEndian.Uint32(b[4:]) != version:
		return 0, fmt.Errorf("the peer speaks version %d, not %d: %w", binary.LittleEndian.Uint32(b[4:]), version, ErrProtocol)
	case ID(b[8:24]) != id:
		return 0, fmt.Errorf("the peer's stream is %x, not %x: %w", b[8:24], id[:], ErrOtherStream)
	}
	return binary.LittleEndian.Uint64(b[24:]), nil
}

type header struct {
	number, ack uint64
	kind        uint16
	head, body  uint32
}

func (h *header) appendTo(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, h.number)
	b = binary.LittleEndian.AppendUint64(b, h.ack)
	b = binary.LittleEndian.AppendUint32(b, uint32(h.kind))
	b = binary.LittleEndian.AppendUint32(b, h.head)
	b = binary.LittleEndian.AppendUint32(b, h.body)
	return binary.LittleEndian.AppendUint32(b, 0)
}

func parseHeader(b []byte) (h header, err error) {
	le := binary.LittleEndian
	h = header{le.Uint64(b), le.Uint64(b[8:]), le.Uint16(b[16:]), le.Uint32(b[20:]), le.Uint32(b[24:])}
	if le.Uint16(b[18:]) != 0 || le.Uint32(b[28:]) != 0 {
		return h, fmt.Errorf("header of frame %d: %w", h.number, ErrProtocol)
	}
	if h.number == 0 && (h.kind != 0 || h.head != 0 || h.body != 0) {
		return h, fmt.Errorf("acknowledgement with contents: %w", ErrProtocol)
	}
	return h, nil
}
