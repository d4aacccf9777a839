package main

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gpuctl/gpuctl/internal/vchan"
	"github.com/gpuctl/gpuctl/internal/vchan/vchantest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTry(t *testing.T) {
	h := vchantest.New(t, nil)
	guest, dom0 := h.Domain(3), h.Domain(0)
	l, err := vchan.Listen(t.Context(), guest.Xenstore(), "data/perf", 0, vchan.Options{Devices: guest})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- serve(ctx, l, func(err error) { t.Log("the server:", err) }) }()
	store := dom0.Xenstore()
	for to := uint16(4); to < 6; to++ {
		dial, end := context.WithTimeout(t.Context(), 20*time.Second)
		conn, err := vchan.Dial(dial, store, guest.ID(), "data/perf", vchan.Options{Devices: dom0, Wait: true})
		end()
		if err != nil {
			t.Fatal(err)
		}
		const size = 5 << 20
		r, err := try(conn, size)
		if err != nil {
			t.Fatal(err)
		}
		if r.Bytes != size || len(r.Sum) != 64 || r.ToGuest <= 0 || r.FromGuest <= 0 || r.Echo <= 0 || r.RoundTripMS <= 0 {
			t.Errorf("%+v", r)
		}
		guest.Migrate(to)
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, vchan.ErrMoved) {
			t.Error(err)
		}
		_ = conn.Close()
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
}

// What comes wrong is found.
func TestWrongBytes(t *testing.T) {
	client, server := net.Pipe()
	defer client.Close()
	go func() {
		defer server.Close()
		_ = answer(&garbler{Conn: server, after: 2000})
	}()
	if _, err := try(client, 100000); err == nil || !strings.Contains(err.Error(), "to the guest") {
		t.Errorf("a byte that was changed on the way in: %v", err)
	}
	p := pattern(1)
	pr, pw := io.Pipe()
	go func() {
		_ = send(pw, p, 3*block)
		_ = pw.Close()
	}()
	if same, err := receive(pr, p, 3*block); err != nil || !same {
		t.Error(same, err)
	}
	if same, err := receive(strings.NewReader(string(p[1:1000])), p, 999); err != nil || same {
		t.Error("bytes that are shifted are not found", err)
	}
}

// garbler changes one byte of what is read.
type garbler struct {
	net.Conn
	after int
}

func (g *garbler) Read(p []byte) (int, error) {
	n, err := g.Conn.Read(p)
	if g.after >= 0 && g.after < n {
		p[g.after]++
	}
	g.after -= n
	return n, err
}
