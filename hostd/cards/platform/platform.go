package platform

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/hostd/config"
	"github.com/gpuctl/gpuctl/internal/vchan"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/xenstore"
	"github.com/gpuctl/gpuctl/passthrough/bind"
	"github.com/gpuctl/gpuctl/passthrough/catalog"
	"github.com/gpuctl/gpuctl/passthrough/isolation"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/reset"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
	"github.com/gpuctl/gpuctl/passthrough/vgpu"
	"github.com/gpuctl/gpuctl/passthrough/xen"
)

// Default paths of what platform talks to, on Debian.
const (
	xenDevices     = "/dev/xen"
	xenstoreSocket = "/run/xenstored/socket"
	socketXen      = "/run/libvirt/libvirt-sock"
	uriXen         = "xen:///system"
	uriQEMU        = "qemu:///system"
)

// Options are the options of Open.
type Options struct {
	Config config.Devices
	Dev    bool       // development mode: no VMs are managed
	Root   sysfs.Root // the host's root folder
	PCI    *pci.Scanner
	Dir    string // folder for records
	// LetGo makes NVML close cards before their drivers are changed; resume ends that.
	LetGo func(context.Context, []pci.Address) (resume func(), err error)
	Log   *slog.Logger
}

// Platform has what the keeper of cards needs of this host, and the connections to libvirt
// and the hypervisor.
type Platform struct {
	Cards   cards.Platform
	Catalog *catalog.Catalog
	Client  *virt.Client // nil: no libvirt on this host
	// Vchan connects to a path of a running VM over vchan; nil: the hypervisor is not
	// Xen.
	Vchan func(ctx context.Context, uuid, path string) (net.Conn, error)
	// Vsock returns what connects to a port of a running VM over vsock, or nil if the VM has
	// none; nil: the hypervisor is not KVM.
	Vsock func(ctx context.Context, uuid string) (dial func(ctx context.Context, port uint32) (net.Conn, error), err error)

	xen      *xen.Host        // nil: the hypervisor is not Xen
	xl       *xen.XL          // as xen
	store    *xenstore.Client // as xen
	log      *slog.Logger
	binder   *bind.Binder
	resetter *reset.Resetter
	close    []func() error
}

// Open finds out what this host has. It changes no card.
func Open(ctx context.Context, o Options) (p *Platform, err error) {
	p = &Platform{log: o.Log}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	if p.Catalog, err = catalog.Open(o.Config.Catalog...); err != nil {
		return p, err
	}
	o.PCI.Also(p.Catalog.AnyClass())
	journal, err := openJournal(ctx, filepath.Join(o.Dir, "drivers"))
	if err != nil {
		return p, fmt.Errorf("journal of drivers: %w", err)
	}
	p.close = append(p.close, journal.Close)
	p.resetter = reset.New(o.Root, reset.WithRecords(filepath.Join(o.Dir, "resets")))
	p.Cards.PCI, p.Cards.Resetter = o.PCI, resetter{p.resetter, p.Catalog, o.Log}
	p.Cards.Slicer = vgpu.New(o.Root, p.Catalog.Lookup, vgpu.WithSwitch(switchNVIDIA(o.Root)))
	if err := p.hypervisor(ctx, o); err != nil {
		return p, err
	}
	options := []bind.Option{bind.WithUsers(guests(p.Cards.Hypervisor))}
	if o.LetGo != nil {
		options = append(options, bind.WithRelease(o.LetGo))
	}
	p.binder = bind.New(o.Root, journal, options...)
	p.Cards.Binder = p.binder
	return p, nil
}

// openJournal opens the binder's journal. A hostd that was killed may still be in its
// last write in the kernel, so it waits for that.
func openJournal(ctx context.Context, dir string) (*bind.Journal, error) {
	ctx, cancel := context.WithTimeout(ctx, journalPatience)
	defer cancel()
	for {
		j, err := bind.OpenJournal(dir)
		if err == nil || !errors.Is(err, bind.ErrJournalBusy) {
			return j, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(100 * time.Millisecond):
		}
	}
}

const journalPatience = 30 * time.Second

// guests makes the binder see the VMs that have a function, as open files do not show
// them.
func guests(h cards.Hypervisor) func(context.Context, []pci.Address) ([]bind.User, error) {
	return func(ctx context.Context, functions []pci.Address) ([]bind.User, error) {
		owners, err := h.Owners(ctx)
		if err != nil {
			return nil, err
		}
		var out []bind.User
		for _, f := range functions {
			if d, owned := owners[f]; owned {
				out = append(out, bind.User{Kind: bind.UserGuest, Function: f, Name: d.Name})
			}
		}
		return out, nil
	}
}

// hypervisor chooses the hypervisor: Xen if this is its control domain, otherwise
// libvirt's qemu driver if its socket exists.
func (p *Platform) hypervisor(ctx context.Context, o Options) error {
	c := &p.Cards
	if o.Dev {
		c.Hypervisor, c.VMs, c.Isolation = noHypervisor{}, noVMs{why: "hostd --dev manages none"}, judge{isolation.Kernel{Root: o.Root}}
		return nil
	}
	uri, socket := o.Config.Libvirt, o.Config.LibvirtSocket
	isXen := xen.Detect(o.Root) == nil
	if uri == "" {
		uri = uriQEMU
		if isXen {
			uri = uriXen
		}
	}
	if socket == "" {
		socket = socketXen
	}
	if isXen {
		store, err := xenstore.Dial(ctx, xenstoreSocket)
		if err != nil {
			return fmt.Errorf("xenstored: %w", err)
		}
		p.close = append(p.close, store.Close)
		hv, why := xen.Open(o.Root, xenDevices)
		if why != nil {
			o.Log.Warn("the hypervisor is asked through xl, which tells less", "err", why)
		}
		p.close = append(p.close, hv.Close)
		p.store, p.xen, p.xl = store, xen.New(o.Root, store, hv), &xen.XL{}
		hypervisor := xenHypervisor{host: p.xen, xl: p.xl, log: o.Log}
		c.Hypervisor = hypervisor
		p.Vchan = func(ctx context.Context, uuid, path string) (net.Conn, error) {
			id, err := hypervisor.domain(ctx, uuid)
			if err != nil {
				return nil, err
			}
			return vchan.Dial(ctx, store, id, path, vchan.Options{})
		}
		c.Isolation = judge{isolation.Xen{Root: o.Root, Hypervisor: hv}}
	} else {
		c.Isolation = judge{isolation.Kernel{Root: o.Root}}
	}
	if _, err := os.Stat(socket); err != nil && !isXen && o.Config.Libvirt == "" {
		c.Hypervisor, c.VMs = noHypervisor{}, noVMs{why: "there is no libvirtd: " + err.Error()}
		return nil
	}
	client, err := virt.Open(uri, virt.WithSocket(socket))
	if err != nil {
		return err
	}
	p.Client = client
	p.close = append(p.close, client.Close)
	c.VMs = vms{client}
	if !isXen {
		c.Hypervisor, c.Mediated = kvmHypervisor{client}, mediated{client}
		p.Vsock = kvmHypervisor{client}.vsock
	}
	return nil
}

// Close closes what Open has opened.
func (p *Platform) Close() error {
	var errs []error
	for i := len(p.close) - 1; i >= 0; i-- {
		errs = append(errs, p.close[i]())
	}
	return errors.Join(errs...)
}

// Scheme returns the scheme of libvirt's URIs for this host's hypervisor.
func (p *Platform) Scheme() string {
	if p.Client != nil && p.Client.Driver() == virt.QEMU {
		return string(virt.QEMU)
	}
	return string(virt.Xen)
}
