package channel

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
)

// The format of a frame, big-endian:
//
//	 0  magic, 4 bytes; the last one is the version
//	 4  kind, 1 byte
//	 5  direction, 1 byte: an end that reads its own frames reads an echo
//	 6  length of the payload, 2 bytes
//	 8  connection, 8 bytes
//	16  sequence number, 4 bytes
//	20  next sequence number expected from the other side, 4 bytes
//	24  CRC-32C of the bytes so far, 4 bytes
//	28  CRC-32C of header and payload, 4 bytes
//	32  payload
const (
	headerSize = 32
	maxPayload = 2 << 10 // bytes
	maxFrame   = headerSize + maxPayload
)

const magic = "\xc7gc\x01"

// checksum continues the CRC-32C of the bytes before b. Processors have an instruction
// for it.
func checksum(before uint32, b []byte) uint32 {
	return crc32.Update(before, crc32.MakeTable(crc32.Castagnoli), b)
}

// kind is the purpose of a frame.
type kind uint8

const (
	kindOpen   kind = 1 + iota // host: open a connection
	kindOpened                 // guest: answer to kindOpen; the payload is the guest's instance
	kindData                   // numbered payload
	kindAck                    // acknowledges what has arrived
	kindNak                    // the same, and reports that something after it was lost
	kindAlive                  // host: asks for an acknowledgement
	kindClose                  // closes the connection
	kindLast   = kindClose
)

// direction is the sender of a frame.
type direction uint8

const (
	fromHost  direction = 'h'
	fromGuest direction = 'g'
)

func (d direction) other() direction {
	if d == fromHost {
		return fromGuest
	}
	return fromHost
}

type frame struct {
	kind    kind
	from    direction
	conn    uint64
	seq     uint32
	ack     uint32
	payload []byte
}

// appendTo appends the encoded frame to b. The payload must not be longer than
// maxPayload.
func (f *frame) appendTo(b []byte) []byte {
	at := len(b)
	b = append(b, magic...)
	b = append(b, byte(f.kind), byte(f.from))
	b = binary.BigEndian.AppendUint16(b, uint16(len(f.payload)))
	b = binary.BigEndian.AppendUint64(b, f.conn)
	b = binary.BigEndian.AppendUint32(b, f.seq)
	b = binary.BigEndian.AppendUint32(b, f.ack)
	sum := checksum(0, b[at:])
	b = binary.BigEndian.AppendUint32(b, sum)
	b = binary.BigEndian.AppendUint32(b, checksum(sum, f.payload))
	return append(b, f.payload...)
}

// padding is sent before the first frame of a connection. If another client has sent half
// a frame before, the decoder takes the padding for its other half, and not the first
// frame.
func padding() []byte { return make([]byte, maxFrame) }

// decoder finds frames in any bytes. It buffers less than one frame.
type decoder struct {
	buf     []byte
	skipped uint64 // bytes that belonged to no frame
}

// feed decodes the next bytes and yields complete frames. A frame's payload is valid
// until yield returns.
func (d *decoder) feed(p []byte, yield func(frame)) {
	d.buf = append(d.buf, p...)
	at := 0
	for {
		n := d.next(d.buf[at:], yield)
		if n == 0 {
			break
		}
		at += n
	}
	d.buf = append(d.buf[:0], d.buf[at:]...)
}

// next returns how many bytes it has processed; 0: it needs more bytes.
func (d *decoder) next(b []byte, yield func(frame)) int {
	start := bytes.IndexByte(b, magic[0])
	if start < 0 {
		start = len(b)
	}
	if start > 0 {
		d.skipped += uint64(start)
		return start
	}
	if len(b) == 0 {
		return 0
	}
	if n := min(len(b), len(magic)); string(b[:n]) != magic[:n] {
		d.skipped++
		return 1
	}
	if len(b) < headerSize {
		return 0
	}
	f, length, ok := parseHeader(b)
	if !ok {
		d.skipped++
		return 1
	}
	if len(b) < headerSize+length {
		return 0
	}
	f.payload = b[headerSize : headerSize+length]
	sum := binary.BigEndian.Uint32(b[24:])
	if checksum(sum, f.payload) != binary.BigEndian.Uint32(b[28:]) {
		d.skipped++ // its supposed payload may contain valid frames
		return 1
	}
	yield(f)
	return headerSize + length
}

func parseHeader(b []byte) (f frame, length int, ok bool) {
	if checksum(0, b[:24]) != binary.BigEndian.Uint32(b[24:]) {
		return f, 0, false
	}
	f = frame{
		kind: kind(b[4]), from: direction(b[5]), conn: binary.BigEndian.Uint64(b[8:]),
		seq: binary.BigEndian.Uint32(b[16:]), ack: binary.BigEndian.Uint32(b[20:]),
	}
	length = int(binary.BigEndian.Uint16(b[6:]))
	known := f.kind >= kindOpen && f.kind <= kindLast && (f.from == fromHost || f.from == fromGuest)
	return f, length, known && length <= maxPayload
}
