package engine

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/beneath"
)

// ErrLocked means that another gpuguest uses a run folder.
var ErrLocked = errors.New("another gpuguest uses this run folder")

// LockFolder locks a run folder, by a file of that name in it, until the file is closed. An
// error may wrap ErrLocked.
func LockFolder(dir, name string) (*os.File, error) {
	lock, err := beneath.OpenFile(dir, name, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("run folder: %w", err)
	}
	err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		return lock, nil
	}
	lock.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, fmt.Errorf("%s: %w", dir, ErrLocked)
	}
	return nil, fmt.Errorf("lock %s: %w", dir, err)
}

// Scarce reports whether an error is for lack of descriptors or memory. Then nothing is known of
// what was looked at.
func Scarce(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM)
}
