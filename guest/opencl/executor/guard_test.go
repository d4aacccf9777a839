package executor

import (
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// An executor that holds no lock is dead to the application, which gives its session up while a long
// command runs. That a machine is short of descriptors for a moment is no reason.
func TestExecutorTakesItsLockThoughDescriptorsAreShort(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	fd, err := shm.Reopen(c.ring.FD())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	short := was
	short.Cur = 0
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &short); err != nil {
		t.Fatal(err)
	}
	over := make(chan struct{})
	go func() { defer close(over); s.takeOver() }()
	t.Cleanup(func() { s.closed.Store(true); <-over })
	testkit.Until(t, "the executor has its lock", func() error {
		locked, err := shm.Locked(fd, wire.LockExecutor)
		if locked || err != nil {
			_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &was)
		}
		return testkit.Want(locked, err)
	})
}

// What an executor does at first after a swap may take long, as a runtime compiles a kernel when it is launched, and
// its mutex is held meanwhile.
func TestExecutorTakesItsLockWhileACallOfTheRuntimeTakesLong(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	fd, err := shm.Reopen(c.ring.FD())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	var over sync.WaitGroup
	s.mu.Lock()
	t.Cleanup(func() { s.closed.Store(true); s.mu.Unlock(); over.Wait() })
	over.Go(s.guard)
	over.Go(s.takeOver)
	time.Sleep(300 * time.Millisecond) // they wait for their turn
	s.active.Store(true)
	testkit.Until(t, "the executor has its lock", func() error {
		locked, err := shm.Locked(fd, wire.LockExecutor)
		return testkit.Want(locked, err)
	})
}
