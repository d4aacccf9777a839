package vchan

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrDevices means that a device of Xen cannot be opened: this is not a domain of Xen, a
// module is not loaded (xen-evtchn, xen-gntdev, xen-gntalloc), or the user has no
// permission.
var ErrDevices = errors.New("no access to Xen's devices")

// Xen uses the devices of the domain in which the program runs.
type Xen struct {
	Dir string // empty: /dev/xen
}

// ioctl requests of the devices: include/uapi/xen/evtchn.h, gntalloc.h, gntdev.h.
const (
	evtchnBindInterdomain = 0x84501
	evtchnBindUnbound     = 0x44502
	evtchnNotify          = 0x44504
	gntallocAlloc         = 0x184705
	gntallocNotify        = 0x104707
	gntdevMap             = 0x184700
	gntdevNotify          = 0x104707

	grantWritable   = 1
	clearByte       = 1
	sendEvent       = 2
	gntdevPair      = 8 // bytes of a domain and a grant
	sharedHeaderLen = 16
)

func (x Xen) open(name string, flags int) (int, error) {
	dir := x.Dir
	if dir == "" {
		dir = "/dev/xen"
	}
	path := filepath.Join(dir, name)
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|flags, 0)
	if err != nil {
		return -1, fmt.Errorf("%w: %w", ErrDevices, &os.PathError{Op: "open", Path: path, Err: err})
	}
	return fd, nil
}

func ioctl(fd int, request uintptr, arg []byte) (int, error) {
	r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(&arg[0])))
	if errno != 0 {
		return 0, errno
	}
	return int(r), nil
}

// Grant implements Devices. gntalloc has 1024 pages for all programs of a domain, unless
// its parameter "limit" is set. Beyond that, the error wraps ENOSPC.
func (x Xen) Grant(peer uint16, pages int) (Memory, error) {
	fd, err := x.open("gntalloc", 0)
	if err != nil {
		return nil, err
	}
	arg := make([]byte, sharedHeaderLen+4*pages)
	le := binary.LittleEndian
	le.PutUint16(arg, peer)
	le.PutUint16(arg[2:], grantWritable)
	le.PutUint32(arg[4:], uint32(pages))
	if _, err := ioctl(fd, gntallocAlloc, arg); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("grant %d pages to domain %d: %w", pages, peer, err)
	}
	m := &memory{fd: fd, index: le.Uint64(arg[8:]), notify: gntallocNotify}
	for i := range pages {
		m.refs = append(m.refs, le.Uint32(arg[sharedHeaderLen+4*i:]))
	}
	if err := m.mmap(pages, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return nil, fmt.Errorf("map %d pages granted to domain %d: %w", pages, peer, err)
	}
	return m, nil
}

// Map implements Devices.
func (x Xen) Map(domain uint16, refs []uint32, writable bool) (Memory, error) {
	fd, err := x.open("gntdev", 0)
	if err != nil {
		return nil, err
	}
	arg := make([]byte, sharedHeaderLen+gntdevPair*len(refs))
	le := binary.LittleEndian
	le.PutUint32(arg, uint32(len(refs)))
	for i, ref := range refs {
		le.PutUint32(arg[sharedHeaderLen+gntdevPair*i:], uint32(domain))
		le.PutUint32(arg[sharedHeaderLen+gntdevPair*i+4:], ref)
	}
	if _, err := ioctl(fd, gntdevMap, arg); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("name %d grants of domain %d: %w", len(refs), domain, err)
	}
	m := &memory{fd: fd, index: le.Uint64(arg[8:]), notify: gntdevNotify}
	protection := unix.PROT_READ
	if writable {
		protection |= unix.PROT_WRITE
	}
	if err := m.mmap(len(refs), protection); err != nil {
		return nil, fmt.Errorf("map %d grants of domain %d: %w", len(refs), domain, err)
	}
	return m, nil
}

// memory has an open file of its own. Closing it undoes all that was done with it.
type memory struct {
	fd     int
	index  uint64 // offset in the file
	notify uintptr
	bytes  []byte
	refs   []uint32
}

func (m *memory) mmap(pages, protection int) (err error) {
	if m.bytes, err = unix.Mmap(m.fd, int64(m.index), pages*pageSize, protection, unix.MAP_SHARED); err != nil {
		unix.Close(m.fd)
	}
	return err
}

func (m *memory) Bytes() []byte  { return m.bytes }
func (m *memory) Refs() []uint32 { return m.refs }

func (m *memory) NotifyOnUnmap(offset int, port uint32) error {
	arg := binary.LittleEndian.AppendUint64(nil, m.index+uint64(offset))
	arg = binary.LittleEndian.AppendUint32(arg, clearByte|sendEvent)
	arg = binary.LittleEndian.AppendUint32(arg, port)
	if _, err := ioctl(m.fd, m.notify, arg); err != nil {
		return fmt.Errorf("have port %d notified of the unmapping: %w", port, err)
	}
	return nil
}

func (m *memory) Close() error { return errors.Join(unix.Munmap(m.bytes), unix.Close(m.fd)) }

// Abandon keeps the mapping and the file open until the process ends: closing either
// would make the kernel close the port.
func (m *memory) Abandon() {}

// BindUnbound implements Devices.
func (x Xen) BindUnbound(peer uint16) (Port, error) {
	p, err := x.bind(evtchnBindUnbound, uint32(peer))
	if err != nil {
		return nil, fmt.Errorf("event channel for domain %d: %w", peer, err)
	}
	return p, nil
}

// BindInterdomain implements Devices.
func (x Xen) BindInterdomain(domain uint16, remote uint32) (Port, error) {
	p, err := x.bind(evtchnBindInterdomain, uint32(domain), remote)
	if err != nil {
		return nil, fmt.Errorf("event channel %d of domain %d: %w", remote, domain, err)
	}
	return p, nil
}

func (x Xen) bind(request uintptr, args ...uint32) (*port, error) {
	fd, err := x.open("evtchn", unix.O_NONBLOCK)
	if err != nil {
		return nil, err
	}
	var arg []byte
	for _, a := range args {
		arg = binary.LittleEndian.AppendUint32(arg, a)
	}
	number, err := ioctl(fd, request, arg)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	keep, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	// Non-blocking, so that Go's poller waits and Close ends the waiting.
	p := &port{file: os.NewFile(uintptr(fd), "evtchn"), keep: keep, number: uint32(number), told: make([]byte, pageSize)}
	binary.LittleEndian.PutUint32(p.name[:], p.number)
	p.send = p.notify
	if p.raw, err = p.file.SyscallConn(); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// port has an open file with this event channel only.
type port struct {
	file   *os.File
	keep   int // another descriptor of the open file, which keeps it open
	raw    syscall.RawConn
	number uint32
	name   [4]byte // the number in the form in which the device reads it
	told   []byte

	mu   sync.Mutex // guards sent, and send while it runs
	send func(fd uintptr)
	sent error
}

func (p *port) Number() uint32 { return p.number }

// Wait first unmasks the channel, which was masked by reading the last event.
func (p *port) Wait() error {
	if _, err := p.file.Write(p.name[:]); err != nil {
		return err
	}
	_, err := p.file.Read(p.told)
	return err
}

func (p *port) Notify() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.raw.Control(p.send); err != nil {
		return err
	}
	return p.sent
}

func (p *port) notify(fd uintptr) { _, p.sent = ioctl(int(fd), evtchnNotify, p.name[:]) }

func (p *port) Close() error { return errors.Join(p.file.Close(), unix.Close(p.keep)) }

func (p *port) Abandon() { _ = p.file.Close() }
