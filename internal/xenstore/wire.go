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

// Limits of the protocol (xs_wire.h).
const (
	MaxPayload      = 4096    // most bytes of a message after its header
	MaxReply        = 1 << 20 // our own limit: oxenstored has none on its socket
	MaxAbsolutePath = 3072
	MaxRelativePath = 2048
)

// Op is the type of a message (enum xsd_sockmsg_type).
type Op uint32

// Types of messages that are used.
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

// String returns the operation as a verb.
func (o Op) String() string {
	if int64(o) < int64(len(opNames)) && opNames[o] != "" {
		return opNames[o]
	}
	return "operation " + strconv.FormatUint(uint64(o), 10)
}

// ErrProtocol means that the other side violates the protocol. The connection is closed.
var ErrProtocol = errors.New("not the xenstore protocol")

const headerSize = 16

// Message is one message of either direction.
type Message struct {
	Op            Op
	Request, TxID uint32
	Payload       []byte
}

// ReadMessage reads one message, and not more. If the payload is longer than most bytes,
// the error wraps ErrProtocol. io.EOF is returned only between messages.
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

// Encode returns the encoded message. The payload must not be longer than MaxPayload.
func (m Message) Encode() []byte {
	b := make([]byte, headerSize, headerSize+len(m.Payload))
	le := binary.LittleEndian
	le.PutUint32(b[0:], uint32(m.Op))
	le.PutUint32(b[4:], m.Request)
	le.PutUint32(b[8:], m.TxID)
	le.PutUint32(b[12:], uint32(len(m.Payload)))
	return append(b, m.Payload...)
}

// Strings splits a payload of texts that are each terminated by a zero byte. The last one
// may lack it.
func Strings(payload []byte) []string {
	if len(payload) == 0 {
		return nil
	}
	payload = bytes.TrimSuffix(payload, []byte{0})
	return strings.Split(string(payload), "\x00")
}

// joined returns a payload of texts, each terminated by a zero byte.
func joined(parts ...string) []byte {
	return []byte(strings.Join(parts, "\x00") + "\x00")
}

// Error is an error that xenstored has returned for a request. It wraps the errno: for
// ENOENT, errors.Is(err, fs.ErrNotExist) is true.
type Error struct {
	Op    Op
	Path  string
	Errno syscall.Errno
}

func (e *Error) Error() string { return fmt.Sprintf("xenstore: %s %q: %v", e.Op, e.Path, e.Errno) }

// Unwrap returns the errno.
func (e *Error) Unwrap() error { return e.Errno }

// Names of errors in messages (xs_wire.h).
var errnos = map[string]syscall.Errno{ //nolint:gochecknoglobals // a table
	"EINVAL": syscall.EINVAL, "EACCES": syscall.EACCES, "EEXIST": syscall.EEXIST, "EISDIR": syscall.EISDIR, "ENOENT": syscall.ENOENT,
	"ENOMEM": syscall.ENOMEM, "ENOSPC": syscall.ENOSPC, "EIO": syscall.EIO, "ENOTEMPTY": syscall.ENOTEMPTY, "ENOSYS": syscall.ENOSYS,
	"EROFS": syscall.EROFS, "EBUSY": syscall.EBUSY, "EAGAIN": syscall.EAGAIN, "EISCONN": syscall.EISCONN, "E2BIG": syscall.E2BIG, "EPERM": syscall.EPERM,
}

// ParseErrno returns the errno with a name. For an unknown name it returns EINVAL, as
// Xen's libraries do.
func ParseErrno(payload []byte) syscall.Errno {
	if e, ok := errnos[string(bytes.TrimSuffix(payload, []byte{0}))]; ok {
		return e
	}
	return syscall.EINVAL
}

// ErrnoName returns the name of an errno; EINVAL if it has none.
func ErrnoName(e syscall.Errno) string {
	for name, errno := range errnos {
		if errno == e {
			return name
		}
	}
	return "EINVAL"
}

// ErrPath means that a text is not a valid path of a node.
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

// Kinds of access, with their letters in the protocol.
const (
	AccessNone  Access = 'n'
	AccessRead  Access = 'r'
	AccessWrite Access = 'w'
	AccessBoth  Access = 'b'
)

// Permission is an entry of a node's access list. The first entry names the owner, which
// has full access, and the access of domains that are not listed.
type Permission struct {
	Domain uint16
	Access Access
}

func (p Permission) String() string { return string(rune(p.Access)) + strconv.Itoa(int(p.Domain)) }

// ParsePermission parses an entry such as "r7".
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
