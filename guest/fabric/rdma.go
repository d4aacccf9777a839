package fabric

import (
	"context"
	"io"
	"net/netip"

	"github.com/gpuctl/gpuctl/internal/rdma"
)

// Open returns RDMA as a Network. The error is rdma.ErrNone where there is none.
func Open() (Network, error) {
	l, err := rdma.Open()
	if err != nil {
		return nil, err
	}
	return network{l}, nil
}

type network struct{ rdma.Library }

func (n network) Dial(ctx context.Context, address string) (io.ReadWriteCloser, error) {
	c, err := n.Library.Dial(ctx, address)
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (n network) Listen(ctx context.Context, address string) (Listener, netip.AddrPort, error) {
	l, err := n.Library.Listen(ctx, address)
	if err != nil {
		return nil, netip.AddrPort{}, err
	}
	return listener{l}, l.Addr().AddrPort, nil
}

type listener struct{ *rdma.Listener }

func (l listener) Accept() (io.ReadWriteCloser, netip.Addr, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, netip.Addr{}, err
	}
	return c, c.RemoteAddr().Addr(), nil
}
