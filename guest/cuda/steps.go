package cuda

import (
	"context"
	"errors"
	"fmt"
	"slices"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/cuda/ask"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
	"github.com/gpuctl/gpuctl/guest/engine"
)

// stepsOf returns the steps of an operation. The undo of each brings the members back into
// the state before it.
func (op *operation) stepsOf(kind string) []engine.Step {
	atHome := func() goal { return goal{state: ask.Running, dest: op.home} }
	back := func(g func() goal) func(context.Context) error {
		return func(ctx context.Context) error {
			err := op.all(ctx, g(), true)
			if err == nil && g().state == ask.Running {
				op.goesOn()
			}
			return err
		}
	}
	check := engine.Step{Name: stepCheck, Run: op.check}
	prepare := engine.Step{Name: stepPrepare, Run: op.prepare, Undo: func(context.Context) error {
		op.caller.pool.end()
		return nil
	}}
	lock := engine.Step{Name: stepLock, Run: op.lockAll, Undo: back(atHome)}
	checkpoint := engine.Step{
		Name: stepCheckpoint,
		Run:  func(ctx context.Context) error { return op.all(ctx, goal{state: ask.Checkpointed}, false) },
		Undo: back(func() goal { return goal{state: ask.Locked, dest: op.home} }),
	}
	restore := engine.Step{
		Name: stepRestore, Commit: true, Run: op.restoreAll,
		Undo: back(func() goal { return goal{state: ask.Checkpointed} }),
	}
	unlock := engine.Step{Name: stepUnlock, Run: op.unlockAll}
	switch kind {
	case kindSuspend:
		return []engine.Step{check, prepare, lock, checkpoint, {Name: stepMark, Commit: true, Run: op.mark}}
	case kindResume:
		return []engine.Step{check, prepare, restore, unlock}
	case kindStore:
		return []engine.Step{
			check, prepare, lock, checkpoint,
			{Name: stepDump, Run: op.dump, Undo: op.undump},
			{Name: stepSeal, Commit: true, Run: op.seal},
			{Name: stepEnd, Run: op.endTree},
		}
	case kindRevive:
		return []engine.Step{check, prepare, {Name: stepMake, Run: op.makeTree, Undo: op.unmake}, restore, unlock}
	}
	return []engine.Step{check, prepare, lock, checkpoint, restore, unlock}
}

// check looks at everything again, brings the session's members up to date, and refuses
// with all reasons. Nothing is touched.
func (op *operation) check(ctx context.Context) error {
	s := op.s
	c, err := s.m.look(ctx)
	if err != nil {
		return noDriver(err)
	}
	var rs reasons
	if op.kind != kindResume && op.kind != kindRevive {
		if rs, err = s.refresh(ctx, c); err != nil {
			return err
		}
	}
	to, more := s.assess(c, op.kind, op.target)
	switch op.kind {
	case kindStore:
		more = append(more, op.checkStore(ctx, c)...)
	case kindRevive:
		more = append(more, op.checkRevive(ctx, c)...)
	}
	if err := engine.Refuse(append(rs, more...)); err != nil {
		return err
	}
	op.caller.shown = c.uuids()
	op.known = map[int]bool{}
	for pid := range c.look.Holders {
		op.known[pid] = true
	}
	op.home, op.dest = nil, nil
	op.to = to
	for _, mb := range s.members() {
		op.home = append(op.home, slices.Clone(mb.Uses))
		op.dest = append(op.dest, mb.on(to))
	}
	return s.update(func(r *record) {
		r.Driver = c.Driver
		r.Op.Home, r.Op.Dest = op.home, op.dest
		if op.target != nil {
			r.Op.Target = marshal(op.target)
		}
		r.Op.GPUs = moved(c, r.GPUs, to)
		for _, g := range r.GPUs {
			op.result.BytesFrozen += g.Used
		}
	})
}

// moved returns the GPUs that the session has after it went from one set to another.
func moved(c *machine, from []gpu, to []ask.UUID) []gpu {
	var gs []gpu
	for slot, f := range from {
		g := gpu{UUID: to[slot], Used: f.Used}
		if have := c.gpu(g.UUID); have != nil {
			g.Address, g.Chip, g.Name = have.Address, have.Chip, have.Name
		}
		gs = append(gs, g)
	}
	return gs
}

// job returns the job that the session is, as it is now, or nil. It has what descends from the
// session's first process, and what belongs to its members: their launcher may have ended. What has
// the pid of one that has ended is none of it, nor what is in another session.
func (s *session) job(l *holders.Look) *holders.Job {
	s.mu.Lock()
	ids := []holders.Process{{PID: s.rec.PID, Start: s.rec.Start}}
	for _, mb := range s.rec.Members {
		ids = append(ids, holders.Process{PID: mb.PID, Start: mb.Start})
	}
	s.mu.Unlock()
	var all *holders.Job
	for _, id := range ids {
		if p := l.Processes[id.PID]; p == nil || p.Start != id.Start || all != nil && all.Has(id.PID) {
			continue
		}
		job := l.JobOf(id.PID)
		if job == nil {
			continue
		}
		if all == nil {
			all = &holders.Job{Root: job.Root}
		}
		for _, h := range job.Holders {
			if of := s.m.sessionOf(h.PID, h.Start); !all.Has(h.PID) && (of == nil || of == s) {
				all.Holders = append(all.Holders, h)
			}
		}
	}
	if all == nil || len(all.Holders) == 0 {
		return nil
	}
	slices.SortFunc(all.Holders, func(a, b *holders.Holder) int { return a.PID - b.PID })
	return all
}

// refresh finds the job's processes anew, and asks the driver for the state of each. All
// must run.
func (s *session) refresh(ctx context.Context, c *machine) (reasons, error) {
	old := s.members()
	job := s.job(c.look)
	if job == nil {
		return nil, fmt.Errorf("session %s: its processes use no GPU any more: %w", s.id, holders.ErrGone)
	}
	found, rs, err := s.m.members(ctx, c, job)
	if err != nil || len(rs) > 0 {
		return rs, err
	}
	for i, mb := range found {
		for _, o := range old {
			if o.PID == mb.PID && o.Start == mb.Start {
				found[i].Shown = o.Shown
			}
		}
	}
	return nil, s.update(func(r *record) {
		r.Members, r.GPUs = found, gpusOf(c, found, r.GPUs)
		r.Op.Home = make([][]ask.UUID, len(found))
		for i, mb := range found {
			r.Op.Home[i] = mb.Uses
		}
	})
}

// on returns the GPUs that a member has if the session has these.
func (mb *member) on(to []ask.UUID) []ask.UUID {
	dest := make([]ask.UUID, len(mb.Uses))
	for i, slot := range mb.Slots {
		dest[i] = to[slot]
	}
	return dest
}

// assess checks an operation, and returns where each of the session's GPUs goes.
func (s *session) assess(c *machine, kind string, target *gpuctlv1.Target) ([]ask.UUID, reasons) {
	s.mu.Lock()
	members, from := slices.Clone(s.rec.Members), slices.Clone(s.rec.GPUs)
	s.mu.Unlock()
	var rs reasons
	c.checkMachine(&rs)
	var to []ask.UUID
	want := target.GetDriver()
	switch {
	case kind == kindSwap && len(want) == 0:
		rs.add(ReasonGPU, "the target names no GPU of NVIDIA's driver")
		return nil, rs
	case len(want) > 0 && (kind == kindSwap || kind == kindResume || kind == kindRevive):
		if len(want) != len(from) {
			rs.add(ReasonPairs, "the session uses %d GPUs, and the target has %d", len(from), len(want))
			return nil, rs
		}
		for _, w := range want {
			to = append(to, ask.UUID(w.GetUuid()))
		}
	default:
		for _, f := range from {
			to = append(to, f.UUID)
		}
	}
	away := kind == kindResume || kind == kindRevive
	if !away {
		var own []ask.UUID
		for _, f := range from {
			own = append(own, f.UUID)
		}
		c.checkGPUs(&rs, own)
		s.m.checkHost(&rs, c, members)
	}
	if kind == kindSwap || away {
		c.checkGPUs(&rs, slices.DeleteFunc(slices.Clone(to), func(u ask.UUID) bool {
			return !away && slices.ContainsFunc(from, func(f gpu) bool { return f.UUID == u })
		}))
		c.checkTarget(&rs, members, from, to, away)
	}
	if kind == kindSuspend && s.m.cfg.Detach || kind == kindStore {
		s.forks(&rs, c, members)
	}
	return to, rs
}

// forks finds processes of the job that keep the card: a child that did not exec has its
// parent's descriptors, and no checkpoint closes those.
func (s *session) forks(rs *reasons, c *machine, members []*member) {
	job := s.job(c.look)
	if job == nil {
		return
	}
	for _, h := range job.Holders {
		if !slices.ContainsFunc(members, func(o *member) bool { return o.PID == h.PID }) {
			rs.add(ReasonFork, "pid %d (%s) does not use CUDA and has %v open, as a child that was forked without exec: the card can't be taken away before it ends", h.PID, h.Command, h.Nodes)
		}
	}
}

// prepare has a canary go the way that the processes go, and starts helpers, so that the
// processes do not wait for them.
func (op *operation) prepare(ctx context.Context) error {
	if !op.s.m.cfg.NoCanary {
		if err := op.canaries(ctx); err != nil {
			return err
		}
	}
	ops := []ask.Op{ask.Lock, ask.Checkpoint, ask.Restore, ask.Unlock}
	switch op.kind {
	case kindSuspend, kindStore: // one that can restore has the GPU open
		ops = []ask.Op{ask.Lock, ask.Checkpoint}
	case kindRevive: // there are no processes yet
		return nil
	case kindResume:
		ops = []ask.Op{ask.Restore, ask.Unlock}
	}
	return op.caller.pool.ready(op.s.m, ops, op.s.members())
}

// lockAll locks the members, and looks whether more have come meanwhile.
func (op *operation) lockAll(ctx context.Context) error {
	if err := op.all(ctx, goal{state: ask.Locked, dest: op.home}, false); err != nil {
		return err
	}
	l, err := op.s.m.cfg.Roots.Take(false)
	if err != nil {
		return err
	}
	members := op.s.members()
	job := op.s.job(l)
	if job == nil {
		return fmt.Errorf("pid %d: %w", members[0].PID, holders.ErrGone)
	}
	for _, h := range job.Holders {
		if !slices.ContainsFunc(members, func(o *member) bool { return o.PID == h.PID }) && !op.known[h.PID] {
			return fmt.Errorf("pid %d (%s) has come to the job meanwhile; try again", h.PID, h.Command)
		}
	}
	return nil
}

// restoreAll is the commit of a swap and of a resume.
func (op *operation) restoreAll(ctx context.Context) error {
	if err := op.all(ctx, goal{state: ask.Locked, dest: op.dest}, false); err != nil {
		return err
	}
	if err := op.fault.Fail(stepRestore); err != nil {
		return err
	}
	return op.s.commit()
}

// settle gives a session what it has after its operation has been committed.
func (r *record) settle() {
	switch r.Op.Kind {
	case kindSuspend:
		r.SuspendedTo = toMemory
		return
	case kindStore:
		r.SuspendedTo = r.Op.Disk.Dir
		return
	case kindResume, kindSwap, kindRevive:
		r.Generation++
	}
	r.SuspendedTo = ""
	r.GPUs = r.Op.GPUs
	if len(r.Op.Target) > 0 {
		r.Target = r.Op.Target
	}
}

func (op *operation) unlockAll(ctx context.Context) error {
	if op.kind == kindRevive {
		op.used()
	}
	err := op.all(ctx, goal{state: ask.Running, dest: op.dest}, true)
	if err == nil {
		op.goesOn()
	}
	return err
}

// mark commits a suspend, after it was seen that the members have let go of the GPUs.
func (op *operation) mark(context.Context) error {
	s := op.s
	if err := op.fault.Fail(stepMark); err != nil {
		return err
	}
	op.caller.pool.end()
	l, err := s.m.cfg.Roots.Take(true)
	if err != nil {
		return err
	}
	var errs []error
	for _, mb := range s.members() {
		if h := l.Holders[mb.PID]; h != nil && s.m.cfg.Detach {
			errs = append(errs, fmt.Errorf("pid %d still has %v open after its checkpoint", mb.PID, slices.Concat(h.Nodes, h.Mapped)))
		} else if h != nil {
			s.log.Warn("a suspended process still has nodes of the driver", "pid", mb.PID, "nodes", h.Nodes, "mapped", h.Mapped)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	err = s.commit()
	if err == nil {
		op.goesOn() // the time from here on is not this operation's
	}
	return err
}
