package cuda

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/cuda/criu"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
	"github.com/gpuctl/gpuctl/guest/engine"
	"github.com/gpuctl/gpuctl/internal/random"
)

// Revive makes the processes of a folder again, on the target's GPUs or those that they had.
// The folder is left as it is if that fails, and marked as used if not.
func (m *Manager) Revive(ctx context.Context, dir string, target *gpuctlv1.Target, failAt string, sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
	return m.revive(ctx, dir, "", target, failAt, sink)
}

// revive does the same for a claim.
func (m *Manager) revive(ctx context.Context, dir, claim string, target *gpuctlv1.Target, failAt string, sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
	s, disk, err := m.inFolder(dir, criu.Open)
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil { // the files were compared, which takes long
		return nil, err
	}
	s.rec.Claim = claim
	op, err := s.begin(ctx, kindRevive, target, 0, failAt, quiet(sink))
	if err != nil {
		return nil, err
	}
	op.dir, op.disk = dir, disk
	if err := m.register(s, nil); err != nil { // after begin: it is never seen without its operation
		op.Over()
		return nil, err
	}
	return op.run(), nil
}

// planFolder plans a store of a session, or a revival without one.
func (m *Manager) planFolder(ctx context.Context, req *gpuctlv1.PlanRequest) (*gpuctlv1.PlanResponse, error) {
	kind := kindRevive
	var s *session
	var disk *criu.Manifest
	var err error
	if req.GetSession() == "" {
		s, disk, err = m.inFolder(req.GetFolder(), criu.Read)
	} else {
		kind = kindStore
		s, err = m.lookup(req.GetSession())
		if err == nil && s.snapshot().GetSuspendedTo() != "" {
			err = connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("session %s is suspended; resume it first", s.id))
		}
	}
	if err != nil {
		return nil, err
	}
	c, err := m.look(ctx)
	if err != nil {
		return nil, noDriver(err)
	}
	_, rs := s.assess(c, kind, req.GetTarget())
	op := &operation{s: s, kind: kind, dir: req.GetFolder(), disk: disk}
	if kind == kindStore {
		more, err := m.planMembers(ctx, c, s)
		if err != nil {
			return nil, err
		}
		rs = append(append(rs, more...), op.checkStore(ctx, c)...)
	} else {
		rs = append(rs, op.checkRevive(ctx, c)...)
	}
	resp := s.planned(kind, rs)
	resp.Bytes = max(resp.Bytes, op.bytes)
	if kind == kindRevive {
		resp.Session = s.snapshot()
	}
	return resp, nil
}

// inFolder returns the session that is in a folder. It is not one of the manager's yet.
func (m *Manager) inFolder(dir string, open func(string) (*criu.Manifest, error)) (*session, *criu.Manifest, error) {
	fail := func(err error) (*session, *criu.Manifest, error) {
		return nil, nil, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	if m.cfg.UID != 0 {
		return fail(errors.New("only root's gpuguest makes processes again"))
	}
	disk, err := open(dir)
	if err != nil {
		return fail(err)
	}
	rec, err := recordOf(disk)
	if err != nil {
		return fail(fmt.Errorf("%s: %w: its session: %w", dir, criu.ErrFolder, err))
	}
	if s, err := m.lookup(rec.ID); err == nil {
		return fail(fmt.Errorf("session %s, which is in %s, is here already: %s", rec.ID, dir, s.snapshot().GetState()))
	}
	return &session{m: m, id: rec.ID, rec: *rec, log: m.log}, disk, nil
}

// recordOf returns the session's record of a manifest.
func recordOf(disk *criu.Manifest) (*record, error) {
	rec, err := parseRecord(disk.State)
	if err != nil {
		return nil, err
	}
	hex, ok := strings.CutPrefix(rec.ID, idPrefix)
	switch {
	case !ok || len(hex) != 8 || strings.Trim(hex, "0123456789abcdef") != "" || rec.ID != disk.Session:
		return nil, fmt.Errorf("its id is %.32q", rec.ID)
	case rec.Op != nil || rec.Lost != "" || rec.SuspendedTo != "":
		return nil, errors.New("it was not running when it was suspended")
	case rec.PID != disk.Root:
		return nil, fmt.Errorf("its first process is %d, not %d", rec.PID, disk.Root)
	}
	for _, mb := range rec.Members {
		if !slices.ContainsFunc(disk.Processes, func(p criu.Process) bool { return p.PID == mb.PID }) {
			return nil, fmt.Errorf("its process %d is none of the folder's", mb.PID)
		}
	}
	return rec, nil
}

// checkRevive checks that the processes can be made here.
func (op *operation) checkRevive(ctx context.Context, c *machine) (rs reasons) {
	op.checkCRIU(ctx, &rs)
	if c.Driver != op.disk.Driver {
		rs.add(ReasonDriver, "the processes are of driver %s, and here is %s: it must be the same", op.disk.Driver, c.Driver)
	}
	op.bytes = 0
	for _, f := range op.disk.Files {
		op.bytes += uint64(f.Size)
	}
	if have, err := op.s.m.availableMemory(); err != nil || op.bytes+op.bytes/100*hostMargin > have {
		rs.add(ReasonMemory, "the processes take %s of host memory, and %s are available without swapping", size(op.bytes), size(have))
	}
	op.checkNumbers(&rs)
	return rs
}

func (op *operation) checkNumbers(rs *reasons) {
	for _, p := range op.disk.Processes {
		for _, id := range append([]int{p.PID}, p.Threads...) {
			if op.s.m.cfg.Roots.Taken(id) {
				rs.add(ReasonPID, "a process here has the number %d, which one of the folder must have (%s)", id, p.Name)
				break
			}
		}
	}
}

// makeTree has criu make the processes again. What it makes is journalled before.
func (op *operation) makeTree(ctx context.Context) error {
	s := op.s
	var rs reasons
	if op.checkNumbers(&rs); len(rs) > 0 {
		return engine.Refuse(rs)
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return err
	}
	d := &diskRecord{Dir: op.dir, Token: random.Hex(8), Since: uint64(now.Sec)*100 + uint64(now.Nsec)/1e7}
	for _, p := range op.disk.Processes {
		d.Tree = append(d.Tree, treeProc{PID: p.PID, Name: p.Name, Layout: p.Layout})
	}
	if err := s.update(func(r *record) { r.Op.Disk = d }); err != nil {
		return err
	}
	op.at("noted")
	if err := criu.Take(op.dir, d.Token); err != nil {
		return err
	}
	op.at("taken")
	if err := s.m.cfg.CRIU.Restore(ctx, op.dir, op.limit(), op.beganCRIU); err != nil {
		return err
	}
	op.at("made")
	starts := map[int]uint64{}
	for i := range d.Tree {
		p := &d.Tree[i]
		pin, err := holders.Pin(p.PID, 0)
		if err != nil {
			return err
		}
		starts[p.PID] = pin.Start
		made := op.made(d, p, pin.Start, 0)
		pin.Close()
		if !made {
			return fmt.Errorf("pid %d is not the process of the folder", p.PID)
		}
	}
	err := s.update(func(r *record) {
		r.Start = starts[r.PID]
		for _, mb := range r.Members {
			mb.Start, mb.state = starts[mb.PID], ""
		}
	})
	op.at("started")
	return err
}

// made reports whether a process with a pid of the folder is one that criu has made or has
// begun to make: it is younger than that, and its memory is laid out as it was, or it is
// still of criu's own session.
func (op *operation) made(d *diskRecord, p *treeProc, start uint64, session int) bool {
	if start < d.Since {
		return false
	}
	if d.CRIU > 1 && session == d.CRIU {
		return true
	}
	layout, err := op.s.m.cfg.Roots.Layout(p.PID)
	return err == nil && layout == p.Layout
}

// used marks the folder of a session that goes on again.
func (op *operation) used() {
	if d := op.s.rec.Op.Disk; d != nil {
		if err := criu.Used(d.Dir, d.Token); err != nil {
			op.s.log.Warn("mark the folder as resumed; remove it", "dir", d.Dir, "err", err)
		}
	}
}

// unmake ends what criu has made: the processes are in the folder still.
func (op *operation) unmake(ctx context.Context) error {
	d := op.s.rec.Op.Disk
	if d == nil {
		return nil
	}
	if err := op.outlive(ctx); err != nil {
		return err
	}
	l, err := op.s.m.cfg.Roots.Take(false)
	if err != nil {
		return err
	}
	var errs []error
	for i := range d.Tree {
		p := &d.Tree[i]
		if have := l.Processes[p.PID]; have != nil && op.made(d, p, have.Start, have.Session) {
			errs = append(errs, end(ctx, p.PID, have.Start))
			op.at("ended")
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return criu.GiveBack(d.Dir, d.Token)
}
