package xenstore

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"syscall"
)

// Limits of the protocol, xs_wire.h.
const (
	MaxPayload      = 4096    // bytes after a message's header
	MaxReply        = 1 << 20 // oxenstored keeps to no limit on its socket; this is ours
	MaxAbsolutePath = 3072
	MaxRelativePath = 2048
)

// Op is the type of a message, enum xsd_sockmsg_type.
type Op uint32

// Types of messages that are spoken here.
const (
	OpDirectory        Op = 1
	OpRead             Op = 2
	OpGetPerms         Op = 3
	OpWatch            Op = 4
	OpUnwatch          Op = 5
	OpTransactionStart Op = 6
	OpTransactionEnd   Op = 7
	OpGetDomainPath    Op = 10
	OpWrite            Op = 11
	OpMkdir            Op = 12
	OpRm               Op = 13
	OpSetPerms         Op = 14
	OpWatchEvent       Op = 15
	OpError            Op = 16
	OpIsIntroduced     Op = 17
	OpDirectoryPart    Op = 22
)

var opNames = [...]string{ //nolint:gochecknoglobals // a table
	OpDirectory: "list", OpRead: "read", OpGetPerms: "get permissions of", OpWatch: "watch", OpUnwatch: "unwatch",
	OpTransactionStart: "start a transaction", OpTransactionEnd: "end a transaction", OpGetDomainPath: "get the path of domain",
	OpWrite: "write", OpMkdir: "make", OpRm: "remove", OpSetPerms: "set permissions of", OpWatchEvent: "event", OpError: "error",
	OpIsIntroduced: "ask for domain", OpDirectoryPart: "list",
}

// String is what the operation does, as a verb.
func (o Op) String() string {
	if int64(o) < int64(len(opNames)) && opNames[o] != "" {
		return opNames[o]
	}
	return "operation " + strconv.FormatUint(uint64(o), 10)
}

// ErrProtocol says that the other side does not keep to the protocol. The
// connection is given up.
var ErrProtocol = errors.New("not the xenstore protocol")

const headerSize = 16

// Message is one message of either direction.
type Message struct {
	Op            Op
	Request, TxID uint32
	Payload       []byte
}

// ReadMessage reads one message; it reads no more than the message has. A
// payload of more than most bytes is ErrProtocol, and io.EOF comes only between
// messages.
func ReadMessage(r io.Reader, most uint32) (Message, error) {
	var header [headerSize]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return Message{}, err
	}
	le := binary.LittleEndian
	m := Message{Op: Op(le.Uint32(header[0:])), Request: le.Uint32(header[4:]), TxID: le.Uint32(header[8:])}
	length := le.Uint32(header[12:])
	if length > most {
		return Message{}, fmt.Errorf("%w: a payload of %d bytes", ErrProtocol, length)
	}
	m.Payload = make([]byte, length)
	if _, err := io.ReadFull(r, m.Payload); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return Message{}, err
	}
	return m, nil
}

// Encode is the message as it goes over the wire. The payload must not be
// longer than MaxPayload.
func (m Message) Encode() []byte {
	b := make([]byte, headerSize, headerSize+len(m.Payload))
	le := binary.LittleEndian
	le.PutUint32(b[0:], uint32(m.Op))
	le.PutUint32(b[4:], m.Request)
	le.PutUint32(b[8:], m.TxID)
	le.PutUint32(b[12:], uint32(len(m.Payload)))
	return append(b, m.Payload...)
}

// Strings splits a payload of texts that each end with a zero byte. The last
// one may lack it.
func Strings(payload []byte) []string {
	if len(payload) == 0 {
		return nil
	}
	payload = bytes.TrimSuffix(payload, []byte{0})
	return strings.Split(string(payload), "\x00")
}

// joined is the payload of texts that each end with a zero byte.
func joined(parts ...string) []byte {
	return []byte(strings.Join(parts, "\x00") + "\x00")
}

// Error is what the store answers to a request that it does not fulfil. It
// wraps the errno, so that errors.Is(err, fs.ErrNotExist) holds for ENOENT.
type Error struct {
	Op    Op
	Path  string
	Errno syscall.Errno
}

func (e *Error) Error() string { return fmt.Sprintf("xenstore: %s %q: %v", e.Op, e.Path, e.Errno) }

// Unwrap is the errno.
func (e *Error) Unwrap() error { return e.Errno }

// The names of errors on the wire, xs_wire.h.
var errnos = map[string]syscall.Errno{ //nolint:gochecknoglobals // a table
	"EINVAL": syscall.EINVAL, "EACCES": syscall.EACCES, "EEXIST": syscall.EEXIST, "EISDIR": syscall.EISDIR, "ENOENT": syscall.ENOENT,
	"ENOMEM": syscall.ENOMEM, "ENOSPC": syscall.ENOSPC, "EIO": syscall.EIO, "ENOTEMPTY": syscall.ENOTEMPTY, "ENOSYS": syscall.ENOSYS,
	"EROFS": syscall.EROFS, "EBUSY": syscall.EBUSY, "EAGAIN": syscall.EAGAIN, "EISCONN": syscall.EISCONN, "E2BIG": syscall.E2BIG, "EPERM": syscall.EPERM,
}

// ParseErrno reads the name of an error; one that the protocol does not know is
// EINVAL, as the libraries of Xen take it.
func ParseErrno(payload []byte) syscall.Errno {
	if e, ok := errnos[string(bytes.TrimSuffix(payload, []byte{0}))]; ok {
		return e
	}
	return syscall.EINVAL
}

// ErrnoName is the name of an error on the wire; EINVAL where it has none.
func ErrnoName(e syscall.Errno) string {
	for name, errno := range errnos {
		if errno == e {
			return name
		}
	}
	return "EINVAL"
}

// ErrPath says that a text cannot name a node.
var ErrPath = errors.New("not a xenstore path")

func checkPath(path string) error {
	limit := MaxRelativePath
	if strings.HasPrefix(path, "/") {
		limit = MaxAbsolutePath
	}
	switch {
	case path == "" || len(path) > limit || strings.ContainsRune(path, 0),
		strings.Contains(path, "//"), len(path) > 1 && strings.HasSuffix(path, "/"):
		return fmt.Errorf("%w: %.80q", ErrPath, path)
	}
	return nil
}

// Access is what a domain may do with a node.
type Access byte

// Kinds of access, as the wire writes them.
const (
	AccessNone  Access = 'n'
	AccessRead  Access = 'r'
	AccessWrite Access = 'w'
	AccessBoth  Access = 'b'
)

// Permission is one entry of a node's list. The first entry names the owner,
// who may do everything, and what domains may do that are not listed.
type Permission struct {
	Domain uint16
	Access Access
}

func (p Permission) String() string { return string(rune(p.Access)) + strconv.Itoa(int(p.Domain)) }

// ParsePermission reads an entry such as "r7".
func ParsePermission(s string) (Permission, error) {
	if s == "" {
		return Permission{}, fmt.Errorf("%w: an empty permission", ErrProtocol)
	}
	switch a := Access(s[0]); a {
	case AccessNone, AccessRead, AccessWrite, AccessBoth:
		n, err := strconv.ParseUint(s[1:], 10, 16)
		if err == nil {
			return Permission{uint16(n), a}, nil
		}
	}
	return Permission{}, fmt.Errorf("%w: permission %.20q", ErrProtocol, s)
}
