package confine

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// ErrNoExec is returned for a folder that programs and libraries can't be loaded from.
var ErrNoExec = errors.New("its file system is mounted with noexec")

// Loadable reports whether processes can load programs and libraries from a folder. The
// error wraps ErrNoExec if its file system does not allow that to anybody.
func Loadable(folder string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(folder, &st); err != nil {
		return fmt.Errorf("%s: %w", folder, err)
	}
	if st.Flags&unix.ST_NOEXEC != 0 {
		return fmt.Errorf("%s: %w", folder, ErrNoExec)
	}
	return nil
}

// MakeLoadable lets processes load libraries from a folder, also where its file system is
// mounted with noexec, as /run is by many distributions. The content of the folder stays as
// it is, and the rest of the file system keeps its noexec. It needs root's rights to mount.
func MakeLoadable(folder string) error {
	no := Loadable(folder)
	if !errors.Is(no, ErrNoExec) {
		return no
	}
	var st unix.Statfs_t
	if err := unix.Statfs(folder, &st); err != nil {
		return fmt.Errorf("%s: %w", folder, err)
	}
	// What is mounted below it stays there.
	if err := unix.Mount(folder, folder, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("%w, and that can't be changed: %w", no, err)
	}
	if err := unix.Mount("", folder, "", unix.MS_REMOUNT|unix.MS_BIND|mountFlags(uint64(st.Flags)), ""); err != nil {
		return errors.Join(fmt.Errorf("%w, and that can't be changed: %w", no, err), unix.Unmount(folder, unix.MNT_DETACH))
	}
	return Loadable(folder)
}

// mountFlags returns the flags to mount a file system as it is mounted now, but without
// noexec. Devices and set-user-ID programs are not allowed in any case.
func mountFlags(now uint64) uintptr {
	flags := uintptr(unix.MS_NOSUID | unix.MS_NODEV)
	for _, f := range []struct{ st, ms uint64 }{
		{unix.ST_RDONLY, unix.MS_RDONLY},
		{unix.ST_NOATIME, unix.MS_NOATIME},
		{unix.ST_NODIRATIME, unix.MS_NODIRATIME},
		{unix.ST_RELATIME, unix.MS_RELATIME},
	} {
		if now&f.st != 0 {
			flags |= uintptr(f.ms)
		}
	}
	return flags
}
