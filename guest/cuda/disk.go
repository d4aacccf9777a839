package cuda

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/cuda/criu"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
)

// endTime is how long a process may take to end after it was killed.
const endTime = time.Minute

// Store suspends a session to a new folder, with its processes: they end, and Revive makes
// them again.
func (m *Manager) Store(ctx context.Context, id, dir string, lockMS int64, failAt string, sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
	s, err := m.lookup(id)
	if err != nil {
		return nil, err
	}
	op, err := s.begin(ctx, kindStore, nil, lockMS, failAt, quiet(sink))
	if err != nil {
		return nil, err
	}
	op.dir = dir
	return op.run(), nil
}

// Revive makes the processes of a folder again, on the target's GPUs or those that they had.
// The folder is left as it is if that fails, and marked as used if not.
func (m *Manager) Revive(ctx context.Context, dir string, target *gpuctlv1.Target, failAt string, sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
	if m.cfg.UID != 0 {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("only root's gpuguest makes processes again"))
	}
	disk, err := criu.Open(dir)
	if err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	rec, err := parseRecord(disk.State)
	if err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("%s: its session: %w", dir, err))
	}
	s := &session{m: m, rec: *rec, log: m.log}
	if _, err := m.lookup(disk.Session); err != nil && m.Has(disk.Session) && disk.Session == rec.ID {
		s.id = disk.Session
	}
	if err := m.register(s); err != nil {
		return nil, err
	}
	op, err := s.begin(ctx, kindRevive, target, 0, failAt, quiet(sink))
	if err != nil {
		m.remove(s)
		return nil, err
	}
	op.dir, op.disk = dir, disk
	return op.run(), nil
}

func quiet(sink func(*gpuctlv1.Progress)) func(*gpuctlv1.Progress) {
	if sink == nil {
		return func(*gpuctlv1.Progress) {}
	}
	return sink
}

// checkStore checks what criu would find out only when the processes are stopped already.
func (op *operation) checkStore(ctx context.Context, c *machine) (rs reasons) {
	s := op.s
	op.checkCRIU(ctx, &rs)
	if !strings.HasPrefix(op.dir, "/") {
		rs.add(ReasonFolder, "the path %q of the folder must be absolute", op.dir)
	} else if err := unix.Lstat(op.dir, &unix.Stat_t{}); !errors.Is(err, unix.ENOENT) {
		rs.add(ReasonFolder, "%s is there already, or can't be looked at: name a new folder", op.dir)
	}
	root := c.look.Processes[s.rec.PID]
	if root == nil {
		rs.add(ReasonGone, "pid %d has ended", s.rec.PID)
		return rs
	}
	tree := c.look.Tree(root.PID)
	for _, mb := range s.members() {
		if !c.look.Descends(mb.PID, root.PID) {
			rs.add(ReasonTied, "pid %d does not descend from pid %d, so they can't be written as one tree", mb.PID, root.PID)
		}
	}
	for _, p := range tree {
		if !slices.ContainsFunc(tree, func(o *holders.Process) bool { return o.PID == p.Session }) {
			rs.add(ReasonTied, "pid %d (%s) is of the session of pid %d, which stays: start the program with setsid, its input and output in files", p.PID, p.Name, p.Session)
		}
	}
	ties, err := s.m.cfg.Roots.Ties(c.look, tree)
	if err != nil {
		rs.add(ReasonTied, "%v", err)
	}
	for _, tie := range ties {
		rs.add(ReasonTied, "%s: start the program with setsid, its input and output in files", tie)
	}
	return rs
}

func (op *operation) checkCRIU(ctx context.Context, rs *reasons) {
	if op.s.m.cfg.UID != 0 {
		rs.add(ReasonForeign, "gpuguest does not run as root, and only root writes processes to a folder")
		return
	}
	if _, err := op.s.m.cfg.CRIU.Check(ctx); err != nil {
		rs.add(ReasonCRIU, "%v", err)
	}
}

// checkRevive checks that the processes can be made here.
func (op *operation) checkRevive(ctx context.Context, c *machine) (rs reasons) {
	op.checkCRIU(ctx, &rs)
	if c.Driver != op.disk.Driver {
		rs.add(ReasonDriver, "the processes are of driver %s, and here is %s: it must be the same", op.disk.Driver, c.Driver)
	}
	var sum uint64
	for _, f := range op.disk.Files {
		sum += uint64(f.Size)
	}
	if have, err := op.s.m.availableMemory(); err != nil || sum+sum/100*hostMargin > have {
		rs.add(ReasonMemory, "the processes take %s of host memory, and %s are available without swapping", size(sum), size(have))
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

// limit is how long criu may take.
func (op *operation) limit() time.Duration {
	d := op.s.m.cfg.Deadlines
	var n uint64
	for _, mb := range op.s.members() {
		n += 2 * mb.bytes() // and what the processes have besides
	}
	return 10*d.Slack + time.Duration(n/d.Rate)*time.Second
}

// beganCRIU journals criu's pid: it goes on if gpuguest dies.
func (op *operation) beganCRIU(pid int) error {
	var start uint64
	if p, err := holders.Pin(pid, 0); err == nil {
		start = p.Start
		p.Close()
	}
	return op.s.update(func(r *record) { r.Op.Disk.CRIU, r.Op.Disk.CRIUStart = pid, start })
}

// outlive waits until the criu of an earlier gpuguest, or one that was cut off, has ended.
func (op *operation) outlive(ctx context.Context) error {
	d := op.s.rec.Op.Disk
	if d == nil || d.CRIU <= 1 {
		return nil
	}
	p, err := holders.Pin(d.CRIU, d.CRIUStart)
	if errors.Is(err, holders.ErrGone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer p.Close()
	select {
	case <-p.Done():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("criu, pid %d, still runs: %w", d.CRIU, ctx.Err())
	}
}

// tree returns the session's whole tree, as it is now.
func (op *operation) tree(l *holders.Look) (all []treeProc) {
	for _, p := range l.Tree(op.s.rec.PID) {
		all = append(all, treeProc{p.PID, p.Start, p.Name})
	}
	return all
}

// dump has criu write the processes, after it was seen that none of them has a node of the
// driver. They are stopped after it.
func (op *operation) dump(ctx context.Context) error {
	s := op.s
	op.caller.pool.end()
	l, err := s.m.cfg.Roots.Take(true)
	if err != nil {
		return err
	}
	tree := op.tree(l)
	for _, p := range tree {
		if h := l.Holders[p.PID]; h != nil {
			return fmt.Errorf("pid %d still has %v after the checkpoint", p.PID, slices.Concat(h.Nodes, h.Mapped))
		}
	}
	if err := s.update(func(r *record) { r.Op.Disk = &diskRecord{Dir: op.dir, Tree: tree} }); err != nil {
		return err
	}
	if err := criu.Make(op.dir); err != nil {
		return err
	}
	if err := s.update(func(r *record) { r.Op.Disk.Made = true }); err != nil {
		return errors.Join(err, criu.Remove(op.dir))
	}
	return s.m.cfg.CRIU.Dump(ctx, s.rec.PID, op.dir, op.limit(), op.beganCRIU)
}

// undump lets the processes go on, and removes the folder.
func (op *operation) undump(ctx context.Context) error {
	d := op.s.rec.Op.Disk
	if d == nil {
		return nil
	}
	if err := op.outlive(ctx); err != nil {
		return err
	}
	if d.Made {
		if err := criu.Remove(d.Dir); err != nil {
			return err
		}
	}
	l, err := op.s.m.cfg.Roots.Take(false)
	if err != nil {
		return err
	}
	var errs []error
	for _, p := range append(op.tree(l), d.Tree...) {
		errs = append(errs, signal(p.PID, p.Start, unix.SIGCONT))
	}
	return errors.Join(errs...)
}

// seal writes the manifest, and commits.
func (op *operation) seal(ctx context.Context) error {
	s := op.s
	l, err := s.m.cfg.Roots.Take(false)
	if err != nil {
		return err
	}
	tree := op.tree(l)
	version, err := s.m.cfg.CRIU.Check(ctx)
	if err != nil {
		return err
	}
	s.mu.Lock()
	rec := s.rec
	rec.Op = nil
	state, err := json.Marshal(&rec)
	man := &criu.Manifest{Session: s.id, Driver: rec.Driver, CRIU: version, Root: rec.PID, State: state}
	s.mu.Unlock()
	if err != nil {
		return err
	}
	for _, p := range tree {
		threads, err := s.m.cfg.Roots.Threads(p.PID)
		if err != nil {
			return err
		}
		man.Processes = append(man.Processes, criu.Process{PID: p.PID, Threads: threads, Name: p.Name})
	}
	if err := s.update(func(r *record) { r.Op.Disk.Tree = tree }); err != nil {
		return err
	}
	if err := criu.Seal(op.dir, man); err != nil {
		return err
	}
	if err := op.fault.Fail(stepSeal); err != nil {
		return err
	}
	err = s.update(func(r *record) {
		r.Op.Committed = true
		r.settle()
	})
	if err != nil { // the journal does not say so: it is taken back
		s.mu.Lock()
		s.rec.Op.Committed, s.rec.SuspendedTo = false, ""
		s.mu.Unlock()
	}
	return err
}

// endTree ends the processes: they are in the folder.
func (op *operation) endTree(ctx context.Context) error {
	var errs []error
	for _, p := range op.s.rec.Op.Disk.Tree {
		errs = append(errs, end(ctx, p.PID, p.Start))
	}
	op.goesOn()
	return errors.Join(errs...)
}

// makeTree has criu make the processes again. What it makes is journalled before.
func (op *operation) makeTree(ctx context.Context) error {
	s := op.s
	var rs reasons
	if op.checkNumbers(&rs); len(rs) > 0 {
		return errors.New(rs[0].GetMessage())
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return err
	}
	d := &diskRecord{Dir: op.dir, Since: uint64(now.Sec)*100 + uint64(now.Nsec)/1e7}
	for _, p := range op.disk.Processes {
		d.Tree = append(d.Tree, treeProc{PID: p.PID, Name: p.Name})
	}
	if err := s.update(func(r *record) { r.Op.Disk = d }); err != nil {
		return err
	}
	if err := s.m.cfg.CRIU.Restore(ctx, op.dir, op.limit(), op.beganCRIU); err != nil {
		return err
	}
	starts := map[int]uint64{}
	for _, p := range append(pids(s.members()), s.rec.PID) {
		pin, err := holders.Pin(p, 0)
		if err != nil {
			return err
		}
		starts[p] = pin.Start
		pin.Close()
	}
	return s.update(func(r *record) {
		r.Start = starts[r.PID]
		for _, mb := range r.Members {
			mb.Start, mb.state = starts[mb.PID], ""
		}
	})
}

// used marks the folder of a session that goes on again.
func (op *operation) used() {
	if d := op.s.rec.Op.Disk; d != nil {
		if err := criu.Used(d.Dir); err != nil {
			op.s.log.Warn("mark the folder as resumed; remove it, so that nobody resumes it again", "dir", d.Dir, "err", err)
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
	for _, p := range d.Tree {
		if made := l.Processes[p.PID]; made != nil && made.Start >= d.Since && made.Name == p.Name {
			errs = append(errs, end(ctx, p.PID, made.Start))
		}
	}
	return errors.Join(errs...)
}

// again brings a session to where its interrupted operation with a folder leads.
func (op *operation) again(ctx context.Context, aim func(context.Context) error) error {
	o := op.s.rec.Op
	switch {
	case o.Kind == kindStore && o.Committed:
		return op.endTree(ctx)
	case o.Kind == kindStore:
		if err := op.undump(ctx); err != nil {
			return err
		}
	case o.Kind == kindRevive && !o.Committed:
		if err := op.outlive(ctx); err != nil {
			return err
		}
		if err := aim(ctx); err != nil {
			return err
		}
		return op.unmake(ctx)
	case o.Kind == kindRevive:
		op.used()
	}
	return aim(ctx)
}

// end ends a process, and waits for that.
func end(ctx context.Context, pid int, start uint64) error {
	p, err := holders.Pin(pid, start)
	if errors.Is(err, holders.ErrGone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer p.Close()
	if err := p.Signal(unix.SIGKILL); err != nil {
		return err
	}
	limit := time.NewTimer(endTime)
	defer limit.Stop()
	select {
	case <-p.Done():
		return nil
	case <-limit.C:
		return fmt.Errorf("pid %d has not ended in %v after it was killed", pid, endTime)
	case <-ctx.Done():
		return fmt.Errorf("pid %d: %w", pid, ctx.Err())
	}
}

func signal(pid int, start uint64, sig unix.Signal) error {
	p, err := holders.Pin(pid, start)
	if errors.Is(err, holders.ErrGone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer p.Close()
	return p.Signal(sig)
}
