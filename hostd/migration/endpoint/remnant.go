package endpoint

import (
	"context"
	"errors"
	"fmt"

	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

// ErrTwice says that a VM runs on two hosts.
var ErrTwice = errors.New("it runs on two hosts")

// Clear ends what a migration has left here of a VM that is at home elsewhere: a
// copy that is paused and has never run, since the source was lost before its
// last word. As long as home does not say that the VM runs there, and is not on
// its way, nothing is touched: it might be the only one.
//
// A copy that runs, beside the one at home, is paused, which can be taken back:
// which of them is to stay is the operator's to say. The error is ErrTwice then.
func (l *Local) Clear(ctx context.Context, uuid, home string) (cleared bool, err error) {
	if l.Client == nil {
		return false, nil
	}
	here, err := l.Where(ctx, uuid)
	if err == nil && here != migrate.Moving {
		// One that runs, or did, is no arrival, whoever pauses it.
		err = l.Fence.Halt(uuid, here == migrate.Running)
	}
	if err != nil || here != migrate.Running && here != migrate.Moving {
		return false, err
	}
	if here == migrate.Moving && (l.Client.Driver() != virt.Xen || l.Fence.Halted(uuid)) {
		return false, nil // qemu ends with the connection that fed it; what was paused has run
	}
	peer, err := l.Peer(home)
	if err != nil {
		return false, err
	}
	there, err := (&Remote{Host: home, Service: peer}).Where(ctx, vm.VM{UUID: uuid})
	if err != nil || there != migrate.Running {
		return false, err
	}
	d, err := l.domain(ctx, uuid)
	if err != nil {
		return false, err
	}
	if here == migrate.Running {
		if now, err := l.Where(ctx, uuid); err != nil || now != migrate.Running {
			return false, err // it has just come here, or gone
		}
		err := fmt.Errorf("VM %s: %w, %s and %s; the copy on %s is paused: find out which is to stay, and destroy the other (virsh destroy %s)", d.Name, ErrTwice, home, l.Name, l.Name, d.Name)
		return false, errors.Join(err, l.Pause(ctx, uuid))
	}
	l.Log.Warn("a migration that lost its source has left a copy of a VM: it is ended", "machine", d.Name, "home", home)
	return true, l.Client.CancelArrival(ctx, d)
}
