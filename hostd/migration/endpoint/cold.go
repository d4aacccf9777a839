package endpoint

import (
	"context"
	"errors"
	"fmt"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/migrate"
)

const (
	shutdownTime = time.Minute // time for a VM to shut down before it is destroyed
	lookEvery    = 200 * time.Millisecond
)

// Stop ends a VM, which stays defined. Its card is reset and stays assigned to it. Its autostart is
// off until Start: the VM may run on another host when this one boots.
func (l *Local) Stop(ctx context.Context, m *gpuctlv1.SiteMachine, gpu string) error {
	free, err := l.alone(m)
	if err != nil {
		return err
	}
	defer free()
	d, err := l.domain(ctx, m.GetUuid())
	if err != nil {
		return err
	}
	if gpu != "" {
		if err := l.Keeper.Keep(ctx, vmOf(m), local(gpu), m.GetMigration()); err != nil {
			return err
		}
	}
	if err := l.stayOff(ctx, d); err != nil {
		return err
	}
	if err := l.end(ctx, d, m); err != nil {
		return err
	}
	l.Guests.Forget(m.GetUuid())
	if gpu == "" {
		return nil
	}
	return l.Keeper.ResetStopped(ctx, vmOf(m), local(gpu))
}

// alone marks a VM as being started or stopped until end is called. A start that libvirt is still
// busy with must not come after what a later driver does.
func (l *Local) alone(m *gpuctlv1.SiteMachine) (end func(), err error) {
	end, ok := l.switching.Begin(m.GetUuid())
	if !ok {
		return nil, fmt.Errorf("%w: VM %s is just being started or stopped", migrate.ErrUnreachable, m.GetName())
	}
	return end, nil
}

// stayOff switches a VM's autostart off, if it can be kept that it was on.
func (l *Local) stayOff(ctx context.Context, d virt.Domain) error {
	if l.Fence == nil {
		return nil
	}
	if stored, err := l.Client.Persistent(ctx, d); err != nil || !stored {
		return err
	}
	on, err := l.Client.Autostart(ctx, d)
	if err != nil || !on {
		return err
	}
	if err := l.Fence.Autostart(d.UUID.String(), true); err != nil {
		return err
	}
	return l.Client.SetAutostart(ctx, d, false)
}

// mayBoot switches the autostart of a VM that is started here on again, if stayOff has switched it
// off.
func (l *Local) mayBoot(ctx context.Context, d virt.Domain) {
	uuid := d.UUID.String()
	if !l.Fence.Autostarts(uuid) {
		return
	}
	err := l.Client.SetAutostart(ctx, d, true)
	if err == nil {
		err = l.Fence.Autostart(uuid, false)
	}
	if err != nil {
		l.Log.Warn("a VM's autostart, which a migration has switched off, is not on again: virsh autostart "+d.Name, "machine", d.Name, "err", err)
	}
}

// end shuts a VM down. If the VM does not do so within shutdownTime, end destroys it, unless its
// driver was replaced meanwhile: the next one may have another use for it.
func (l *Local) end(ctx context.Context, d virt.Domain, m *gpuctlv1.SiteMachine) error {
	patience, cancel := context.WithTimeout(ctx, shutdownTime)
	defer cancel()
	asked := false
	for {
		state, err := l.Client.State(ctx, d)
		if err != nil {
			return err
		}
		if !state.Active() {
			return nil
		}
		if !asked && state != virt.Paused {
			if err := l.Client.Shutdown(ctx, d); err != nil && !errors.Is(err, virt.ErrState) {
				l.Log.Warn("a VM does not shut down", "machine", d.Name, "err", err)
				cancel()
			}
			asked = true
		} else if state == virt.Paused {
			cancel()
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-patience.Done():
			if err := l.Fence.Admit(m); err != nil {
				return err
			}
			if err := l.Client.Destroy(ctx, d); err != nil && !errors.Is(err, virt.ErrState) {
				return err
			}
		case <-time.After(lookEvery):
		}
	}
}

// Start starts a VM with a card that is assigned to it. libvirt's hook prepares the card,
// as for any start.
func (l *Local) Start(ctx context.Context, m *gpuctlv1.SiteMachine, gpu string, stored bool) error {
	free, err := l.alone(m)
	if err != nil {
		return err
	}
	defer free()
	d, err := l.domain(ctx, m.GetUuid())
	if err != nil {
		return err
	}
	state, err := l.Client.State(ctx, d)
	if err != nil {
		return err
	}
	if !state.Active() {
		if err := l.startWith(ctx, d, m, gpu); err != nil {
			return err
		}
	}
	l.mayBoot(ctx, d)
	if gpu == "" {
		return nil
	}
	// The hypervisor confirms that the VM has the card. Then the stored definition is
	// changed.
	if err := l.Keeper.AttachPrepared(ctx, vmOf(m), local(gpu), stored, nil); err != nil || stored {
		return err
	}
	functions, err := l.Keeper.Functions(ctx, local(gpu))
	if err != nil {
		return err
	}
	return l.VMs.Unstore(ctx, m.GetUuid(), functions)
}

func (l *Local) startWith(ctx context.Context, d virt.Domain, m *gpuctlv1.SiteMachine, gpu string) error {
	if gpu != "" {
		functions, err := l.Keeper.Functions(ctx, local(gpu))
		if err == nil {
			err = l.VMs.Store(ctx, m.GetUuid(), functions)
		}
		if err != nil {
			return err
		}
	}
	if err := l.Fence.Admit(m); err != nil {
		return err // the next driver may start it on the other host
	}
	_, err := l.Client.Start(context.WithoutCancel(ctx), d) // libvirt goes on, too, if the driver leaves
	return l.barred(ctx, vmOf(m), l.Name, err)
}

// Definition returns the stored definition of a VM.
func (l *Local) Definition(ctx context.Context, uuid string) (string, error) {
	d, err := l.domain(ctx, uuid)
	if err != nil {
		return "", err
	}
	text, err := l.Client.XML(ctx, d, virt.XMLInactive|virt.XMLSecure)
	return string(text), err
}

// Define stores the definition that a VM had on another host.
func (l *Local) Define(ctx context.Context, m *gpuctlv1.SiteMachine, xml string) error {
	if l.Client == nil {
		return fmt.Errorf("host %s has no libvirt", l.Name)
	}
	d, err := l.Client.Define(ctx, []byte(xml))
	if err == nil && d.UUID.String() != m.GetUuid() {
		err = fmt.Errorf("the definition of VM %s is of another one, %s", m.GetName(), d.UUID)
	}
	return err
}

// Undefine removes the definition of a VM that does not run on this host.
func (l *Local) Undefine(ctx context.Context, m *gpuctlv1.SiteMachine) error {
	free, err := l.alone(m)
	if err != nil {
		return err
	}
	defer free()
	d, err := l.domain(ctx, m.GetUuid())
	if errors.Is(err, virt.ErrNotFound) {
		return l.Fence.Autostart(m.GetUuid(), false)
	}
	if err != nil {
		return err
	}
	state, err := l.Client.State(ctx, d)
	if err != nil {
		return err
	}
	if state.Active() {
		return fmt.Errorf("VM %s runs on host %s: its definition stays", d.Name, l.Name)
	}
	if err := l.Client.Undefine(ctx, d); err != nil {
		return err
	}
	return l.Fence.Autostart(m.GetUuid(), false)
}
