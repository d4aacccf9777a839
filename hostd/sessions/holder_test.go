package sessions

import (
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// A program whose first thread has ended computes on, and its GPU must not be given to another.
func TestHolderWhoseFirstThreadHasEndedIsAlive(t *testing.T) {
	const rest = " 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 "
	for threads, alive := range map[string]bool{"0": false, "1": false, "2": true, "10": true} {
		proc := fstest.MapFS{"7/stat": {Data: []byte("7 (a) Z" + rest + threads + " 0 77 0")}}
		if got := (holder{PID: 7, Start: 77}).alive(proc); got != alive {
			t.Errorf("%s threads: alive is %v", threads, got)
		}
	}
}

// denied is a /proc in which nothing can be read.
type denied struct{ why error }

func (d denied) Open(name string) (fs.File, error) {
	return nil, &fs.PathError{Op: "open", Path: name, Err: d.why}
}

// For lack of descriptors nobody is seen. The claims of programs that run must not end by that.
func TestHolderThatCannotBeLookedAtIsNotGone(t *testing.T) {
	for why, gone := range map[syscall.Errno]bool{syscall.EMFILE: false, syscall.ENFILE: false, syscall.ENOMEM: false, syscall.ENOENT: true, syscall.ESRCH: true} {
		if got := (holder{PID: 7, Start: 77}).gone(denied{why}); got != gone {
			t.Errorf("%v: gone is %v", why, got)
		}
	}
	for start, gone := range map[uint64]bool{77: false, 78: true} { // the number of another process
		proc := fstest.MapFS{"7/stat": {Data: fmt.Appendf(nil, "7 (a) Z 1) (b) S 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 0 %d 0", start)}}
		if got := (holder{PID: 7, Start: 77}).gone(proc); got != gone {
			t.Errorf("started at %d: gone is %v", start, got)
		}
	}
}

// A process that uses a GPU can keep who reads its command line waiting for as long as it runs. The
// host says all the same which GPUs it has.
func TestProcessThatCannotBeReadIsNoExecutor(t *testing.T) {
	h := &Host{proc: os.DirFS("/proc")}
	pid := testkit.Unreadable(t)
	ours := make(chan bool, 1)
	go func() { ours <- h.ours(uint32(pid)) }()
	select {
	case is := <-ours:
		if is {
			t.Error("it is taken for an executor")
		}
	case <-time.After(20 * time.Second):
		t.Error("the list of GPUs waits for it")
	}
}
