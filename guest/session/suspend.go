package session

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/confine"
	"github.com/gpuctl/gpuctl/guest/engine"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/guest/statestream"
	"github.com/gpuctl/gpuctl/internal/beneath"
	"github.com/gpuctl/gpuctl/internal/room"
)

// Suspend saves the session's state to memory or to a file, or sends it to the host. Then
// it ends the session's executor. The application waits until resume.
func (m *Manager) Suspend(ctx context.Context, req *gpuctlv1.SuspendRequest, sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
	s, err := m.lookup(req.Session)
	if err != nil {
		return nil, err
	}
	if req.Away != "" {
		return s.suspendAway(ctx, req, sink)
	}
	w := &suspending{req: req, to: toMemory, export: &gpuctlv1.ExportRequest{Memory: true}}
	if req.File != "" {
		if !filepath.IsAbs(req.File) || filepath.Clean(req.File) != req.File {
			return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%q is not an absolute, clean path", req.File))
		}
		if o := req.Owner; o != nil {
			w.owner = &fileOwner{o.Uid, o.Gid}
		}
		look := func() error { _, err := os.Lstat(req.File); return err }
		if w.owner != nil {
			err = confine.AsOwner(w.owner.UID, w.owner.GID, look)
		} else {
			err = look()
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("%s exists, or can't be looked at", req.File))
		}
		w.to, w.part = req.File, partName(req.File, req.Session)
		w.export = &gpuctlv1.ExportRequest{File: w.part}
	}
	op, err := s.begin(ctx, kindSuspend, w.steps, req.FailAt, stillPatience(req.TimeoutMs, req.FreezeTimeoutMs), sink)
	if err != nil {
		return nil, err
	}
	return op.run(), nil
}

// suspending is the state that the steps of a suspend to memory or to a file share.
type suspending struct {
	req      *gpuctlv1.SuspendRequest
	to, part string     // where the state goes; the file's name until it is complete
	owner    *fileOwner // owner of the file; nil: gpuguest's user
	export   *gpuctlv1.ExportRequest
}

func (w *suspending) steps(op *operation) []engine.Step {
	return []engine.Step{
		{Name: stepCheck, Run: func(ctx context.Context) error {
			d, err := op.source.describeBusy(ctx, freezePatience(w.req.FreezeTimeoutMs), op)
			if err != nil {
				return err
			}
			op.freeze = d.Freezes + 1
			return engine.Refuse(roomFor(d.Usage.GetMemory(), w.req.File))
		}},
		// The file or memory is allocated and filled while the application runs.
		{Name: stepPrecopy, Undo: func(ctx context.Context) error { return op.s.dropWritten(ctx, op.source, w.to, w.part) }, Run: func(ctx context.Context) error {
			if err := op.s.update(func(r *record) { r.Op.File, r.FileOwner = w.to, w.owner }); err != nil {
				return err
			}
			if err := op.s.dropSaved("", w.part); err != nil {
				return err
			}
			if w.part != "" {
				if err := op.s.createState(ctx, op.source, w.part); err != nil {
					return err
				}
			}
			first := proto.CloneOf(w.export)
			first.All = true
			n, err := op.source.export(ctx, first, op)
			op.result.BytesPrecopied = n.bytes
			return err
		}},
		{Name: stepFreeze, Undo: op.thawSource, Run: func(ctx context.Context) error {
			return op.freezeSource(ctx, w.req.FreezeTimeoutMs)
		}},
		{Name: stepExport, Run: func(ctx context.Context) error {
			w.export.Final = true
			n, err := op.source.export(ctx, w.export, op)
			op.result.BytesFrozen = n.bytes
			if err != nil {
				return err
			}
			if w.part != "" {
				if err := op.s.finishState(w.part, w.to); err != nil {
					return err
				}
			}
			return replaceFile(op.s.dir, graphName, op.graph)
		}},
		op.mark(func(r *record) { r.SuspendedTo = w.to }),
		{Name: stepRetire, Run: func(ctx context.Context) error { return op.retireSource(op.source.retire(ctx)) }},
	}
}

// mark is the step that records that the session is suspended.
func (op *operation) mark(change func(*record)) engine.Step {
	s := op.s
	return engine.Step{Name: stepMark, Commit: true, Run: func(context.Context) error {
		if err := op.fault.Fail(stepMark); err != nil {
			return err
		}
		source := op.source.record()
		if err := s.update(func(r *record) { change(r); r.Op.Other = &source }); err != nil {
			return err
		}
		s.mem.setState(wire.StateSuspended)
		s.mu.Lock()
		s.current = nil
		s.mu.Unlock()
		op.recordDowntime()
		return nil
	}}
}

// suspendAway is suspend for a state that the VM has no room for. The state is sent while
// the application is frozen. The session drops its copy after the host has confirmed that
// it keeps all of it. Nothing is copied before the freeze, because there is no place where
// a part could wait for its newer version.
func (s *session) suspendAway(ctx context.Context, req *gpuctlv1.SuspendRequest, sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
	if req.File != "" {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("a state is kept on the host or in a file, not both"))
	}
	if err := checkStateID(req.Away); err != nil {
		return nil, err
	}
	w := &leaving{req: req, transit: newTransit(req.Away, true)}
	op, err := s.begin(ctx, kindSuspend, w.steps, req.FailAt, stillPatience(req.TimeoutMs, req.FreezeTimeoutMs), sink)
	if err != nil {
		return nil, err
	}
	defer op.offer(w.transit)()
	return op.run(), nil
}

// leaving is the state that the steps of a suspend share, if the state is sent to the host.
type leaving struct {
	req     *gpuctlv1.SuspendRequest
	transit *transit
	total   uint64 // bytes of memory objects
	mark    statestream.Mark
}

func (w *leaving) steps(op *operation) []engine.Step {
	return []engine.Step{
		{Name: stepCheck, Run: func(ctx context.Context) error {
			d, err := op.source.describeBusy(ctx, freezePatience(w.req.FreezeTimeoutMs), op)
			w.total, op.freeze = d.GetUsage().GetMemory(), d.GetFreezes()+1
			return err
		}},
		{Name: stepFreeze, Undo: op.thawSource, Run: func(ctx context.Context) error {
			return op.freezeSource(ctx, w.req.FreezeTimeoutMs)
		}},
		{Name: stepExport, Undo: func(context.Context) error { return op.s.dropSaved("", "") }, Run: func(ctx context.Context) (err error) {
			if err := replaceFile(op.s.dir, graphName, op.graph); err != nil {
				return err
			}
			w.mark, err = op.sendAway(ctx, w.transit, w.total)
			return err
		}},
		op.mark(func(r *record) { r.SuspendedTo, r.Away = toAway, newAwayRecord(w.mark) }),
		{Name: stepRetire, Run: func(ctx context.Context) error { return op.retireSource(op.source.retire(ctx)) }},
	}
}

// Resume makes a suspended session run on the target. If that fails, the session stays
// suspended and can be resumed on another GPU.
func (m *Manager) Resume(ctx context.Context, req *gpuctlv1.ResumeRequest, sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
	s, err := m.lookup(req.Session)
	if err != nil {
		return nil, err
	}
	target := req.Target
	if target == nil {
		s.mu.Lock()
		target = s.rec.Current.target() // the GPU that it ran on before
		s.mu.Unlock()
	}
	if err := checkTarget(target); err != nil {
		return nil, err
	}
	w := &resuming{target: target}
	op, err := s.begin(ctx, kindResume, w.steps, req.FailAt, stillPatience(req.TimeoutMs, 0), sink)
	if err != nil {
		return nil, err
	}
	saved := s.snapshot()
	w.saved = saved
	w.load = func(ctx context.Context) error {
		req := &gpuctlv1.LoadRequest{Memory: true}
		if saved.SuspendedTo != toMemory {
			if err := s.openState(ctx, op.target, saved.SuspendedTo); err != nil {
				return err
			}
			req = &gpuctlv1.LoadRequest{File: saved.SuspendedTo}
		}
		count := &counter{listener: op}
		err := op.target.load(ctx, req, count)
		op.result.BytesFrozen = count.bytes
		return err
	}
	if saved.SuspendedTo == toAway {
		t := newTransit(saved.GetAway().GetId(), false)
		defer op.offer(t)()
		w.load = func(ctx context.Context) error {
			want, err := statestream.MarkOf(saved.GetAway())
			if err != nil {
				return err
			}
			return op.receiveAway(ctx, t, want)
		}
	}
	return op.run(), nil
}

// resuming is the state that the steps of a resume share.
type resuming struct {
	target *gpuctlv1.Target
	saved  *gpuctlv1.Session // as it was when the operation began
	load   func(context.Context) error
}

func (w *resuming) steps(op *operation) []engine.Step {
	return []engine.Step{
		{Name: stepCheck, Run: func(context.Context) (err error) {
			if err := engine.Refuse(Reasons(w.saved.Usage, w.target.Limits)); err != nil {
				return err
			}
			op.graph, err = op.s.readGraph()
			return err
		}},
		{Name: stepStart, Undo: op.killTarget, Run: func(ctx context.Context) error {
			return op.startTarget(ctx, w.target, w.saved.Usage, 0)
		}},
		{Name: stepPrepare, Run: func(ctx context.Context) error {
			return op.target.prepare(ctx, &gpuctlv1.PrepareRequest{Graph: op.graph, Final: true}, op)
		}},
		{Name: stepLoad, Run: func(ctx context.Context) error {
			if err := w.load(ctx); err != nil {
				return err
			}
			return op.verify(ctx)
		}},
		{Name: stepSwitch, Commit: true, Run: func(ctx context.Context) error {
			op.s.mem.setState(wire.StateRunning)
			if err := op.handOver(ctx, w.saved.Generation); err != nil {
				if !errors.Is(err, errLost) {
					op.s.mem.setState(wire.StateSuspended)
				}
				return err
			}
			op.adoptTarget(func(r *record) { r.SuspendedTo, r.Away, r.Op.File = "", nil, w.saved.SuspendedTo })
			return nil
		}},
		{Name: stepDiscard, Run: func(context.Context) error { return op.s.dropSaved(w.saved.SuspendedTo, "") }},
	}
}

// dropSaved deletes a suspended state: what was saved to to, the part of a file that was
// being written, and the graph.
func (s *session) dropSaved(to, part string) error {
	var errs []error
	for _, f := range []string{to, part, s.graphPath()} {
		if f == "" || f == toAway {
			continue
		}
		switch f {
		case toMemory:
			errs = append(errs, s.mem.dropState())
		case s.graphPath():
			if err := os.Remove(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
			}
		default:
			errs = append(errs, s.removeState(f))
		}
	}
	return errors.Join(errs...)
}

// dropWritten is dropSaved for a state that the executor may still be writing. An executor
// that lives empties the state memory itself, because it would die when it writes there
// afterwards. If it does not do so now, the memory is used until the session's next suspend.
func (s *session) dropWritten(ctx context.Context, e *executor, to, part string) error {
	if e != nil {
		s.dropExport(ctx, e)
		if to == toMemory && !e.dead() {
			to = ""
		}
	}
	if isFile(to) {
		return errors.Join(s.removeWritten(to), s.dropSaved("", part))
	}
	return s.dropSaved(to, part)
}

// dropExport makes the executor give back what an export that is not needed has used.
func (s *session) dropExport(ctx context.Context, e *executor) {
	if err := e.discard(ctx); err != nil && !e.dead() {
		_ = ignore(s, err)
	}
}

// isFile reports whether to names a file that has a suspended session's state.
func isFile(to string) bool { return to != "" && to != toMemory && to != toAway }

func suspendedText(to string) string {
	if to == toAway {
		return "suspended, its state is out of the VM"
	}
	return "suspended to " + to
}

func (s *session) graphPath() string { return filepath.Join(s.dir, graphName) }

func (s *session) readGraph() ([]byte, error) {
	b, err := beneath.ReadFile(s.dir, graphName, mostGraph)
	if err != nil {
		return nil, fmt.Errorf("graph of session: %w", err)
	}
	return b, nil
}

// roomFor returns the reasons why so many bytes don't fit into the file's file system or,
// without a file, into memory. If the room is unknown, it returns none.
func roomFor(need uint64, file string) []*gpuctlv1.Reason {
	if file != "" {
		free, err := room.Folder(filepath.Dir(file))
		switch {
		case err != nil:
			return []*gpuctlv1.Reason{{Code: "file", Message: err.Error()}}
		case need > free:
			return []*gpuctlv1.Reason{{Code: "disk", Message: fmt.Sprintf(
				"the session's memory objects take %s, the file system of %s has %s left", formatBytes(need), file, formatBytes(free))}}
		}
		return nil
	}
	if free, err := room.Memory(); err == nil && need > free {
		return []*gpuctlv1.Reason{{Code: "host_memory", Message: fmt.Sprintf(
			"the session's memory objects take %s, the host has %s left", formatBytes(need), formatBytes(free))}}
	}
	return nil
}
