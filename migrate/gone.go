package migrate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// errLost means that no host has the VM any more.
var errLost = errors.New("it is gone")

// errAstray means that a host has the VM that has no part in the migration. Nothing more is
// done: on that host nobody knows what is to be undone.
var errAstray = errors.New("somebody else has taken the VM away")

// askOthers is how long hosts without a part in the migration may take to say whether they have
// the VM.
const askOthers = 5 * time.Second

// missing returns the error for a VM that neither host has: it wraps errAstray if another host
// says that it has it, and errLost otherwise. is says in words where it is not.
func (r *run) missing(ctx context.Context, is string) error {
	ctx, cancel := context.WithTimeout(ctx, askOthers)
	defer cancel()
	var mu sync.Mutex
	var wg sync.WaitGroup
	has := ""
	for _, host := range r.Hosts() {
		if host == r.move().GetFromHost() || host == r.move().GetToHost() {
			continue
		}
		wg.Go(func() {
			p, err := r.Sites.Site(host).Where(ctx, r.vm())
			mu.Lock()
			defer mu.Unlock()
			if err == nil && alive(p) {
				has = host
			}
		})
	}
	wg.Wait()
	if has == "" {
		return fmt.Errorf("%s: %w", is, errLost)
	}
	home := r.move().GetFromHost()
	if r.did(StepMove) {
		home = r.move().GetToHost()
	}
	return fmt.Errorf("%w: %s, and host %s has it, which has no part in this migration; bring it back to host %s (virsh migrate --live), then gpuctl migrations resume %s",
		errAstray, is, has, home, r.m.GetId())
}

// gone looks for the VM after an undo has failed. It returns an error if neither host has the VM any
// more, as nothing is left that could be undone then. One that is just started anew may be nowhere
// for a moment, so they are asked for a while. hint says what to do about a VM that is only stopped.
func (r *run) gone(ctx context.Context) (hint string, err error) {
	from, to := r.move().GetFromHost(), r.move().GetToHost()
	for until := time.Now().Add(r.Patience / 4); ; {
		here, err := r.where(ctx, r.a, from)
		there, lost := r.where(ctx, r.b, to)
		switch {
		case err != nil || lost != nil || alive(here) || alive(there) || r.move().GetCold() && (here == Stopped || there == Stopped):
			return "", nil //nolint:nilerr // where it is, is not known
		case here == Stopped:
			return fmt.Sprintf("the VM is stopped on host %s: start it there first; ", from), nil
		case there == Stopped:
			return fmt.Sprintf("the VM is stopped on host %s: start it there first; ", to), nil
		case time.Now().Before(until):
			_ = wait(ctx, r.Patience/100) // when ctx ends, the hosts do not answer
			continue
		case from == to:
			return "", r.missing(ctx, "the VM is absent on host "+from)
		}
		return "", r.missing(ctx, fmt.Sprintf("the VM is absent on host %s and absent on host %s", from, to))
	}
}

// start starts the VM, which was stopped, on a host. Somebody may have started it on the other one
// again: an operator, or that host itself when it has booted.
func (r *run) start(ctx context.Context, s Site, gpu string, other Site, host string) error {
	if r.move().GetFromHost() != r.move().GetToHost() {
		if err := r.alone(ctx, s, other, host); err != nil {
			return err
		}
	}
	return s.Start(ctx, r.vm(), gpu, r.move().GetStored())
}

// alone returns an error if the VM is not to be started on a host, as it runs on the other one.
func (r *run) alone(ctx context.Context, s, other Site, host string) error {
	here, unknown := s.Where(ctx, r.vm())
	there, err := r.where(ctx, other, host)
	runs := err == nil && alive(there)
	switch twice := r.move().GetTwice(); {
	case errors.Is(err, ErrStale):
		return err
	case runs && unknown == nil && alive(here):
		return r.twice(ctx)
	case twice && (err != nil || unknown != nil): // a copy is paused, and may be the only one
		return fmt.Errorf("%w, as far as is known: %w; gpuctl migrations resume %s when both answer", errTwice, cmp.Or(err, unknown), r.m.GetId())
	case twice && r.move().GetPaused():
		// One of the two was destroyed. If the other is that which was paused, it goes on.
		if p, err := r.to().Where(ctx, r.vm()); err == nil && p == Moving {
			if err := r.to().Unpause(ctx, r.vm()); err != nil {
				return err
			}
		}
	}
	r.m.Machine.Twice, r.m.Machine.Paused = false, false
	if runs {
		return fmt.Errorf("the VM runs on host %s, where somebody has started it again", host)
	}
	return nil
}

// where asks a host for the VM. If it cannot be asked, the operator's word counts.
func (r *run) where(ctx context.Context, s Site, host string) (Presence, error) {
	p, err := s.Where(ctx, r.vm())
	if errors.Is(err, ErrUnreachable) && r.saidAbsent(host) {
		return Absent, nil
	}
	return p, err
}
