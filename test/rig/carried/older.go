package main

import (
	"context"
	"errors"
	"os"

	"github.com/gpuctl/gpuctl/guest/lease"
	"github.com/gpuctl/gpuctl/guest/session"
)

// older are executors of an earlier release, as while hosts are upgraded one after the other: those that
// ran before the upgrade go on, and carriers have far executors on hosts of either release.
type older struct {
	*session.ExecLauncher
	leases *lease.Manager // of far executors
}

// newOlder returns executors of the gpuguest that GPUCTL_TEST_OLDER names. c is of the lease manager for those of this release.
func newOlder(newer *session.ExecLauncher, c lease.Config, dir string) (*older, error) {
	binary := os.Getenv("GPUCTL_TEST_OLDER")
	if _, err := os.Stat(binary); err != nil {
		return nil, errors.Join(errors.New("GPUCTL_TEST_OLDER names no gpuguest of an earlier release"), err)
	}
	o := &older{ExecLauncher: &session.ExecLauncher{Binary: binary, Dir: newer.Dir, Users: newer.Users}}
	c.Launcher = o.ExecLauncher
	var err error
	o.leases, err = lends(c, dir, true)
	return o, err
}

// of returns the launcher of a session's executor, and the lease manager of its far executor; nil: it has none. The
// generations of a session's executors are by turns: of the earlier release, of this one, this
// one's carrier to an executor of the earlier, and the other way round.
func (o *older) of(l *launcher, generation uint32) (*session.ExecLauncher, *lease.Manager) {
	switch generation % 4 {
	case 1:
		return o.ExecLauncher, nil
	case 2:
		return l.ExecLauncher, nil
	case 3:
		return l.ExecLauncher, o.leases
	}
	return o.ExecLauncher, l.leases
}

// Warm implements session.Launcher.
func (l *launcher) Warm(ctx context.Context, spec session.Spec) error {
	if l.older != nil && spec.Dir != "" {
		return nil // of which release it will be is not known yet
	}
	return l.ExecLauncher.Warm(ctx, spec)
}
