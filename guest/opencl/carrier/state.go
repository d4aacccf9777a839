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
	req := &gpuctlv1.ExportRequest{File: remote.StateName, Final: r.Final, All: r.All || c.exportedTo("state:"+r.File)}
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
	n := d.Msg.Usage.GetMemory()
	if n == 0 || n > remote.MaxState {
		return nil
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

// getState gets the state that the far executor has written.
func (c *carrier) getState(ctx context.Context, out *connect.ServerStream[gpuctlv1.Progress]) error {
	conn, err := c.dialer.Dial(ctx, remote.State)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if _, err := conn.Write(binary.LittleEndian.AppendUint64(nil, remote.GetState)); err != nil {
		return err
	}
	n, err := word(conn)
	if err != nil {
		return err
	}
	if n > remote.MaxState {
		return fmt.Errorf("state of %d bytes: %w", n, errHostile)
	}
	f := c.saving.f
	w := &counting{out: out, step: "copy", total: n}
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
	out         *connect.ServerStream[gpuctlv1.Progress]
	step        string
	done, total uint64
	last        time.Time
}

// Write implements io.Writer.
func (w *counting) Write(p []byte) (int, error) {
	w.done += uint64(len(p))
	if time.Since(w.last) > 50*time.Millisecond {
		w.last = time.Now()
		_ = w.out.Send(&gpuctlv1.Progress{Step: w.step, BytesDone: w.done, BytesTotal: w.total})
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
	w := &counting{out: out, step: "load", total: n}
	if _, err := io.Copy(conn, io.TeeReader(io.NewSectionReader(f, 0, st.Size()), w)); err != nil {
		return fmt.Errorf("bring %s: %w", f.Name(), err)
	}
	if got, err := word(conn); err != nil || got != n {
		return fmt.Errorf("bring %s: %w", f.Name(), errors.Join(err, errHostile))
	}
	return nil
}
