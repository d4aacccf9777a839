package rdma

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// standIn is set where the libraries are testdata/device.c. Variables of the environment say what
// goes wrong there.
const standIn = "GPUCTL_TEST_RDMA_STAND_IN"

// TestMain runs the tests with libraries that need no device, if no device is named.
func TestMain(m *testing.M) {
	if os.Getenv("GPUCTL_TEST_RDMA") == "" {
		if err := withStandIn(); err != nil {
			fmt.Fprintln(os.Stderr, "tests that need a device are skipped:", err)
		}
	}
	code := m.Run()
	if dir := os.Getenv(standIn); dir != "" {
		_ = os.RemoveAll(dir)
	}
	os.Exit(code)
}

// withStandIn begins the program anew, as libraries are found where it was told at its begin.
func withStandIn() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "rdma") // the next program removes it
	if err != nil {
		return err
	}
	verbs := filepath.Join(dir, "libibverbs.so.1")
	if out, err := exec.Command("cc", "-shared", "-fPIC", "-g", "-Wall", "-Wextra", "-Werror", "-o", verbs, "testdata/device.c").CombinedOutput(); err != nil {
		_ = os.RemoveAll(dir)
		return fmt.Errorf("%w: %s", err, out)
	}
	if err := os.Symlink(verbs, filepath.Join(dir, "librdmacm.so.1")); err != nil {
		_ = os.RemoveAll(dir)
		return err
	}
	return syscall.Exec(self, os.Args, append(os.Environ(), "LD_LIBRARY_PATH="+dir, "GPUCTL_TEST_RDMA=192.0.2.1", standIn+"="+dir))
}

// failing returns the stand-in, with faults that are named.
func failing(t *testing.T, faults ...string) (Library, string) {
	t.Helper()
	if os.Getenv(standIn) == "" {
		t.Skip("only a device that is not there fails when it is told to")
	}
	for _, f := range faults {
		t.Setenv(f, "1")
	}
	return world(t)
}

// descriptors returns how many descriptors this process has: each connection has some.
func descriptors(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// gone waits until there are as few descriptors as there were.
func gone(t *testing.T, before int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), endFor/2)
	defer cancel()
	err := testkit.Poll(ctx, "the end of what connections have", func() error {
		n := descriptors(t)
		return testkit.Want(n <= before, n-before, "descriptors are left over")
	})
	if err != nil {
		t.Fatal(err)
	}
}

// lateContext ends just after it was asked whether it has.
type lateContext struct {
	context.Context
	cancel context.CancelFunc
}

func (c lateContext) Err() error {
	defer func() {
		c.cancel()
		time.Sleep(10 * time.Millisecond) // who waits for it, sees that
	}()
	return c.Context.Err()
}

// A connection that is made while who wants it gives up is not left over.
func TestDialLeavesNothing(t *testing.T) {
	l, ip := failing(t)
	at := listen(t, l, ip, func(c *Conn) { _, _ = io.Copy(c, c) })
	before := descriptors(t)
	for range 20 {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(100*time.Millisecond, cancel)
		if c, err := l.Dial(lateContext{ctx, cancel}, at); err == nil {
			_ = c.Close()
		}
	}
	gone(t, before)
}

// What a device says beside keeps nobody waiting who comes after it.
func TestListenerTakesWhatFollowsAnotherEvent(t *testing.T) {
	l, ip := failing(t, "RDMA_OTHER_EVENT")
	at := listen(t, l, ip, func(c *Conn) { _, _ = io.Copy(c, c) })
	for range 50 {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		c, err := l.Dial(ctx, at)
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
	}
}

// A signal, as that a child has ended, does not end a connection that is being made.
func TestSignalsEndNoDial(t *testing.T) {
	l, ip := failing(t, "RDMA_SLOW")
	at := listen(t, l, ip, func(c *Conn) { _, _ = io.Copy(c, c) })
	ctx, cancel := context.WithCancel(t.Context())
	var work sync.WaitGroup
	work.Go(func() {
		for ctx.Err() == nil {
			threads, _ := os.ReadDir("/proc/self/task")
			for _, thread := range threads {
				if id, err := strconv.Atoi(thread.Name()); err == nil {
					_ = unix.Tgkill(os.Getpid(), id, unix.SIGCHLD)
				}
			}
			time.Sleep(10 * time.Millisecond)
		}
	})
	for range 5 {
		c, err := l.Dial(t.Context(), at)
		if err != nil {
			t.Error(err)
			break
		}
		_ = c.Close()
	}
	cancel()
	work.Wait()
}

// Who sends no acknowledgement keeps nothing of a connection over which nothing was written,
// and of others only until Close returns.
func TestWhoAcknowledgesNothingKeepsNothing(t *testing.T) {
	l, ip := failing(t, "RDMA_DEAF")
	for name, write := range map[string]func(*Conn){
		"nothing was written": func(*Conn) {},
		"a byte was written":  func(c *Conn) { _, _ = c.Write(make([]byte, 1)) },
	} {
		t.Run(name, func(t *testing.T) {
			came, silent := make(chan struct{}), make(chan struct{})
			at := listen(t, l, ip, func(*Conn) {
				close(came)
				<-silent
			})
			before := descriptors(t)
			c := dial(t, l, at)
			<-came
			each := (descriptors(t) - before) / 2
			write(c)
			_ = c.Close()
			gone(t, before+each)
			close(silent)
			gone(t, before)
		})
	}
}

// Who begins connections and finishes none keeps out nobody else, and holds up no end.
func TestUnfinishedConnectionsKeepNobodyOut(t *testing.T) {
	l, ip := failing(t, "RDMA_MUTE")
	s, err := l.Listen(t.Context(), net.JoinHostPort(ip, "0"))
	if err != nil {
		t.Fatal(err)
	}
	at := s.Addr().String()
	var silent sync.WaitGroup
	for range mostWaiting + 2*mostUnfinished { // some of which are refused
		silent.Go(func() {
			if c, err := l.Dial(t.Context(), at); err == nil {
				_ = c.Close()
			}
		})
	}
	testkit.Until(t, "all places are taken", func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		return testkit.Want(len(s.unfinished) == mostUnfinished, len(s.unfinished), mostUnfinished)
	})
	soon, cancel := context.WithTimeout(t.Context(), stepFor/2)
	defer cancel()
	c, err := l.Dial(soon, fromAnother(at))
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	began := time.Now()
	if err := s.Close(); err != nil || time.Since(began) > stepFor/2 {
		t.Errorf("its end took %v: %v", time.Since(began), err)
	}
	silent.Wait()
}

// fromAnother returns the address of a listener at which it takes who connects for 192.0.2.2, and not
// for 192.0.2.1.
func fromAnother(at string) string { return strings.Replace(at, "192.0.2.1", "192.0.2.2", 1) }

// One connection that can't be taken is refused, and keeps out no other.
func TestListenerGoesOnAfterConnectionThatIsNotTaken(t *testing.T) {
	l, ip := failing(t, "RDMA_NO_ROOM")
	at := listen(t, l, ip, func(c *Conn) { _, _ = io.Copy(c, c) })
	for range 5 {
		if c, err := l.Dial(t.Context(), at); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%v %v, want refused", c, err)
		}
		c, err := l.Dial(t.Context(), fromAnother(at))
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
	}
}

// A listener whose device has gone takes no processor's time.
func TestListenerRestsWhenItsDeviceIsLost(t *testing.T) {
	l, ip := failing(t, "RDMA_LOST")
	s, err := l.Listen(t.Context(), net.JoinHostPort(ip, "0"))
	if err != nil {
		t.Fatal(err)
	}
	used := func() time.Duration {
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
			t.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	before := used()
	time.Sleep(500 * time.Millisecond) // in which one that asks without end would take as much
	if n := used() - before; n > 200*time.Millisecond {
		t.Errorf("it takes %v in half a second", n)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

func TestCrowded(t *testing.T) {
	all := func(hosts ...byte) (out []*request) {
		for _, h := range hosts {
			out = append(out, &request{from: netip.AddrFrom4([4]byte{192, 0, 2, h})})
		}
		return out
	}
	for what, c := range map[string]struct {
		all  []*request
		want int
	}{
		"one":                      {all(1), 0},
		"the oldest of all":        {all(2, 1, 3), 0},
		"the oldest of who crowds": {all(1, 2, 3, 2), 1},
	} {
		if got := crowded(c.all); got != c.want {
			t.Errorf("%s: %d, want %d", what, got, c.want)
		}
	}
}
