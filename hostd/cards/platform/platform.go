package platform

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/hostd/cards/libvirthook"
	"github.com/gpuctl/gpuctl/hostd/config"
	"github.com/gpuctl/gpuctl/internal/durable"
	"github.com/gpuctl/gpuctl/internal/hook/wire"
	"github.com/gpuctl/gpuctl/internal/vchan"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/internal/wait"
	"github.com/gpuctl/gpuctl/internal/xenstore"
	"github.com/gpuctl/gpuctl/passthrough/bind"
	"github.com/gpuctl/gpuctl/passthrough/catalog"
	"github.com/gpuctl/gpuctl/passthrough/isolation"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/reset"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
	"github.com/gpuctl/gpuctl/passthrough/uevent"
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
	Config  config.Devices
	Dev     bool       // development mode: no VMs are managed
	Root    sysfs.Root // the host's root folder
	PCI     *pci.Scanner
	Dir     string // folder for records
	RunDir  string // folder for the hook's socket
	Cluster cards.Cluster
	GPUs    func(ctx context.Context) ([]*clusterv1.GPU, error)
	// LetGo makes NVML close cards before their drivers are changed; resume ends that.
	LetGo func(context.Context, []pci.Address) (resume func(), err error)
	Event func(gpu, kind, message string)
	Log   *slog.Logger
}

// Platform has the keeper of cards, and the connections to libvirt and the hypervisor.
type Platform struct {
	Keeper  *cards.Keeper
	Catalog *catalog.Catalog
	Client  *virt.Client // nil: no libvirt on this host
	// Vchan connects to a path of a running VM over vchan; nil: the hypervisor is not
	// Xen.
	Vchan func(ctx context.Context, uuid, path string) (net.Conn, error)
	// PrepareStart prepares what a VM gets beside cards for its start; nil: nothing.
	PrepareStart func(ctx context.Context, m vm.VM) error
	// Arrived completes what a VM has beside cards, before a VM that a migration has brought
	// runs here; nil: nothing. After an error the VM is ended, and goes on where it was.
	Arrived func(ctx context.Context, m vm.VM) error

	xen      *xen.Host        // nil: the hypervisor is not Xen
	store    *xenstore.Client // as xen
	log      *slog.Logger
	pci      *pci.Scanner
	runDir   string
	event    func(gpu, kind, message string)
	binder   *bind.Binder
	resetter *reset.Resetter
	close    []func() error
}

// Open finds out what this host has. It changes no card.
func Open(ctx context.Context, o Options) (p *Platform, err error) {
	p = &Platform{log: o.Log, runDir: o.RunDir, event: o.Event, pci: o.PCI}
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
	c := cards.Config{
		PCI: o.PCI, File: filepath.Join(o.Dir, "cards.json"), Resetter: resetter{p.resetter, p.Catalog, o.Log},
		Cluster: o.Cluster, GPUs: o.GPUs, Event: o.Event, Log: o.Log, Park: o.Config.Park,
	}
	c.Slicer = vgpu.New(o.Root, p.Catalog.Lookup, vgpu.WithSwitch(switchNVIDIA(o.Root)))
	if err := p.hypervisor(ctx, o, &c); err != nil {
		return p, err
	}
	options := []bind.Option{bind.WithUsers(guests(c.Hypervisor))}
	if o.LetGo != nil {
		options = append(options, bind.WithRelease(o.LetGo))
	}
	p.binder = bind.New(o.Root, journal, options...)
	c.Binder = p.binder
	if p.Keeper, err = cards.New(c); err != nil {
		return p, err
	}
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
func (p *Platform) hypervisor(ctx context.Context, o Options, c *cards.Config) error {
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
		p.store, p.xen = store, xen.New(o.Root, store, hv)
		hypervisor := xenHypervisor{host: p.xen, xl: &xen.XL{}, log: o.Log}
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
	}
	return nil
}

// Run finishes or undoes what was interrupted. Then it runs the keeper of cards, and
// passes events to it, until ctx ends.
func (p *Platform) Run(ctx context.Context) error {
	// First finish an interrupted reset, because its card may have no driver until then.
	if _, err := p.resetter.Recover(ctx); err != nil {
		p.log.Error("a reset that was cut short is not undone", "err", err)
	}
	done, err := p.binder.Recover(ctx)
	for _, r := range done {
		p.log.Info("driver settled", "function", r.Function, "outcome", r.Outcome, "driver", r.Driver)
	}
	if err != nil {
		// The other cards can be managed nevertheless.
		p.log.Error("a driver is not as it was recorded", "err", err)
	}
	listener, err := libvirthook.Listen(p.runDir)
	if err != nil {
		return err
	}
	// gpuctl-hook reads this when hostd does not run.
	ids := strings.Join(append(p.Catalog.AnyClassIDs(), ""), "\n")
	if err := durable.Replace(filepath.Join(p.runDir, wire.IDsName), []byte(ids), 0o600); err != nil {
		return err
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		if err := libvirthook.New(libvirthook.HandlerFunc(p.Hook), libvirthook.WithLog(p.log)).Serve(ctx, listener); err != nil && ctx.Err() == nil {
			p.log.Error("libvirt's hooks are not answered any more", "err", err)
		}
	})
	wg.Go(func() { p.uevents(ctx) })
	if p.Client != nil {
		wg.Go(func() { p.libvirt(ctx) })
	}
	p.Keeper.Run(ctx)
	return nil
}

// uevents makes the keeper reconcile when a PCI device appears, disappears or changes its
// driver.
func (p *Platform) uevents(ctx context.Context) {
	l, err := uevent.Listen()
	if err != nil {
		p.log.Warn("changes of devices are noticed late", "err", err)
		return
	}
	defer func() { _ = l.Close() }()
	p.pci.Hears(true)
	defer p.pci.Hears(false)
	for ctx.Err() == nil {
		e, err := l.Next(ctx)
		if err != nil {
			if ctx.Err() == nil {
				p.pci.Changed()
				p.log.Warn("uevents", "err", err)
				_ = wait.For(ctx, time.Second)
			}
			continue
		}
		if e.Subsystem == "pci" || e.Action == uevent.Lost {
			p.pci.Changed()
			p.Keeper.Kick()
		}
	}
}

// libvirt passes libvirt's events about VMs to the keeper.
func (p *Platform) libvirt(ctx context.Context) {
	sub := p.Client.Subscribe()
	defer sub.Close()
	for {
		e, err := sub.Next(ctx)
		if err != nil {
			return
		}
		switch e.Kind {
		case virt.Stopped:
			if e.Detail == stoppedSaved {
				p.saved(e.Domain)
			}
			p.Keeper.Stopped(e.Domain.UUID.String())
		case virt.Started, virt.Resync:
			p.Keeper.Kick()
		default:
		}
	}
}

// stoppedSaved is VIR_DOMAIN_EVENT_STOPPED_SAVED.
const stoppedSaved = 4

// saved reports to the operator that a VM was saved while it had a card. libvirt does not
// refuse that, although the card's state is lost.
func (p *Platform) saved(d virt.Domain) {
	for _, gpu := range p.Keeper.Of(d.UUID.String()) {
		p.event(gpu, "SavedWithGPU", "VM "+d.Name+" was saved while it had it: the state in the card is lost, and a restore may not get it back; detach a card before saving")
		p.log.Warn("a VM was saved with a card", "machine", d.Name, "gpu", gpu)
	}
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
