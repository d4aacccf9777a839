package turn

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/timeshare"
)

// ends returns a connection: for the arbiter, and as a descriptor that blocks its thread, as in
// another process.
func ends(b *testing.B) (*net.UnixConn, int) {
	b.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		b.Fatal(err)
	}
	f := os.NewFile(uintptr(fds[1]), "pair")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		b.Fatal(err)
	}
	return c.(*net.UnixConn), fds[0]
}

// BenchmarkTurn is a whole turn, from one grant to the next, of two sessions that always want
// one and launch nothing in it.
func BenchmarkTurn(b *testing.B) {
	for _, p := range []timeshare.Policy{timeshare.FIFO, timeshare.Fair} {
		b.Run(string(p), func(b *testing.B) { turns(b, p) })
	}
}

func turns(b *testing.B, p timeshare.Policy) {
	c := DefaultConfig()
	c.Policy = timeshare.DefaultConfig(p)
	a, err := New("g", c)
	if err != nil {
		b.Fatal(err)
	}
	defer a.Close()
	var wg sync.WaitGroup
	for i := range 2 {
		conn, fd := ends(b)
		if _, err := a.Join(Member{Session: fmt.Sprint(i), Owner: fmt.Sprint(i), Weight: 1}, 0, conn); err != nil {
			b.Fatal(err)
		}
		wg.Go(func() {
			runtime.LockOSThread()
			var buf [FrameSize]byte
			send := func(f Frame) {
				x := f.Encode()
				_, _ = unix.Write(fd, x[:])
			}
			var epoch uint32
			var n uint64
			for done := 0; done < b.N/2; {
				if k, err := unix.Read(fd, buf[:]); err != nil || k != FrameSize {
					b.Error(k, err)
					return
				}
				f, _ := Decode(&buf)
				switch f.Kind {
				case Share:
					epoch, n = f.Epoch, 0
				case Grant:
					done++
				default:
					continue
				}
				send(Frame{Kind: End, Epoch: epoch, Number: n})
				if n++; done < b.N/2 {
					send(Frame{Kind: Ask, Epoch: epoch, Number: n})
				}
			}
		})
	}
	wg.Wait()
}

// BenchmarkSocket is what the socket of a turn costs: there and back between a thread that
// blocks and a goroutine.
func BenchmarkSocket(b *testing.B) {
	conn, fd := ends(b)
	defer conn.Close()
	go func() {
		var buf [FrameSize]byte
		for {
			if _, err := conn.Read(buf[:]); err != nil {
				return
			}
			_, _ = conn.Write(buf[:])
		}
	}()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var buf [FrameSize]byte
	for b.Loop() {
		_, _ = unix.Write(fd, buf[:])
		_, _ = unix.Read(fd, buf[:])
	}
}

// BenchmarkFutex is the same with two words of shared memory and two threads.
func BenchmarkFutex(b *testing.B) {
	mem, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		b.Fatal(err)
	}
	word := (*uint32)(unsafe.Pointer(&mem[0]))
	reply := (*uint32)(unsafe.Pointer(&mem[64]))
	wait := func(w *uint32, v uint32) {
		ts := unix.NsecToTimespec(int64(time.Second))
		for atomic.LoadUint32(w) == v {
			_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(w)), 0, uintptr(v), uintptr(unsafe.Pointer(&ts)), 0, 0)
		}
	}
	wake := func(w *uint32, v uint32) {
		atomic.StoreUint32(w, v)
		_, _, _ = unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(w)), 1, 1, 0, 0, 0)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		for n := uint32(0); ; n++ {
			wait(word, n)
			if atomic.LoadUint32(word) == 1<<31 {
				return
			}
			wake(reply, n+1)
		}
	}()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	n := uint32(0)
	for b.Loop() {
		n++
		wake(word, n)
		wait(reply, n-1)
	}
	wake(word, 1<<31)
	<-done
}
