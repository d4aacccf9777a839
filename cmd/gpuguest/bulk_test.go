package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/guest/vm/channel"
	"github.com/gpuctl/gpuctl/internal/vchan"
	"github.com/gpuctl/gpuctl/internal/vchan/vchantest"
)

// The host reaches gpuguest's services over vchans, several at once and one after the
// other. Each vchan ends with its connection.
func TestBulkOverVchan(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	h := vchantest.New(t, nil)
	guest, dom0 := h.Domain(7), h.Domain(0)
	sum := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, n, err)
	})
	ending, end := context.WithCancel(ctx)
	b := &bulk{ctx: ending, handler: sum, log: slog.New(slog.DiscardHandler), store: guest.Xenstore(), devices: guest}
	inDom0 := dom0.Xenstore()
	dial := func(path string) (*http.Client, io.Closer, error) {
		conn, err := vchan.Dial(ctx, inDom0, guest.ID(), path, vchan.Options{Devices: dom0})
		if err != nil {
			return nil, nil, err
		}
		return channel.Over(conn)
	}
	const size = 3 << 20
	for range 2 {
		var all []io.Closer
		for i := range mostBulks {
			path, err := b.Open(ctx)
			if err != nil {
				t.Fatal(err)
			}
			c, closer, err := dial(path)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, closer)
			for range 2 {
				res, err := c.Post(channel.BaseURL, "", bytes.NewReader(make([]byte, size+i)))
				if err != nil {
					t.Fatal(err)
				}
				text, _ := io.ReadAll(res.Body)
				res.Body.Close()
				if string(text) != fmt.Sprint(size+i, " <nil>") {
					t.Errorf("%s", text)
				}
			}
			if _, _, err := dial(path); !errors.Is(err, vchan.ErrNoServer) {
				t.Errorf("a second client: %v", err)
			}
		}
		if _, err := b.Open(ctx); !errors.Is(err, errBulks) {
			t.Errorf("one more: %v", err)
		}
		for _, c := range all {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
		b.wg.Wait()
	}
	// A vchan that waits for the host, and one that is connected, end with gpuguest.
	if _, err := b.Open(ctx); err != nil {
		t.Fatal(err)
	}
	path, err := b.Open(ctx)
	if err != nil {
		t.Fatal(err)
	}
	_, closer, err := dial(path)
	if err != nil {
		t.Fatal(err)
	}
	end()
	b.Close()
	_ = closer.Close()
}
