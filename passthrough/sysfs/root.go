package sysfs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// ErrStuck means that the kernel did not return from a write in time. The write may still
// take effect. That can only be found out by reading later.
var ErrStuck = errors.New("the kernel has not returned from the write")

// Root is a host's files as its kernel shows them. Names are those of [fs.ValidPath],
// such as sys/bus/pci/drivers_probe.
type Root interface {
	fs.FS
	fs.ReadFileFS
	fs.ReadDirFS
	fs.ReadLinkFS

	// Write writes data to an existing file with one write(2). Errors wrap those of the
	// kernel. The error wraps ErrStuck if the kernel does not return before ctx ends. If
	// ctx has ended before, nothing is written.
	Write(ctx context.Context, name, data string) error
}

// Dir returns the host's files below path, which is / except in tests.
func Dir(path string) Root {
	return &dir{os.DirFS(path), path, sync.Mutex{}, map[write]bool{}}
}

type dir struct {
	fs.FS
	path string

	mu    sync.Mutex
	stuck map[write]bool // writes from which the kernel has not returned
}

// write is data and the file to which it is written.
type write struct{ name, data string }

func (d *dir) ReadFile(name string) ([]byte, error)       { return fs.ReadFile(d.FS, name) }
func (d *dir) ReadDir(name string) ([]fs.DirEntry, error) { return fs.ReadDir(d.FS, name) }
func (d *dir) ReadLink(name string) (string, error)       { return fs.ReadLink(d.FS, name) }
func (d *dir) Lstat(name string) (fs.FileInfo, error)     { return fs.Lstat(d.FS, name) }

func (d *dir) Write(ctx context.Context, name, data string) error {
	if !fs.ValidPath(name) {
		return &fs.PathError{Op: "write", Path: name, Err: fs.ErrInvalid}
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	w := write{name, data}
	// A second thread would block in the same place.
	if !d.begin(w) {
		return fmt.Errorf("write %.40q to %s: %w since an earlier call", data, name, ErrStuck)
	}
	done := make(chan error, 1)
	go func() {
		err := writeOnce(filepath.Join(d.path, name), data)
		d.end(w)
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			return &fs.PathError{Op: "write", Path: name, Err: err}
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("write %.40q to %s: %w (%w)", data, name, ErrStuck, context.Cause(ctx))
	}
}

func (d *dir) begin(w write) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.stuck[w] {
		return false
	}
	d.stuck[w] = true
	return true
}

func (d *dir) end(w write) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.stuck, w)
}

// writeOnce uses system calls directly, because data in two writes would be two commands
// to the kernel. It truncates, as a shell does: the kernel's files ignore that, and in a
// copy of them no rest of a longer value stays.
func writeOnce(path, data string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_TRUNC|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for {
		n, err := unix.Write(fd, []byte(data))
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case n < len(data):
			return io.ErrShortWrite
		default:
			return nil
		}
	}
}
