package main

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/guest/vm/channel"
	"github.com/gpuctl/gpuctl/internal/relay"
	"github.com/gpuctl/gpuctl/internal/rundir"
)

// relayed has carriers connect as those in a VM without a network do: through a relay, whose
// streams go over two connections to the host's part, both in this process.
func relayed(ctx context.Context, dir string, log *slog.Logger) (socket string, err error) {
	socket = filepath.Join(dir, "relay.sock")
	l, err := rundir.ListenMode(socket, 0o666)
	if err != nil {
		return "", err
	}
	guest := relay.NewGuest(func(uint32) bool { return true }, log)
	mux := http.NewServeMux()
	mux.Handle(relay.Path, guest)
	ways := map[bool]*http.Client{}
	for _, bulk := range []bool{false, true} {
		if ways[bulk], err = wayTo(mux, filepath.Join(dir, "way.sock")); err != nil {
			return "", err
		}
	}
	host := &relay.Host{
		May: func(string, []byte) error { return nil },
		Open: func(_ context.Context, bulk bool) (*http.Client, func(error), error) {
			return ways[bulk], func(error) {}, nil
		},
		URL: channel.BaseURL, Log: log,
	}
	var mu sync.Mutex
	var all []relay.Wish
	take := func() {
		mu.Lock()
		defer mu.Unlock()
		host.Take(ctx, all)
	}
	go func() { _ = guest.Serve(ctx, l) }()
	go func() {
		_ = guest.Watch(ctx, "host", func(now []relay.Wish) error {
			mu.Lock()
			all = now
			mu.Unlock()
			take()
			return nil
		})
	}()
	go func() { // those that were left out
		for range time.Tick(100 * time.Millisecond) {
			if ctx.Err() != nil {
				return
			}
			take()
		}
	}()
	return socket, nil
}

// wayTo returns a client of the VM's part over one connection.
func wayTo(handler http.Handler, path string) (*http.Client, error) {
	_ = os.Remove(path)
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	host, err := net.Dial("unix", path)
	if err != nil {
		return nil, err
	}
	guest, err := l.Accept()
	if err != nil {
		return nil, err
	}
	go func() { _ = channel.ServeOver(guest, handler) }()
	client, _, err := channel.Over(host)
	return client, err
}
