package carrier

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/internal/room"
	"github.com/gpuctl/gpuctl/internal/size"
)

// saving is a state that is being written: the file, or the state memory. It is protected by
// the controller's lock.
type saving struct {
	f      *os.File
	name   string // of the file; "" is the state memory
	memory bool
}

// exportState suspends the session to a file or to memory of this host. The far executor
// writes the state into memory of its own, as into a file. The whole of it comes here when
// the session is frozen.
func (c *carrier) exportState(ctx context.Context, r *gpuctlv1.ExportRequest, out *connect.ServerStream[gpuctlv1.Progress]) error {
	if r.All || c.saving.f == nil || c.saving.name != r.File || c.saving.memory != r.Memory {
		c.dropState()
		if err := c.beginState(ctx, r); err != nil {
			return err
		}
	}
	other := c.exportedTo("state:" + r.File)
	req := &gpuctlv1.ExportRequest{File: remote.StateName, Final: r.Final, All: r.All || other}
	err := relay(ctx, connect.NewRequest(req), out, c.far.Export)
	if err == nil && r.Final {
		err = c.getState(ctx, out)
	}
	if err != nil {
		c.exportedTo("")
		c.dropState()
		var ce *connect.Error
		if !errors.As(err, &ce) {
			err = connect.NewError(connect.CodeInternal, err)
		}
	}
	return err
}

// beginState reserves room while the session runs.
func (c *carrier) beginState(ctx context.Context, r *gpuctlv1.ExportRequest) error {
	d, err := unary(ctx, connect.NewRequest(&gpuctlv1.DescribeRequest{}), c.far.Describe)
	if err != nil {
		return err
	}
	s := saving{f: c.state, memory: true}
	if !r.Memory {
		f, err := c.files.take(r.File)
		if err != nil {
			return connect.NewError(connect.CodeInvalidArgument, err)
		}
		s = saving{f: f, name: r.File}
	} else if err := c.state.Truncate(0); err != nil {
		return connect.NewError(connect.CodeInternal, fmt.Errorf("state memory: %w", err))
	}
	c.saving = s
	n := d.Msg.GetUsage().GetMemory()
	if n == 0 {
		return nil
	}
	if err := c.mayHave(n); err != nil {
		c.dropState()
		return err
	}
	if err := s.hasRoom(n); err != nil {
		c.dropState()
		return err
	}
	if err := unix.Fallocate(int(s.f.Fd()), 0, 0, int64(n)); err != nil && (s.memory || !errors.Is(err, unix.EOPNOTSUPP)) {
		c.dropState()
		return connect.NewError(connect.CodeInternal, fmt.Errorf("room for %d bytes of state in %s: %w", n, s.f.Name(), err))
	}
	return nil
}

// dropState forgets a state that is not needed.
func (c *carrier) dropState() {
	switch s := c.saving; {
	case s.f == nil:
	case s.memory:
		_ = c.state.Truncate(0)
	default:
		s.f.Close()
	}
	c.saving = saving{}
}

// tooMuch refuses what a far host sends.
func tooMuch(format string, args ...any) error {
	return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("the far host: "+format, args...))
}

// mayHave returns an error if the far executor reports more memory objects than the lease
// permits.
func (c *carrier) mayHave(memory uint64) error {
	if most := c.cfg.Remote.GetMemory(); most > 0 && memory > most {
		return tooMuch("it says that the session has %s of memory objects, and the session may have %s there: %w", size.Format(memory), size.Format(most), errHostile)
	}
	return nil
}

// hasRoom returns an error if this host has no room for a state of so many bytes.
func (s saving) hasRoom(n uint64) error {
	left, where := room.File, "the file system of "+s.name
	if s.memory {
		left, where = room.MemoryFile, "the memory of this host"
	}
	have, err := left(s.f)
	if err != nil {
		return fmt.Errorf("room for a state of %s: %w", size.Format(n), err)
	}
	if n > have {
		return tooMuch("a state of %s comes from it, and %s has %s left for it", size.Format(n), where, size.Format(have))
	}
	return nil
}

// mostState returns how many bytes the state of a session can have, by what the far executor
// has reported of it after its freeze. The state has room for each object, and for those
// that were released since the first were written.
func mostState(u *gpuctlv1.Usage, may uint64) uint64 {
	objects := uint64(u.GetBuffers()) + uint64(u.GetImages())
	return u.GetMemory() + max(u.GetMemory(), may) + 2*objects*stateObject + stateSlack
}

const (
	stateObject = 4096 + 32 // bytes that an object takes beside its contents, at most: it begins with a page, and is in the index
	stateSlack  = 64 << 20  // for what was released since, and has no bound of its own
)

// getState gets the state that the far executor has written.
func (c *carrier) getState(ctx context.Context, out *connect.ServerStream[gpuctlv1.Progress]) error {
	d, err := unary(ctx, connect.NewRequest(&gpuctlv1.DescribeRequest{}), c.far.Describe)
	if err != nil {
		return err
	}
	if err := c.mayHave(d.Msg.GetUsage().GetMemory()); err != nil {
		return err
	}
	conn, err := c.dialer.Dial(ctx, remote.State)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	return c.receiveState(conn, d.Msg.GetUsage(), func(done, total uint64) {
		_ = out.Send(&gpuctlv1.Progress{Step: "copy", BytesDone: done, BytesTotal: total})
	})
}

// receiveState receives the state of a session that uses so much. Nothing is written of one
// that is larger than it can be, or than there is room for.
func (c *carrier) receiveState(conn io.ReadWriter, usage *gpuctlv1.Usage, report func(done, total uint64)) error {
	if _, err := conn.Write(binary.LittleEndian.AppendUint64(nil, remote.GetState)); err != nil {
		return err
	}
	n, err := word(conn)
	if err != nil {
		return err
	}
	if most := mostState(usage, c.cfg.Remote.GetMemory()); n > min(most, remote.MaxState) {
		return tooMuch("a state of %s comes from it, and that of a session with %s in %d buffers and %d images, which may have %s, has %s at most: %w",
			size.Format(n), size.Format(usage.GetMemory()), usage.GetBuffers(), usage.GetImages(), size.Format(c.cfg.Remote.GetMemory()), size.Format(most), errHostile)
	}
	if err := c.saving.hasRoom(n); err != nil {
		return err
	}
	f := c.saving.f
	w := &counting{report: report, total: n}
	if _, err := io.CopyN(io.NewOffsetWriter(f, 0), io.TeeReader(conn, w), int64(n)); err != nil {
		return fmt.Errorf("write %s: %w", f.Name(), err)
	}
	if err := f.Truncate(int64(n)); err != nil {
		return fmt.Errorf("write %s: %w", f.Name(), err)
	}
	if c.saving.memory {
		return nil
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("write %s: %w", f.Name(), err)
	}
	return nil
}

// counting reports progress, so that the caller sees that a long copy goes on.
type counting struct {
	report      func(done, total uint64)
	done, total uint64
	last        time.Time
}

// Write implements io.Writer.
func (w *counting) Write(p []byte) (int, error) {
	w.done += uint64(len(p))
	if time.Since(w.last) > 50*time.Millisecond {
		w.last = time.Now()
		w.report(w.done, w.total)
	}
	return len(p), nil
}

// Load implements ExecutorService. It brings the state to the far executor, which then loads
// it as from a file.
func (k *controller) Load(ctx context.Context, r *connect.Request[gpuctlv1.LoadRequest], out *connect.ServerStream[gpuctlv1.Progress]) error {
	k.op.Lock()
	defer k.op.Unlock()
	c := k.c
	f := c.state
	if !r.Msg.Memory {
		var err error
		if f, err = c.files.take(r.Msg.File); err != nil {
			return connect.NewError(connect.CodeNotFound, err)
		}
		defer f.Close()
	}
	if err := c.bringState(ctx, f, out); err != nil {
		return connect.NewError(connect.CodeInternal, err)
	}
	return relay(ctx, connect.NewRequest(&gpuctlv1.LoadRequest{File: remote.StateName}), out, c.far.Load)
}

func (c *carrier) bringState(ctx context.Context, f *os.File, out *connect.ServerStream[gpuctlv1.Progress]) error {
	st, err := f.Stat()
	if err != nil {
		return fmt.Errorf("state: %w", err)
	}
	conn, err := c.dialer.Dial(ctx, remote.State)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	n := uint64(st.Size())
	if _, err := conn.Write(binary.LittleEndian.AppendUint64(nil, n)); err != nil {
		return err
	}
	w := &counting{total: n, report: func(done, total uint64) {
		_ = out.Send(&gpuctlv1.Progress{Step: "load", BytesDone: done, BytesTotal: total})
	}}
	if _, err := io.Copy(conn, io.TeeReader(io.NewSectionReader(f, 0, st.Size()), w)); err != nil {
		return fmt.Errorf("bring %s: %w; if the far executor does not take it, its log says why", f.Name(), err)
	}
	if got, err := word(conn); err != nil || got != n {
		return fmt.Errorf("bring %s: %w", f.Name(), errors.Join(err, errHostile))
	}
	return nil
}
