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
	bulkWait  = 30 * time.Second    // until the host has connected
	mostBulks = 6                   // at the same time: a domain has 1024 pages to share, and each vchan takes 129
)

var errBulks = fmt.Errorf("%d ways to the host are open, and there are no more", mostBulks)

// bulk opens vchans to dom0, over which the host reaches the same services as over its
// channel. Each vchan is for one connection. None stays open, because a vchan does not
// survive a migration of the VM.
type bulk struct {
	ctx     context.Context // ends all vchans
	handler http.Handler
	log     *slog.Logger
	store   *xenstore.Client
	devices vchan.Devices // nil: Xen's

	mu   sync.Mutex
	open int
	wg   sync.WaitGroup
}

// newBulk returns nil if there is no Xen.
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

// Close waits until the open vchans have ended with their context.
func (b *bulk) Close() {
	b.wg.Wait()
	_ = b.store.Close()
}
