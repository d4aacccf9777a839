package fabric_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/gpuctl/gpuctl/guest/fabric"
	"github.com/gpuctl/gpuctl/guest/fabric/fabrictest"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/internal/rdma"
	"github.com/gpuctl/gpuctl/internal/relay"
	"github.com/gpuctl/gpuctl/internal/rundir"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// world is a network and the address of a device: with GPUCTL_TEST_RDMA (see package rdma) that
// one, without it TCP in its place.
func world(t *testing.T) (n fabric.Network, ip string) {
	t.Helper()
	ip = os.Getenv("GPUCTL_TEST_RDMA")
	if ip == "" {
		return fabrictest.TCP{}, "127.0.0.1"
	}
	n, err := fabric.Open()
	if err != nil {
		t.Fatal(err)
	}
	return n, ip
}

// serve serves until the test's end, and returns the carriers' socket.
func serve(t *testing.T, c fabric.Config) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	var err error
	if c.Carriers, err = rundir.ListenMode(socket, 0o666); err != nil {
		t.Fatal(err)
	}
	if c.May == nil {
		c.May = func(uint32) bool { return true }
	}
	c.Log = slog.New(slog.DiscardHandler)
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	work.Go(func() { _ = fabric.New(c).Serve(ctx) })
	t.Cleanup(func() {
		cancel()
		work.Wait()
	})
	return socket
}

var first = remote.Preamble{Role: remote.Commands, Token: remote.Token{1, 2, 3}}.Append(nil)

// A carrier's connection arrives at the far host's port of TCP, and nothing else does.
func TestCarriersReachThePort(t *testing.T) {
	l, ip := world(t)
	port := testkit.Port(t, func(c net.Conn) { _, _ = io.Copy(c, c) })
	s, at, err := l.Listen(t.Context(), net.JoinHostPort(ip, "0"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	work.Go(func() { fabric.Pass(ctx, s, port, slog.New(slog.DiscardHandler)) })
	t.Cleanup(func() {
		cancel()
		work.Wait()
	})
	socket := serve(t, fabric.Config{Open: func() (fabric.Network, error) { return l, nil }})
	conn, err := relay.Dial(testkit.Context(t), socket, at.String(), true, first)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	data, got := make([]byte, 16<<20), make([]byte, len(first)+16<<20)
	_, _ = rand.Read(data)
	go func() { _, _ = conn.Write(data) }()
	if _, err := io.ReadFull(conn, got); err != nil || !bytes.Equal(got, append(bytes.Clone(first), data...)) {
		t.Errorf("other bytes than were sent: %v", err)
	}

	stranger, err := l.Dial(testkit.Context(t), at.String())
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	_, _ = stranger.Write([]byte("GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: nobody that the port knows\r\n\r\n"))
	if n, err := stranger.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("the port has answered a stranger: %d, %v", n, err)
	}
}

// A device that comes later is used.
func TestDevicesMayComeLater(t *testing.T) {
	l, ip := world(t)
	var asked atomic.Int64
	socket := serve(t, fabric.Config{Open: func() (fabric.Network, error) {
		if asked.Add(1) == 1 {
			return nil, rdma.ErrNone
		}
		return l, nil
	}})
	s, at, err := l.Listen(t.Context(), net.JoinHostPort(ip, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	_, err = relay.Dial(testkit.Context(t), socket, at.String(), false, first)
	if !errors.Is(err, relay.ErrRefused) || !strings.Contains(err.Error(), rdma.ErrNone.Error()) {
		t.Errorf("without a device: %v", err)
	}
	conn, err := relay.Dial(testkit.Context(t), socket, at.String(), false, first)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}

func TestOthersMayNotConnect(t *testing.T) {
	l, ip := world(t)
	s, at, err := l.Listen(t.Context(), net.JoinHostPort(ip, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	open := func() (fabric.Network, error) { return l, nil }
	for says, c := range map[string]struct {
		may   bool
		first []byte
	}{
		"may not connect":          {false, first},
		remote.ErrPreamble.Error(): {true, bytes.Repeat([]byte{'x'}, len(first))},
	} {
		socket := serve(t, fabric.Config{Open: open, May: func(uint32) bool { return c.may }})
		conn, err := relay.Dial(testkit.Context(t), socket, at.String(), false, c.first)
		if err == nil {
			conn.Close()
		}
		if !errors.Is(err, relay.ErrRefused) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
	}
}

// Strangers cannot fill the log.
func TestStrangersAreLoggedAtALimitedRate(t *testing.T) {
	s, at, err := fabrictest.TCP{}.Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var lines counter
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	work.Go(func() { fabric.Pass(ctx, s, "127.0.0.1:1", slog.New(slog.NewTextHandler(&lines, nil))) })
	for range 200 {
		c, err := net.Dial("tcp", at.String())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write(bytes.Repeat([]byte{'x'}, len(first)))
		_, _ = c.Read(make([]byte, 1)) // it is refused
		c.Close()
	}
	cancel()
	work.Wait()
	if n := lines.Load(); n == 0 || n > 50 {
		t.Errorf("%d lines in the log", n)
	}
}

// counter counts writes.
type counter struct{ atomic.Int64 }

func (c *counter) Write(b []byte) (int, error) {
	c.Add(1)
	return len(b), nil
}
