package confine

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	readFiles = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR
	runFiles  = readFiles | unix.LANDLOCK_ACCESS_FS_EXECUTE
	useFiles  = readFiles | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV | unix.LANDLOCK_ACCESS_FS_TRUNCATE
	ownFiles  = readFiles | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_TRUNCATE |
		unix.LANDLOCK_ACCESS_FS_REMOVE_DIR | unix.LANDLOCK_ACCESS_FS_REMOVE_FILE | unix.LANDLOCK_ACCESS_FS_REFER |
		unix.LANDLOCK_ACCESS_FS_MAKE_DIR | unix.LANDLOCK_ACCESS_FS_MAKE_REG | unix.LANDLOCK_ACCESS_FS_MAKE_SYM |
		unix.LANDLOCK_ACCESS_FS_MAKE_SOCK | unix.LANDLOCK_ACCESS_FS_MAKE_FIFO

	// ofFile are the rights that a rule for a file, not a folder, can have.
	ofFile = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_EXECUTE |
		unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
)

// systemFiles returns the folders with vendors' libraries and what they need. In /dev,
// devices can be written as far as their own rights allow, but nothing can be created.
// /proc and /sys can be read.
func systemFiles() []pathRights {
	return []pathRights{
		{"/usr", runFiles},
		{"/lib", runFiles},
		{"/lib32", runFiles},
		{"/lib64", runFiles},
		{"/bin", runFiles},
		{"/sbin", runFiles},
		{"/opt", runFiles},
		{"/etc", readFiles},
		{"/proc", readFiles},
		{"/sys", readFiles},
		{"/run/udev", readFiles},
		{"/dev", useFiles},
	}
}

// pathRights are the rights that a rule gives below a path.
type pathRights struct {
	path   string
	rights uint64
}

// Landlock returns the kernel's version of Landlock; 0: it has none.
func Landlock() int {
	v, _, e := syscall.RawSyscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if e != 0 {
		return 0
	}
	return int(v)
}

// handled returns the rights that are denied unless a rule grants them.
func handled(version int) uint64 {
	all := uint64(unix.LANDLOCK_ACCESS_FS_MAKE_SYM<<1 - 1) // all of version 1
	for v, right := range map[int]uint64{
		2: unix.LANDLOCK_ACCESS_FS_REFER,
		3: unix.LANDLOCK_ACCESS_FS_TRUNCATE,
		5: unix.LANDLOCK_ACCESS_FS_IOCTL_DEV,
	} {
		if version >= v {
			all |= right
		}
	}
	return all
}

// restrictFiles restricts the thread to the files of the policy. From version 6 on, it also
// blocks abstract sockets of others, and signals to processes of others. Without Landlock
// in the kernel, the user's own rights are the only limit.
func (p Policy) restrictFiles() error {
	version := Landlock()
	if version == 0 {
		return nil
	}
	attr := unix.LandlockRulesetAttr{Handled_access_fs: handled(version)}
	size := unsafe.Offsetof(attr.Handled_access_net)
	if version >= 6 {
		attr.Scoped = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL
		size = unsafe.Offsetof(attr.Quiet_access_fs)
	}
	set, _, e := syscall.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), size, 0)
	if e != 0 {
		return fmt.Errorf("landlock: %w", e)
	}
	defer unix.Close(int(set))
	for _, f := range systemFiles() {
		if err := allow(int(set), f.path, f.rights&attr.Handled_access_fs); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for rights, paths := range map[uint64][]string{runFiles: append([]string{p.Program}, p.Read...), ownFiles: p.Write} {
		for _, path := range paths {
			// A path that does not exist will not be used either.
			if err := allow(int(set), path, rights&attr.Handled_access_fs); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	if _, _, e := syscall.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, set, 0, 0); e != 0 {
		return fmt.Errorf("landlock: %w", e)
	}
	return nil
}

func allow(set int, path string, rights uint64) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("landlock: %s: %w", path, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("landlock: %s: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		rights &= ofFile
	}
	// The kernel's struct has no padding after parent_fd, and Go's has. That does no harm.
	rule := unix.LandlockPathBeneathAttr{Allowed_access: rights, Parent_fd: int32(fd)}
	if _, _, e := syscall.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(set), unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&rule)), 0, 0, 0); e != 0 {
		return fmt.Errorf("landlock: %s: %w", path, e)
	}
	return nil
}
