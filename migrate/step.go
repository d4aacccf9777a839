package migrate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
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
		StepPrepare, "take " + m.GetToGpu() + " from its driver, reset it, read it back", "it is returned", 3 * time.Minute,
		func(ctx context.Context, r *run) error {
			return r.to().Prepare(ctx, r.machine(), r.move().GetToGpu(), r.move().GetToClaim())
		},
		func(ctx context.Context, r *run) error { return r.to().GiveBack(ctx, r.machine(), r.move().GetToGpu()) },
	})
	add(gpu, step{
		StepFreeze, "stop the applications at their next call; their state is in the VM's memory", "they go on where they were", 10 * time.Minute,
		func(ctx context.Context, r *run) error {
			// Which ones is recorded first: those that somebody has suspended
			// before are not to be woken at the end.
			sessions, err := r.from().Sessions(ctx, r.machine())
			if err != nil {
				return err
			}
			for _, s := range sessions {
				if !slices.Contains(r.move().GetSessions(), s) {
					r.m.Machine.Sessions = append(r.move().GetSessions(), s)
				}
			}
			if err := r.put(ctx); err != nil {
				return err
			}
			return r.from().Freeze(ctx, r.machine(), r.move().GetSessions(), r.progress)
		},
		func(ctx context.Context, r *run) error { return r.thaw(ctx, r.from(), r.move().GetFromGpu()) },
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
		StepMove, fmt.Sprintf("migrate the VM live from %s to %s; it can't be stopped once it runs", from, to), "it is migrated back", 30 * time.Minute,
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
		StepThaw, "put the applications' state on it and let them go on", "they are frozen again", 10 * time.Minute,
		func(ctx context.Context, r *run) error { return r.thaw(ctx, r.to(), r.move().GetToGpu()) },
		func(ctx context.Context, r *run) error {
			return r.to().Freeze(ctx, r.machine(), r.move().GetSessions(), r.progress)
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
			if err := r.from().GiveBack(ctx, r.machine(), r.move().GetFromGpu()); err != nil {
				return err
			}
			return r.Claims.Release(ctx, r.move().GetFromClaim(), r.machine(), r.move().GetFromGpu())
		}, nil,
	})
	return out
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
		there, err := b.Where(ctx, r.machine())
		if err != nil {
			return fmt.Errorf("host %s: %w", to, err)
		}
		here, err := a.Where(ctx, r.machine())
		switch {
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
