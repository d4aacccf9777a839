package bind

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
)

// Errors of a Binder. They are wrapped with what to do next.
var (
	ErrInUse      = errors.New("in use")
	ErrNotFound   = errors.New("no such PCI function")
	ErrPartial    = errors.New("a card is given away whole")
	ErrBridge     = errors.New("a bridge cannot be given away")
	ErrNoDriver   = errors.New("driver is not loaded")
	ErrNoIOMMU    = errors.New("no IOMMU group")
	ErrDead       = errors.New("device does not answer")
	ErrUnfinished = errors.New("an earlier change is unfinished")
	ErrForeign    = errors.New("somebody else has bound it")
	ErrRefused    = errors.New("the driver did not take it")
)

const (
	driversDir = "sys/bus/pci/drivers"
	devicesDir = "sys/bus/pci/devices"

	defaultPatience = 30 * time.Second
	defaultSettle   = 5 * time.Second
	pollEvery       = 5 * time.Millisecond

	classBridge = 0x06 // base class of bridges
)

// Binder binds functions to drivers. It is safe for concurrent use; changes are made one
// after the other.
type Binder struct {
	root     sysfs.Root
	journal  *Journal
	release  func(context.Context, []pci.Address) (resume func(), err error)
	users    func(context.Context, []pci.Address) ([]User, error)
	bootVGA  bool
	patience time.Duration
	settle   time.Duration
	turn     chan struct{}
	stuck    map[pci.Address]bool // functions for which the kernel has not returned from a write
}

// Option is an option of New.
type Option func(*Binder)

// WithRelease sets a function that is called before functions lose their drivers, so that
// the caller's own libraries close them (NVML keeps a GPU open that it knows). The
// returned function is called at the end, even after an error.
func WithRelease(f func(context.Context, []pci.Address) (resume func(), err error)) Option {
	return func(b *Binder) { b.release = f }
}

// WithUsers sets a function that finds users which files do not show, such as VMs.
func WithUsers(f func(context.Context, []pci.Address) ([]User, error)) Option {
	return func(b *Binder) { b.users = f }
}

// WithBootVGA permits taking the host's boot display.
func WithBootVGA() Option { return func(b *Binder) { b.bootVGA = true } }

// WithPatience sets how long one write may take (default 30 s), and how long its effect
// may need to be visible (default 5 s).
func WithPatience(write, settle time.Duration) Option {
	return func(b *Binder) { b.patience, b.settle = write, settle }
}

// New returns a Binder. Recover must be called before anything else.
func New(root sysfs.Root, j *Journal, options ...Option) *Binder {
	b := &Binder{root: root, journal: j, patience: defaultPatience, settle: defaultSettle, turn: make(chan struct{}, 1), stuck: map[pci.Address]bool{}}
	for _, o := range options {
		o(b)
	}
	return b
}

func (b *Binder) begin(ctx context.Context) (end func(), err error) {
	select {
	case b.turn <- struct{}{}:
		return func() { <-b.turn }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for another change of drivers: %w", ctx.Err())
	}
}

// state is the state of a function in sysfs.
type state struct {
	driver, override string
	class            uint32
	vendor, device   uint16
	vf               bool
	group            string // IOMMU group; empty: none
}

func devicePath(a pci.Address, parts ...string) string {
	return path.Join(append([]string{devicesDir, a.String()}, parts...)...)
}

func (b *Binder) read(a pci.Address) (state, error) {
	var s state
	if _, err := b.root.ReadLink(devicePath(a)); gone(err) {
		return s, fmt.Errorf("%s: %w: lspci -D lists what there is", a, ErrNotFound)
	} else if err != nil {
		return s, err
	}
	link := func(name string) (string, error) {
		target, err := b.root.ReadLink(devicePath(a, name))
		if gone(err) {
			return "", nil
		}
		return path.Base(target), err
	}
	var pf string
	for name, to := range map[string]*string{"driver": &s.driver, "iommu_group": &s.group, "physfn": &pf} {
		var err error
		if *to, err = link(name); err != nil {
			return s, err
		}
	}
	s.vf = pf != ""
	override, err := b.root.ReadFile(devicePath(a, "driver_override"))
	if err != nil {
		return s, err
	}
	if s.override = strings.TrimSuffix(string(override), "\n"); s.override == "(null)" {
		s.override = ""
	}
	for _, n := range []struct {
		name string
		set  func(uint64)
	}{
		{"class", func(v uint64) { s.class = uint32(v) }},
		{"vendor", func(v uint64) { s.vendor = uint16(v) }},
		{"device", func(v uint64) { s.device = uint16(v) }},
	} {
		data, err := b.root.ReadFile(devicePath(a, n.name))
		if err != nil {
			return s, err
		}
		var v uint64
		if _, err := fmt.Sscanf(string(data), "0x%x", &v); err != nil {
			return s, fmt.Errorf("%s of %s: %.40q", n.name, a, data)
		}
		n.set(v)
	}
	return s, nil
}

// move is the change of one function's driver.
type move struct {
	record Record
	now    state
	to     string // new driver
}

// Take binds functions to a driver: all of them, or none. functions must contain all
// functions of each card, or be virtual functions. A function that is bound to that
// driver already stays. A function that was taken for another driver is moved, and its
// record keeps where it is to be returned to. Errors wrap those of this package.
//
// After an error, everything is as before, unless the error says otherwise: if the undo
// failed, or the kernel has not returned (sysfs.ErrStuck), Recover continues. The end of
// ctx is checked between writes.
func (b *Binder) Take(ctx context.Context, functions []pci.Address, driver string) error {
	end, err := b.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	functions = unique(functions)
	if err := b.whole(functions); err != nil {
		return err
	}
	moves, err := b.plan(functions, driver)
	if err != nil || len(moves) == 0 {
		return err
	}
	var lose []pci.Address
	for _, m := range moves {
		if m.now.driver != m.to {
			lose = append(lose, m.record.Function)
		}
	}
	resume, err := b.clear(ctx, lose)
	if err != nil {
		return err
	}
	defer resume()
	records := recordsOf(moves)
	if err := b.journal.update(records); err != nil {
		return err
	}
	for _, m := range moves {
		if err := b.take(ctx, m.record, m.now); err != nil {
			b.note(m.record.Function, err)
			err = fmt.Errorf("give %s to %s: %w", m.record.Function, m.to, err)
			return errors.Join(err, b.undo(ctx, records))
		}
	}
	for i := range records {
		records[i].Phase, records[i].Before = Held, ""
	}
	if err := b.journal.update(records); err != nil {
		return errors.Join(err, b.undo(ctx, recordsOf(moves)))
	}
	return nil
}

func unique(functions []pci.Address) []pci.Address {
	out := slices.Clone(functions)
	slices.SortFunc(out, pci.Address.Compare)
	return slices.Compact(out)
}

func recordsOf(moves []move) []Record {
	out := make([]Record, len(moves))
	for i, m := range moves {
		out[i] = m.record
	}
	return out
}

// whole checks that the functions are all functions of their cards.
func (b *Binder) whole(functions []pci.Address) error {
	slots := map[pci.Address]bool{}
	for _, a := range functions {
		now, err := b.read(a)
		switch {
		case err != nil:
			return err
		case now.class>>16 == classBridge:
			return fmt.Errorf("%s: %w; name the functions of the card behind it", a, ErrBridge)
		}
		if !now.vf {
			slots[a.Slot()] = true
		}
	}
	for slot := range slots {
		for f := range uint8(8) {
			a := slot
			a.Function = f
			if slices.Contains(functions, a) {
				continue
			}
			now, err := b.read(a)
			switch {
			case errors.Is(err, ErrNotFound):
			case err != nil:
				return err
			case !now.vf && now.class>>16 != classBridge:
				return fmt.Errorf("%w: %s belongs to the card of %s too; name all of its functions", ErrPartial, a, slot)
			}
		}
	}
	return nil
}

// plan returns the moves for a take, or why it is impossible.
func (b *Binder) plan(functions []pci.Address, driver string) ([]move, error) {
	boot := b.boot()
	var moves []move
	for _, a := range functions {
		now, err := b.read(a)
		if err != nil {
			return nil, err
		}
		to, err := b.choose(driver, a)
		if err != nil {
			return nil, err
		}
		r, known := b.journal.Record(a)
		switch {
		case !validName(to):
			return nil, fmt.Errorf("%.40q cannot be the name of a driver", driver)
		case known && r.Phase != Held:
			return nil, unfinished(r)
		case known && now.driver != r.Driver && now.driver != "" && now.driver != r.Native:
			return nil, fmt.Errorf("%s: %w to %s, and it was taken for %s: unbind it, or bind it to %s again", a, ErrForeign, now.driver, r.Driver, r.Driver)
		case known && r.Driver == to && now.driver == to && now.override == to:
			continue
		case !b.loaded(to):
			return nil, fmt.Errorf("%s: %w: modprobe %s", to, ErrNoDriver, module(to))
		case isVFIO(to) && now.group == "":
			return nil, fmt.Errorf("%s: %w, and %s wants one: turn the IOMMU on in the firmware and with intel_iommu=on or amd_iommu=on; in a Xen dom0 take %s", a, ErrNoIOMMU, to, XenPciback)
		}
		if dead, err := b.dead(a); err != nil {
			return nil, err
		} else if dead {
			return nil, fmt.Errorf("%s: %w, its configuration space reads all ones: reset it first, or power the host off and on", a, ErrDead)
		}
		if !known {
			r = Record{Function: a, Vendor: now.vendor, Device: now.device, Native: now.driver, Override: now.override, Slot: b.hasSlot(a)}
			if err := r.checkNative(); err != nil {
				return nil, err
			}
		} else {
			r.Before = ""
			if now.driver == r.Driver {
				r.Before = r.Driver
			}
		}
		r.Phase, r.Driver, r.Boot = Taking, to, boot
		moves = append(moves, move{r, now, to})
	}
	return moves, nil
}

// checkNative refuses a record that the journal could not read back.
func (r Record) checkNative() error {
	r.Phase, r.Driver = Held, VFIOPCI
	if err := r.check(); err != nil {
		return fmt.Errorf("%s cannot be recorded: %w", r.Function, err)
	}
	return nil
}

// clear makes the caller's libraries close the functions that are to lose their driver,
// and checks that nobody uses them.
func (b *Binder) clear(ctx context.Context, lose []pci.Address) (resume func(), err error) {
	if len(lose) == 0 {
		return func() {}, nil
	}
	resume = func() {}
	if b.release != nil {
		r, err := b.release(ctx, lose)
		if r != nil {
			resume = r
		}
		if err != nil {
			resume()
			return nil, fmt.Errorf("have the driver's library let go: %w", err)
		}
	}
	users, err := b.Users(ctx, lose)
	if err == nil && len(users) > 0 {
		err = &InUseError{users}
	}
	if err != nil {
		resume()
		return nil, err
	}
	return resume, nil
}

// note records a function for which the kernel has not returned.
func (b *Binder) note(a pci.Address, err error) {
	if errors.Is(err, sysfs.ErrStuck) {
		b.stuck[a] = true
	}
}

// settled makes sure that a write that hung cannot take effect any more. The kernel
// processes writes for a device one after the other, so a write that changes nothing is
// enough.
func (b *Binder) settled(ctx context.Context, a pci.Address) error {
	if !b.stuck[a] {
		return nil
	}
	now, err := b.read(a)
	if errors.Is(err, ErrNotFound) {
		delete(b.stuck, a)
		return nil
	} else if err != nil {
		return err
	}
	if err := b.write(ctx, devicePath(a, "driver_override"), now.override+"\n"); err != nil {
		return err
	}
	delete(b.stuck, a)
	return nil
}

// undo returns functions to where they were before a take, and removes their records or
// restores the former ones. If that fails for a function, its record stays in the
// journal. A function that the kernel has locked is not tried.
func (b *Binder) undo(ctx context.Context, records []Record) error {
	ctx = context.WithoutCancel(ctx)
	var errs []error
	var put []Record
	var remove []pci.Address
	for _, r := range slices.Backward(records) {
		if b.stuck[r.Function] {
			errs = append(errs, fmt.Errorf("%s is left half-way until the kernel returns", r.Function))
			continue
		}
		if err := b.back(ctx, r); err != nil {
			b.note(r.Function, err)
			errs = append(errs, fmt.Errorf("put %s back to %s: %w", r.Function, place(r.target()), err))
			continue
		}
		if r.Before != "" {
			r.Driver, r.Before, r.Phase = r.Before, "", Held
			put = append(put, r)
		} else {
			remove = append(remove, r.Function)
		}
	}
	if len(put)+len(remove) > 0 {
		errs = append(errs, b.journal.update(put, remove...))
	}
	return errors.Join(errs...)
}

func place(driver, _ string) string {
	if driver == "" {
		return "no driver"
	}
	return driver
}

// target returns the driver and the override to which a function is returned.
func (r Record) target() (driver, override string) {
	if r.Phase == Taking && r.Before != "" {
		return r.Before, r.Before
	}
	return r.Native, r.Override
}

// take binds a function to a driver, from any state.
func (b *Binder) take(ctx context.Context, r Record, now state) error {
	a, to := r.Function, r.Driver
	// Set the override first: then no other driver can bind the function when it has
	// none.
	if now.override != to {
		if err := b.override(ctx, a, to); err != nil {
			return err
		}
	}
	if now.driver != "" && now.driver != to {
		if err := b.unbind(ctx, a, now.driver); err != nil {
			return err
		}
	}
	if err := b.unlist(ctx, r, to); err != nil {
		return err
	}
	if now.driver == to {
		return nil
	}
	return b.bind(ctx, a, to)
}

// back returns a function to its record's driver, from any intermediate state.
func (b *Binder) back(ctx context.Context, r Record) error {
	a := r.Function
	driver, override := r.target()
	now, err := b.read(a)
	if err != nil {
		return err
	}
	switch now.driver {
	case "", driver:
	case r.Driver, r.Native, r.Before:
		if err := b.unbind(ctx, a, now.driver); err != nil {
			return err
		}
		now.driver = ""
	default:
		return fmt.Errorf("%w to %s: unbind it from there", ErrForeign, now.driver)
	}
	if err := b.unlist(ctx, r, driver); err != nil {
		return err
	}
	if now.override != override {
		if err := b.override(ctx, a, override); err != nil {
			return err
		}
	}
	if driver == "" || now.driver == driver {
		return nil
	}
	if !b.loaded(driver) {
		return fmt.Errorf("%s: %w: modprobe %s", driver, ErrNoDriver, module(driver))
	}
	return b.bind(ctx, a, driver)
}

// Return returns functions to where they were before they were taken. It ignores
// functions that were not taken, so it may be repeated. If a function cannot be returned,
// its record stays in the journal, and Recover tries again.
func (b *Binder) Return(ctx context.Context, functions []pci.Address) error {
	end, err := b.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	var records []Record
	var lose []pci.Address
	var errs []error
	for _, a := range unique(functions) {
		r, ok := b.journal.Record(a)
		if !ok {
			continue
		}
		if err := b.settled(ctx, a); err != nil {
			return fmt.Errorf("return %s: %w", a, err)
		}
		for _, other := range b.journal.Records() {
			// A card must not be partly a VM's and partly the host's.
			if other.Function.Slot() == a.Slot() && !slices.Contains(functions, other.Function) && !b.isVF(other.Function) && !b.isVF(a) {
				return fmt.Errorf("%w: %s belongs to the card of %s too; name all of its functions", ErrPartial, other.Function, a)
			}
		}
		now, err := b.read(a)
		switch {
		case errors.Is(err, ErrNotFound):
			errs = append(errs, err)
			continue
		case err != nil:
			return err
		case r.Phase == Taking:
			return unfinished(r)
		case now.driver == r.Driver: // even if that was its former driver, which it keeps
			lose = append(lose, a)
		}
		r.Phase = Returning
		records = append(records, r)
	}
	if len(records) == 0 {
		return errors.Join(errs...)
	}
	resume, err := b.clear(ctx, lose)
	if err != nil {
		return err
	}
	defer resume()
	return errors.Join(append(errs, b.finish(ctx, records))...)
}

func unfinished(r Record) error {
	return fmt.Errorf("%s: %w (%s %s): recover it first, as a restart does", r.Function, ErrUnfinished, r.Phase, r.Driver)
}

// finish returns functions.
func (b *Binder) finish(ctx context.Context, records []Record) error {
	if err := b.journal.update(records); err != nil {
		return err
	}
	var errs []error
	var done []pci.Address
	for _, r := range records {
		if err := b.back(ctx, r); err != nil {
			b.note(r.Function, err)
			errs = append(errs, fmt.Errorf("return %s to %s: %w", r.Function, place(r.target()), err))
			continue
		}
		done = append(done, r.Function)
	}
	if len(done) > 0 {
		errs = append(errs, b.journal.update(nil, done...))
	}
	return errors.Join(errs...)
}

func (b *Binder) isVF(a pci.Address) bool {
	_, err := b.root.ReadLink(devicePath(a, "physfn"))
	return err == nil
}

func (b *Binder) boot() string {
	id := b.text("proc/sys/kernel/random/boot_id")
	return id[:min(len(id), maxName)]
}

func (b *Binder) loaded(driver string) bool {
	_, err := fs.Stat(b.root, path.Join(driversDir, driver))
	return err == nil
}

// dead reports whether a device does not answer. The ids of a virtual function also read
// as all ones, but the rest of its header does not.
func (b *Binder) dead(a pci.Address) (bool, error) {
	data, err := b.root.ReadFile(devicePath(a, "config"))
	if err != nil {
		return false, fmt.Errorf("read the configuration space of %s: %w", a, err)
	}
	return len(data) > 0 && !slices.ContainsFunc(data[:min(len(data), 64)], func(c byte) bool { return c != 0xff }), nil
}

func (b *Binder) hasSlot(a pci.Address) bool {
	for slot := range strings.FieldsSeq(b.text(path.Join(driversDir, pciback, "slots"))) {
		if s, err := pci.ParseAddress(slot); err == nil && s == a {
			return true
		}
	}
	return false
}

// write writes to a file unless ctx has ended. It does not return early when ctx ends: it
// is better to wait for what the kernel has begun.
func (b *Binder) write(ctx context.Context, name, data string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.patience)
	defer cancel()
	return b.root.Write(ctx, name, data)
}

// shows waits until a function has the state that a write should cause.
func (b *Binder) shows(ctx context.Context, a pci.Address, ok func(state) bool) (state, error) {
	ctx, cancel := context.WithTimeout(ctx, b.settle)
	defer cancel()
	for {
		now, err := b.read(a)
		if err != nil || ok(now) {
			return now, err
		}
		select {
		case <-ctx.Done():
			return now, context.Cause(ctx)
		case <-time.After(pollEvery):
		}
	}
}

func (b *Binder) override(ctx context.Context, a pci.Address, to string) error {
	// An empty write would not reach the kernel: a newline clears the override.
	if err := b.write(ctx, devicePath(a, "driver_override"), to+"\n"); err != nil {
		return err
	}
	now, err := b.shows(ctx, a, func(s state) bool { return s.override == to })
	if err != nil {
		return fmt.Errorf("driver_override of %s is %q after %q was written: %w", a, now.override, to, err)
	}
	return nil
}

func (b *Binder) unbind(ctx context.Context, a pci.Address, from string) error {
	werr := b.write(ctx, path.Join(driversDir, from, "unbind"), a.String())
	if errors.Is(werr, sysfs.ErrStuck) {
		return fmt.Errorf("%w; something keeps the device: see what the kernel logs of %s", werr, a)
	}
	if werr != nil && !gone(werr) { // ENODEV: it has lost that driver by itself
		return werr
	}
	now, err := b.shows(ctx, a, func(s state) bool { return s.driver != from })
	switch {
	case err != nil:
		return fmt.Errorf("%s is still bound to %s: %w", a, from, errors.Join(werr, err))
	case now.driver != "":
		return fmt.Errorf("%s: %w to %s", a, ErrForeign, now.driver)
	}
	return nil
}

// bind binds a function to one driver. Unlike drivers_probe, it returns the driver's
// error.
func (b *Binder) bind(ctx context.Context, a pci.Address, to string) error {
	werr := b.write(ctx, path.Join(driversDir, to, "bind"), a.String())
	if errors.Is(werr, sysfs.ErrStuck) {
		return werr
	}
	if werr != nil {
		now, err := b.read(a)
		if err == nil && now.driver != to {
			err = fmt.Errorf("%s: %w: %s %w; see what the kernel logs", a, ErrRefused, to, werr)
		}
		return err
	}
	now, err := b.shows(ctx, a, func(s state) bool { return s.driver != "" })
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w: %s said yes and is not bound: %w", a, ErrRefused, to, err)
	case now.driver != to:
		return fmt.Errorf("%s: %w to %s", a, ErrForeign, now.driver)
	}
	return nil
}

// unlist removes a function from pciback's list of slots when it is taken for another
// driver. It stays in the list after it was bound by an override, and pciback would bind
// it again at the next probe.
func (b *Binder) unlist(ctx context.Context, r Record, to string) error {
	if r.Slot || to == pciback || !b.hasSlot(r.Function) {
		return nil
	}
	err := b.write(ctx, path.Join(driversDir, pciback, "remove_slot"), r.Function.String())
	if err != nil && !gone(err) {
		return err
	}
	if b.hasSlot(r.Function) {
		return fmt.Errorf("%s is still in the list of pciback", r.Function)
	}
	return nil
}
