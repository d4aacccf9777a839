package testkit

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// muteFile tells a test's program to be what Unreadable starts.
const muteFile = "GPUCTL_TEST_MUTE_FILE"

func unreadableMain() {
	path := os.Getenv(muteFile)
	if path == "" {
		return
	}
	file, err := os.Open(path)
	if err == nil {
		var mem *os.File
		if mem, err = os.Open("/proc/self/mem"); err == nil {
			block(int(file.Fd()), int(mem.Fd()))
		}
	}
	panic(err)
}

// block has one thread read the process's own memory that the file is mapped to, for which the kernel
// keeps the list of mappings as it is, and another one wait to change that list. Who comes after that
// waits, too.
func block(file, mem int) {
	at, err := unix.Mmap(file, 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		panic(err)
	}
	var b [1]byte
	go func() {
		_, _, _ = unix.RawSyscall6(unix.SYS_PREAD64, uintptr(mem), uintptr(unsafe.Pointer(&b)), 1, uintptr(unsafe.Pointer(&at[0])), 0, 0)
	}()
	time.Sleep(100 * time.Millisecond)
	_, _, _ = unix.RawSyscall6(unix.SYS_MMAP, 0, uintptr(os.Getpagesize()), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, ^uintptr(0), 0)
}

// Unreadable starts a process whose command line, environment and mappings can't be read: who tries
// waits for a file server that does not answer. files are open in it. The test is skipped where there
// is no such server.
func Unreadable(t *testing.T, files ...*os.File) (pid int) {
	t.Helper()
	path, _, end := mute(t)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), muteFile+"="+path)
	cmd.ExtraFiles = files
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		end() // no signal ends it before
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	in := func(call int) bool { // a thread is in that system call
		all, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/syscall", cmd.Process.Pid))
		return slices.ContainsFunc(all, func(name string) bool {
			b, err := os.ReadFile(name)
			return err == nil && strings.HasPrefix(string(b), fmt.Sprintf("%d ", call))
		})
	}
	Until(t, "it can't be read", func() error {
		read, change := in(unix.SYS_PREAD64), in(unix.SYS_MMAP)
		return Want(read && change, [2]bool{read, change})
	})
	return cmd.Process.Pid
}

// Mute returns a file whose server never answers a read, and after hush not what the file's attributes
// are either. The test is skipped where none can be mounted.
func Mute(t *testing.T) (path string, hush func()) {
	t.Helper()
	path, hush, end := mute(t)
	t.Cleanup(end)
	return path, hush
}

func mute(t *testing.T) (path string, hush, end func()) {
	t.Helper()
	dir := t.TempDir()
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skip("no file server:", err)
	}
	if err := unix.Mount("gpuctl-test", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", fd)); err != nil {
		_ = unix.Close(fd)
		t.Skip("no file server:", err)
	}
	s := &server{fd: fd}
	over := make(chan struct{})
	go func() { defer close(over); s.serve() }()
	return filepath.Join(dir, "file"), func() { s.hushed.Store(true) }, func() {
		_ = unix.Unmount(dir, unix.MNT_FORCE|unix.MNT_DETACH) // who waits gets an error
		<-over
		_ = unix.Close(fd)
	}
}

// server speaks FUSE, of fuse(4), for a folder with one file.
type server struct {
	fd     int
	hushed atomic.Bool
}

func (s *server) serve() {
	const getattr, open, read, forget, interrupt, initialize, opendir, releasedir, lookup, all = 3, 14, 15, 2, 36, 26, 27, 29, 1, 42
	b := make([]byte, 1<<20)
	for {
		n, err := unix.Read(s.fd, b)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil { // not mounted any more
			return
		}
		op, unique, node := binary.NativeEndian.Uint32(b[4:]), binary.NativeEndian.Uint64(b[8:]), binary.NativeEndian.Uint64(b[16:])
		switch {
		case n < 40 || op == forget || op == interrupt || op == all || op == read || op == getattr && node != 1 && s.hushed.Load():
		case op == initialize:
			out := make([]byte, 64)
			binary.NativeEndian.PutUint32(out, 7)
			binary.NativeEndian.PutUint32(out[4:], 31)
			binary.NativeEndian.PutUint32(out[20:], 1<<16) // the largest write
			s.answer(unique, 0, out)
		case op == lookup:
			out := make([]byte, 40)
			binary.NativeEndian.PutUint64(out, 2)
			s.answer(unique, 0, append(out, attributes(2)...))
		case op == getattr:
			s.answer(unique, 0, append(make([]byte, 16), attributes(node)...))
		case op == open || op == opendir:
			s.answer(unique, 0, make([]byte, 16))
		case op == releasedir:
			s.answer(unique, 0, nil)
		default:
			s.answer(unique, -int32(syscall.ENOSYS), nil)
		}
	}
}

// attributes are those of the folder, 1, or of the file.
func attributes(node uint64) []byte {
	b := make([]byte, 88)
	mode := uint32(unix.S_IFREG | 0o644)
	if node == 1 {
		mode = unix.S_IFDIR | 0o755
	}
	binary.NativeEndian.PutUint64(b, node)
	binary.NativeEndian.PutUint64(b[8:], 1<<20)
	binary.NativeEndian.PutUint32(b[60:], mode)
	binary.NativeEndian.PutUint32(b[64:], 1)
	binary.NativeEndian.PutUint32(b[80:], 4096)
	return b
}

func (s *server) answer(unique uint64, err int32, body []byte) {
	b := make([]byte, 16, 16+len(body))
	binary.NativeEndian.PutUint32(b, uint32(16+len(body)))
	binary.NativeEndian.PutUint32(b[4:], uint32(err))
	binary.NativeEndian.PutUint64(b[8:], unique)
	_, _ = unix.Write(s.fd, append(b, body...))
}
