package migrate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/excerpt"
	"github.com/gpuctl/gpuctl/internal/size"
)

// Names of steps, for operators and in the record. A name is never used for another step.
const (
	StepReserve = "reserve"
	StepPrepare = "prepare"
	StepFreeze  = "freeze"
	StepRelease = "release"
	StepDetach  = "detach"
	StepMove    = "move"
	StepAttach  = "attach"
	StepAwait   = "await"
	StepThaw    = "thaw"
	StepCommit  = "commit"
	StepClean   = "clean"

	// Steps for a VM that cannot be migrated live.
	StepStop   = "stop"
	StepDefine = "define"
	StepStart  = "start"
)

// MostSessions is how many sessions of a VM one migration can freeze. The record and
// requests contain their ids, which the VM chooses, up to twice.
const (
	MostSessions = 2000
	longestName  = 48 // bytes
)

// nameable returns why a record cannot contain the ids of a VM's sessions; empty: it can.
func nameable(name string, sessions []SessionFacts) string {
	for _, s := range sessions {
		if n := len(s.ID); n > longestName {
			return fmt.Sprintf("VM %s names a session with %d bytes, and at most %d can be kept: its gpuguest is not a known one; install gpuctl's there", name, n, longestName)
		}
	}
	if n := len(sessions); n > MostSessions {
		return tooMany(name, n)
	}
	return ""
}

func tooMany(name string, n int) string {
	return fmt.Sprintf("VM %s has %d sessions, and at most %d can be moved: end some; maxSessions in its gpuguest.yaml keeps them fewer", name, n, MostSessions)
}

// expectTimeout is how long a VM may take to load its next runtime, while its
// applications run. The VM usually gives up sooner.
const expectTimeout = 3 * time.Minute

// step is one step of a transaction.
type step struct {
	name, what, undone string // in words; if undone is empty, there is nothing to undo
	limit              time.Duration
	do, undo           func(ctx context.Context, r *run) error
}

// steps returns the steps of a migration, in order.
func steps(m *clusterv1.MachineMove) []step {
	l := list{
		MachineMove: m,
		card:        m.GetToGpu() != "" || m.GetFromGpu() != "", moves: m.GetFromHost() != m.GetToHost(), cold: m.GetCold(),
	}
	l.own = m.GetToGpu() != "" && m.GetToGpu() == m.GetFromGpu()
	l.gpu = l.card && !l.cold
	l.live = l.gpu && m.GetFarGpu() != ""
	l.freezes = l.gpu && !l.live
	l.leave()
	l.arrive()
	l.restart()
	l.end()
	return l.steps
}

// list is the steps of a migration, while they are put together.
type list struct {
	*clusterv1.MachineMove
	card, moves, cold bool
	own               bool // the VM gets the card that it had
	gpu               bool // the card is exchanged while the VM runs
	live, freezes     bool // what its applications do meanwhile: compute on a remote GPU, or stand still
	steps             []step
}

func (l *list) add(when bool, s step) {
	if when {
		l.steps = append(l.steps, s)
	}
}

// leave adds what happens on the source before the VM moves.
func (l *list) leave() {
	l.add(l.card && !l.own, step{
		StepReserve, fmt.Sprintf("bind a claim of %s to %s", l.GetName(), l.GetToGpu()), "the claim is released", 30 * time.Second,
		func(ctx context.Context, r *run) error {
			return r.Claims.Reserve(ctx, r.move().GetToClaim(), r.vm(), r.move().GetToGpu())
		},
		func(ctx context.Context, r *run) error {
			return r.Claims.EndClaim(ctx, r.move().GetToClaim(), r.vm(), r.move().GetToGpu())
		},
	})
	l.add(l.card && !l.own, step{
		StepPrepare, "take " + l.GetToGpu() + " from its driver, reset it, read it back, have the VM load its runtime", "it is returned", 3*time.Minute + expectTimeout,
		func(ctx context.Context, r *run) error {
			id, err := r.to().Prepare(ctx, r.vm(), r.move().GetToGpu(), r.move().GetToClaim())
			if err != nil || !l.gpu || slices.Contains(r.m.GetDone(), StepFreeze) || slices.Contains(r.m.GetDone(), StepSwap) { // for the next candidate, the VM may be elsewhere already
				return err
			}
			// If this fails, only the downtime is longer.
			ctx, cancel := context.WithTimeout(ctx, expectTimeout)
			defer cancel()
			if err := r.from().Expect(ctx, r.vm(), id); err != nil {
				r.Log.Warn("the runtime of the next card is not loaded ahead", "migration", r.m.GetId(), "gpu", r.move().GetToGpu(), "err", err)
			}
			return nil
		},
		func(ctx context.Context, r *run) error { return r.to().GiveBack(ctx, r.vm(), r.move().GetToGpu()) },
	})
	l.borrow()
	l.add(l.freezes, step{
		StepFreeze, "stop the applications at their next call; their state is in the VM's memory" + whereElse(l.MachineMove), "they go on where they were", 10*time.Minute + freezePatience(l.MachineMove) + awayLimit(l.MachineMove),
		func(ctx context.Context, r *run) error { return r.freeze(ctx) },
		func(ctx context.Context, r *run) error {
			if err := r.thaw(ctx, r.from(), r.move().GetFromGpu()); err != nil {
				return err
			}
			r.forget(ctx, r.from())
			if l.moves {
				r.forget(ctx, r.to())
			}
			return nil
		},
	})
	l.add(l.gpu, step{
		StepRelease, "have the VM release " + l.GetFromGpu() + " and confirm that it can be detached", "the VM takes it up again", releaseLimit(l.live),
		func(ctx context.Context, r *run) error { return r.release(ctx) },
		func(ctx context.Context, r *run) error {
			return r.from().TakeUp(ctx, r.vm(), r.move().GetFromGpu())
		},
	})
	l.add(l.gpu, step{
		StepDetach, "detach " + l.GetFromGpu() + ", have the hypervisor confirm it, reset it", "it is attached again", 3 * time.Minute,
		func(ctx context.Context, r *run) error {
			at, err := r.from().Detach(ctx, r.vm(), r.move().GetFromGpu())
			if err == nil && at != "" {
				r.m.Machine.GuestAddress = at // it is recorded with the step's end
			}
			return err
		},
		func(ctx context.Context, r *run) error {
			return r.from().Attach(ctx, r.vm(), r.move().GetFromGpu(), r.move().GetStored(), r.move().GetGuestAddress())
		},
	})
}

// arrive adds the move, and what happens on the destination then.
func (l *list) arrive() {
	l.park()
	l.add(l.moves && !l.cold, step{
		StepMove, fmt.Sprintf("migrate the VM live from %s to %s; it can't be stopped once it runs", l.GetFromHost(), l.GetToHost()), "it is migrated back", 30*time.Minute + awayLimit(l.MachineMove),
		func(ctx context.Context, r *run) error {
			return r.carry(ctx, r.move().GetFromHost(), r.move().GetToHost(), false)
		},
		func(ctx context.Context, r *run) error {
			return r.carry(ctx, r.move().GetToHost(), r.move().GetFromHost(), true)
		},
	})
	l.restore()
	l.add(l.gpu, step{
		StepAttach, "attach " + l.GetToGpu() + ", and have the hypervisor confirm it", "it is detached", 3 * time.Minute,
		func(ctx context.Context, r *run) error {
			return r.to().Attach(ctx, r.vm(), r.move().GetToGpu(), r.move().GetStored(), r.move().GetGuestAddress())
		},
		func(ctx context.Context, r *run) error {
			if err := r.to().Release(ctx, r.vm(), r.move().GetToGpu()); err != nil {
				return err
			}
			_, err := r.to().Detach(ctx, r.vm(), r.move().GetToGpu())
			return err
		},
	})
	l.add(l.gpu, step{
		StepAwait, "wait until the VM has found it and a runtime serves it", "", 3 * time.Minute,
		func(ctx context.Context, r *run) error {
			return r.to().Await(ctx, r.vm(), r.move().GetToGpu())
		}, nil,
	})
	l.comeHome()
	l.add(l.freezes, step{
		StepThaw, "put the applications' state on it and let them go on", "they are frozen again", 10*time.Minute + freezePatience(l.MachineMove) + awayLimit(l.MachineMove),
		func(ctx context.Context, r *run) error { return r.thaw(ctx, r.to(), r.move().GetToGpu()) },
		func(ctx context.Context, r *run) error {
			return r.to().Freeze(ctx, r.vm(), r.freezing(r.move().GetFromHost()), r.progress)
		},
	})
}

// restart adds what takes the place of both if the VM is ended in between.
func (l *list) restart() {
	l.add(l.cold, step{
		StepStop, "end the VM, and its applications with it", "it is started again", 5 * time.Minute,
		func(ctx context.Context, r *run) error {
			return r.from().Stop(ctx, r.vm(), r.move().GetFromGpu())
		},
		func(ctx context.Context, r *run) error {
			return r.start(ctx, r.from(), r.move().GetFromGpu(), r.to(), r.move().GetToHost())
		},
	})
	l.renew()
	l.add(l.cold && l.moves, step{
		StepDefine, "give its definition to " + l.GetToHost(), "it is taken away from there", time.Minute,
		func(ctx context.Context, r *run) error {
			xml, err := r.from().Definition(ctx, r.vm())
			if err != nil {
				return err
			}
			return r.to().Define(ctx, r.vm(), xml)
		},
		func(ctx context.Context, r *run) error { return r.takeBack(ctx) },
	})
	l.add(l.cold, step{
		StepStart, "start it" + with(l.GetToGpu()), "it is ended", 5 * time.Minute,
		func(ctx context.Context, r *run) error {
			return r.start(ctx, r.to(), r.move().GetToGpu(), r.from(), r.move().GetFromHost())
		},
		func(ctx context.Context, r *run) error {
			if p, err := r.to().Where(ctx, r.vm()); err == nil && p == Absent {
				return nil // somebody has taken its definition away
			}
			return r.to().Stop(ctx, r.vm(), r.move().GetToGpu())
		},
	})
}

// end adds what comes when all of it is done.
func (l *list) end() {
	l.add(true, step{
		StepCommit, "record that it is done: from here there is no way back", "", time.Minute,
		func(context.Context, *run) error { return nil }, nil,
	})
	l.add(l.card || l.cold && l.moves, step{
		StepClean, leftover(l.MachineMove), "", 3 * time.Minute,
		func(ctx context.Context, r *run) error { return r.clean(ctx) }, nil,
	})
	l.leaveParts()
}

// takeBack takes the VM's definition away from the destination, unless somebody has removed that
// on the source meanwhile: then it is the only one.
func (r *run) takeBack(ctx context.Context) error {
	m := r.move()
	switch p, err := r.from().Where(ctx, r.vm()); {
	case err != nil:
		return err
	case p == Absent:
		return fmt.Errorf("host %s does not know the VM any more, so its definition on host %s stays, which is the only one: define it on host %s again (virsh dumpxml --inactive --security-info %s on host %s, virsh define on host %s)",
			m.GetFromHost(), m.GetToHost(), m.GetFromHost(), r.vm().Name, m.GetToHost(), m.GetFromHost())
	}
	return r.to().Undefine(ctx, r.vm())
}

// sessions returns the sessions that run in the VM on its source, if all can be moved.
func (r *run) sessions(ctx context.Context) (*AgentFacts, error) {
	facts, err := r.from().Sessions(ctx, r.vm())
	if err != nil {
		return nil, err
	}
	if why := nameable(r.vm().Name, facts.Sessions); why != "" {
		return nil, errors.New(why)
	}
	if why := facts.stuck(r.vm().Name); len(why) > 0 {
		return nil, errors.New(strings.Join(why, "; "))
	}
	return facts, nil
}

// note adds sessions to those of the migration. The caller records it.
func (r *run) note(sessions []SessionFacts) error {
	all := r.move().GetSessions()
	for _, s := range sessions {
		if !slices.Contains(all, s.ID) {
			all = append(all, s.ID)
		}
	}
	if len(all) > MostSessions {
		return errors.New(tooMany(r.vm().Name, len(all)))
	}
	r.m.Machine.Sessions = all
	return nil
}

// freeze records which sessions are frozen and freezes them.
func (r *run) freeze(ctx context.Context) error {
	// First record which sessions are frozen: sessions that were suspended before
	// must not be resumed at the end. Also record whose state leaves the VM, so
	// that any driver can bring it back.
	facts, err := r.sessions(ctx)
	if err != nil {
		return err
	}
	if err := r.note(facts.Sessions); err != nil {
		return err
	}
	leave := facts.away(r.move().GetAway())
	r.m.Machine.AwayBytes = max(r.move().GetAwayBytes(), sum(leave))
	for _, s := range leave {
		if !slices.Contains(r.move().GetAway(), s.ID) {
			r.m.Machine.Away = append(r.move().GetAway(), s.ID)
		}
	}
	if err := r.put(ctx); err != nil {
		return err
	}
	r.all = steps(r.move()) // with the time limits for the states that leave the VM
	return r.from().Freeze(ctx, r.vm(), r.freezing(r.move().GetToHost()), r.progress)
}

// clean removes what is left on the source when nothing can be undone any more.
func (r *run) clean(ctx context.Context) error {
	// The remote GPU first, and without keeping the rest from being done.
	return errors.Join(r.endLend(ctx), r.cleanSource(ctx))
}

func (r *run) cleanSource(ctx context.Context) error {
	if m := r.move(); m.GetCold() && m.GetFromHost() != m.GetToHost() {
		err := r.from().Undefine(ctx, r.vm())
		r.leaves(m.GetFromHost(), err != nil)
		if err != nil {
			return err
		}
	}
	if r.move().GetToGpu() == "" && r.move().GetFromGpu() == "" {
		return nil
	}
	if len(r.move().GetAway()) > 0 {
		if err := errors.Join(r.from().Forget(ctx, r.vm()), r.to().Forget(ctx, r.vm())); err != nil {
			return err
		}
	}
	if r.move().GetToGpu() == r.move().GetFromGpu() {
		return nil // it is the VM's card still
	}
	if err := r.from().GiveBack(ctx, r.vm(), r.move().GetFromGpu()); err != nil {
		return err
	}
	return r.Claims.EndClaim(ctx, r.move().GetFromClaim(), r.vm(), r.move().GetFromGpu())
}

// leaves notes whether the VM's definition is left on a host where it is not to stay. That host
// removes it by itself after the migration has ended. The caller records it.
func (r *run) leaves(host string, left bool) {
	m := r.m.Machine
	m.DefinedOn = slices.DeleteFunc(m.GetDefinedOn(), func(h string) bool { return h == host })
	if left {
		m.DefinedOn = append(m.DefinedOn, host)
	}
}

// whereElse returns in words where the applications' state is, apart from the VM's
// memory.
func whereElse(m *clusterv1.MachineMove) string {
	switch {
	case m.GetAwayBytes() == 0:
		return ""
	case m.GetFromHost() == m.GetToHost():
		return fmt.Sprintf(", but for %s that go out to host %s", size.Format(m.GetAwayBytes()), m.GetFromHost())
	}
	return fmt.Sprintf(", but for %s that go out to hosts %s and %s", size.Format(m.GetAwayBytes()), m.GetFromHost(), m.GetToHost())
}

// freezing returns which sessions are frozen. The states that leave the VM are also kept
// on the host to.
func (r *run) freezing(to string) Freezing {
	return Freezing{Sessions: r.move().GetSessions(), Away: r.move().GetAway(), To: to, Patience: freezePatience(r.move())}
}

// freezePatience returns the time that the operator permits for running kernels to end.
func freezePatience(m *clusterv1.MachineMove) time.Duration {
	return time.Duration(m.GetFreezeTimeoutMs()) * time.Millisecond
}

// awayLimit returns the additional time for a step in which states leave the VM or come
// back. A transfer that makes no progress ends by itself.
func awayLimit(m *clusterv1.MachineMove) time.Duration {
	return time.Duration(float64(m.GetAwayBytes()) / slowestBulk * float64(time.Second))
}

// forget makes a host remove the states that it keeps. If the host cannot do that now, it
// does so by itself after the migration has ended.
func (r *run) forget(ctx context.Context, s Site) {
	if len(r.move().GetAway()) == 0 {
		return
	}
	if err := s.Forget(ctx, r.vm()); err != nil {
		r.Log.Warn("a GPU state is not dropped yet", "migration", r.m.GetId(), "err", err)
	}
}

func with(gpu string) string {
	if gpu == "" {
		return ""
	}
	return " with " + gpu
}

// leftover returns in words what is to be done on the source.
func leftover(m *clusterv1.MachineMove) string {
	var out []string
	if m.GetCold() && m.GetFromHost() != m.GetToHost() {
		out = append(out, "take the VM's definition away from "+m.GetFromHost())
	}
	if m.GetFromGpu() != "" && m.GetFromGpu() != m.GetToGpu() {
		out = append(out, "reset "+m.GetFromGpu()+", return it and release its claim")
	}
	if m.GetFarGpu() != "" && !m.GetCold() {
		out = append(out, "release the claim of "+m.GetFarGpu())
	}
	return strings.Join(out, ", ")
}

// errAtHome means that the destination is unreachable, but the VM runs on its source and
// was never sent away. It can go on there.
var errAtHome = errors.New("the VM is at home")

// errTwice means that a VM runs on two hosts. Nothing more is done, except pausing one of
// them.
var errTwice = errors.New("the VM runs on two hosts")

// looks is how often both hosts must report that the VM runs before that is believed,
// because the hosts are not asked at the same moment.
const looks = 3

// carry moves the VM from one host to another. It never sends the VM twice. Until one of
// the hosts alone has the VM, it waits. After the VM was sent, a VM that runs on its
// source proves nothing: if the destination's last answer is lost, libvirt lets the
// source go on, although the VM may run on the destination. Then the destination, or an
// operator, must state that it does not have the VM. On the way home, a host to which the
// VM was never sent need not be asked.
func (r *run) carry(ctx context.Context, from, to string, home bool) error {
	a, b := r.Sites.Site(from), r.Sites.Site(to)
	var sent error
	both, kept := 0, 0
	for {
		here, there, said, err := r.places(ctx, a, b, from, to, home)
		if err != nil {
			return err
		}
		if r.move().GetTwice() {
			switch {
			case alive(here) && alive(there):
				return r.twice(ctx)
			case r.move().GetPaused() && there == Moving && !home || here == Moving && home && r.move().GetPaused():
				if err := r.to().Unpause(ctx, r.vm()); err != nil { // it is the only copy now
					return err
				}
			}
			r.m.Machine.Twice, r.m.Machine.Paused = false, false
			continue
		}
		if here == Running && there == Running {
			if both++; both == looks {
				return r.twice(ctx)
			}
			if err := wait(ctx, r.Pause); err != nil {
				return fmt.Errorf("%w: it runs on host %s and on host %s, as it seems", ErrUnreachable, from, to)
			}
			continue
		}
		both = 0
		if here == Kept && there != Moving || there == Kept && here != Moving {
			if kept++; kept == looks {
				return r.keeps(ctx, from, here, to, there, sent)
			}
			if err := wait(ctx, r.Pause); err != nil {
				return fmt.Errorf("%w: the VM is %s on host %s and %s on host %s", ErrUnreachable, here, from, there, to)
			}
			continue
		}
		kept = 0
		if alone := here != Kept && there != Kept && here != Moving && there != Moving; alone {
			r.m.Machine.KeptOn = ""
		}
		switch {
		case there == Running && here != Moving:
			return nil
		case sent != nil && here == Running && there != Moving:
			return sent
		case here == Running && said:
			return fmt.Errorf("host %s cannot be reached", to) // it cannot be sent there
		case here == Running && there != Moving:
			// Nobody sends the VM to a host that does not expect its parts. The first time park sees to it.
			if home && r.withParts() {
				if err := r.expect(ctx, a, b); err != nil {
					return err
				}
			}
			// States outside of the VM must be on the destination before the VM is.
			if away := r.move().GetAway(); len(away) > 0 {
				if err := a.Deposit(ctx, r.vm(), away, to, r.progress); err != nil {
					return err
				}
			}
			// From now on the VM may be on the destination. Each driver must know that.
			r.m.Machine.SentTo = r.move().GetToHost()
			r.m.Machine.AbsentOn = nil // it was about an earlier attempt
			if err := r.put(ctx); err != nil {
				return err
			}
			if sent = a.Move(ctx, r.vm(), to, r.progress); sent != nil {
				r.Log.Warn("sending the VM has failed", "migration", r.m.GetId(), "err", sent)
			} else {
				sent = fmt.Errorf("host %s says that it is done, and the VM is still on it", from)
			}
			continue
		case here != Moving && there != Moving:
			return r.missing(ctx, fmt.Sprintf("the VM is %s on host %s and %s on host %s", here, from, there, to))
		}
		is := fmt.Sprintf("the VM is %s on host %s and %s on host %s", here, from, there, to)
		r.Report(r.m, r.bytes, 0, is)
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %s", ErrUnreachable, is)
		case <-time.After(r.Pause):
		}
	}
}

// places asks both hosts for the VM's state. said means that it is the operator who has stated
// that the VM is not on the host to.
func (r *run) places(ctx context.Context, a, b Site, from, to string, home bool) (here, there Presence, said bool, err error) {
	// Ask the source first: if it is not sending the VM, the answer of the
	// destination after that stays valid.
	here, err = a.Where(ctx, r.vm())
	there, lost := b.Where(ctx, r.vm())
	if said = errors.Is(lost, ErrUnreachable) && r.saidAbsent(to); said {
		there, lost = Absent, nil
	}
	if errors.Is(err, ErrUnreachable) && r.saidAbsent(from) {
		here, err = Absent, nil
	}
	switch {
	case errors.Is(lost, ErrUnreachable) && !home && err == nil && here == Running && r.move().GetSentTo() == "":
		return here, there, said, fmt.Errorf("%w: host %s: %w", errAtHome, to, lost)
	case lost != nil:
		return here, there, said, r.unsure(to, lost)
	case home && there == Running && errors.Is(err, ErrUnreachable) && r.move().GetSentTo() == "":
		here = Absent // it was never sent there
	case err != nil:
		return here, there, said, r.unsure(from, err)
	}
	if there == Running { // what an operator has said of this host before is over
		r.m.Machine.AbsentOn = slices.DeleteFunc(r.move().GetAbsentOn(), func(host string) bool { return host == to })
	}
	if gone := (home && !alive(here) || !home && !alive(there)) && here != Moving && there != Moving; gone {
		r.m.Machine.SentTo = "" // the other host has confirmed that it does not have the VM
	}
	return here, there, said, nil
}

// errKept means that libvirt keeps a copy of a VM from running. Nothing more is done: what
// is to become of the copy is the operator's to say.
var errKept = errors.New("libvirt keeps a copy of the VM from running")

// keeps ends a step in which libvirt has paused the VM on a host for good: it did not let it
// go on there after a migration that failed. If its lock manager did that, because the other
// host has the VM, then the copy is older than the VM and its disks, and must never run. It is
// not ended here: nobody knows for sure that it is not the better one.
func (r *run) keeps(ctx context.Context, from string, here Presence, to string, there Presence, sent error) error {
	host, other, otherHas := from, to, there
	if here != Kept {
		host, other, otherHas = to, from, here
	}
	r.m.Machine.KeptOn = host
	if err := r.put(ctx); err != nil {
		return err
	}
	why := ""
	if sent != nil {
		why = " (" + excerpt.Of(sent.Error(), 300) + ")"
	}
	if otherHas == Running {
		return fmt.Errorf("%w: it runs on host %s, and is paused on host %s%s, where libvirt did not let it go on after the move: end that copy, which is older than the VM's disks (virsh destroy %s on host %s), then gpuctl migrations resume %s",
			errKept, other, host, why, r.vm().Name, host, r.m.GetId())
	}
	return fmt.Errorf("%w: it is paused on host %s%s, where libvirt could not let it go on after the move, and %s on host %s: see that libvirt's lock manager answers on host %s; if the VM has not run on host %s meanwhile, let it go on (virsh resume %s on host %s), else it is older than its disks and must be started anew; then gpuctl migrations resume %s",
		errKept, host, why, otherHas, other, host, other, r.vm().Name, host, r.m.GetId())
}

// alive reports whether the VM runs, migrates or is kept on a host, and is not only defined
// there.
func alive(p Presence) bool { return p == Running || p == Moving || p == Kept }

// saidAbsent reports whether an operator has stated that the VM is not on a host. That is
// used if the host itself cannot be asked.
func (r *run) saidAbsent(host string) bool { return slices.Contains(r.move().GetAbsentOn(), host) }

// nothingThere reports whether a step needs no undo: it was done with the VM on the
// destination, which does not answer, and an operator has stated that the VM is not there.
func (r *run) nothingThere(ctx context.Context, name string) bool {
	there := []string{StepDefine, StepStart, StepRestore, StepAttach, StepThaw, StepHome}
	host := r.move().GetToHost()
	if host == r.move().GetFromHost() || !r.saidAbsent(host) || !slices.Contains(there, name) {
		return false
	}
	_, err := r.to().Where(ctx, r.vm())
	return errors.Is(err, ErrUnreachable)
}

// unsure returns the error for a host that cannot be asked. If the VM was sent, it may
// run there.
func (r *run) unsure(host string, err error) error {
	if r.move().GetSentTo() == "" {
		return fmt.Errorf("host %s: %w", host, err)
	}
	return fmt.Errorf("host %s: %w; the VM was sent to host %s and may run there: nothing goes on until host %s says that it does not, or you do: if it has no power, or the VM is destroyed there, gpuctl migrations resume %s --absent-on %s",
		host, err, r.move().GetSentTo(), host, r.m.GetId(), host)
}

// twice pauses the copy on the destination, which can be undone, and ends the step with
// an error.
func (r *run) twice(ctx context.Context) error {
	home, copied := r.move().GetFromHost(), r.move().GetToHost()
	r.m.Machine.Twice, r.m.Machine.Paused = true, true // first, so that the next driver knows why it is paused
	if err := r.put(ctx); err != nil {
		return err
	}
	how := "the copy on host " + copied + " is paused"
	if err := r.to().Pause(ctx, r.vm()); err != nil {
		how = fmt.Sprintf("the copy on host %s could not be paused: %v", copied, err)
		r.m.Machine.Paused = errors.Is(err, ErrUnreachable) // then it may be
	}
	how += r.distrust(ctx)
	return fmt.Errorf("%w, %s and %s: %s; find out which is to stay, destroy the other (virsh destroy %s on its host), check the disks, then gpuctl migrations resume %s",
		errTwice, home, copied, how, r.vm().Name, r.m.GetId())
}

// thaw resumes the sessions on a card, after the VM has found it.
func (r *run) thaw(ctx context.Context, s Site, gpu string) error {
	if err := s.Await(ctx, r.vm(), gpu); err != nil {
		return err
	}
	return r.account(ctx, s, s.Thaw(ctx, r.vm(), gpu, r.move().GetSessions(), r.progress))
}

// index returns the index of a step by its name; -1: there is none.
func index(all []step, name string) int {
	return slices.IndexFunc(all, func(s step) bool { return s.name == name })
}

// StepNames returns the names of a migration's steps, in order.
func StepNames(m *clusterv1.MachineMove) []string {
	var out []string
	for _, s := range steps(m) {
		out = append(out, s.name)
	}
	return out
}
