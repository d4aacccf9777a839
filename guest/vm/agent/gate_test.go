package agent_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/guest/vm/agent"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

func TestGate(t *testing.T) {
	listen := func(t *testing.T) *net.UnixListener {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "app.sock"), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l
	}
	// serve answers with its letter whoever it accepts.
	serve := func(l *net.UnixListener) error {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return err
			}
			_, _ = c.Write([]byte("served"))
			c.Close()
		}
	}
	come := func(t *testing.T, l *net.UnixListener) net.Conn {
		t.Helper()
		c, err := net.Dial("unix", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write(make([]byte, 64))
		return c
	}
	told := func(c net.Conn, wait time.Duration) string {
		defer c.Close()
		_ = c.SetReadDeadline(time.Now().Add(wait))
		b := make([]byte, 100)
		n, err := c.Read(b)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return "waits"
		}
		return string(b[:n])
	}
	knock := func(t *testing.T, l *net.UnixListener, wait time.Duration) string {
		t.Helper()
		return told(come(t, l), wait)
	}
	run := func(t *testing.T, l *net.UnixListener, wait time.Duration) *agent.Gate {
		g := agent.NewGate(l, serve, wait, nil)
		ctx, cancel := context.WithCancel(context.Background())
		over := make(chan struct{})
		go func() {
			defer close(over)
			if err := g.Run(ctx); err != nil {
				t.Error(err)
			}
		}()
		t.Cleanup(func() { cancel(); <-over })
		return g
	}
	t.Run("forever", func(t *testing.T) {
		l := listen(t)
		g := run(t, l, agent.Forever)
		if got := knock(t, l, 50*time.Millisecond); got != "waits" {
			t.Fatalf("got %q", got)
		}
		for range 3 {
			c := come(t, l)
			g.Set(true)
			if s := told(c, patience); s != "served" {
				t.Fatalf("who waited got %q", s)
			}
			g.Set(false)
			testkit.Until(t, "who knocks waits again", func() error {
				got := knock(t, l, 50*time.Millisecond)
				if got != "waits" && got != "served" {
					t.Fatalf("got %q", got)
				}
				return testkit.Want(got == "waits", got)
			})
		}
	})
	t.Run("not at all", func(t *testing.T) {
		l := listen(t)
		g := run(t, l, 0)
		if got := knock(t, l, patience); !strings.Contains(got, "no GPU") || !strings.HasPrefix(got, "\xfe\xff\xff\xff") {
			t.Fatalf("got %q", got)
		}
		g.Set(true)
		for knock(t, l, patience) != "served" {
		}
	})
	t.Run("a while", func(t *testing.T) {
		l := listen(t)
		run(t, l, 200*time.Millisecond)
		began := time.Now()
		if got := knock(t, l, patience); !strings.Contains(got, "no GPU") {
			t.Fatalf("got %q", got)
		}
		if took := time.Since(began); took < 100*time.Millisecond {
			t.Errorf("told so after %v", took)
		}
	})
}
