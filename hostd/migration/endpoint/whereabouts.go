package endpoint

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
	"github.com/gpuctl/gpuctl/passthrough/domxml"
)

const whereTimeout = 5 * time.Second // for a host to say whether it has a VM

// ErrNoHost means that a host is not in the cluster.
var ErrNoHost = errors.New("it is not in the cluster")

// Whereabouts say where VMs are: on this host, as libvirt says, or on another, as that says.
type Whereabouts struct {
	Name   string       // of this host
	Client *virt.Client // nil: this host has no libvirt
	// Peer returns a client for another host.
	Peer func(host string) (gpuctlv1connect.SiteServiceClient, error)
	// Member reports whether a host is in the cluster, or whether that is unknown; nil:
	// each is.
	Member func(host string) bool
	Log    *slog.Logger
}

// domain returns libvirt's domain of the VM.
func (w Whereabouts) domain(ctx context.Context, uuid string) (virt.Domain, error) {
	if w.Client == nil {
		return virt.Domain{}, fmt.Errorf("host %s has no libvirt", w.Name)
	}
	u, err := virt.ParseUUID(uuid)
	if err != nil {
		return virt.Domain{}, err
	}
	return w.Client.LookupUUID(ctx, u)
}

// Where returns the VM's state on this host.
func (w Whereabouts) Where(ctx context.Context, uuid string) (migrate.Presence, error) {
	d, err := w.domain(ctx, uuid)
	if errors.Is(err, virt.ErrNotFound) {
		return migrate.Absent, nil
	}
	if err != nil {
		return 0, err
	}
	state, why, err := w.Client.StateReason(ctx, d)
	switch {
	case errors.Is(err, virt.ErrNotFound):
		return migrate.Absent, nil
	case err != nil:
		return 0, err
	case !state.Active():
		return migrate.Stopped, nil
	}
	if inName, err := w.Client.PausedInName(ctx, d, state, why); err != nil {
		return 0, err // it may be migrating
	} else if inName {
		w.Log.Debug("libvirt says that the VM is paused, but the migration has ended and Xen runs it; restart libvirtd, which then reads the state from Xen", "machine", d.Name)
		return migrate.Running, nil
	}
	if state == virt.Paused { // a VM that migrates is paused on one of the two hosts
		if why == virt.PausedMigration && w.keptPaused(ctx, d) {
			return migrate.Kept, nil
		}
		return migrate.Moving, nil
	}
	switch job, err := w.Client.Job(ctx, d); {
	case errors.Is(err, virt.ErrUnsupported):
	case err != nil:
		return 0, err // it may be migrating
	case job.State == virt.JobBounded || job.State == virt.JobUnbounded:
		return migrate.Moving, nil
	}
	return migrate.Running, nil
}

// keptPaused reports whether qemu's driver has paused a domain for a migration that is over. Then
// it could not let the domain go on after a migration that failed, mostly because its lock
// manager does not permit it. If the domain is arriving, libvirt refuses to tell of its job.
func (w Whereabouts) keptPaused(ctx context.Context, d virt.Domain) bool {
	job, err := w.Client.Job(ctx, d)
	return err == nil && job.State == virt.NoJob
}

// WhereOn returns a VM's state on a host. The error wraps ErrNoHost if that is not in the
// cluster.
func (w Whereabouts) WhereOn(ctx context.Context, host string, m vm.VM) (migrate.Presence, error) {
	ctx, cancel := context.WithTimeout(ctx, whereTimeout)
	defer cancel()
	switch {
	case host == w.Name:
		return w.Where(ctx, m.UUID)
	case w.Member != nil && !w.Member(host):
		return 0, fmt.Errorf("host %s: %w", host, ErrNoHost)
	}
	peer, err := w.Peer(host)
	if err != nil {
		return 0, peerError(host, err)
	}
	return (&Remote{Host: host, Service: peer}).Where(ctx, m)
}

// Channel returns the path of a VM's guest channel, from its definition.
func (w Whereabouts) Channel(ctx context.Context, uuid string) (string, error) {
	d, err := w.domain(ctx, uuid)
	if err != nil {
		return "", err
	}
	text, err := w.Client.XML(ctx, d, 0)
	if err != nil {
		return "", err
	}
	doc, err := domxml.Parse(text)
	if err != nil {
		return "", err
	}
	for _, c := range doc.Channels() {
		if c.Name == channelName {
			return c.Path, nil
		}
	}
	return "", fmt.Errorf("the definition of VM %s has no channel %s on a unix socket", d.Name, channelName)
}
