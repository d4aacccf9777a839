package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"syscall"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/excerpt"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
)

// Errors of a release or its undo.
var (
	ErrNoDevice  = errors.New("there is no such PCI device in this VM")
	ErrNotOurs   = errors.New("not a graphics card or accelerator, nor a part of one")
	ErrNoHotPlug = errors.New("cannot be unplugged while the VM runs")
	ErrInUse     = errors.New("in use")
	ErrVerify    = errors.New("the kernel did not do as it was told")

	errStarting = errors.New("a session is being started")
	errLending  = fmt.Errorf("%w: for another VM or host", errStarting)
)

// noDriver is a name that no driver has.
const noDriver = "gpuctl-released"

const (
	writeTimeout  = 30 * time.Second
	settleTimeout = 5 * time.Second
	settleEvery   = 20 * time.Millisecond
	undoTimeout   = time.Minute
	startTimeout  = 20 * time.Second
	startSettle   = 50 * time.Millisecond // time between an application's hello and its session's folder
)

// release unbinds the driver of a function. If it fails, it changes nothing. Errors may
// wrap ErrNoDevice, ErrNotOurs, ErrNoHotPlug or ErrInUse.
func (a *Agent) release(ctx context.Context, at pci.Address) error {
	a.turn.Lock()
	defer a.turn.Unlock()
	f, ok := a.kernel.function(at)
	if !ok {
		return fmt.Errorf("%s: %w", at, ErrNoDevice)
	}
	if !a.releasable(&f) {
		return fmt.Errorf("%s (%04x:%04x, class %06x): %w", at, f.id.Vendor, f.id.Device, f.id.Class, ErrNotOurs)
	}
	if _, ok := a.kernel.slot(at); !ok {
		return fmt.Errorf("%s: %w: %s", at, ErrNoHotPlug, a.hotplugReason(at))
	}
	if a.journal.has(at) && f.driver == "" && f.override == noDriver {
		return nil
	}
	done := false
	defer func() {
		if !done && a.cfg.Services != nil {
			a.wakeServices(context.WithoutCancel(ctx))
		}
	}()
	if err := a.quiet(ctx, at); err != nil {
		return err
	}
	if err := a.unused(ctx, at); err != nil && !errors.Is(err, errStarting) {
		return err
	}
	// From now on, no session starts on it, and no probe opens it.
	a.hold(ctx, at, true)
	defer func() {
		if !done {
			a.hold(context.WithoutCancel(ctx), at, false)
		}
	}()
	if err := a.stayUnused(ctx, at); err != nil {
		return err
	}
	auto, err := a.kernel.autoprobe()
	if err != nil {
		return err
	}
	had := a.journal.has(at)
	if auto {
		a.seenByKernel()
	}
	if err := a.journal.change(func(d *journalData) {
		if len(d.Released) == 0 {
			d.Autoprobe = auto
		}
		if !had {
			d.Released[at.String()] = releasedData{Driver: f.driver, Override: f.override}
		}
	}); err != nil {
		return err
	}
	// Once more: NVIDIA's driver, told to let go of a card that somebody has opened
	// meanwhile, waits for ever.
	if err = a.unused(ctx, at); err == nil {
		err = a.letGo(ctx, at)
	}
	if err == nil {
		done = true
		a.log.Info("released", "device", at, "driver", f.driver)
		return nil
	}
	if errors.Is(err, sysfs.ErrStuck) {
		done = true // it stays released, because nobody knows what the kernel has done
		return fmt.Errorf("release %s: %w; the driver %s hangs, restart the VM", at, err, f.driver)
	}
	uctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if uerr := a.giveBack(uctx, at); uerr != nil {
		err = errors.Join(err, fmt.Errorf("undo: %w", uerr))
	}
	return fmt.Errorf("release %s: %w", at, err)
}

// takeUp is the undo of release. If the function does not exist any more, it is only
// removed from the journal.
func (a *Agent) takeUp(ctx context.Context, at pci.Address) error {
	a.turn.Lock()
	defer a.turn.Unlock()
	if !a.journal.has(at) {
		if _, ok := a.kernel.function(at); !ok {
			return fmt.Errorf("%s: %w", at, ErrNoDevice)
		}
		return nil
	}
	if err := a.giveBack(ctx, at); err != nil {
		return fmt.Errorf("take up %s: %w", at, err)
	}
	a.hold(ctx, at, false)
	a.log.Info("taken up", "device", at)
	return nil
}

// stayUnused checks that a function is unused, after sessions that were being started
// have either started or failed.
func (a *Agent) stayUnused(ctx context.Context, at pci.Address) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for {
		select {
		case <-ctx.Done():
		case <-time.After(startSettle):
		}
		err := a.unused(ctx, at)
		if err == nil || !errors.Is(err, errStarting) || ctx.Err() != nil {
			return err
		}
	}
}

// unused returns an error if a session or a process uses the function.
func (a *Agent) unused(ctx context.Context, at pci.Address) error {
	sessions, err := a.sessions.List(ctx)
	if err != nil {
		return fmt.Errorf("ask which sessions run: %w", err)
	}
	target := a.targetOf(at)
	var users []string
	for _, s := range sessions {
		if s.Target == nil && runs(s) {
			return fmt.Errorf("%s: %w: %w; try again", at, ErrInUse, errStarting)
		}
		if runs(s) && serves(s.Target, target, at) {
			users = append(users, fmt.Sprintf("session %s (%s, pid %d)", s.Id, excerpt.Of(s.Command, 60), s.Pid))
		}
	}
	leases, err := a.leasesOn(at, target)
	if err != nil {
		return err
	}
	users = append(users, leases...)
	if len(users) == 0 && a.users != nil {
		if users, err = a.users(ctx, []pci.Address{at}); err != nil {
			return fmt.Errorf("%s: find out who uses it: %w", at, err)
		}
	}
	if len(users) > 0 {
		const shown = 8
		if n := len(users); n > shown {
			users = append(users[:shown], fmt.Sprintf("and %d more", n-shown))
		}
		return fmt.Errorf("%s: %w: %s; suspend or end what uses it", at, ErrInUse, strings.Join(users, ", "))
	}
	return nil
}

// runs reports whether a session has an executor.
func runs(s *gpuctlv1.Session) bool {
	switch s.State {
	case gpuctlv1.SessionState_SESSION_STATE_RUNNING, gpuctlv1.SessionState_SESSION_STATE_SWAPPING, gpuctlv1.SessionState_SESSION_STATE_HELD:
		return true
	default:
		return false
	}
}

// serves reports whether a session's target is this function. A target that the agent has
// named is compared exactly. A target with a name of the host's inventory is compared by
// its runtime, which may also match another function of the same kind.
func serves(t, ours *gpuctlv1.Target, at pci.Address) bool {
	if strings.HasPrefix(t.GetGpu(), gpuPrefix) {
		return t.GetGpu() == gpuID(at)
	}
	for _, g := range t.GetDriver() {
		if address, err := pci.ParseAddress(g.GetPciAddress()); err == nil && address == at {
			return true
		}
		for _, own := range ours.GetDriver() {
			if own.GetUuid() == g.GetUuid() {
				return true
			}
		}
	}
	return ours != nil && sameRuntime(t.GetRuntime(), ours.Runtime)
}

// letGo unbinds the driver, and keeps the kernel from binding one again.
func (a *Agent) letGo(ctx context.Context, at pci.Address) error {
	if err := a.setAutoprobe(ctx, false); err != nil {
		return err
	}
	if err := a.setOverride(ctx, at, noDriver); err != nil {
		return err
	}
	if driver := a.kernel.driver(at); driver != "" {
		err := a.write(ctx, deviceFile(at, "driver/unbind"), at.String())
		// The driver may have unbound the device by itself.
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENODEV) {
			return fmt.Errorf("unbind %s: %w", driver, err)
		}
	}
	return a.settled(ctx, func() error {
		f, ok := a.kernel.function(at)
		switch {
		case !ok:
			return nil // it was unplugged already
		case f.driver != "":
			return fmt.Errorf("%w: %s still has the driver %s", ErrVerify, at, f.driver)
		case f.override != noDriver:
			return fmt.Errorf("%w: the driver_override of %s is %q", ErrVerify, at, f.override)
		}
		for _, class := range []string{"drm", "accel", "graphics"} {
			if left, err := a.kernel.root.ReadDir(deviceFile(at, class)); err == nil && len(left) > 0 {
				return fmt.Errorf("%w: %s still has %s/%s", ErrVerify, at, class, left[0].Name())
			}
		}
		return nil
	})
}

// giveBack lets drivers bind the function again, and then removes it from the journal.
func (a *Agent) giveBack(ctx context.Context, at pci.Address) error {
	before := a.journal.data.Released[at.String()]
	if _, ok := a.kernel.function(at); ok {
		// The journal may have lost the override. Only the agent writes that name.
		if now := a.kernel.override(at); now == noDriver {
			if err := a.setOverride(ctx, at, before.Override); err != nil {
				return err
			}
		}
		if a.kernel.driver(at) == "" {
			if err := a.probeDriver(ctx, at); err != nil {
				return err
			}
		}
	}
	if len(a.journal.data.Released) == 1 && a.journal.data.Autoprobe {
		if err := a.setAutoprobe(ctx, true); err != nil {
			return err
		}
	}
	return a.journal.change(func(d *journalData) { delete(d.Released, at.String()) })
}

// probeDriver makes the kernel look for a driver. If there is none, or it refuses the
// device, that is noticed later.
func (a *Agent) probeDriver(ctx context.Context, at pci.Address) error {
	err := a.write(ctx, probeFile, at.String())
	if err != nil && errors.Is(err, sysfs.ErrStuck) {
		return fmt.Errorf("find a driver for %s: %w", at, err)
	}
	if err != nil {
		a.log.Warn("the kernel finds no driver", "device", at, "err", err)
	}
	return nil
}

// seenByKernel records the functions that exist while drivers still bind automatically.
// One of them without a driver is to stay without. The caller holds turn.
func (a *Agent) seenByKernel() {
	functions, err := a.kernel.functions()
	if err != nil {
		return
	}
	for _, f := range functions {
		a.offeredDriver[f.address] = true
	}
}

func (a *Agent) setAutoprobe(ctx context.Context, on bool) error {
	if now, err := a.kernel.autoprobe(); err != nil || now == on {
		return err
	}
	value := "0"
	if on {
		value = "1"
	}
	if err := a.write(ctx, autoFile, value); err != nil {
		return err
	}
	if now, err := a.kernel.autoprobe(); err != nil || now != on {
		return errors.Join(fmt.Errorf("%w: %s was set to %s and is not", ErrVerify, autoFile, value), err)
	}
	return nil
}

func (a *Agent) setOverride(ctx context.Context, at pci.Address, driver string) error {
	if a.kernel.override(at) == driver {
		return nil
	}
	data := driver
	if data == "" {
		data = "\n" // an empty line removes the override
	}
	if err := a.write(ctx, deviceFile(at, "driver_override"), data); err != nil {
		return err
	}
	if now := a.kernel.override(at); now != driver {
		return fmt.Errorf("%w: the driver_override of %s was set to %q and is %q", ErrVerify, at, driver, now)
	}
	return nil
}

func (a *Agent) write(ctx context.Context, name, data string) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	return a.kernel.root.Write(ctx, name, data)
}

// settled calls check until it returns no error, for a limited time.
func (a *Agent) settled(ctx context.Context, check func() error) error {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	for {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(settleEvery):
		}
	}
}

// enforce keeps released functions without a driver, even after they were plugged in
// again, and finds drivers for new functions that are not released. The caller holds
// turn.
func (a *Agent) enforce(ctx context.Context, functions []function) {
	if len(a.journal.data.Released) == 0 {
		return
	}
	if err := a.setAutoprobe(ctx, false); err != nil {
		a.log.Warn("drivers may bind what is released", "err", err)
	}
	for _, f := range functions {
		released := a.journal.has(f.address)
		switch {
		case released && (f.override != noDriver || f.driver != ""):
			a.log.Info("a released device was plugged again", "device", f.address)
			if err := a.letGo(ctx, f.address); err != nil {
				a.log.Warn("released device", "device", f.address, "err", err)
			}
		case !released && f.driver == "" && f.override == "" && !a.offeredDriver[f.address]:
			a.offeredDriver[f.address] = true
			if err := a.probeDriver(ctx, f.address); err != nil {
				a.log.Warn("find a driver", "device", f.address, "err", err)
			}
		}
	}
}
