package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/guest/vm/channel"
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/vchan"
	"github.com/gpuctl/gpuctl/internal/xenstore"
)

const (
	bulkPath  = "data/gpuctl/bulk-" // below the domain's home in xenstore
	bulkWait  = 30 * time.Second    // for the host to connect
	mostBulks = 4                   // at once: a domain has 1024 pages to share, and each takes 129
)

var errBulks = fmt.Errorf("%d ways to the host are open, and there are no more", mostBulks)

// bulk opens vchans to dom0, on which the host reaches what its channel leads
// to. Each is there for one connection, and none is left open: a vchan does not
// survive that the VM is migrated.
type bulk struct {
	ctx     context.Context // ends all of them
	handler http.Handler
	log     *slog.Logger
	store   *xenstore.Client
	devices vchan.Devices // nil: Xen's

	mu   sync.Mutex
	open int
	wg   sync.WaitGroup
}

// newBulk is nil where there is no Xen.
func newBulk(ctx context.Context, device string, handler http.Handler, log *slog.Logger) *bulk {
	store, err := xenstore.Dial(ctx, device)
	if err != nil {
		log.Debug("no vchan", "err", err)
		return nil
	}
	return &bulk{ctx: ctx, handler: handler, log: log, store: store}
}

// Open returns the path of a vchan that waits for the host.
func (b *bulk) Open(ctx context.Context) (path string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open == mostBulks {
		return "", errBulks
	}
	path = bulkPath + random.Hex(8)
	l, err := vchan.Listen(ctx, b.store, path, 0, vchan.Options{Devices: b.devices})
	if err != nil {
		return "", err
	}
	b.open++
	b.wg.Go(func() {
		err := b.serve(l)
		if !errors.Is(err, http.ErrServerClosed) {
			b.log.Info("a vchan has ended", "path", path, "err", err)
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		b.open--
	})
	return path, nil
}

func (b *bulk) serve(l *vchan.Listener) error {
	defer func() { _ = l.Close() }()
	ctx, cancel := context.WithTimeout(b.ctx, bulkWait)
	defer cancel()
	conn, err := l.AcceptContext(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	defer context.AfterFunc(b.ctx, func() { _ = conn.Close() })()
	return channel.ServeOver(conn, b.handler)
}

// Close waits for those that are open to end with their context.
func (b *bulk) Close() {
	b.wg.Wait()
	_ = b.store.Close()
}
