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

// ErrStuck says that the kernel had not returned from a write when its time
// was up. It may still do what it was told: only what is read later tells.
var ErrStuck = errors.New("the kernel has not returned from the write")

// Root is a machine's files as its kernel shows them. Names are those of
// [fs.ValidPath], as sys/bus/pci/drivers_probe.
type Root interface {
	fs.FS
	fs.ReadFileFS
	fs.ReadDirFS
	fs.ReadLinkFS

	// Write gives data to an existing file with one write(2). Errors are
	// those of the kernel, by errors.Is; ErrStuck if the kernel does not
	// return before ctx ends. If ctx has ended before, nothing is written.
	Write(ctx context.Context, name, data string) error
}

// Dir is the machine below path, which is / but in tests.
func Dir(path string) Root {
	return &dir{os.DirFS(path), path, sync.Mutex{}, map[write]bool{}}
}

type dir struct {
	fs.FS
	path string

	mu    sync.Mutex
	stuck map[write]bool // from which the kernel has not returned
}

// write is what was written where.
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
	// A second thread would wait where the first does.
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

// writeOnce uses the calls themselves: a store that is cut in two is two
// commands to the kernel. It truncates, as a shell does: that means nothing to
// the kernel's files, and no copy of them keeps the end of what was longer.
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
