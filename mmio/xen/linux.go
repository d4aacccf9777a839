package xen

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/vchan"
)

// Requests of the device privcmd: include/uapi/xen/privcmd.h.
const (
	privcmdMapBatch    = 0x205004
	privcmdDeviceOp    = 0x105005
	privcmdMapResource = 0x205007
)

// Linux uses the devices of a control domain. It needs root there, and Linux 4.18.
type Linux struct {
	dir string
	fd  int
}

// OpenLinux opens privcmd in a folder, such as /dev/xen. If it cannot be opened, the error
// wraps vchan.ErrDevices.
func OpenLinux(dir string) (*Linux, error) {
	path := filepath.Join(dir, "privcmd")
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", vchan.ErrDevices, &os.PathError{Op: "open", Path: path, Err: err})
	}
	return &Linux{dir: dir, fd: fd}, nil
}

// Close closes privcmd. No call may be in progress; mapped memory stays.
func (l *Linux) Close() error { return unix.Close(l.fd) }

func (l *Linux) ioctl(request uintptr, arg unsafe.Pointer) error {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(l.fd), request, uintptr(arg))
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return errno
		}
	}
}

// DeviceOp implements Hypervisor.
func (l *Linux) DeviceOp(domain uint16, op, more []byte) error {
	type buffer struct {
		at   unsafe.Pointer
		size uint64
	}
	b := [2]buffer{{unsafe.Pointer(&op[0]), uint64(len(op))}}
	count := uint16(1)
	if len(more) > 0 {
		b[1], count = buffer{unsafe.Pointer(&more[0]), uint64(len(more))}, 2
	}
	arg := struct {
		domain, count uint16
		_             uint32
		buffers       unsafe.Pointer
	}{domain, count, 0, unsafe.Pointer(&b)}
	err := l.ioctl(privcmdDeviceOp, unsafe.Pointer(&arg))
	runtime.KeepAlive(&b)
	runtime.KeepAlive(op)
	runtime.KeepAlive(more)
	return err
}

// mapped is memory of another domain.
type mapped []byte

func (m mapped) Bytes() []byte { return m }
func (m mapped) Close() error  { return unix.Munmap(m) }

// room makes an address range for pages of another domain.
func (l *Linux) room(pages, protection int) (mapped, error) {
	b, err := unix.Mmap(l.fd, 0, pages*pageSize, protection, unix.MAP_SHARED)
	return b, err
}

// MapResource implements Hypervisor.
func (l *Linux) MapResource(domain uint16, kind, id, first uint32, frames int) (Memory, error) {
	m, err := l.room(frames, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		return nil, err
	}
	arg := struct {
		domain          uint16
		kind, id, first uint32
		count           uint64
		at              unsafe.Pointer
	}{domain, kind, id, first, uint64(frames), unsafe.Pointer(&m[0])}
	if err := l.ioctl(privcmdMapResource, unsafe.Pointer(&arg)); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// MapForeign implements Hypervisor.
func (l *Linux) MapForeign(domain uint16, frames []uint64, writable bool) (Memory, error) {
	protection := unix.PROT_READ
	if writable {
		protection |= unix.PROT_WRITE
	}
	m, err := l.room(len(frames), protection)
	if err != nil {
		return nil, err
	}
	failed := make([]int32, len(frames))
	arg := struct {
		count          uint32
		domain         uint16
		at             unsafe.Pointer
		frames, failed unsafe.Pointer
	}{uint32(len(frames)), domain, unsafe.Pointer(&m[0]), unsafe.Pointer(&frames[0]), unsafe.Pointer(&failed[0])}
	err = l.ioctl(privcmdMapBatch, unsafe.Pointer(&arg))
	runtime.KeepAlive(frames)
	for i, f := range failed {
		if f != 0 && err == nil {
			err = fmt.Errorf("frame %#x: %w", frames[i], unix.Errno(-f))
		}
	}
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// BindInterdomain implements Hypervisor.
func (l *Linux) BindInterdomain(domain uint16, port uint32) (vchan.Port, error) {
	return vchan.Xen{Dir: l.dir}.BindInterdomain(domain, port)
}
