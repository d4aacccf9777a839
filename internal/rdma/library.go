package rdma

/*
#cgo LDFLAGS: -ldl
#include <netinet/in.h>
#include <stdlib.h>
#include "call.h"
*/
import "C"

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrNone is returned where rsockets cannot be had: without librdmacm, or without any device
// for RDMA.
var ErrNone = errors.New("no RDMA here")

const name = "librdmacm.so.1"

// Library is librdmacm. It is safe for concurrent use. A process has one at most (see loop).
type Library struct {
	f    C.gxRsockets
	loop *loop
}

// Open loads librdmacm, and reports whether there is a device: the error is ErrNone if not.
func Open() (*Library, error) {
	l, err := Load(name, "r")
	if err != nil {
		return nil, err
	}
	s, err := l.socket(unix.AF_INET)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNone, err)
	}
	l.end(s)
	return l, nil
}

// Load loads a library with the functions of sockets, each name behind a prefix. That of tests
// is the C library, whose sockets have the same functions.
func Load(path, prefix string) (*Library, error) {
	p, b := C.CString(path), C.CString(prefix)
	defer C.free(unsafe.Pointer(p))
	defer C.free(unsafe.Pointer(b))
	l := &Library{}
	var why [256]C.char
	if C.gxRdmaOpen(p, b, &l.f, &why[0], C.size_t(len(why))) != 0 {
		return nil, fmt.Errorf("%w: %s", ErrNone, C.GoString(&why[0]))
	}
	var err error
	if l.loop, err = newLoop(l); err != nil {
		return nil, err
	}
	return l, nil
}

// result is what a call has returned, as Go has it.
func result[T C.int | C.ssize_t](n T) (int, error) {
	if n < 0 {
		return -1, syscall.Errno(-n)
	}
	return int(n), nil
}

func (l *Library) socket(family int) (C.int, error) {
	s, err := result(C.gxRdmaSocket(&l.f, C.int(family)))
	return C.int(s), err
}

// end closes a socket. What was sent arrives first, if the other end still takes it.
func (l *Library) end(s C.int) {
	C.gxRdmaShutdown(&l.f, s)
	C.gxRdmaClose(&l.f, s)
}

// raw is an address as the functions take it.
type raw [C.sizeof_struct_sockaddr_in6]byte

func rawOf(a netip.AddrPort) (r raw, n C.socklen_t, family int) {
	binary.BigEndian.PutUint16(r[2:], a.Port())
	ip := a.Addr().Unmap()
	if ip.Is4() {
		family, n = unix.AF_INET, C.sizeof_struct_sockaddr_in
		copy(r[4:], ip.AsSlice())
	} else {
		family, n = unix.AF_INET6, C.sizeof_struct_sockaddr_in6
		copy(r[8:], ip.AsSlice())
		if zone, err := net.InterfaceByName(ip.Zone()); err == nil {
			binary.NativeEndian.PutUint32(r[24:], uint32(zone.Index))
		}
	}
	binary.NativeEndian.PutUint16(r[:], uint16(family))
	return r, n, family
}

// nameOf returns the address of a socket's end.
func (l *Library) nameOf(s C.int, peer bool) Addr {
	var r raw
	n, which := C.socklen_t(len(r)), C.int(0)
	if peer {
		which = 1
	}
	if _, err := result(C.gxRdmaName(&l.f, s, which, unsafe.Pointer(&r), &n)); err != nil {
		return Addr{}
	}
	port := binary.BigEndian.Uint16(r[2:])
	if binary.NativeEndian.Uint16(r[:]) == unix.AF_INET6 {
		return Addr{netip.AddrPortFrom(netip.AddrFrom16([16]byte(r[8:24])).Unmap(), port)}
	}
	return Addr{netip.AddrPortFrom(netip.AddrFrom4([4]byte(r[4:8])), port)}
}

// Addr is an address of RDMA's connection manager: an IP address of a device, and a port of
// its own ports, which are not TCP's.
type Addr struct{ netip.AddrPort }

// Network implements net.Addr.
func (Addr) Network() string { return "rdma" }
