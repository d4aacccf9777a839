package platform

import (
	"context"
	"net"

	"github.com/mdlayher/vsock"
)

// vsock returns what connects to a running VM's ports by its context id, or nil if it has none.
func (k kvmHypervisor) vsock(ctx context.Context, uuid string) (func(context.Context, uint32) (net.Conn, error), error) {
	d, err := k.client.Lookup(ctx, uuid)
	if err != nil {
		return nil, err
	}
	doc, err := document(ctx, k.client, d, 0)
	if err != nil {
		return nil, err
	}
	cid := doc.VsockCID()
	if cid == 0 {
		return nil, nil //nolint:nilnil // it has none
	}
	return func(ctx context.Context, port uint32) (net.Conn, error) { return dialVsock(ctx, cid, port) }, nil
}

// dialVsock connects. The kernel waits for two seconds at most.
func dialVsock(ctx context.Context, cid, port uint32) (net.Conn, error) {
	type result struct {
		conn *vsock.Conn
		err  error
	}
	done := make(chan result, 1)
	go func() {
		conn, err := vsock.Dial(cid, port, nil)
		done <- result{conn, err}
	}()
	select {
	case r := <-done:
		if r.err != nil {
			return nil, r.err
		}
		return r.conn, nil
	case <-ctx.Done():
		go func() {
			if r := <-done; r.err == nil {
				_ = r.conn.Close()
			}
		}()
		return nil, ctx.Err()
	}
}
