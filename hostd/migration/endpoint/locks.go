package endpoint

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

// barred adds to an error of a VM that was to run on a host what libvirt's lock manager has
// to do with it: which other host has the VM, and what to do. Other errors are returned
// unchanged.
func (l *Local) barred(ctx context.Context, m vm.VM, host string, err error) error {
	switch {
	case errors.Is(err, virt.ErrLockManager):
		return reason.Errorf(reason.LockManagerDown, "VM %s does not run on host %s without libvirt's lock manager: %w", m.Name, host, err).
			On("host", host).Do("start virtlockd there (systemctl start virtlockd.socket), and restart libvirtd if file_lockspace_dir is set; VMs go on meanwhile")
	case !errors.Is(err, virt.ErrLocked):
		return err
	}
	has, silent := l.elsewhere(ctx, m)
	out := reason.Errorf(reason.Locked, "VM %s does not run on host %s, as its disks are locked by another: %w", m.Name, host, err).On("vm", m.Name)
	switch {
	case len(has) > 0:
		out = reason.Errorf(reason.Locked, "VM %s does not run on host %s, as host %s has it and its disks are locked there: %w", m.Name, host, strings.Join(has, " and host "), err).On("vm", m.Name)
		return out.Do("gpuctl migrate %s --to HOST moves it; or end it where it is not to stay (virsh destroy %s on that host)", m.Name, m.Name)
	case len(silent) > 0:
		return out.Do("see whether it runs on host %s, which did not answer, and that no other VM has its disks", strings.Join(silent, " or host "))
	}
	return out.Do("no host of the cluster says that it runs there: see which other VM, or host outside of the cluster, has its disks")
}

// elsewhere asks the other hosts of the cluster which of them have a VM that is not stopped,
// and returns those that do not answer, too.
func (l *Local) elsewhere(ctx context.Context, m vm.VM) (has, silent []string) {
	if l.Others == nil || l.Peer == nil {
		return nil, nil
	}
	const patience = 5 * time.Second
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, host := range l.Others() {
		wg.Go(func() {
			peer, err := l.Peer(host)
			p := migrate.Absent
			if err == nil {
				p, err = (&Remote{Host: host, Service: peer}).Where(ctx, m)
			}
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				silent = append(silent, host)
			case p != migrate.Absent && p != migrate.Stopped:
				has = append(has, host)
			}
		})
	}
	wg.Wait()
	slices.Sort(has)
	slices.Sort(silent)
	return has, silent
}

// unlocked returns which disks of a running VM libvirt's lock manager should have locked, and
// has not.
func (l *Local) unlocked(disks []*gpuctlv1.SiteDisk) (out []string) {
	locks := l.Locks()
	for _, d := range disks {
		if d.GetReadOnly() {
			continue
		}
		switch bare, err := locks.Unlocked(d.GetPath()); {
		case err != nil:
			l.Log.Warn("whether a disk is locked is not known", "disk", d.GetPath(), "err", err)
		case bare:
			out = append(out, d.GetPath())
		}
	}
	return out
}

// lockManager returns the name of libvirt's lock manager on this host, and why it does not
// answer.
func (l *Local) lockManager(ctx context.Context) (name, why string) {
	if l.Locks == nil {
		return "", ""
	}
	locks := l.Locks()
	if err := locks.Serves(ctx); err != nil {
		why = fmt.Sprintf("%s: %v", locks.Manager, err)
	}
	return locks.Manager, why
}
