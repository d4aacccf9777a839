package rdma

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// world is the libraries, and the address of a device. Few machines have one: testdata/device.c
// stands in for it, and TestRDMA of test/xen runs these tests on a host of the lab, where
// GPUCTL_TEST_RDMA is that address.
func world(t *testing.T) (Library, string) {
	t.Helper()
	ip := os.Getenv("GPUCTL_TEST_RDMA")
	if ip == "" {
		t.Skip("GPUCTL_TEST_RDMA names no address of a device for RDMA")
	}
	l, err := Open()
	if err != nil {
		t.Fatal(err)
	}
	return l, ip
}

// listen serves every connection by f.
func listen(t *testing.T, l Library, ip string, f func(*Conn)) string {
	t.Helper()
	s, err := l.Listen(t.Context(), net.JoinHostPort(ip, "0"))
	if err != nil {
		t.Fatal(err)
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		for {
			c, err := s.Accept()
			if err != nil {
				if !errors.Is(err, net.ErrClosed) {
					t.Error(err)
				}
				return
			}
			go func() {
				defer c.Close()
				f(c)
			}()
		}
	}()
	t.Cleanup(func() {
		_ = s.Close()
		<-over
	})
	return s.Addr().String()
}

func dial(t *testing.T, l Library, at string) *Conn {
	t.Helper()
	c, err := l.Dial(testkit.Context(t), at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestBothDirectionsAtOnce(t *testing.T) {
	l, ip := world(t)
	at := listen(t, l, ip, func(c *Conn) { _, _ = io.Copy(c, c) })
	c := dial(t, l, at)
	if a := c.RemoteAddr(); a.String() != at || a.Network() != "rdma" {
		t.Errorf("the other end is %s %s, not %s", a.Network(), a, at)
	}
	for _, size := range []int{1, 100, 64 << 10, 1<<20 + 1, 20 << 20} {
		data, got := make([]byte, size), make([]byte, size)
		_, _ = rand.Read(data)
		sent := make(chan error, 1)
		go func() {
			n, err := c.Write(data)
			if n != size && err == nil {
				err = fmt.Errorf("%d bytes were written", n)
			}
			sent <- err
		}()
		_, err := io.ReadFull(c, got)
		if err = errors.Join(err, <-sent); err != nil || !bytes.Equal(data, got) {
			t.Fatalf("%d bytes: %v, the same: %v", size, err, bytes.Equal(data, got))
		}
	}
}

// What was written before the end arrives, and then the end.
func TestTheEndComesLast(t *testing.T) {
	l, ip := world(t)
	at := listen(t, l, ip, func(c *Conn) { _, _ = c.Write(make([]byte, 3<<20)) })
	n, err := io.Copy(io.Discard, dial(t, l, at))
	if n != 3<<20 || err != nil {
		t.Errorf("%d bytes: %v", n, err)
	}
}

// Close ends who reads, and who writes to somebody who does not read.
func TestCloseEndsWhoWaits(t *testing.T) {
	l, ip := world(t)
	for name, wait := range map[string]func(*Conn) error{
		"a reader": func(c *Conn) error {
			_, err := c.Read(make([]byte, 1))
			return err
		},
		"a writer": func(c *Conn) error {
			_, err := c.Write(make([]byte, 64<<20))
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			silent := make(chan struct{})
			defer close(silent)
			c := dial(t, l, listen(t, l, ip, func(*Conn) { <-silent }))
			time.AfterFunc(100*time.Millisecond, func() { _ = c.Close() })
			if err := wait(c); !errors.Is(err, net.ErrClosed) {
				t.Error(err)
			}
		})
	}
}

// Many connections at once, each of which gets its own bytes.
func TestManyConnections(t *testing.T) {
	l, ip := world(t)
	at := listen(t, l, ip, func(c *Conn) { _, _ = io.Copy(c, c) })
	var work sync.WaitGroup
	for i := range 24 {
		work.Go(func() {
			c, err := l.Dial(testkit.Context(t), at)
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			data, got := bytes.Repeat([]byte{byte(i)}, 100<<10), make([]byte, 100<<10)
			for range 5 {
				_, werr := c.Write(data)
				_, rerr := io.ReadFull(c, got)
				if err := errors.Join(werr, rerr); err != nil || !bytes.Equal(data, got) {
					t.Errorf("connection %d: %v, or the bytes of another one", i, err)
					return
				}
			}
		})
	}
	work.Wait()
}

func TestDialFails(t *testing.T) {
	l, ip := world(t)
	if c, err := l.Dial(testkit.Context(t), net.JoinHostPort(ip, "1")); err == nil {
		c.Close()
		t.Error("connected to nobody")
	}
	for _, at := range []string{"nowhere", "", "127.0.0.1:x"} {
		if c, err := l.Dial(testkit.Context(t), at); err == nil {
			c.Close()
			t.Errorf("connected to %q", at)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if c, err := l.Dial(ctx, net.JoinHostPort("192.0.2.1", "7")); err == nil {
		c.Close()
		t.Error("connected although it was cancelled")
	}
}

func TestOpenLooksForADevice(t *testing.T) {
	devices, _ := filepath.Glob("/sys/class/infiniband/*")
	_, err := Open()
	if os.Getenv(standIn) != "" {
		devices = append(devices, "stand-in")
	}
	if len(devices) == 0 && !errors.Is(err, ErrNone) {
		t.Errorf("without a device: %v", err)
	}
	if len(devices) > 0 && err != nil {
		t.Errorf("with devices %v: %v", devices, err)
	}
}
