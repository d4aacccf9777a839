package testkit

import (
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// FewDescriptors leaves this process so many descriptors, until the end of f.
func FewDescriptors(t testing.TB, left int, f func()) {
	t.Helper()
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	var fill []int
	for most := 0; most < 1000; { // all numbers below that are taken
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		fill, most = append(fill, fd), fd
	}
	slices.Reverse(fill)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(fill[0] + 1), Max: before.Max}); err != nil {
		t.Fatal(err)
	}
	for _, fd := range fill[:left] {
		_ = unix.Close(fd)
	}
	f()
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Error(err)
	}
	for _, fd := range fill[left:] {
		_ = unix.Close(fd)
	}
}
