package room

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/beneath"
)

// ErrUnknown means that the kernel does not say how much memory is available.
var ErrUnknown = errors.New("available memory is unknown")

const mostMeminfo = 64 << 10

// Memory returns how many bytes this machine can give without swapping: MemAvailable of
// proc_meminfo(5).
func Memory() (uint64, error) {
	b, err := beneath.ReadFile("/proc", "meminfo", mostMeminfo)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		var kib uint64
		if _, err := fmt.Sscanf(line, "MemAvailable: %d kB", &kib); err == nil && kib < 1<<54 {
			return kib << 10, nil
		}
	}
	return 0, ErrUnknown
}

// Folder returns how many bytes the file system of a folder has left for users.
func Folder(dir string) (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("%s: %w", dir, err)
	}
	return st.Bavail * uint64(st.Bsize), nil
}

// File returns how many bytes a file can have in all: what it takes already, and what its
// file system has left.
func File(f *os.File) (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return 0, fmt.Errorf("%s: %w", f.Name(), err)
	}
	has, err := taken(f)
	return has + st.Bavail*uint64(st.Bsize), err
}

// MemoryFile does the same for a file that is in the memory of this machine.
func MemoryFile(f *os.File) (uint64, error) {
	free, err := Memory()
	if err != nil {
		return 0, err
	}
	has, err := taken(f)
	return has + free, err
}

// taken returns how many bytes a file takes.
func taken(f *os.File) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, fmt.Errorf("%s: %w", f.Name(), err)
	}
	return uint64(st.Blocks) * 512, nil
}
