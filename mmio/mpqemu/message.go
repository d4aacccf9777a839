package mpqemu

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// ErrProtocol means that QEMU has sent what the protocol does not have.
var ErrProtocol = errors.New("not QEMU's multi-process protocol")

type command int32

// Commands, and the sizes of what follows their header.
const (
	cmdMemory command = iota // 192 bytes and up to 8 files; no answer
	cmdReturn                // 8 bytes: the answer to the others
	cmdConfigWrite
	cmdConfigRead
	cmdBARWrite
	cmdBARRead
	cmdInterrupts // two files; no answer
	cmdReset

	headerSize = 16
	maxFiles   = 8
	memorySize = maxFiles * 3 * 8
	configSize = 12
	accessSize = 24
	maxPayload = memorySize
)

// message is a message after it has been checked.
type message struct {
	cmd   command
	addr  uint64
	value uint64
	size  int
	io    bool // an access to ports
	areas []area
}

// area is a range of the VM's memory in a file.
type area struct {
	start, size uint64
	offset      int64
}

// payload returns how many bytes follow a header.
func payload(header []byte) (command, int, error) {
	le := binary.LittleEndian
	cmd, size := command(le.Uint32(header)), le.Uint64(header[8:])
	want := map[command]uint64{
		cmdMemory: memorySize, cmdConfigWrite: configSize, cmdConfigRead: configSize,
		cmdBARWrite: accessSize, cmdBARRead: accessSize, cmdInterrupts: 0,
	}
	n, known := want[cmd]
	if cmd == cmdReset && size <= maxPayload { // what follows has no meaning
		n, known = size, true
	}
	if !known || n != size {
		return 0, 0, fmt.Errorf("%w: command %d with %d bytes", ErrProtocol, cmd, size)
	}
	return cmd, int(size), nil
}

// parse checks a message.
func parse(cmd command, body []byte, files int) (message, error) {
	le := binary.LittleEndian
	m := message{cmd: cmd}
	bad := func(what string, args ...any) (message, error) {
		return message{}, fmt.Errorf("%w: command %d %s", ErrProtocol, cmd, fmt.Sprintf(what, args...))
	}
	switch cmd {
	case cmdMemory:
		if files < 1 || files > maxFiles {
			return bad("with %d files", files)
		}
		for i := range files {
			a := area{le.Uint64(body[8*i:]), le.Uint64(body[8*(maxFiles+i):]), int64(le.Uint64(body[8*(2*maxFiles+i):]))}
			if a.size == 0 || a.size > 1<<48 || a.start > 1<<48 || a.offset < 0 || a.offset > 1<<48 {
				return bad("with %d bytes of memory at %#x", a.size, a.start)
			}
			m.areas = append(m.areas, a)
		}
		return m, nil
	case cmdInterrupts:
		if files != 2 {
			return bad("with %d files", files)
		}
		return m, nil
	}
	if files != 0 {
		return bad("with %d files", files)
	}
	switch cmd {
	case cmdConfigRead, cmdConfigWrite:
		m.addr, m.value, m.size = uint64(le.Uint32(body)), uint64(le.Uint32(body[4:])), int(int32(le.Uint32(body[8:])))
	case cmdBARRead, cmdBARWrite:
		m.addr, m.value, m.size, m.io = le.Uint64(body), le.Uint64(body[8:]), int(int32(le.Uint32(body[16:]))), body[20] == 0
	}
	if cmd != cmdReset && m.size != 1 && m.size != 2 && m.size != 4 && m.size != 8 {
		return bad("of %d bytes", m.size)
	}
	return m, nil
}

// answer returns the message that answers one.
func answer(value uint64) []byte {
	le := binary.LittleEndian
	b := make([]byte, headerSize+8)
	le.PutUint32(b, uint32(cmdReturn))
	le.PutUint64(b[8:], 8)
	le.PutUint64(b[headerSize:], value)
	return b
}
