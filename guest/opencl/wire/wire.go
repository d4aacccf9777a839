package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unsafe"
)

// Errors of the decoder. All of them mean a broken or hostile client.
var (
	// ErrShort is returned when a request ends before its fields do.
	ErrShort = errors.New("request too short")
	// ErrUnknownOp is returned for an operation number outside the table.
	ErrUnknownOp = errors.New("unknown operation")
)

// Op is the number of an operation.
type Op uint16

// String returns the operation's name in the table.
func (o Op) String() string {
	if int(o) < len(opNames) {
		return opNames[o]
	}
	return fmt.Sprintf("op(%d)", uint16(o))
}

// Request is one decoded operation.
type Request interface {
	Op() Op
	Decode(b []byte) error
	Append(b []byte) []byte
}

func short(op Op, n int) error { return fmt.Errorf("%s: %w (%d bytes)", op, ErrShort, n) }

func le32(b []byte) uint32 { return binary.LittleEndian.Uint32(b) }
func le64(b []byte) uint64 { return binary.LittleEndian.Uint64(b) }

func put32(b []byte, v uint32) []byte { return binary.LittleEndian.AppendUint32(b, v) }
func put64(b []byte, v uint64) []byte { return binary.LittleEndian.AppendUint64(b, v) }

func takeBytes(op Op, b []byte, n uint32) (v, rest []byte, err error) {
	pad := (uint64(n) + 7) &^ 7
	if pad > uint64(len(b)) {
		return nil, nil, short(op, len(b))
	}
	return b[:n:n], b[pad:], nil
}

// take32 and take64 use b without a copy if it is aligned. It normally is: the fixed part
// and all lists are padded to 8 bytes, and callers decode from memory with 8-byte
// alignment.
func take32(op Op, b []byte, n uint32) (v []uint32, rest []byte, err error) {
	pad := (uint64(n)*4 + 7) &^ 7
	if pad > uint64(len(b)) {
		return nil, nil, short(op, len(b))
	}
	if n == 0 {
		return nil, b, nil
	}
	if uintptr(unsafe.Pointer(&b[0]))%4 == 0 {
		return unsafe.Slice((*uint32)(unsafe.Pointer(&b[0])), n), b[pad:], nil
	}
	v = make([]uint32, n)
	for i := range v {
		v[i] = le32(b[4*i:])
	}
	return v, b[pad:], nil
}

func take64(op Op, b []byte, n uint32) (v []uint64, rest []byte, err error) {
	pad := uint64(n) * 8
	if pad > uint64(len(b)) {
		return nil, nil, short(op, len(b))
	}
	if n == 0 {
		return nil, b, nil
	}
	if uintptr(unsafe.Pointer(&b[0]))%8 == 0 {
		return unsafe.Slice((*uint64)(unsafe.Pointer(&b[0])), n), b[pad:], nil
	}
	v = make([]uint64, n)
	for i := range v {
		v[i] = le64(b[8*i:])
	}
	return v, b[pad:], nil
}

func padTo8(b []byte, n int) []byte {
	for ; n%8 != 0; n++ {
		b = append(b, 0)
	}
	return b
}

func appendBytes(b, v []byte) []byte { return padTo8(append(b, v...), len(v)) }

func append32(b []byte, v []uint32) []byte {
	for _, x := range v {
		b = put32(b, x)
	}
	return padTo8(b, 4*len(v))
}

func append64(b []byte, v []uint64) []byte {
	for _, x := range v {
		b = put64(b, x)
	}
	return b
}
