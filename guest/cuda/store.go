package cuda

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/cuda/criu"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
	"github.com/gpuctl/gpuctl/internal/random"
)

// stopTime is how long a process may take to stop.
const stopTime = 2 * time.Second

// tree returns the session's whole tree, as it is now.
func (op *operation) tree(l *holders.Look) (all []treeProc, err error) {
	root := l.Processes[op.s.rec.PID]
	if root == nil || root.Start != op.s.rec.Start { // its pid may be somebody else's
		return nil, fmt.Errorf("pid %d: %w", op.s.rec.PID, holders.ErrGone)
	}
	for _, p := range l.Tree(root.PID) {
		all = append(all, treeProc{PID: p.PID, Start: p.Start, Name: p.Name})
	}
	return all, nil
}

// whole returns an error if a member is not in the tree: its parent has ended meanwhile, so it
// descends from another process. It would not be written, and the folder could not be used.
func (op *operation) whole(tree []treeProc) error {
	for _, mb := range op.s.members() {
		if !slices.ContainsFunc(tree, func(p treeProc) bool { return p.PID == mb.PID && p.Start == mb.Start }) {
			return fmt.Errorf("pid %d (%s) does not descend from pid %d any more, or has ended: they can't be written as one tree", mb.PID, mb.Command, op.s.rec.PID)
		}
	}
	return nil
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
	tree, err := op.tree(l)
	if err == nil {
		err = op.whole(tree)
	}
	if err != nil {
		return err
	}
	for _, p := range tree {
		if h := l.Holders[p.PID]; h != nil {
			return fmt.Errorf("pid %d still has %v after the checkpoint", p.PID, slices.Concat(h.Nodes, h.Mapped))
		}
	}
	token := random.Hex(8)
	if err := s.update(func(r *record) { r.Op.Disk = &diskRecord{Dir: op.dir, Token: token, Tree: tree} }); err != nil {
		return err
	}
	op.at("noted")
	err = criu.Make(op.dir, token, func(id criu.ID) error {
		err := s.update(func(r *record) { r.Op.Disk.Folder = id })
		op.at("folder")
		return err
	})
	if err != nil {
		return err
	}
	op.at("made")
	if err := s.m.cfg.CRIU.Dump(ctx, s.rec.PID, op.dir, op.limit(), op.beganCRIU); err != nil {
		return err
	}
	op.at("dumped")
	return nil
}

// undump lets the processes go on, and removes the folder. If some have ended and the folder
// is whole, the others end, too, and the folder stays: nothing is lost by that.
func (op *operation) undump(ctx context.Context) error {
	s := op.s
	d := s.rec.Op.Disk
	if d == nil {
		return nil
	}
	if err := op.outlive(ctx); err != nil {
		return err
	}
	if slices.ContainsFunc(d.Tree, func(p treeProc) bool { return ended(p.PID, p.Start) }) {
		if _, err := criu.Open(d.Dir); err == nil && criu.Is(d.Dir, d.Folder) {
			s.log.Warn("processes have ended that are in the folder; the suspend is finished", "dir", d.Dir)
			if err := s.commit(); err != nil {
				return err
			}
			return op.endTree(ctx)
		}
	}
	// A commit whose writing has failed may be in the journal all the same.
	if err := s.update(func(*record) {}); err != nil {
		return err
	}
	if err := criu.Remove(d.Dir, d.Token, d.Folder); err != nil {
		return err
	}
	l, err := s.m.cfg.Roots.Take(false)
	if err != nil {
		return err
	}
	tree, err := op.tree(l)
	if err != nil && !errors.Is(err, holders.ErrGone) {
		return err
	}
	var errs []error
	for _, p := range append(tree, d.Tree...) {
		errs = append(errs, signal(p.PID, p.Start, unix.SIGCONT))
	}
	return errors.Join(errs...)
}

// seal writes the manifest, and commits.
func (op *operation) seal(ctx context.Context) error {
	s := op.s
	man, err := op.manifest(ctx)
	if err != nil {
		return err
	}
	if err := criu.Seal(op.dir, man); err != nil {
		return err
	}
	op.at("sealed")
	if err := op.fault.Fail(stepSeal); err != nil {
		return err
	}
	// Their user may have let them go on. Then they are further than what was written.
	tree, err := op.stoppedTree()
	if err == nil {
		err = op.whole(tree)
	}
	if err != nil {
		return err
	}
	if err := s.commit(); err != nil {
		return err
	}
	op.at("committed")
	return nil
}

// stops waits until the processes are stopped: criu has sent the signal, and does not wait.
func (op *operation) stops(ctx context.Context) (tree []treeProc, err error) {
	until := time.Now().Add(stopTime)
	for {
		tree, err = op.stoppedTree()
		if err == nil || errors.Is(err, holders.ErrGone) || time.Now().After(until) {
			return tree, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(stopTime / 400):
		}
	}
}

// stoppedTree returns the tree, and an error if one of it is not stopped.
func (op *operation) stoppedTree() ([]treeProc, error) {
	l, err := op.s.m.cfg.Roots.Take(false)
	if err != nil {
		return nil, err
	}
	tree, err := op.tree(l)
	if err != nil {
		return nil, err
	}
	for _, p := range tree {
		if !l.Processes[p.PID].Stopped {
			return nil, fmt.Errorf("pid %d (%s) was written and has been let go on meanwhile", p.PID, p.Name)
		}
	}
	return tree, nil
}

// manifest describes the session and its processes, which are stopped.
func (op *operation) manifest(ctx context.Context) (*criu.Manifest, error) {
	s := op.s
	tree, err := op.stops(ctx)
	if err == nil {
		err = op.whole(tree)
	}
	if err != nil {
		return nil, err
	}
	version, err := s.m.cfg.CRIU.Check(ctx)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	rec := s.rec
	rec.Op = nil
	state, err := json.Marshal(&rec)
	man := &criu.Manifest{Session: s.id, Driver: rec.Driver, CRIU: version, Root: rec.PID, State: state}
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	for _, p := range tree {
		threads, err := s.m.cfg.Roots.Threads(p.PID)
		if err != nil {
			return nil, err
		}
		layout, err := s.m.cfg.Roots.Layout(p.PID)
		if err != nil {
			return nil, err
		}
		man.Processes = append(man.Processes, criu.Process{PID: p.PID, Threads: threads, Name: p.Name, Layout: layout})
	}
	return man, s.update(func(r *record) { r.Op.Disk.Tree = tree })
}
