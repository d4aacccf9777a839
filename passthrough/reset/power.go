package reset

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpuctl/gpuctl/internal/durable"
	"github.com/gpuctl/gpuctl/internal/wait"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
)

const (
	autoprobe  = "sys/bus/pci/drivers_autoprobe"
	probe      = "sys/bus/pci/drivers_probe"
	noOverride = "(null)"

	regSecondary   = 0x1e // secondary status of a bridge
	regBridge      = 0x3e // bridge control
	secondaryReset = 1 << 6

	holdReset  = 10 * time.Millisecond  // PCI Express 5.0, 6.6.1: at least 1 ms
	afterReset = 200 * time.Millisecond // PCI Express 5.0, 6.6.1: 100 ms until the first request to a device
	maxRecord  = 64 << 10
	suffix     = ".reset.json"
)

// record contains what must be restored after a reset, or after a crash during it. It is
// on disk before the first change.
type record struct {
	Boot      string            `json:"boot"`               // boot id; after another boot, nothing need be restored
	Choices   map[string]string `json:"choices,omitempty"`  // reset_method, by function
	Controls  map[string]string `json:"controls,omitempty"` // power/control, by function or bridge
	Bridge    *pci.Address      `json:"bridge,omitempty"`   // bridge below which the functions were
	Autoprobe string            `json:"autoprobe,omitempty"`
	Functions []held            `json:"functions,omitempty"` // functions that are removed from the bus

	away bool // it counts among the cards that are off the bus
}

// held is a function with its driver.
type held struct {
	Address  pci.Address `json:"address"`
	Driver   string      `json:"driver,omitempty"`
	Override string      `json:"override,omitempty"`
}

func (r *Resetter) boot() string {
	data, err := r.root.ReadFile("proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

func (r *Resetter) recordFile(a pci.Address) string {
	return filepath.Join(r.records, a.String()+suffix)
}

// record writes the card's record. forget removes it. Without a folder for records, it
// does nothing.
func (j *job) record(rec *record) (forget func(), err error) {
	if j.records == "" {
		return func() {}, nil
	}
	rec.Boot = j.boot()
	data, err := json.Marshal(rec)
	if err != nil {
		return nil, fmt.Errorf("record of the reset: %w", err)
	}
	name := j.recordFile(j.card.Address)
	if err := os.MkdirAll(j.records, 0o700); err != nil {
		return nil, fmt.Errorf("record of the reset: %w", err)
	}
	if err := durable.Replace(name, data, 0o600); err != nil {
		return nil, fmt.Errorf("record of the reset: %w", err)
	}
	return func() { _ = os.Remove(name) }, nil // if that fails, Recover repeats what is done already
}

// d3cold switches the card's power off and on. It lets the functions sleep. If a driver
// keeps them awake, it removes them from the bus: a bridge that may sleep, with nothing
// below it, switches its slot's power off.
func (j *job) d3cold(ctx context.Context) error {
	bridge, err := j.switchable()
	if err != nil {
		return err
	}
	cut, err := j.sleep(ctx, bridge)
	if err != nil || cut {
		return err
	}
	if bridge == nil {
		return skipf("the platform does not switch the power of %s, which has no bridge above", j.main.Address)
	}
	return j.unplug(ctx, *bridge)
}

// switchable returns an error if the card's power cannot be switched. The bridge is nil
// for a card on a root bus.
func (j *job) switchable() (bridge *pci.Address, err error) {
	if j.text(j.main.Address, "d3cold_allowed") != "1" {
		return nil, skipf("d3cold_allowed of %s is not 1", j.main.Address)
	}
	if len(j.main.Upstream) == 0 {
		return nil, nil
	}
	above, err := j.alone()
	if err != nil {
		return nil, err
	}
	if other, ok := j.other(above); ok {
		return nil, skipf("%s is below the bridge %s, too, and would keep its power on", other, above)
	}
	if j.text(above, "d3cold_allowed") == "0" {
		return nil, skipf("d3cold_allowed of the bridge %s is 0", above)
	}
	return &above, nil
}

// other returns a device below a bridge that does not belong to the card.
func (j *job) other(bridge pci.Address) (pci.Address, bool) {
	entries, err := j.root.ReadDir(j.at(bridge, ""))
	if err != nil {
		return bridge, true
	}
	for _, e := range entries {
		if a, err := pci.ParseAddress(e.Name()); err == nil && !j.own(a) {
			return a, true
		}
	}
	return pci.Address{}, false
}

// sleep lets the functions sleep and wakes them. cut reports whether power was off.
func (j *job) sleep(ctx context.Context, bridge *pci.Address) (cut bool, err error) {
	rec := &record{Controls: map[string]string{}}
	all := make([]pci.Address, 0, len(j.card.Functions)+1)
	for _, f := range j.card.Functions {
		all = append(all, f.Address)
	}
	if bridge != nil && j.exists(j.at(*bridge, "power/control")) {
		all = append(all, *bridge)
	}
	for _, a := range all {
		control := j.text(a, "power/control")
		if control == "" {
			return false, skipf("%s has no power management at run time", a)
		}
		rec.Controls[a.String()] = control
	}
	return cut, j.with(ctx, rec, func(ctx context.Context) error {
		for _, a := range all {
			if err := j.root.Write(ctx, j.at(a, "power/control"), "auto"); err != nil {
				return fmt.Errorf("let %s sleep: %w", a, err)
			}
		}
		cut = j.cold(ctx, j.main.Address)
		// Keep them awake, whatever the setting was before, because they must be read.
		for _, a := range slices.Backward(all) {
			if err := j.root.Write(ctx, j.at(a, "power/control"), "on"); err != nil {
				return fmt.Errorf("wake %s: %w", a, err)
			}
		}
		return nil
	})
}

// unplug removes the functions from the bus until power has been off.
func (j *job) unplug(ctx context.Context, bridge pci.Address) error {
	if j.records == "" {
		return skipf("%s does not sleep, and there is no folder for records, without which a crash would leave it off the bus", j.main.Address)
	}
	for _, name := range []string{"power/control", "power_state"} {
		if !j.exists(j.at(bridge, name)) {
			return skipf("the bridge %s has no %s", bridge, name)
		}
	}
	return j.away(ctx, bridge, func(ctx context.Context) error {
		if err := j.root.Write(ctx, j.at(bridge, "power/control"), "auto"); err != nil {
			return fmt.Errorf("let %s sleep: %w", bridge, err)
		}
		if !j.cold(ctx, bridge) {
			return fmt.Errorf("power stayed on: the bridge %s is in %s after %s; the platform does not switch this slot's power", bridge, j.text(bridge, "power_state"), j.power)
		}
		return nil
	})
}

// hot resets the bus below a bridge by the bridge's own bit, as the kernel does for a
// card with one function. Meanwhile the functions are removed from the bus, so nobody
// uses their registers. The rescan configures these again.
func (j *job) hot(ctx context.Context, bridge pci.Address) error {
	if j.records == "" {
		return skipf("the kernel does not reset the bus of %s (one with several functions it does since Linux 6.13), and there is no folder for records", j.main.Address)
	}
	if other, ok := j.other(bridge); ok {
		return skipf("%s is below the bridge %s, too", other, bridge)
	}
	s := j.read(&pci.Device{Address: bridge})
	if !s.alive() || s.u8(regHeader)&0x7f != 1 {
		return skipf("the bridge %s cannot be read", bridge)
	}
	return j.away(ctx, bridge, func(ctx context.Context) error {
		if err := j.busReset(ctx, bridge, true); err != nil {
			return err
		}
		if err := wait.For(ctx, holdReset); err != nil {
			return err // restore ends the reset
		}
		if err := j.busReset(ctx, bridge, false); err != nil {
			return err
		}
		return wait.For(ctx, afterReset)
	})
}

// busReset sets or clears the bridge's Secondary Bus Reset bit (PCI-to-PCI Bridge 1.2,
// 3.2.5.18), unless it has that value already. The header is written back unchanged,
// except for bits that have an effect when they are written.
func (r *Resetter) busReset(ctx context.Context, bridge pci.Address, on bool) error {
	s := r.read(&pci.Device{Address: bridge})
	if !s.alive() || s.u8(regHeader)&0x7f != 1 {
		return fmt.Errorf("the bridge %s does not answer", bridge)
	}
	control := s.u16(regBridge)
	if control&secondaryReset != 0 == on {
		return nil
	}
	b := slices.Clone(s.data[:header])
	binary.LittleEndian.PutUint16(b[regStatus:], 0)
	binary.LittleEndian.PutUint16(b[regSecondary:], 0)
	b[regBIST] = 0
	binary.LittleEndian.PutUint16(b[regBridge:], control^secondaryReset)
	if err := r.root.Write(ctx, r.at(bridge, "config"), string(b)); err != nil {
		return fmt.Errorf("reset the bus below %s: %w", bridge, err)
	}
	if now := r.read(&pci.Device{Address: bridge}).u16(regBridge); now&secondaryReset != 0 != on {
		return fmt.Errorf("reset the bus below %s: its control register is %#04x", bridge, now)
	}
	return nil
}

// away calls do while the functions are removed from the bus, and drivers are not bound
// automatically.
func (j *job) away(ctx context.Context, bridge pci.Address, do func(context.Context) error) (err error) {
	if !j.exists(j.at(bridge, "rescan")) {
		return skipf("the bridge %s has no rescan", bridge)
	}
	rec := &record{Bridge: &bridge, Controls: map[string]string{}}
	if control := j.text(bridge, "power/control"); control != "" {
		rec.Controls[bridge.String()] = control
	}
	for _, f := range j.card.Functions {
		if !j.exists(j.file(f, "remove")) {
			return skipf("%s cannot be taken off the bus", f.Address)
		}
		h := held{Address: f.Address, Driver: j.driver(f.Address), Override: j.text(f.Address, "driver_override")}
		if h.Override == noOverride {
			h.Override = ""
		}
		rec.Functions = append(rec.Functions, h)
	}
	if err := j.leave(rec); err != nil {
		return skipf("drivers cannot be kept off: %v", err)
	}
	defer func() {
		if rec.away { // it was not restored
			err = errors.Join(err, j.stay(ctx, rec, errors.Is(err, sysfs.ErrStuck)))
		}
	}()
	return j.with(ctx, rec, func(ctx context.Context) error {
		if rec.Autoprobe == "1" {
			if err := j.root.Write(ctx, autoprobe, "0"); err != nil {
				return fmt.Errorf("keep drivers off: %w", err)
			}
		}
		j.fresh = true
		for _, f := range slices.Backward(j.card.Functions) {
			if err := j.root.Write(ctx, j.file(f, "remove"), "1"); err != nil {
				return fmt.Errorf("take %s off the bus: %w", f.Address, err)
			}
		}
		return do(ctx)
	})
}

// leave counts a card among those that are off the bus, and enters into its record what
// drivers_autoprobe was before the first of them left. It stays off until the last one is back:
// the kernel would bind drivers to the functions of the others when it finds them.
func (r *Resetter) leave(rec *record) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.off == 0 {
		auto, err := r.root.ReadFile(autoprobe)
		if err != nil {
			return err
		}
		r.probes = strings.TrimSpace(string(auto))
	}
	r.off++
	rec.Autoprobe, rec.away = r.probes, true
	return nil
}

// back lets drivers probe again, unless other cards are off the bus.
func (r *Resetter) back(ctx context.Context, rec *record) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if rec.away {
		rec.away = false
		r.off--
	}
	if r.off > 0 || rec.Autoprobe != "1" {
		return nil
	}
	return r.root.Write(ctx, autoprobe, "1")
}

// stay is back with a time of its own. If a card is stuck, its record remains, and drivers do not
// probe for its sake.
func (r *Resetter) stay(ctx context.Context, rec *record, stuck bool) error {
	if stuck {
		rec.Autoprobe = ""
	}
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	return r.back(undo, rec)
}

// with calls do with a record on disk, and restores everything afterwards.
func (j *job) with(ctx context.Context, rec *record, do func(context.Context) error) (err error) {
	forget, err := j.record(rec)
	if err != nil {
		return err
	}
	attempt, cancel := context.WithTimeout(ctx, j.attempt)
	defer cancel()
	err = do(attempt)
	if errors.Is(err, sysfs.ErrStuck) {
		return err // restoring would block, too; the record remains
	}
	undo, stop := context.WithTimeout(context.WithoutCancel(ctx), j.ready)
	defer stop()
	if back := j.restore(undo, rec); back != nil {
		return errors.Join(err, back)
	}
	forget()
	return err
}

// cold waits until a device has no power.
func (j *job) cold(ctx context.Context, a pci.Address) bool {
	ctx, cancel := context.WithTimeout(ctx, j.power)
	defer cancel()
	for pause := firstPause; ; pause = min(2*pause, mostPause) {
		if j.text(a, "power_state") == "D3cold" {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(pause):
		}
	}
}

// restore restores what a record contains, unless it is restored already. It may be
// repeated.
func (r *Resetter) restore(ctx context.Context, rec *record) error {
	var errs []error
	note := func(what string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	for address, choice := range rec.Choices {
		a, err := pci.ParseAddress(address)
		if err != nil {
			note("record", err)
			continue
		}
		note("put back reset_method", r.root.Write(ctx, r.at(a, "reset_method"), choice))
	}
	if rec.Bridge != nil {
		if control := r.text(*rec.Bridge, "power/control"); control != "" && control != "on" {
			note("wake the bridge", r.root.Write(ctx, r.at(*rec.Bridge, "power/control"), "on"))
		}
		note("end the reset", r.busReset(ctx, *rec.Bridge, false))
		if slices.ContainsFunc(rec.Functions, func(h held) bool { return !r.exists(r.at(h.Address, "vendor")) }) {
			note("find the card again", r.root.Write(ctx, r.at(*rec.Bridge, "rescan"), "1"))
		}
		for _, h := range rec.Functions {
			note("bring "+h.Address.String()+" back", r.rebind(ctx, h))
		}
	}
	// Not before, because the kernel might bind another driver. The time may be up because a card
	// does not come back: that is no reason to keep drivers off the host's other devices.
	note("let drivers probe", r.stay(ctx, rec, errors.Is(errors.Join(errs...), sysfs.ErrStuck)))
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	for address, control := range rec.Controls {
		a, err := pci.ParseAddress(address)
		if err == nil && r.text(a, "power/control") != control {
			err = r.root.Write(ctx, r.at(a, "power/control"), control)
		}
		note("put back power/control", err)
	}
	return errors.Join(errs...)
}

// rebind binds a function that was found again to its driver.
func (r *Resetter) rebind(ctx context.Context, h held) error {
	for pause := firstPause; !r.exists(r.at(h.Address, "vendor")); pause = min(2*pause, mostPause) {
		select {
		case <-ctx.Done():
			return errors.New("the rescan has not found it")
		case <-time.After(pause):
		}
		if err := r.root.Write(ctx, "sys/bus/pci/rescan", "1"); err != nil {
			return err
		}
	}
	now := r.text(h.Address, "driver_override")
	if now == noOverride {
		now = ""
	}
	if now != h.Override {
		if err := r.root.Write(ctx, r.at(h.Address, "driver_override"), h.Override+"\n"); err != nil {
			return fmt.Errorf("driver_override: %w", err)
		}
	}
	if h.Driver == "" || r.driver(h.Address) == h.Driver {
		return nil
	}
	if err := r.root.Write(ctx, probe, h.Address.String()); err != nil {
		return fmt.Errorf("probe: %w", err)
	}
	if now := r.driver(h.Address); now != h.Driver {
		return fmt.Errorf("has driver %q, it had %s", now, h.Driver)
	}
	return nil
}

// Recover undoes what interrupted resets have left: cards are put back on the bus with
// their drivers, and reset_method is restored. It returns the cards concerned, which were
// not reset. It must be called before anything is reset or bound, and may be repeated.
func (r *Resetter) Recover(ctx context.Context) ([]pci.Address, error) {
	if r.records == "" {
		return nil, nil
	}
	entries, err := os.ReadDir(r.records)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("records of resets: %w", err)
	}
	var out []pci.Address
	var errs []error
	for _, e := range entries {
		address, ok := strings.CutSuffix(e.Name(), suffix)
		a, err := pci.ParseAddress(address)
		if !ok || err != nil {
			continue
		}
		name := filepath.Join(r.records, e.Name())
		rec, err := readRecord(name)
		if err == nil && rec.Boot == r.boot() {
			err = r.recover(ctx, rec)
		}
		if err == nil {
			err = os.Remove(name)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("recover from the reset of %s: %w", a, err))
			continue
		}
		out = append(out, a)
	}
	return out, errors.Join(errs...)
}

// recover restores what a record contains. A card that does not come back, or is stuck, keeps
// nobody waiting for longer than at the end of a reset.
func (r *Resetter) recover(ctx context.Context, rec *record) error {
	ctx, cancel := context.WithTimeout(ctx, r.ready)
	defer cancel()
	if len(rec.Functions) > 0 && rec.Autoprobe == "1" { // the functions may be found now
		if err := r.root.Write(ctx, autoprobe, "0"); err != nil {
			return fmt.Errorf("keep drivers off: %w", err)
		}
	}
	return r.restore(ctx, rec)
}

func readRecord(name string) (*record, error) {
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	return parseRecord(data)
}

// parseRecord checks everything that is used in a path.
func parseRecord(data []byte) (*record, error) {
	if len(data) > maxRecord {
		return nil, errors.New("record: too large")
	}
	var rec record
	if err := json.Unmarshal(data, &rec); err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	for _, m := range []map[string]string{rec.Choices, rec.Controls} {
		for a := range m {
			if _, err := pci.ParseAddress(a); err != nil {
				return nil, fmt.Errorf("record: %w", err)
			}
		}
	}
	if len(rec.Functions) > 0 && rec.Bridge == nil {
		return nil, errors.New("record: functions without a bridge")
	}
	return &rec, nil
}
