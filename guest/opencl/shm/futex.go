package shm

import (
	"math"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	futexWait = 0 // not private: the word's other users are other processes
	futexWake = 1

	// All wakes every waiter.
	All = math.MaxInt32
)

// FutexWait sleeps while *addr is val, until FutexWake or, unless negative,
// the timeout. It returns false after the timeout only; true may be spurious.
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
	// Raw: it never blocks, and the scheduler need not hear of it.
	woken, _, e := unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(addr)), futexWake, uintptr(n), 0, 0, 0)
	if e != 0 {
		return 0
	}
	return int(woken)
}
