// Package fabrictest has a network of TCP that stands in for RDMA where there is no device.
package fabrictest

import (
	"context"
	"io"
	"net"
	"net/netip"

	"github.com/gpuctl/gpuctl/guest/fabric"
)

// TCP is a fabric.Network.
type TCP struct{}

// Dial implements fabric.Network. Its connection is no net.Conn, as RDMA's is none.
func (TCP) Dial(ctx context.Context, address string) (io.ReadWriteCloser, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return stream{c}, nil
}

// Listen implements fabric.Network.
func (TCP) Listen(ctx context.Context, address string) (fabric.Listener, netip.AddrPort, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, netip.AddrPort{}, err
	}
	at, err := netip.ParseAddrPort(l.Addr().String())
	return listener{l}, at, err
}

type stream struct{ io.ReadWriteCloser }

type listener struct{ net.Listener }

func (l listener) Accept() (io.ReadWriteCloser, netip.Addr, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, netip.Addr{}, err
	}
	from, err := netip.ParseAddrPort(c.RemoteAddr().String())
	return stream{c}, from.Addr(), err
}
