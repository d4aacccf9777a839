package cuda

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
	"github.com/gpuctl/gpuctl/internal/room"
)

// endTime is how long a process may take to end after it was killed.
const endTime = time.Minute

// mostTree is how many processes a session may have that goes to a folder: its journal has all.
const mostTree = 4096

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
	op.checkSpace(&rs, tree)
	return rs
}

// checkSpace checks that the folder's file system has room for the processes, with what they
// have on GPUs now, and notes how much that is.
func (op *operation) checkSpace(rs *reasons, tree []*holders.Process) {
	op.bytes = 0
	for _, mb := range op.s.members() {
		op.bytes += mb.bytes()
	}
	for _, p := range tree {
		if p.Stopped {
			rs.add(ReasonState, "pid %d (%s) is stopped; let it go on first, or it would go on after a failure", p.PID, p.Name)
		}
		n, err := op.s.m.cfg.Roots.Resident(p.PID)
		if err != nil {
			rs.add(ReasonGone, "%v", err)
		}
		op.bytes += n
	}
	above := filepath.Dir(op.dir)
	if have, err := room.Folder(above); err != nil {
		rs.add(ReasonFolder, "%v", err)
	} else if op.bytes+op.bytes/100*hostMargin > have {
		rs.add(ReasonFolder, "the processes take %s, and the file system of %s has %s left", size(op.bytes), above, size(have))
	}
	if len(tree) > mostTree {
		rs.add(ReasonTied, "the job has %d processes; at most %d can be written", len(tree), mostTree)
	}
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

// limit is how long criu may take.
func (op *operation) limit() time.Duration {
	d := op.s.m.cfg.Deadlines
	return 10*d.Slack + time.Duration(op.bytes/d.Rate)*time.Second
}

// at is called where tests end gpuguest.
func (op *operation) at(point string) {
	if f := op.s.m.cfg.at; f != nil {
		f(point)
	}
}

// beganCRIU journals criu's pid: it goes on if gpuguest dies.
func (op *operation) beganCRIU(pid int) error {
	var start uint64
	if p, err := holders.Pin(pid, 0); err == nil {
		start = p.Start
		p.Close()
	}
	err := op.s.update(func(r *record) { r.Op.Disk.CRIU, r.Op.Disk.CRIUStart = pid, start })
	op.at("criu")
	return err
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

// endTree ends the processes: they are in the folder.
func (op *operation) endTree(ctx context.Context) error {
	var errs []error
	for _, p := range op.s.rec.Op.Disk.Tree {
		errs = append(errs, end(ctx, p.PID, p.Start))
		op.at("ended")
	}
	op.goesOn()
	return errors.Join(errs...)
}

// left reports whether a process of the tree has not ended.
func (d *diskRecord) left() bool {
	return slices.ContainsFunc(d.Tree, func(p treeProc) bool { return !ended(p.PID, p.Start) })
}

// again brings a session to where its interrupted operation with a folder leads.
func (op *operation) again(ctx context.Context, aim func(context.Context) error) error {
	o := op.s.rec.Op
	switch {
	case o.Kind == kindStore && o.Committed:
		return op.endTree(ctx)
	case o.Kind == kindStore:
		if err := op.undump(ctx); err != nil || o.Committed {
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

func ended(pid int, start uint64) bool {
	p, err := holders.Pin(pid, start)
	if err == nil {
		p.Close()
	}
	return errors.Is(err, holders.ErrGone)
}
