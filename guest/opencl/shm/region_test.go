package shm

import (
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

func newRegion(t testing.TB, size int64) *Region {
	t.Helper()
	r, err := Create("test", size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

func TestRegionIsSparse(t *testing.T) {
	const size = 300 << 30
	r := newRegion(t, size)
	r.Bytes()[size-1] = 7
	r.Store64(200<<30, 9)
	blocks := func() int64 {
		var st unix.Stat_t
		if err := unix.Fstat(r.FD(), &st); err != nil {
			t.Fatal(err)
		}
		return st.Blocks * 512
	}
	if n := blocks(); n == 0 || n > 8<<20 {
		t.Errorf("%d bytes in use after writing two pages", n)
	}
	if err := r.PunchHole(200<<30, 4096); err != nil {
		t.Fatal(err)
	}
	if err := r.PunchHole(size-4096, 4096); err != nil {
		t.Fatal(err)
	}
	if n := blocks(); n != 0 {
		t.Errorf("%d bytes in use after punching holes", n)
	}
	if r.Load64(200<<30) != 0 || r.Bytes()[size-1] != 0 {
		t.Error("a hole does not read as 0")
	}
}

func TestRegionIsShared(t *testing.T) {
	a := newRegion(t, 8192)
	fd, err := Reopen(a.FD())
	if err != nil {
		t.Fatal(err)
	}
	b, err := Open(fd, 8192)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	a.Store32(8, 5)
	if b.Load32(8) != 5 || !b.CAS32(8, 5, 6) || b.CAS32(8, 5, 7) || a.Swap32(8, 8) != 6 || b.Load64(8) != 8 {
		t.Error("the mappings differ")
	}
	if *(*byte)(b.Pointer(8)) != 8 {
		t.Error("Pointer points elsewhere")
	}
}

func TestRegionCannotShrink(t *testing.T) {
	r := newRegion(t, 8192)
	if err := unix.Ftruncate(r.FD(), 0); err == nil {
		t.Error("a peer could truncate the memory under us")
	}
	fd, err := unix.MemfdCreate("hostile", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, 8192); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(fd, 8192); !errors.Is(err, ErrUnsealed) {
		t.Errorf("unsealed: %v", err)
	}
	if _, err := Open(r.FD(), 16384); !errors.Is(err, ErrRange) {
		t.Errorf("too large: %v", err)
	}
	if _, err := Open(r.FD(), -1); !errors.Is(err, ErrRange) {
		t.Errorf("negative: %v", err)
	}
}

func TestRegionRange(t *testing.T) {
	r := newRegion(t, 8192)
	for _, c := range []struct {
		off, n uint64
		ok     bool
	}{{0, 8192, true}, {8192, 0, true}, {8191, 1, true}, {8191, 2, false}, {8193, 0, false}, {1, ^uint64(0), false}, {^uint64(0), 1, false}} {
		b, err := r.Range(c.off, c.n)
		if (err == nil) != c.ok || c.ok && uint64(len(b)) != c.n {
			t.Errorf("Range(%d, %d): %d bytes, %v", c.off, c.n, len(b), err)
		}
		if !c.ok && r.PunchHole(c.off, c.n) == nil {
			t.Errorf("PunchHole(%d, %d) worked", c.off, c.n)
		}
	}
}

func TestEmptyRegionIsAFile(t *testing.T) {
	r := newRegion(t, 0)
	if _, err := unix.Pwrite(r.FD(), []byte("state"), 0); err != nil {
		t.Fatal(err)
	}
	if r.Size() != 0 {
		t.Errorf("size %d", r.Size())
	}
}

func TestFutex(t *testing.T) {
	r := newRegion(t, 4096)
	w := r.Word32(64)
	if !FutexWait(w, 1, time.Minute) {
		t.Error("waited although the value differs")
	}
	if FutexWait(w, 0, time.Millisecond) {
		t.Error("woken by nobody")
	}
	woken := make(chan bool)
	go func() {
		for atomic.LoadUint32(w) == 0 {
			FutexWait(w, 0, -1)
		}
		woken <- true
	}()
	testkit.Parked(t, "shm.FutexWait", 1)
	atomic.StoreUint32(w, 1)
	FutexWake(w, 1)
	select {
	case <-woken:
	case <-testkit.Context(t).Done():
		t.Fatal("not woken")
	}
}

func TestSpin(t *testing.T) {
	for _, n := range []int{-1, 0, 1, 1000} {
		Spin(n)
	}
	Pause()
}

func TestLocks(t *testing.T) {
	r := newRegion(t, 4096)
	own, err := Reopen(r.FD())
	if err != nil {
		t.Fatal(err)
	}
	other, err := Reopen(r.FD())
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(other)
	is := func(fd int, off int64, want bool) {
		t.Helper()
		if got, err := Locked(fd, off); err != nil || got != want {
			t.Errorf("byte %d locked: %v, %v, want %v", off, got, err, want)
		}
	}
	is(r.FD(), 1, false)
	if err := LockByte(own, 1); err != nil {
		t.Fatal(err)
	}
	is(r.FD(), 1, true)
	is(r.FD(), 0, false)
	is(own, 1, false)
	if err := LockByte(other, 1); !errors.Is(err, ErrLocked) {
		t.Errorf("second lock: %v", err)
	}
	if err := LockByte(other, 0); err != nil {
		t.Error(err)
	}
	if err := UnlockByte(other, 0); err != nil {
		t.Error(err)
	}
	is(r.FD(), 0, false)
	unix.Close(own)
	is(r.FD(), 1, false)
}

func socketPair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	conn := func(fd int) *net.UnixConn {
		f := os.NewFile(uintptr(fd), "socket")
		defer f.Close()
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c.(*net.UnixConn)
	}
	return conn(fds[0]), conn(fds[1])
}

func TestFds(t *testing.T) {
	a, b := socketPair(t)
	r := newRegion(t, 4096)
	r.Store32(0, 77)
	if err := SendFds(a, []byte("hello"), r.FD(), r.FD()); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 64)
	n, fds, err := RecvFds(b, buf, 3)
	if err != nil || string(buf[:n]) != "hello" || len(fds) != 2 {
		t.Fatalf("%q, %v, %v", buf[:n], fds, err)
	}
	defer closeAll(fds)
	got, err := Open(fds[0], 4096)
	if err != nil {
		t.Fatal(err)
	}
	if got.Load32(0) != 77 {
		t.Error("another memfd arrived")
	}
	if fl, _ := unix.FcntlInt(uintptr(fds[0]), unix.F_GETFD, 0); fl&unix.FD_CLOEXEC == 0 {
		t.Error("descriptor survives exec")
	}

	for _, many := range []int{2, 40} {
		before := openFds(t)
		if err := SendFds(a, []byte("x"), make([]int, many)...); err != nil {
			t.Fatal(err)
		}
		if _, _, err := RecvFds(b, buf, 1); !errors.Is(err, ErrDescriptors) {
			t.Errorf("%d descriptors for 1: %v", many, err)
		}
		if after := openFds(t); after != before {
			t.Errorf("%d descriptors leaked", after-before)
		}
	}
	if err := SendFds(a, nil, 0); err == nil {
		t.Error("sent without data")
	}
	a.Close()
	if _, _, err := RecvFds(b, buf, 1); !errors.Is(err, io.EOF) {
		t.Errorf("end: %v", err)
	}
}

func openFds(t *testing.T) int {
	t.Helper()
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}
