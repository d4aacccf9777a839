package beneath

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

var (
	// ErrKernel means that the kernel cannot open files safely.
	ErrKernel = errors.New("this kernel has no openat2, or a filter keeps it from us: Linux 5.6 or later is needed")
	// ErrNotRegular means that a name is not that of a regular file.
	ErrNotRegular = errors.New("not a regular file")
)

// OpenFile does the same as os.OpenFile for a name in a folder, or in folders below it.
// The path of dir is trusted; its content is not. Errors may wrap ErrKernel or
// ErrNotRegular.
func OpenFile(dir, name string, flags int, perm os.FileMode) (*os.File, error) {
	var mode uint64
	if flags&os.O_CREATE != 0 {
		mode = uint64(perm.Perm())
	}
	// Opening a named pipe or a device may block, or have an effect.
	f, err := open(dir, name, flags&^os.O_TRUNC|unix.O_NOCTTY|unix.O_NONBLOCK, mode)
	if err != nil {
		return nil, err
	}
	fd := int(f.Fd())
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		err = ErrNotRegular
	}
	if err == nil && flags&os.O_TRUNC != 0 {
		err = unix.Ftruncate(fd, 0) // truncate only after it is known to be a regular file
	}
	if err == nil {
		err = unix.SetNonblock(fd, false) // O_NONBLOCK is of no use for regular files
	}
	if err != nil {
		return nil, errors.Join(&os.PathError{Op: "open", Path: f.Name(), Err: err}, f.Close())
	}
	return f, nil
}

// OpenDir opens a folder in a folder, or in folders below it, for listing. "." is dir
// itself.
func OpenDir(dir, name string) (*os.File, error) {
	return open(dir, name, os.O_RDONLY|unix.O_DIRECTORY, 0)
}

func open(dir, name string, flags int, mode uint64) (*os.File, error) {
	path := filepath.Join(dir, name)
	fail := func(err error) error {
		if errors.Is(err, unix.ENOSYS) {
			err = ErrKernel
		}
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	d, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fail(err)
	}
	defer unix.Close(d)
	how := unix.OpenHow{
		Flags:   uint64(flags) | unix.O_CLOEXEC,
		Mode:    mode,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	}
	for {
		fd, err := unix.Openat2(d, name, &how)
		if err == nil {
			return os.NewFile(uintptr(fd), path), nil
		}
		if !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN) { // something was renamed meanwhile
			return nil, fail(err)
		}
	}
}

// ReadFile does the same as os.ReadFile, for a file of at most that many bytes.
func ReadFile(dir, name string, most int64) ([]byte, error) {
	f, err := OpenFile(dir, name, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, most+1))
	if err != nil {
		return nil, err
	}
	if int64(len(b)) > most {
		return nil, fmt.Errorf("%s is longer than %d bytes", f.Name(), most)
	}
	return b, nil
}

// Replace writes a file so that readers see either the old or the new content. It
// replaces an incomplete file that another process has left.
func Replace(dir, name string, b []byte, perm os.FileMode) error {
	tmp := name + ".new"
	f, err := OpenFile(dir, tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, perm)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, os.Remove(filepath.Join(dir, tmp)))
	}
	return os.Rename(filepath.Join(dir, tmp), filepath.Join(dir, name))
}
