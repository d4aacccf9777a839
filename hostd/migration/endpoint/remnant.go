package endpoint

import (
	"context"
	"errors"
	"fmt"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

// ErrTwice means that a VM runs on two hosts.
var ErrTwice = errors.New("it runs on two hosts")

// Clear removes the copy of a VM that a migration has left on this host, if the VM
// belongs to the host home: a copy that is paused and has never run, because the source
// failed before the end of the migration, one that has not even begun to arrive, or one
// that libvirt does not know. Unless home reports that the VM runs there and is not
// migrating, nothing is changed: the copy might be the only one.
//
// If the copy runs while the VM runs at home, the copy is paused, which can be undone.
// The operator must decide which of the two stays. The error wraps ErrTwice then.
func (l *Local) Clear(ctx context.Context, uuid, home string) (cleared bool, err error) {
	if l.Client == nil {
		return false, nil
	}
	here, err := l.Where(ctx, uuid)
	if err == nil && here != migrate.Moving && here != migrate.Kept {
		// A copy that runs now, or ran before, is not an arrival, even if it is paused.
		if err = l.Fence.Halt(uuid, here == migrate.Running); err != nil && here == migrate.Running {
			l.Log.Error("that a copy of a VM runs here is not recorded", "machine", uuid, "err", err)
			err = nil // it may have to be paused
		}
	}
	if err == nil && here == migrate.Stopped && l.Client.Driver() == virt.Xen && l.transient(ctx, uuid) {
		here = migrate.Moving
	}
	if err == nil && here == migrate.Absent && l.Domains != nil {
		return l.clearUnknown(ctx, uuid, home)
	}
	if err != nil || here != migrate.Running && here != migrate.Moving {
		return false, err
	}
	if here == migrate.Moving && (l.Client.Driver() != virt.Xen || l.Fence.Halted(uuid)) {
		return false, nil // qemu ends when the connection from its source ends; a halted copy has run
	}
	if there, err := l.WhereOn(ctx, home, vm.VM{UUID: uuid}); err != nil || there != migrate.Running {
		return false, err
	}
	d, err := l.domain(ctx, uuid)
	if err != nil {
		return false, err
	}
	if here == migrate.Running {
		if now, err := l.Where(ctx, uuid); err != nil || now != migrate.Running {
			return false, err // it has just arrived, or left
		}
		err := fmt.Errorf("VM %s: %w, %s and %s; the copy on %s is paused: find out which is to stay, and destroy the other (virsh destroy %s)", d.Name, ErrTwice, home, l.Name, l.Name, d.Name)
		return false, errors.Join(err, l.Pause(ctx, uuid))
	}
	l.Log.Warn("a migration that lost its source has left a copy of a VM: it is ended", "machine", d.Name, "home", home)
	return true, l.Client.CancelArrival(ctx, d)
}

// clearUnknown ends a domain of a VM that has never run and that libvirt does not know: a libvirtd that is killed
// while a VM arrives on Xen leaves such a one. As long as it is there, that VM can't come to this host.
func (l *Local) clearUnknown(ctx context.Context, uuid, home string) (cleared bool, err error) {
	id, ok, err := l.Domains.Unstarted(ctx, uuid)
	if err != nil || !ok {
		return false, err
	}
	// libvirt knows a VM that arrives before Xen has its domain. So what it does not know now does not arrive.
	if here, err := l.Where(ctx, uuid); err != nil || here != migrate.Absent {
		return false, err
	}
	if there, err := l.WhereOn(ctx, home, vm.VM{UUID: uuid}); err != nil || there != migrate.Running {
		return false, err
	}
	l.Log.Warn("a libvirtd that has ended has left a domain of a VM that did not arrive: it is ended", "machine", uuid, "domain", id, "home", home)
	return true, l.Domains.End(ctx, id)
}

// Withdraw removes the definition of a VM that a migration has left on this host, if the VM
// belongs to the host home, which must have it, and does not run here. It does so once for a
// migration, by its token: who defines the VM here later wants that.
func (l *Local) Withdraw(ctx context.Context, uuid, home string, token uint64) (removed bool, err error) {
	if l.Client == nil || l.Fence.Withdrawn(uuid, token) {
		return false, nil
	}
	here, err := l.Where(ctx, uuid)
	if err == nil && here == migrate.Absent {
		return false, l.Fence.Withdraw(uuid, token)
	}
	if err != nil || here != migrate.Stopped || l.transient(ctx, uuid) {
		return false, err
	}
	there, err := l.WhereOn(ctx, home, vm.VM{UUID: uuid})
	if err != nil || there != migrate.Running && there != migrate.Stopped {
		return false, err
	}
	m := &gpuctlv1.SiteMachine{Uuid: uuid, Token: token}
	if err := l.Fence.Admit(m); err != nil {
		return false, err // the next migration has begun
	}
	l.Log.Warn("a migration that could not reach this host has left a definition of a VM: it is removed", "machine", uuid, "home", home)
	if err := l.Undefine(ctx, m); err != nil {
		return false, err
	}
	return true, l.Fence.Withdraw(uuid, token)
}

// transient reports whether a domain has no stored definition. If it is shut off, then, it was
// prepared for a migration: libvirt knows no other.
func (l *Local) transient(ctx context.Context, uuid string) bool {
	d, err := l.domain(ctx, uuid)
	if err != nil {
		return false
	}
	stored, err := l.Client.Persistent(ctx, d)
	return err == nil && !stored
}
