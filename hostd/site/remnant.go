package site

import (
	"context"

	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/migrate"
)

// Clear ends what a migration has left here of a VM that is at home elsewhere: a
// copy that is paused and has never run, since the source was lost before its
// last word. As long as home does not say that the VM runs there, and is not on
// its way, nothing is touched: it might be the only one.
func (l *Local) Clear(ctx context.Context, uuid, home string) (cleared bool, err error) {
	if l.Client == nil || l.Client.Driver() != virt.Xen {
		return false, nil // qemu ends with the connection that fed it
	}
	here, err := l.Where(ctx, uuid)
	if err != nil || here != migrate.Moving {
		return false, err
	}
	peer, err := l.Peer(home)
	if err != nil {
		return false, err
	}
	there, err := (&Remote{Host: home, Service: peer}).Where(ctx, migrate.Machine{UUID: uuid})
	if err != nil || there != migrate.Running {
		return false, err
	}
	d, err := l.domain(ctx, uuid)
	if err != nil {
		return false, err
	}
	l.Log.Warn("a migration that lost its source has left a copy of a VM: it is ended", "machine", d.Name, "home", home)
	return true, l.Client.CancelArrival(ctx, d)
}
