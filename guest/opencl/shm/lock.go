package shm

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// ErrLocked is returned for a byte that is locked through another open file description.
var ErrLocked = errors.New("locked by another process")

// Reopen creates a new open file description of a memfd. Locks taken through it conflict
// with those of all others, and are released when it is closed.
func Reopen(fd int) (int, error) {
	// Only /proc offers this; there is no system call for it.
	n, err := unix.Open("/proc/self/fd/"+strconv.Itoa(fd), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("reopen descriptor %d: %w", fd, err)
	}
	return n, nil
}

func byteLock(typ int16, off int64) *unix.Flock_t {
	return &unix.Flock_t{Type: typ, Start: off, Len: 1}
}

// LockByte takes the OFD write lock of a byte and does not wait. It returns ErrLocked if
// another open file description has the lock. The lock is released when the last descriptor
// of this description is closed.
func LockByte(fd int, off int64) error {
	err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, byteLock(unix.F_WRLCK, off))
	switch {
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EACCES):
		return fmt.Errorf("lock byte %d: %w", off, ErrLocked)
	case err != nil:
		return fmt.Errorf("lock byte %d: %w", off, err)
	}
	return nil
}

// Take locks a byte as soon as it is wanted and nobody else has its lock, and returns then, or when that is
// over. It looks every tenth of a second.
func Take(fd int, off int64, wanted, over func() bool) {
	for !over() {
		if wanted() && LockByte(fd, off) == nil {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// UnlockByte releases the lock of a byte.
func UnlockByte(fd int, off int64) error {
	if err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, byteLock(unix.F_UNLCK, off)); err != nil {
		return fmt.Errorf("unlock byte %d: %w", off, err)
	}
	return nil
}

// Locked reports whether another open file description has the lock of a byte.
func Locked(fd int, off int64) (bool, error) {
	l := byteLock(unix.F_WRLCK, off)
	if err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_GETLK, l); err != nil {
		return false, fmt.Errorf("query lock of byte %d: %w", off, err)
	}
	return l.Type != unix.F_UNLCK, nil
}
