package vchan

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/gpuctl/gpuctl/internal/xenstore"
)

// ErrNoServer means that no server listens at the path, that another client is connected,
// or that a server died and left the path.
var ErrNoServer = errors.New("no vchan server")

// Dial connects to the server at a path in a domain's home in xenstore, or at an absolute
// path. The error wraps ErrNoServer if there is none. The store must stay open as long as
// the connection.
func Dial(ctx context.Context, store *xenstore.Client, domain uint16, path string, opts Options) (*Conn, error) {
	addr := Addr{domain, path}
	c, err := dial(ctx, store, addr, opts)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", addr, err)
	}
	return c, nil
}

func dial(ctx context.Context, store *xenstore.Client, addr Addr, opts Options) (*Conn, error) {
	base := addr.Path
	if !strings.HasPrefix(base, "/") {
		home, err := store.DomainPath(ctx, addr.Domain)
		if err != nil {
			return nil, err
		}
		base = home + "/" + base
	}
	watch, err := store.Watch(ctx, base)
	if err != nil {
		return nil, err
	}
	var absent error
	for {
		c, err := connect(ctx, &published{store: store, path: base}, addr, opts.devices())
		if err == nil {
			c.start(watch)
			return c, nil
		}
		if over := ctx.Err(); over != nil && opts.Wait {
			if !errors.Is(err, over) { // it ended while connect learnt that there is no server
				err = errors.Join(over, err)
			}
			err = errors.Join(err, absent)
		}
		if opts.Wait && errors.Is(err, ErrNoServer) && ctx.Err() == nil {
			absent = err
			var stop error
			if _, stop = watch.Next(ctx); stop == nil {
				select {
				case <-time.After(watchPause):
					continue
				case <-ctx.Done():
					stop = ctx.Err()
				}
			}
			err = errors.Join(stop, err)
		}
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), storePatience)
		defer cancel()
		return nil, errors.Join(err, watch.Close(end))
	}
}

// connect connects to a published ring.
func connect(ctx context.Context, offer *published, addr Addr, devices Devices) (*Conn, error) {
	ref, remote, err := offer.read(ctx)
	if err != nil {
		return nil, err
	}
	c, err := join(addr, devices, ref, remote)
	if err == nil {
		c.offer = *offer
	}
	return c, err
}

// join makes a connection from the page that was granted as ref, and the other side's
// port.
func join(addr Addr, devices Devices, ref, remote uint32) (c *Conn, err error) {
	var undo []func() error
	defer func() {
		if err != nil {
			for i := len(undo) - 1; i >= 0; i-- {
				err = errors.Join(err, undo[i]())
			}
		}
	}()
	// What a server that died has left cannot be bound or mapped.
	absent := func(err error) error {
		if errors.Is(err, ErrDevices) {
			return err
		}
		return fmt.Errorf("%w: %w", ErrNoServer, err)
	}
	port, err := devices.BindInterdomain(addr.Domain, remote)
	if err != nil {
		return nil, absent(err)
	}
	undo = append(undo, port.Close)
	shared := func(refs []uint32, writable bool) (Memory, error) {
		if len(refs) == 0 {
			return nil, nil
		}
		m, err := devices.Map(addr.Domain, refs, writable)
		if err != nil {
			return nil, absent(err)
		}
		undo = append(undo, m.Close)
		return m, nil
	}
	page, err := shared([]uint32{ref}, true)
	if err != nil {
		return nil, err
	}
	c = newConn(addr, false, port, page)
	// Check this before NotifyOnUnmap is set for our byte, because another client may
	// have it.
	state := atomic.LoadUint32(c.state)
	if live := state >> shiftServerLive & 0xff; live != alive {
		return nil, fmt.Errorf("%w: it has ended", ErrNoServer)
	}
	if live := state >> shiftClientLive & 0xff; live != expected {
		return nil, fmt.Errorf("%w: it has had its client", ErrNoServer)
	}
	left, right, err := readOrders(page.Bytes())
	if err != nil {
		return nil, err
	}
	leftRefs, rightRefs := readGrants(page.Bytes(), left, right)
	leftMemory, err := shared(leftRefs, true)
	if err != nil {
		return nil, err
	}
	rightMemory, err := shared(rightRefs, false)
	if err != nil {
		return nil, err
	}
	c.attach(left, right, leftMemory, rightMemory)
	for _, h := range []*half{&c.in, &c.out} {
		h.own = atomic.LoadUint32(h.mine)
	}
	if _, err := c.in.ready(); err != nil {
		return nil, err
	}
	if _, err := c.out.space(); err != nil {
		return nil, err
	}
	if err := page.NotifyOnUnmap(offState+shiftClientLive/8, port.Number()); err != nil {
		return nil, err
	}
	// From 2 over 3 to 1: for the server, only 0 means that there is no client.
	atomic.OrUint32(c.state, alive<<shiftClientLive|wishWritten<<shiftClientWishes)
	atomic.AndUint32(c.state, ^uint32(expected<<shiftClientLive))
	if err := port.Notify(); err != nil {
		return nil, err
	}
	return c, nil
}
