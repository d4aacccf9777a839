package platform

import (
	"context"
	"time"

	"github.com/gpuctl/gpuctl/internal/wait"
	"github.com/gpuctl/gpuctl/internal/xenstore"
	"github.com/gpuctl/gpuctl/passthrough/xen"
)

// Domain is the domain of a VM, as Xen has it.
type Domain struct {
	ID     uint16
	Paused bool
	HVM    bool
	Ran    bool // one of its vCPUs has run
}

// Domains returns the domains of the VMs that run, by the VMs' UUIDs. Without Xen there
// are none.
func (p *Platform) Domains(ctx context.Context) (map[string]Domain, error) {
	out := map[string]Domain{}
	if p.xen == nil {
		return out, nil
	}
	all, err := p.xen.Domains(ctx)
	if err != nil {
		return nil, err
	}
	for _, d := range all {
		if !d.Dying && d.ID != 0 {
			out[canonical(d.UUID)] = Domain{ID: d.ID, Paused: d.Paused, HVM: d.Type == xen.TypeHVM, Ran: d.Ran}
		}
	}
	return out, nil
}

// Unstarted returns the domain of a VM that has never run, whether libvirt knows it or not. Without Xen
// there is none.
func (p *Platform) Unstarted(ctx context.Context, uuid string) (id uint16, ok bool, err error) {
	if p.xen == nil {
		return 0, false, nil
	}
	all, err := p.xen.Domains(ctx)
	id, ok = unstarted(all, canonical(uuid))
	return id, ok, err
}

// End ends a domain of Xen at once, without libvirt.
func (p *Platform) End(ctx context.Context, id uint16) error { return p.xl.Destroy(ctx, id) }

// Xen reports whether this host is a control domain of Xen.
func (p *Platform) Xen() bool { return p.xen != nil }

// FollowDomains calls changed when domains come and go, until ctx ends.
func (p *Platform) FollowDomains(ctx context.Context, changed func()) {
	if p.store == nil {
		return
	}
	for _, name := range []string{"@introduceDomain", "@releaseDomain"} {
		go p.follow(ctx, name, changed)
	}
	<-ctx.Done()
}

func (p *Platform) follow(ctx context.Context, name string, changed func()) {
	for ctx.Err() == nil {
		if err := followOnce(ctx, p.store, name, changed); err != nil && ctx.Err() == nil {
			p.log.Warn("domains that come and go are noticed late", "watch", name, "err", err)
			_ = wait.For(ctx, time.Second)
		}
	}
}

func followOnce(ctx context.Context, store *xenstore.Client, name string, changed func()) error {
	w, err := store.Watch(ctx, name)
	if err != nil {
		return err
	}
	for {
		if _, err := w.Next(ctx); err != nil {
			return err
		}
		changed()
	}
}
