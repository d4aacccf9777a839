package main

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/mdlayher/vsock"
	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/vm/channel"
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/vchan"
	"github.com/gpuctl/gpuctl/internal/xenstore"
)

const (
	bulkPath   = "data/gpuctl/bulk-" // below the domain's home in xenstore
	bulkWait   = 30 * time.Second    // until the host has connected
	mostBulks  = 6                   // at the same time: a domain has 1024 pages to share, and each vchan takes 129
	firstGuest = 3                   // the lowest context id of a VM (vsock(7))
	secretSize = 32                  // bytes
	secretFor  = 5 * time.Second     // for who connects by vsock to send it
	mostOpen   = 64                  // connections that have not sent it
)

var errBulks = fmt.Errorf("%d ways to the host are open, and there are no more", mostBulks)

// bulk opens vchans or vsock to the host, over which it reaches the same services as over its
// channel. Each is for one connection. None stays open, because neither survives a migration
// of the VM.
type bulk struct {
	ctx     context.Context // ends all connections
	handler http.Handler
	log     *slog.Logger
	listen  func(ctx context.Context) (*way, error)
	close   func() error

	mu   sync.Mutex
	open int
	wg   sync.WaitGroup
}

// way waits for one connection of the host.
type way struct {
	accept func(ctx context.Context) (net.Conn, error)
	close  func() error
	told   *gpuctlv1.OpenBulkResponse
}

// newBulk returns nil if there is neither Xen nor vsock.
func newBulk(ctx context.Context, device string, handler http.Handler, log *slog.Logger) *bulk {
	b := &bulk{ctx: ctx, handler: handler, log: log, close: func() error { return nil }}
	store, err := xenstore.Dial(ctx, device)
	if err == nil {
		b.listen, b.close = listenVchan(store, nil), store.Close
		return b
	}
	cid, verr := vsock.ContextID()
	if verr != nil || cid < firstGuest {
		log.Debug("neither vchan nor vsock", "vchan", err, "vsock", verr, "cid", cid)
		return nil
	}
	b.listen = listenVsock(func() (net.Listener, error) { return vsock.ListenContextID(unix.VMADDR_CID_ANY, 0, nil) })
	return b
}

// listenVchan listens on vchans for dom0. devices is nil for those of Xen.
func listenVchan(store *xenstore.Client, devices vchan.Devices) func(context.Context) (*way, error) {
	return func(ctx context.Context) (*way, error) {
		path := bulkPath + random.Hex(8)
		l, err := vchan.Listen(ctx, store, path, 0, vchan.Options{Devices: devices})
		if err != nil {
			return nil, err
		}
		accept := func(ctx context.Context) (net.Conn, error) { return l.AcceptContext(ctx) }
		return &way{accept: accept, close: l.Close, told: &gpuctlv1.OpenBulkResponse{Vchan: path}}, nil
	}
}

// listenVsock listens on vsock. Any process of the host and of the VM could connect: the host
// has to send a secret that it was told over the VM's channel.
func listenVsock(listen func() (net.Listener, error)) func(context.Context) (*way, error) {
	return func(context.Context) (*way, error) {
		l, err := listen()
		if err != nil {
			return nil, err
		}
		told := &gpuctlv1.OpenBulkResponse{Secret: make([]byte, secretSize)}
		_, _ = rand.Read(told.Secret) // crypto/rand never fails
		if a, ok := l.Addr().(*vsock.Addr); ok {
			told.VsockPort = a.Port
		}
		accept := func(ctx context.Context) (net.Conn, error) { return acceptSecret(ctx, l, told.Secret) }
		return &way{accept: accept, close: l.Close, told: told}, nil
	}
}

// acceptSecret returns the first connection that begins with the secret.
func acceptSecret(ctx context.Context, l net.Listener, secret []byte) (net.Conn, error) {
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	right, places := make(chan net.Conn), make(chan struct{}, mostOpen)
	ctx, cancel := context.WithCancel(ctx)
	var work sync.WaitGroup
	defer work.Wait()
	defer cancel()
	failed := make(chan error, 1)
	work.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				failed <- err
				return
			}
			places <- struct{}{}
			work.Go(func() {
				defer func() { <-places }()
				got := make([]byte, len(secret))
				_ = conn.SetReadDeadline(time.Now().Add(secretFor))
				stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
				_, err := io.ReadFull(conn, got)
				if stop() && err == nil && subtle.ConstantTimeCompare(got, secret) == 1 {
					_ = conn.SetReadDeadline(time.Time{})
					select {
					case right <- conn:
						return
					case <-ctx.Done():
					}
				}
				_ = conn.Close()
			})
		}
	})
	select {
	case conn := <-right:
		_ = l.Close()
		return conn, nil
	case err := <-failed:
		return nil, errors.Join(err, ctx.Err())
	}
}

// opener returns Open, or nil if there is no way but the channel.
func (b *bulk) opener() func(context.Context) (*gpuctlv1.OpenBulkResponse, error) {
	if b == nil {
		return nil
	}
	return b.Open
}

// Open says how the host reaches a way that waits for it.
func (b *bulk) Open(ctx context.Context) (*gpuctlv1.OpenBulkResponse, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open == mostBulks {
		return nil, errBulks
	}
	w, err := b.listen(ctx)
	if err != nil {
		return nil, err
	}
	b.open++
	b.wg.Go(func() {
		err := b.serve(w)
		if !errors.Is(err, http.ErrServerClosed) {
			b.log.Info("a way to the host has ended", "vchan", w.told.GetVchan(), "vsock", w.told.GetVsockPort(), "err", err)
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		b.open--
	})
	return w.told, nil
}

func (b *bulk) serve(w *way) error {
	defer func() { _ = w.close() }()
	ctx, cancel := context.WithTimeout(b.ctx, bulkWait)
	defer cancel()
	conn, err := w.accept(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	defer context.AfterFunc(b.ctx, func() { _ = conn.Close() })()
	return channel.ServeOver(conn, b.handler)
}

// Close waits until the open connections have ended with their context.
func (b *bulk) Close() {
	if b == nil {
		return
	}
	b.wg.Wait()
	_ = b.close()
}
