package mpqemu

import (
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// ErrNoMemory means that not all of a range is memory of the VM.
var ErrNoMemory = errors.New("not memory of the VM")

// guest implements mmio.Guest with the files that QEMU has sent.
type guest struct {
	mu    sync.RWMutex
	areas []area
	files []int
	raise *raiser // nil: there is no interrupt
}

func closeAll(files []int) {
	for _, f := range files {
		_ = unix.Close(f)
	}
}

// memory replaces the VM's memory. It takes over the files.
func (g *guest) memory(areas []area, files []int) error {
	for i, f := range files {
		var st unix.Stat_t
		err := unix.Fstat(f, &st)
		if err == nil {
			err = inMemory(f)
		}
		if err == nil && (st.Mode&unix.S_IFMT != unix.S_IFREG || areas[i].offset+int64(areas[i].size) > st.Size) {
			err = fmt.Errorf("%w: file %d has not the %d bytes of memory at %#x", ErrProtocol, i, areas[i].size, areas[i].start)
		}
		if err != nil {
			closeAll(files)
			return err
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	closeAll(g.files)
	g.areas, g.files = areas, files
	return nil
}

// inMemory returns an error for a file that is not in this host's memory. Who serves another
// kind of file may let a read of it take as long as it likes, and the GPU waits.
func inMemory(f int) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(f, &st); err != nil {
		return err
	}
	if st.Type != unix.TMPFS_MAGIC && st.Type != unix.HUGETLBFS_MAGIC {
		return fmt.Errorf("%w: the VM's memory is in a file of a file system %#x: use memory-backend-memfd", ErrProtocol, st.Type)
	}
	return nil
}

// raiser writes an eventfd of KVM, in a goroutine of its own: whether that blocks is up to
// QEMU, which has the same file, and may change its mind. Then only this VM's interrupts wait.
type raiser struct{ asked chan struct{} }

func newRaiser(fd int) *raiser {
	r := &raiser{asked: make(chan struct{}, 1)}
	go func() {
		defer unix.Close(fd)
		one := [8]byte{1}
		for range r.asked {
			_, _ = unix.Write(fd, one[:]) // it fails only where an interrupt is pending already
		}
	}()
	return r
}

// ask has the interrupt raised. One that is asked for already is the same.
func (r *raiser) ask() {
	if r == nil {
		return
	}
	select {
	case r.asked <- struct{}{}:
	default:
	}
}

func (r *raiser) stop() {
	if r != nil {
		close(r.asked)
	}
}

// interrupts replaces the VM's interrupt. It takes over the files.
func (g *guest) interrupts(files []int) error {
	flags, err := unix.FcntlInt(uintptr(files[0]), unix.F_GETFL, 0)
	if err == nil && flags&unix.O_NONBLOCK == 0 {
		err = fmt.Errorf("%w: an interrupt whose file blocks", ErrProtocol)
	}
	if err != nil {
		closeAll(files)
		return err
	}
	_ = unix.Close(files[1]) // says that the VM has acknowledged it
	g.mu.Lock()
	defer g.mu.Unlock()
	g.raise.stop()
	g.raise = newRaiser(files[0])
	return nil
}

func (g *guest) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	closeAll(g.files)
	g.areas, g.files = nil, nil
	g.raise.stop()
	g.raise = nil
}

// each calls do for the parts of a range, each in one file.
func (g *guest) each(gpa uint64, p []byte, do func(fd int, p []byte, at int64) (int, error)) error {
	g.mu.RLock()
	defer g.mu.RUnlock()
	for len(p) > 0 {
		i := 0
		for ; i < len(g.areas); i++ {
			if a := g.areas[i]; gpa >= a.start && gpa-a.start < a.size {
				break
			}
		}
		if i == len(g.areas) {
			return fmt.Errorf("%d bytes at %#x: %w", len(p), gpa, ErrNoMemory)
		}
		in := gpa - g.areas[i].start
		n := min(uint64(len(p)), g.areas[i].size-in)
		done, err := do(g.files[i], p[:n], g.areas[i].offset+int64(in))
		if err == nil && done == 0 {
			err = ErrNoMemory // the file has become shorter
		}
		if err != nil {
			return fmt.Errorf("%d bytes at %#x: %w", len(p), gpa, err)
		}
		p, gpa = p[done:], gpa+uint64(done)
	}
	return nil
}

// ReadMemory implements mmio.Guest.
func (g *guest) ReadMemory(gpa uint64, p []byte) error { return g.each(gpa, p, unix.Pread) }

// WriteMemory implements mmio.Guest.
func (g *guest) WriteMemory(gpa uint64, p []byte) error {
	return g.each(gpa, p, func(fd int, p []byte, at int64) (int, error) {
		var st unix.Stat_t // pwrite would make a short file longer
		if err := unix.Fstat(fd, &st); err != nil {
			return 0, err
		}
		if at >= st.Size {
			return 0, nil
		}
		return unix.Pwrite(fd, p[:min(int64(len(p)), st.Size-at)], at)
	})
}

// MemorySize implements mmio.Guest.
func (g *guest) MemorySize() (end uint64) {
	g.mu.RLock()
	defer g.mu.RUnlock()
	for _, a := range g.areas {
		end = max(end, a.start+a.size)
	}
	return end
}

// Interrupt implements mmio.Guest.
func (g *guest) Interrupt(up bool) {
	g.mu.RLock()
	defer g.mu.RUnlock()
	if up {
		g.raise.ask()
	}
}
