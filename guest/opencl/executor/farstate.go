package executor

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/opencl/remote"
)

// farState is the state file of a far executor, in memory of this host. The carrier gets it
// after a suspend, and brings it before a resume.
type farState struct {
	mu sync.Mutex
	f  *os.File
}

// create makes a new, empty file.
func (x *farState) create() (*os.File, error) {
	fd, err := unix.MemfdCreate("gpuctl-far-state", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("state: %w", err)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.f != nil {
		x.f.Close()
	}
	x.f = os.NewFile(uintptr(fd), remote.StateName)
	return x.open()
}

// open returns the file once more. The caller holds x.mu.
func (x *farState) open() (*os.File, error) {
	if x.f == nil {
		return nil, fmt.Errorf("the carrier has brought no state: %w", ErrState)
	}
	fd, err := unix.FcntlInt(x.f.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("state: %w", err)
	}
	return os.NewFile(uintptr(fd), remote.StateName), nil
}

func (f *farEnd) stateFile(name string, create bool) (*os.File, error) {
	if name != remote.StateName {
		return nil, fmt.Errorf("state file %q: %w", name, ErrState)
	}
	if create {
		return f.state.create()
	}
	f.state.mu.Lock()
	defer f.state.mu.Unlock()
	return f.state.open()
}

// serve sends or receives the file.
func (x *farState) serve(conn net.Conn) error {
	var b [8]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		return err
	}
	n := binary.LittleEndian.Uint64(b[:])
	if n == remote.GetState {
		x.mu.Lock()
		f, err := x.open()
		x.mu.Unlock()
		if err != nil {
			return err
		}
		defer f.Close()
		st, err := f.Stat()
		if err != nil {
			return err
		}
		if _, err := conn.Write(binary.LittleEndian.AppendUint64(nil, uint64(st.Size()))); err != nil {
			return err
		}
		_, err = io.Copy(conn, io.NewSectionReader(f, 0, st.Size()))
		return err
	}
	if n > remote.MaxState {
		return fmt.Errorf("state of %d bytes: %w", n, errHostile)
	}
	f, err := x.create()
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := io.CopyN(f, conn, int64(n)); err != nil {
		return err
	}
	_, err = conn.Write(b[:])
	return err
}

// fetchContents gets what a session suspended to memory has left in the arena of the
// application's host.
func (s *session) fetchContents(ctx context.Context) error {
	if s.far == nil {
		return nil
	}
	var need []remote.Block
	s.mu.Lock()
	s.each(func(_ uint32, _ uint64, o any) {
		if m, ok := o.(*mem); ok && m.parent == nil && m.kind == memBuffer && m.inArena {
			need = append(need, remote.Range(m.arena, m.size))
		}
	})
	s.mu.Unlock()
	for i := range need {
		if err := need[i].Check(s.split); err != nil {
			return err
		}
		s.far.send(s.far.commands, remote.KindNeed, need[i].Append(nil), nil)
	}
	return s.far.sync(ctx)
}
