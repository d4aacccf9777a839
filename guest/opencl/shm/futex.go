package shm

import (
	"math"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	futexWait = 0 // not private, because other processes use the word, too
	futexWake = 1

	// All wakes every waiter.
	All = math.MaxInt32
)

// FutexWait sleeps while *addr is val, until FutexWake or the timeout. A negative timeout
// means no limit. It returns false only after the timeout; true may be spurious.
func FutexWait(addr *uint32, val uint32, timeout time.Duration) (woken bool) {
	var ts *unix.Timespec
	if timeout >= 0 {
		t := unix.NsecToTimespec(int64(timeout))
		ts = &t
	}
	_, _, e := unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(addr)), futexWait, uintptr(val), uintptr(unsafe.Pointer(ts)), 0, 0)
	return e != unix.ETIMEDOUT
}

// FutexWake wakes up to n waiters of addr and returns how many it woke.
func FutexWake(addr *uint32, n int) int {
	// A raw system call: it never blocks, so the Go scheduler need not be involved.
	woken, _, e := unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(addr)), futexWake, uintptr(n), 0, 0, 0)
	if e != 0 {
		return 0
	}
	return int(woken)
}
