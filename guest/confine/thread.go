package confine

import (
	"errors"
	"fmt"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// OnThread runs f on a thread that ends with it, so that f may give up rights of
// its thread. It is never the main thread, which Go would keep.
func OnThread(f func() error) error {
	err := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			err <- OnThread(f) // held here, so that f gets another
			runtime.UnlockOSThread()
			return
		}
		err <- f() // never unlocked: Go drops the thread
	}()
	return <-err
}

// AsOwner runs f with a user's and one group's rights to files, and with no
// others' rights to them. The thread stays root's otherwise, so that the user can't signal it. f
// must not start goroutines. If this process is not root's, f has its rights.
func AsOwner(uid, gid uint32, f func() error) error {
	if unix.Geteuid() != 0 || uid == 0 {
		return f()
	}
	return OnThread(func() error {
		// Go's own calls change all threads.
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

// signalling runs f on a thread that may signal processes of the user and of
// nobody else, and that the user can't signal. keeper has no process.
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
