package platform

import (
	"context"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/hostd/cards/libvirthook"
	"github.com/gpuctl/gpuctl/internal/durable"
	"github.com/gpuctl/gpuctl/internal/hook/wire"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/internal/wait"
	"github.com/gpuctl/gpuctl/passthrough/uevent"
)

// Parts is what VMs get beside cards.
type Parts interface {
	// PrepareStart prepares it for a VM's start.
	PrepareStart(ctx context.Context, m vm.VM) error
	// Arrived completes it, before a VM that a migration has brought runs here. After an
	// error the VM is ended, and goes on where it was.
	Arrived(ctx context.Context, m vm.VM) error
}

// Runner runs the keeper of cards, and passes on what the kernel, libvirt and its hooks tell.
type Runner struct {
	*Platform
	Dir    string // folder for the hook's socket
	Keeper *cards.Keeper
	Parts  Parts
	Event  func(gpu, kind, message string)
}

// Run finishes or undoes what was interrupted. Then it runs the keeper of cards, and
// passes events to it, until ctx ends.
func (r *Runner) Run(ctx context.Context) error {
	// First finish an interrupted reset, because its card may have no driver until then.
	if _, err := r.resetter.Recover(ctx); err != nil {
		r.log.Error("a reset that was cut short is not undone", "err", err)
	}
	done, err := r.binder.Recover(ctx)
	for _, d := range done {
		r.log.Info("driver settled", "function", d.Function, "outcome", d.Outcome, "driver", d.Driver)
	}
	if err != nil {
		// The other cards can be managed nevertheless.
		r.log.Error("a driver is not as it was recorded", "err", err)
	}
	listener, err := libvirthook.Listen(r.Dir)
	if err != nil {
		return err
	}
	// gpuctl-hook reads this when hostd does not run.
	ids := strings.Join(append(r.Catalog.AnyClassIDs(), ""), "\n")
	if err := durable.Replace(filepath.Join(r.Dir, wire.IDsName), []byte(ids), 0o600); err != nil {
		return err
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		if err := libvirthook.New(libvirthook.HandlerFunc(r.Hook), libvirthook.WithLog(r.log)).Serve(ctx, listener); err != nil && ctx.Err() == nil {
			r.log.Error("libvirt's hooks are not answered any more", "err", err)
		}
	})
	wg.Go(func() { r.uevents(ctx) })
	if r.Client != nil {
		wg.Go(func() { r.libvirt(ctx) })
	}
	r.Keeper.Run(ctx)
	return nil
}

// uevents makes the keeper reconcile when a PCI device appears, disappears or changes its
// driver.
func (r *Runner) uevents(ctx context.Context) {
	l, err := uevent.Listen()
	if err != nil {
		r.log.Warn("changes of devices are noticed late", "err", err)
		return
	}
	defer func() { _ = l.Close() }()
	r.Cards.PCI.Hears(true)
	defer r.Cards.PCI.Hears(false)
	for ctx.Err() == nil {
		e, err := l.Next(ctx)
		if err != nil {
			if ctx.Err() == nil {
				r.Cards.PCI.Changed()
				r.log.Warn("uevents", "err", err)
				_ = wait.For(ctx, time.Second)
			}
			continue
		}
		if e.Subsystem == "pci" || e.Action == uevent.Lost {
			r.Cards.PCI.Changed()
			r.Keeper.Kick()
		}
	}
}

// libvirt passes libvirt's events about VMs to the keeper.
func (r *Runner) libvirt(ctx context.Context) {
	sub := r.Client.Subscribe()
	defer sub.Close()
	for {
		e, err := sub.Next(ctx)
		if err != nil {
			return
		}
		switch e.Kind {
		case virt.Stopped:
			if e.Detail == stoppedSaved {
				r.saved(e.Domain)
			}
			r.Keeper.Ended(e.Domain.UUID.String())
		case virt.Started, virt.Resync:
			r.Keeper.Kick()
		default:
		}
	}
}

// stoppedSaved is VIR_DOMAIN_EVENT_STOPPED_SAVED.
const stoppedSaved = 4

// saved reports to the operator that a VM was saved while it had a card. libvirt does not
// refuse that, although the card's state is lost.
func (r *Runner) saved(d virt.Domain) {
	for _, gpu := range r.Keeper.Of(d.UUID.String()) {
		r.Event(gpu, "SavedWithGPU", "VM "+d.Name+" was saved while it had it: the state in the card is lost, and a restore may not get it back; detach a card before saving")
		r.log.Warn("a VM was saved with a card", "machine", d.Name, "gpu", gpu)
	}
}
