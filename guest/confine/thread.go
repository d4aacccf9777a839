package confine

import (
	"errors"
	"fmt"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// OnThread runs f on a thread that ends after f, so that f can give up rights of its
// thread. It is never the main thread, because Go would keep that one.
func OnThread(f func() error) error {
	err := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			err <- OnThread(f) // this goroutine blocks here, so f gets another thread
			runtime.UnlockOSThread()
			return
		}
		err <- f() // not unlocked, so Go ends the thread
	}()
	return <-err
}

// AsOwner runs f with the rights on files of a user and one group, and without any other
// rights on files. Otherwise the thread stays root's, so the user can't signal it. f must
// not start goroutines. If this process does not run as root, f has the rights of the
// process.
func AsOwner(uid, gid uint32, f func() error) error {
	if unix.Geteuid() != 0 || uid == 0 {
		return f()
	}
	return OnThread(func() error {
		// Go's own functions would change all threads.
		if _, _, e := syscall.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0); e != 0 {
			return fmt.Errorf("act as user %d: drop groups: %w", uid, e)
		}
		for _, c := range []struct {
			call uintptr
			id   uint32
		}{{unix.SYS_SETFSGID, gid}, {unix.SYS_SETFSUID, uid}} {
			_, _, _ = syscall.RawSyscall(c.call, uintptr(c.id), 0, 0)
			if now, _, _ := syscall.RawSyscall(c.call, ^uintptr(0), 0, 0); uint32(now) != c.id {
				return fmt.Errorf("act as user %d: the kernel refuses; is it mapped in this container?", uid)
			}
		}
		return f()
	})
}

// signalling runs f on a thread that can signal the processes of the user and of nobody
// else. The user can't signal that thread. No process runs as keeper.
func signalling(uid, keeper uint32, f func() error) error {
	return OnThread(func() error {
		if uid == 0 || keeper == 0 || uid == keeper || uid == ^uint32(0) || keeper == ^uint32(0) {
			return fmt.Errorf("signal as user %d by %d: these are no users of sessions", uid, keeper)
		}
		if _, _, e := syscall.RawSyscall(unix.SYS_SETRESUID, uintptr(keeper), uintptr(uid), uintptr(keeper)); e != 0 {
			return fmt.Errorf("signal as user %d: %w", uid, e)
		}
		var r, e, s uint32
		_, _, err := syscall.RawSyscall(unix.SYS_GETRESUID, uintptr(unsafe.Pointer(&r)), uintptr(unsafe.Pointer(&e)), uintptr(unsafe.Pointer(&s)))
		if err != 0 || r != keeper || e != uid || s != keeper {
			return fmt.Errorf("signal as user %d: the thread is %d, %d, %d", uid, r, e, s)
		}
		var data [2]unix.CapUserData
		if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &data[0]); err != nil || data[0].Effective|data[1].Effective != 0 {
			return errors.Join(fmt.Errorf("signal as user %d: the thread has capabilities %x", uid, data), err)
		}
		return f()
	})
}
