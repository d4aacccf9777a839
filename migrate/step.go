package migrate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/size"
)

// Names of steps, as operators see them and as the record has them. They are
// never used for something else.
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

	// Of a VM that cannot be moved alive.
	StepStop   = "stop"
	StepDefine = "define"
	StepStart  = "start"
)

// expectTimeout is how long a VM's applications run on for its next runtime.
const expectTimeout = time.Minute

// step is one step of a transaction.
type step struct {
	name, what, undone string // in words; undone empty: there is nothing to undo
	limit              time.Duration
	do, undo           func(ctx context.Context, r *run) error
}

// steps of a migration, in order.
func steps(m *clusterv1.MachineMove) []step {
	card, moves := m.GetToGpu() != "" || m.GetFromGpu() != "", m.GetFromHost() != m.GetToHost()
	gpu, cold := card && !m.GetCold(), m.GetCold() // gpu: exchanged while the VM runs
	from, to := m.GetFromHost(), m.GetToHost()
	var out []step
	add := func(when bool, s step) {
		if when {
			out = append(out, s)
		}
	}
	add(card, step{
		StepReserve, fmt.Sprintf("bind a claim of %s to %s", m.GetName(), m.GetToGpu()), "the claim is released", 30 * time.Second,
		func(ctx context.Context, r *run) error {
			return r.Claims.Reserve(ctx, r.move().GetToClaim(), r.machine(), r.move().GetToGpu())
		},
		func(ctx context.Context, r *run) error {
			return r.Claims.Release(ctx, r.move().GetToClaim(), r.machine(), r.move().GetToGpu())
		},
	})
	add(card, step{
		StepPrepare, "take " + m.GetToGpu() + " from its driver, reset it, read it back, have the VM load its runtime", "it is returned", 3 * time.Minute,
		func(ctx context.Context, r *run) error {
			id, err := r.to().Prepare(ctx, r.machine(), r.move().GetToGpu(), r.move().GetToClaim())
			if err != nil || !gpu || slices.Contains(r.m.GetDone(), StepFreeze) { // of another candidate
				return err
			}
			// Without it the applications stand still for longer, no more.
			ctx, cancel := context.WithTimeout(ctx, expectTimeout)
			defer cancel()
			if err := r.from().Expect(ctx, r.machine(), id); err != nil {
				r.Log.Warn("the runtime of the next card is not loaded ahead", "migration", r.m.GetId(), "gpu", r.move().GetToGpu(), "err", err)
			}
			return nil
		},
		func(ctx context.Context, r *run) error { return r.to().GiveBack(ctx, r.machine(), r.move().GetToGpu()) },
	})
	add(gpu, step{
		StepFreeze, "stop the applications at their next call; their state is in the VM's memory" + whereElse(m), "they go on where they were", 10*time.Minute + awayLimit(m),
		func(ctx context.Context, r *run) error {
			// Which ones is recorded first: those that somebody has suspended
			// before are not to be woken at the end. So is whose state leaves
			// the VM, for whoever has to bring it back.
			facts, err := r.from().Sessions(ctx, r.machine())
			if err != nil {
				return err
			}
			for _, s := range facts.Sessions {
				if !slices.Contains(r.move().GetSessions(), s.ID) {
					r.m.Machine.Sessions = append(r.move().GetSessions(), s.ID)
				}
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
			r.all = steps(r.move()) // with the time that what is away takes
			return r.from().Freeze(ctx, r.machine(), r.move().GetSessions(), r.move().GetAway(), r.move().GetToHost(), r.progress)
		},
		func(ctx context.Context, r *run) error {
			if err := r.thaw(ctx, r.from(), r.move().GetFromGpu()); err != nil {
				return err
			}
			r.forget(ctx, r.from())
			if moves {
				r.forget(ctx, r.to())
			}
			return nil
		},
	})
	add(gpu, step{
		StepRelease, "have the VM let go of " + m.GetFromGpu() + " and confirm that it can be unplugged", "the VM takes it up again", time.Minute,
		func(ctx context.Context, r *run) error {
			return r.from().Release(ctx, r.machine(), r.move().GetFromGpu())
		},
		func(ctx context.Context, r *run) error {
			return r.from().TakeUp(ctx, r.machine(), r.move().GetFromGpu())
		},
	})
	add(gpu, step{
		StepDetach, "unplug " + m.GetFromGpu() + ", have the hypervisor confirm it, reset it", "it is plugged in again", 3 * time.Minute,
		func(ctx context.Context, r *run) error {
			return r.from().Detach(ctx, r.machine(), r.move().GetFromGpu())
		},
		func(ctx context.Context, r *run) error {
			return r.from().Attach(ctx, r.machine(), r.move().GetFromGpu(), r.move().GetStored())
		},
	})
	add(moves && !cold, step{
		StepMove, fmt.Sprintf("migrate the VM live from %s to %s; it can't be stopped once it runs", from, to), "it is migrated back", 30*time.Minute + awayLimit(m),
		func(ctx context.Context, r *run) error {
			return r.carry(ctx, r.move().GetFromHost(), r.move().GetToHost(), false)
		},
		func(ctx context.Context, r *run) error {
			return r.carry(ctx, r.move().GetToHost(), r.move().GetFromHost(), true)
		},
	})
	add(gpu, step{
		StepAttach, "plug " + m.GetToGpu() + " in, and have the hypervisor confirm it", "it is unplugged", 3 * time.Minute,
		func(ctx context.Context, r *run) error {
			return r.to().Attach(ctx, r.machine(), r.move().GetToGpu(), r.move().GetStored())
		},
		func(ctx context.Context, r *run) error {
			if err := r.to().Release(ctx, r.machine(), r.move().GetToGpu()); err != nil {
				return err
			}
			return r.to().Detach(ctx, r.machine(), r.move().GetToGpu())
		},
	})
	add(gpu, step{
		StepAwait, "wait until the VM has found it and a runtime serves it", "", 3 * time.Minute,
		func(ctx context.Context, r *run) error {
			return r.to().Await(ctx, r.machine(), r.move().GetToGpu())
		}, nil,
	})
	add(gpu, step{
		StepThaw, "put the applications' state on it and let them go on", "they are frozen again", 10*time.Minute + awayLimit(m),
		func(ctx context.Context, r *run) error { return r.thaw(ctx, r.to(), r.move().GetToGpu()) },
		func(ctx context.Context, r *run) error {
			return r.to().Freeze(ctx, r.machine(), r.move().GetSessions(), r.move().GetAway(), r.move().GetFromHost(), r.progress)
		},
	})
	add(cold, step{
		StepStop, "end the VM, and its applications with it", "it is started again", 5 * time.Minute,
		func(ctx context.Context, r *run) error {
			return r.from().Stop(ctx, r.machine(), r.move().GetFromGpu())
		},
		func(ctx context.Context, r *run) error {
			return r.from().Start(ctx, r.machine(), r.move().GetFromGpu(), r.move().GetStored())
		},
	})
	add(cold && moves, step{
		StepDefine, "give its definition to " + to, "it is taken away from there", time.Minute,
		func(ctx context.Context, r *run) error {
			xml, err := r.from().Definition(ctx, r.machine())
			if err != nil {
				return err
			}
			return r.to().Define(ctx, r.machine(), xml)
		},
		func(ctx context.Context, r *run) error { return r.to().Undefine(ctx, r.machine()) },
	})
	add(cold, step{
		StepStart, "start it" + with(m.GetToGpu()), "it is ended", 5 * time.Minute,
		func(ctx context.Context, r *run) error {
			return r.to().Start(ctx, r.machine(), r.move().GetToGpu(), r.move().GetStored())
		},
		func(ctx context.Context, r *run) error {
			return r.to().Stop(ctx, r.machine(), r.move().GetToGpu())
		},
	})
	add(true, step{
		StepCommit, "record that it is done: from here there is no way back", "", time.Minute,
		func(context.Context, *run) error { return nil }, nil,
	})
	add(card || cold && moves, step{
		StepClean, leftover(m), "", 3 * time.Minute,
		func(ctx context.Context, r *run) error {
			if cold && moves {
				if err := r.from().Undefine(ctx, r.machine()); err != nil {
					return err
				}
			}
			if !card {
				return nil
			}
			if len(r.move().GetAway()) > 0 {
				if err := errors.Join(r.from().Forget(ctx, r.machine()), r.to().Forget(ctx, r.machine())); err != nil {
					return err
				}
			}
			if err := r.from().GiveBack(ctx, r.machine(), r.move().GetFromGpu()); err != nil {
				return err
			}
			return r.Claims.Release(ctx, r.move().GetFromClaim(), r.machine(), r.move().GetFromGpu())
		}, nil,
	})
	return out
}

// whereElse says where the applications' state is beside the VM's memory.
func whereElse(m *clusterv1.MachineMove) string {
	switch {
	case m.GetAwayBytes() == 0:
		return ""
	case m.GetFromHost() == m.GetToHost():
		return fmt.Sprintf(", but for %s that go out to host %s", size.Format(m.GetAwayBytes()), m.GetFromHost())
	}
	return fmt.Sprintf(", but for %s that go out to hosts %s and %s", size.Format(m.GetAwayBytes()), m.GetFromHost(), m.GetToHost())
}

// awayLimit is how much longer a step may take in which states leave the VM or
// come back. Each of them ends by itself when it stalls.
func awayLimit(m *clusterv1.MachineMove) time.Duration {
	return time.Duration(float64(m.GetAwayBytes()) / slowestBulk * float64(time.Second))
}

// forget has a host drop what it keeps of the sessions. If it can't now, it
// does by itself when the migration has ended.
func (r *run) forget(ctx context.Context, s Site) {
	if len(r.move().GetAway()) == 0 {
		return
	}
	if err := s.Forget(ctx, r.machine()); err != nil {
		r.Log.Warn("a GPU state is not dropped yet", "migration", r.m.GetId(), "err", err)
	}
}

func with(gpu string) string {
	if gpu == "" {
		return ""
	}
	return " with " + gpu
}

// leftover says what is left to do at the source.
func leftover(m *clusterv1.MachineMove) string {
	var out []string
	if m.GetCold() && m.GetFromHost() != m.GetToHost() {
		out = append(out, "take the VM's definition away from "+m.GetFromHost())
	}
	if m.GetFromGpu() != "" {
		out = append(out, "reset "+m.GetFromGpu()+", return it and release its claim")
	}
	return strings.Join(out, ", ")
}

// errAtHome says that a VM whose destination is unreachable runs where it was,
// and is not on its way: it can go on there.
var errAtHome = errors.New("the VM is at home")

// carry moves the VM from one host to another. It is never sent twice: as long
// as neither host alone has it, it is waited for. On the way home a host that is
// gone need not be asked: a VM that runs at home, and is not moving, is there.
func (r *run) carry(ctx context.Context, from, to string, home bool) error {
	a, err := r.Sites.Site(from)
	if err != nil {
		return err
	}
	b, err := r.Sites.Site(to)
	if err != nil {
		return err
	}
	var sent error
	for {
		there, lost := b.Where(ctx, r.machine())
		here, err := a.Where(ctx, r.machine())
		switch {
		case errors.Is(lost, ErrUnreachable) && !home && err == nil && here == Running:
			return fmt.Errorf("%w: host %s: %w", errAtHome, to, lost)
		case lost != nil:
			return fmt.Errorf("host %s: %w", to, lost)
		case home && there == Running && errors.Is(err, ErrUnreachable):
			return nil
		case err != nil:
			return fmt.Errorf("host %s: %w", from, err)
		}
		switch {
		case there == Running && here != Running && here != Moving:
			return nil
		case sent != nil && here == Running && there != Moving:
			return sent
		case here == Running && there != Moving:
			// The states that are not in it are where it goes before it is.
			if away := r.move().GetAway(); len(away) > 0 {
				if err := a.Deposit(ctx, r.machine(), away, to, r.progress); err != nil {
					return err
				}
			}
			if sent = a.Move(ctx, r.machine(), to, r.progress); sent == nil {
				sent = fmt.Errorf("host %s says that it is done, and the VM is still on it", from)
			}
			continue
		case here != Running && here != Moving && there != Moving:
			return fmt.Errorf("the VM is %s on host %s and %s on host %s: %w", here, from, there, to, errLost)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: the VM is %s on host %s and %s on host %s", ErrUnreachable, here, from, there, to)
		case <-time.After(r.Pause):
		}
	}
}

// thaw lets the sessions go on with a card, once the VM has it.
func (r *run) thaw(ctx context.Context, s Site, gpu string) error {
	if err := s.Await(ctx, r.machine(), gpu); err != nil {
		return err
	}
	return s.Thaw(ctx, r.machine(), gpu, r.move().GetSessions(), r.progress)
}

// index of a step by name; -1: there is none.
func index(all []step, name string) int {
	return slices.IndexFunc(all, func(s step) bool { return s.name == name })
}

// StepNames are the names of a migration's steps, in order.
func StepNames(m *clusterv1.MachineMove) []string {
	var out []string
	for _, s := range steps(m) {
		out = append(out, s.name)
	}
	return out
}
