package rdma

/*
#cgo LDFLAGS: -ldl
#include <netinet/in.h>
#include "verbs.h"
*/
import "C"

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrNone is returned where RDMA cannot be had: without its libraries, or without any device.
var ErrNone = errors.New("no RDMA here")

// Library is librdmacm and libibverbs, loaded. It is safe for concurrent use.
type Library struct{}

// Open loads the libraries, and looks for a device: the error is ErrNone if there is none.
func Open() (Library, error) {
	var why [256]C.char
	if C.rxLoad(&why[0], C.size_t(len(why))) != 0 {
		return Library{}, fmt.Errorf("%w: %s", ErrNone, C.GoString(&why[0]))
	}
	if C.rxDevices() == 0 {
		return Library{}, fmt.Errorf("%w: there is no device", ErrNone)
	}
	return Library{}, nil
}

// failed is a result of C's functions as an error.
func failed[T C.int | C.int64_t](n T) error {
	if n < 0 {
		return syscall.Errno(-n)
	}
	return nil
}

// raw is an address as C has it.
type raw [C.sizeof_struct_sockaddr_in6]byte

func rawOf(a netip.AddrPort) (r raw) {
	binary.BigEndian.PutUint16(r[2:], a.Port())
	family := unix.AF_INET
	if ip := a.Addr().Unmap(); ip.Is4() {
		copy(r[4:], ip.AsSlice())
	} else {
		family = unix.AF_INET6
		copy(r[8:], ip.AsSlice())
		if zone, err := net.InterfaceByName(ip.Zone()); err == nil {
			binary.NativeEndian.PutUint32(r[24:], uint32(zone.Index))
		}
	}
	binary.NativeEndian.PutUint16(r[:], uint16(family))
	return r
}

func (r raw) addr() Addr {
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

func resolve(ctx context.Context, address string) (netip.AddrPort, error) {
	if a, err := netip.ParseAddrPort(address); err == nil {
		return a, nil
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return netip.AddrPort{}, err
	}
	n, err := net.DefaultResolver.LookupPort(ctx, "tcp", port)
	if err != nil {
		return netip.AddrPort{}, err
	}
	if host == "" {
		return netip.AddrPortFrom(netip.IPv6Unspecified(), uint16(n)), nil
	}
	all, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return netip.AddrPort{}, err
	}
	return netip.AddrPortFrom(all[0].Unmap(), uint16(n)), nil
}
