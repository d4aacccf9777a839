package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/mdlayher/vsock"
	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
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
	store := guest.Xenstore()
	b := &bulk{ctx: ending, handler: sum, log: slog.New(slog.DiscardHandler), listen: listenVchan(store, guest), close: store.Close}
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
			to, err := b.Open(ctx)
			if err != nil {
				t.Fatal(err)
			}
			path := to.GetVchan()
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
	to, err := b.Open(ctx)
	if err != nil {
		t.Fatal(err)
	}
	_, closer, err := dial(to.GetVchan())
	if err != nil {
		t.Fatal(err)
	}
	end()
	b.Close()
	_ = closer.Close()
}

// Over vsock, the host gets its connection although others connect before it, who send nothing,
// something else or too little, and keep their connections.
func TestBulkOverVsockTakesWhoKnowsTheSecret(t *testing.T) {
	var at string // TCP stands for vsock
	listen := func() (net.Listener, error) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err == nil {
			at = l.Addr().String()
		}
		return l, err
	}
	takesWhoKnowsTheSecret(t, listen, func(*gpuctlv1.OpenBulkResponse) (net.Conn, error) { return net.Dial("tcp", at) })
}

// The same over vsock of this machine. The lab runs it, as few machines have that.
func TestBulkOverVsockOfThisMachine(t *testing.T) {
	if l, err := vsock.ListenContextID(vsock.Local, 0, nil); err != nil {
		t.Skipf("no vsock_loopback: %v", err)
	} else {
		l.Close()
	}
	listen := func() (net.Listener, error) { return vsock.ListenContextID(unix.VMADDR_CID_ANY, 0, nil) }
	takesWhoKnowsTheSecret(t, listen, func(to *gpuctlv1.OpenBulkResponse) (net.Conn, error) {
		return vsock.Dial(vsock.Local, to.GetVsockPort(), nil)
	})
}

func takesWhoKnowsTheSecret(t *testing.T, listen func() (net.Listener, error), dial func(*gpuctlv1.OpenBulkResponse) (net.Conn, error)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	hello := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") })
	ending, end := context.WithCancel(ctx)
	b := &bulk{ctx: ending, handler: hello, log: slog.New(slog.DiscardHandler), close: func() error { return nil }, listen: listenVsock(listen)}
	for range 2 {
		to, err := b.Open(ctx)
		if err != nil || len(to.GetSecret()) != secretSize {
			t.Fatal(to, err)
		}
		connect := func(first []byte) net.Conn {
			t.Helper()
			conn, err := dial(to)
			if err == nil {
				_, err = conn.Write(first)
			}
			if err != nil {
				t.Fatal(err)
			}
			return conn
		}
		for _, first := range [][]byte{nil, make([]byte, secretSize), to.GetSecret()[:secretSize-1]} {
			defer connect(first).Close()
		}
		c, closer, err := channel.Over(connect(to.GetSecret()))
		if err != nil {
			t.Fatal(err)
		}
		res, err := c.Get(channel.BaseURL)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(res.Body)
		res.Body.Close()
		if string(text) != "hello" {
			t.Errorf("%q", text)
		}
		if conn, err := dial(to); err == nil {
			conn.Close()
			t.Error("a second connection is taken")
		}
		if err := closer.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := b.Open(ctx); err != nil { // nobody comes
		t.Fatal(err)
	}
	end()
	b.Close()
}
