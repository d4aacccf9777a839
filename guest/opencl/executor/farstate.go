package executor

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/internal/room"
	"github.com/gpuctl/gpuctl/internal/size"
)

// farState is the state file of a far executor, in memory of this host. The carrier gets it
// after a suspend, and brings it before a resume.
type farState struct {
	mu sync.Mutex
	f  *os.File

	receives sync.Mutex // one at a time: each takes the memory that it says
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

// mostState returns how many bytes a state can have that is brought for the objects of this
// session, and these in words. It may have room for objects that were released while it was
// written, as many as the session may have.
func (s *session) mostState() (most uint64, what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	objects := uint64(0)
	s.each(func(_ uint32, _ uint64, o any) {
		if m, ok := o.(*mem); ok && m.parent == nil {
			objects++
		}
	})
	limit := min(s.memoryLimit(), remote.MaxState)
	most = s.memory + limit + 2*objects*(4096+entrySize) + 64<<20
	return most, fmt.Sprintf("the session has %s in %d memory objects and may have %s", size.Format(s.memory), objects, size.Format(limit))
}

// receive receives a state of n bytes, if the session can have such a one and this host has
// room for it.
func (x *farState) receive(conn io.Reader, n, most uint64, what string) error {
	if n > most {
		return fmt.Errorf("a state of %s comes from the carrier, and %s: %s at most: %w", size.Format(n), what, size.Format(most), errHostile)
	}
	if have, err := room.Memory(); err != nil || n > have {
		return errors.Join(err, fmt.Errorf("a state of %s comes from the carrier, and this host has %s of memory left", size.Format(n), size.Format(have)))
	}
	f, err := x.create()
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.CopyN(f, conn, int64(n))
	return err
}

// serve sends or receives the file.
func (x *farState) serve(conn net.Conn, s *session) error {
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
	if !x.receives.TryLock() {
		return fmt.Errorf("a second state comes beside another one: %w", errHostile)
	}
	defer x.receives.Unlock()
	most, what := s.mostState()
	if err := x.receive(conn, n, most, what); err != nil {
		return err
	}
	_, err := conn.Write(b[:])
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
