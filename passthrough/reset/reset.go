package reset

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
)

// Method is a reset method.
type Method string

// Methods, from those that affect least to those that affect most.
const (
	FLR    Method = "flr"    // of each function (PCI Express 5.0, 6.6.2, or Advanced Features)
	PM     Method = "pm"     // D3hot and back, of each function
	Bus    Method = "bus"    // hot reset of the bus, or of the slot if it has a controller
	ACPI   Method = "acpi"   // the firmware's _RST
	D3cold Method = "d3cold" // power off and on
	Vendor Method = "vendor" // the kernel's device_specific, or the operator's own
)

// Methods returns all methods in the order in which they are tried.
func Methods() []Method { return []Method{FLR, PM, Bus, ACPI, D3cold, Vendor} }

// Errors of Reset.
var (
	// ErrDead means that no method brought the card back. It must not be given to anybody
	// before an operator has repaired that.
	ErrDead = errors.New("the card did not come back from any reset")
	// ErrNoMethod means that the card has no usable method. The card is unchanged, with
	// the data of its last user.
	ErrNoMethod = errors.New("there is no way to reset the card")
	// ErrInUse means that nothing was tried, because virtual functions exist.
	ErrInUse = errors.New("the card is in use")

	errSkipped = errors.New("left out")
)

// Avoid is a method that must not be used with this card.
type Avoid struct {
	Method Method
	Why    string
}

// Attempt is the result of one method.
type Attempt struct {
	Method   Method
	Skipped  bool // it was skipped; Err contains why
	Took     time.Duration
	Restored bool          // registers had to be restored
	Left     []pci.Address // functions that do not have the method
	Err      error         // nil: it succeeded
}

// Result is the result of a reset.
type Result struct {
	By       Method // the method that succeeded; empty: none did
	Took     time.Duration
	Attempts []Attempt // in order
}

// String returns one line for people.
func (r Result) String() string {
	var parts []string
	for _, a := range r.Attempts {
		switch {
		case a.Err != nil:
			parts = append(parts, fmt.Sprintf("%s: %v", a.Method, a.Err))
		default:
			parts = append(parts, fmt.Sprintf("%s: worked in %s", a.Method, a.Took.Round(time.Millisecond)))
		}
	}
	return strings.Join(parts, "; ")
}

// Stuck reports whether the kernel did not return from one of the attempts. Until it
// does, the device's lock is held, so binding the device to a driver would block, too.
func (r Result) Stuck() bool {
	return slices.ContainsFunc(r.Attempts, func(a Attempt) bool { return errors.Is(a.Err, sysfs.ErrStuck) })
}

// Times of the specification, and time limits.
const (
	defaultReady   = 60 * time.Second // PCI Express 5.0, 6.6.1 and 2.3.1: a device may answer with retries for so long
	defaultAttempt = 90 * time.Second // for a write that resets, including the kernel's own waiting
	defaultPower   = 10 * time.Second // until a bridge with nothing below it sleeps
	undoTime       = 5 * time.Second
)

// Option is an option of New.
type Option func(*Resetter)

// WithTimes sets how long a device may take to answer after a reset, how long the kernel
// may take for a reset, and how long a bridge may take to sleep. Zero means the default.
func WithTimes(ready, attempt, power time.Duration) Option {
	return func(r *Resetter) {
		for _, t := range []struct {
			to   *time.Duration
			from time.Duration
		}{{&r.ready, ready}, {&r.attempt, attempt}, {&r.power, power}} {
			if t.from > 0 {
				*t.to = t.from
			}
		}
	}
}

// WithVendor sets the last method: that of the vendor or the operator for the card. ok is
// false if there is none for this card.
func WithVendor(f func(ctx context.Context, card *pci.Card) (ok bool, err error)) Option {
	return func(r *Resetter) { r.vendor = f }
}

// WithRecords sets the folder for records of what a crash during a reset would leave.
// Without it, no card is removed from the bus.
func WithRecords(dir string) Option { return func(r *Resetter) { r.records = dir } }

// Resetter resets cards of one host. One card must not be reset twice at the same time.
type Resetter struct {
	root                  sysfs.Root
	ready, attempt, power time.Duration
	vendor                func(context.Context, *pci.Card) (bool, error)
	records               string

	mu     sync.Mutex
	off    int    // cards that are off the bus
	probes string // drivers_autoprobe before the first of them left
}

// New returns a Resetter for the host.
func New(root sysfs.Root, opts ...Option) *Resetter {
	r := &Resetter{root: root, ready: defaultReady, attempt: defaultAttempt, power: defaultPower}
	for _, o := range opts {
		o(r)
	}
	return r
}

// Reset resets the card, whose functions must have been scanned after the last change of
// their drivers. It skips the methods in avoid. The Result contains all methods, even if
// there is an error. Errors wrap ErrDead, ErrNoMethod or ErrInUse.
//
// If the kernel does not return from a reset in time, no other method is tried, as it
// would wait for the same lock. The error wraps ErrDead and sysfs.ErrStuck.
func (r *Resetter) Reset(ctx context.Context, card *pci.Card, avoid []Avoid) (Result, error) {
	start := time.Now()
	j := &job{Resetter: r, card: card, main: card.Main()}
	result, err := j.run(ctx, avoid)
	result.Took = time.Since(start)
	return result, err
}

// job is one reset of one card.
type job struct {
	*Resetter
	card   *pci.Card
	main   *pci.Device
	before map[pci.Address]snapshot
	plain  bool // Linux before 5.15, which chooses the method itself
	fresh  bool // the functions were found again by a rescan
}

func (j *job) run(ctx context.Context, avoid []Avoid) (Result, error) {
	var result Result
	if j.main == nil {
		return result, fmt.Errorf("reset %s: the card has no such function", j.card.Address)
	}
	if err := j.free(); err != nil {
		return result, err
	}
	j.before = map[pci.Address]snapshot{}
	dead := false
	for _, f := range j.card.Functions {
		s := j.read(f)
		j.before[f.Address] = s
		dead = dead || !s.alive()
	}
	j.plain = j.exists(j.file(j.main, "reset")) && !j.exists(j.file(j.main, "reset_method"))
	tried := false
	for _, m := range Methods() {
		if err := ctx.Err(); err != nil && !tried {
			return result, fmt.Errorf("reset %s: %w", j.card.Address, err)
		}
		a := Attempt{Method: m}
		begin := time.Now()
		err := j.skip(m, dead, avoid)
		if err == nil {
			err = j.try(ctx, m, &a)
		}
		a.Err, a.Took = err, time.Since(begin)
		a.Skipped = errors.Is(err, errSkipped)
		tried = tried || !a.Skipped
		result.Attempts = append(result.Attempts, a)
		if err == nil {
			result.By = m
			return result, nil
		}
		if errors.Is(err, sysfs.ErrStuck) || tried && ctx.Err() != nil {
			return result, fmt.Errorf("reset %s: %w: %s: %w", j.card.Address, ErrDead, m, err)
		}
	}
	switch {
	case tried, dead:
		return result, fmt.Errorf("reset %s: %w (%s): power the host off and on, or replace the card", j.card.Address, ErrDead, result)
	default:
		return result, fmt.Errorf("reset %s: %w (%s): reboot the host before another VM gets it", j.card.Address, ErrNoMethod, result)
	}
}

// free refuses a physical function with virtual functions: a reset would remove them,
// even if somebody uses them.
func (j *job) free() error {
	for _, f := range j.card.Functions {
		if n := j.number(f, "sriov_numvfs"); n > 0 {
			return fmt.Errorf("reset %s: %w: %d virtual functions of %s exist; remove them first", j.card.Address, ErrInUse, n, f.Address)
		}
	}
	return nil
}

func skipf(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errSkipped, fmt.Sprintf(format, args...))
}

// skip returns why a method is skipped; nil if it is not.
func (j *job) skip(m Method, dead bool, avoid []Avoid) error {
	if i := slices.IndexFunc(avoid, func(a Avoid) bool { return a.Method == m }); i >= 0 {
		return skipf("%s", avoid[i].Why)
	}
	if j.main.PF != nil && m != FLR && m != Vendor {
		return skipf("a virtual function has no reset of its own but FLR; others would hit the whole card")
	}
	if dead && (m == FLR || m == PM) {
		return skipf("the device does not answer, so it cannot be told to")
	}
	return nil
}

// try tries one method and verifies the card.
func (j *job) try(ctx context.Context, m Method, a *Attempt) error {
	var err error
	switch {
	case m == D3cold:
		err = j.d3cold(ctx)
	case j.plain && m != Vendor:
		err = j.old(ctx, m)
	case m == FLR, m == PM:
		err = j.each(ctx, m, a)
	case m == Bus:
		err = j.bus(ctx)
	case m == ACPI:
		err = j.one(ctx, "acpi")
	default:
		err = j.special(ctx)
	}
	if err != nil {
		return err
	}
	a.Restored, err = j.verify(ctx)
	return err
}

// kernelNames returns the names of a method in reset_method, best first.
func kernelNames(m Method) []string {
	switch m {
	case FLR:
		return []string{"flr", "af_flr"}
	case PM:
		return []string{"pm"}
	case Bus:
		return []string{"bus", "cxl_bus"}
	}
	return []string{string(m)}
}

func (j *job) has(f *pci.Device, names ...string) string {
	have := j.methods(f)
	for _, n := range names {
		if slices.Contains(have, n) {
			return n
		}
	}
	return ""
}

// methods returns the methods of a function. They are read again, because a module may
// have been loaded, or an operator may have changed them since the scan. Methods that the
// operator has disabled are not included.
func (j *job) methods(f *pci.Device) []string {
	data, err := j.root.ReadFile(j.file(f, "reset_method"))
	if err != nil {
		return nil
	}
	return strings.Fields(string(data))
}

// each resets the functions one by one. The main function must have the method. A
// function that does not have it is reset by its other own method, if any, and otherwise
// left as it is.
func (j *job) each(ctx context.Context, m Method, a *Attempt) error {
	if j.has(j.main, kernelNames(m)...) == "" {
		return skipf("the kernel has no %s for %s", m, j.main.Address)
	}
	for _, f := range j.card.Functions {
		name := j.has(f, kernelNames(m)...)
		if name == "" && f != j.main {
			name = j.has(f, "flr", "af_flr", "pm")
		}
		if name == "" {
			a.Left = append(a.Left, f.Address)
			continue
		}
		if err := j.write(ctx, f, name); err != nil {
			return err
		}
	}
	return nil
}

// one resets the card by a method of the main function.
func (j *job) one(ctx context.Context, name string) error {
	if j.has(j.main, name) == "" {
		return skipf("the kernel has no %s for %s", name, j.main.Address)
	}
	return j.write(ctx, j.main, name)
}

func (j *job) special(ctx context.Context) error {
	if j.vendor != nil {
		ctx, cancel := context.WithTimeout(ctx, j.attempt)
		defer cancel()
		if ok, err := j.vendor(ctx, j.card); ok || err != nil {
			return err
		}
	}
	return j.one(ctx, "device_specific")
}

// bus resets the bus of the card. Other devices must not be affected.
func (j *job) bus(ctx context.Context) error {
	bridge, err := j.alone()
	if err != nil {
		return err
	}
	// pci_parent_bus_reset refuses a bus with more than one function.
	if name := j.has(j.main, kernelNames(Bus)...); name != "" && j.below(bridge) == 1 {
		return j.write(ctx, j.main, name)
	}
	file := j.at(bridge, "reset_subordinate")
	if !j.exists(file) {
		return j.hot(ctx, bridge)
	}
	ctx, cancel := context.WithTimeout(ctx, j.attempt)
	defer cancel()
	return j.root.Write(ctx, file, "1")
}

// alone returns the bridge above the card, if only the card's own functions, or no device
// that is in use, are below it.
func (j *job) alone() (pci.Address, error) {
	if len(j.main.Upstream) == 0 {
		return pci.Address{}, skipf("%s is on a root bus, which cannot be reset", j.main.Address)
	}
	bridge := j.main.Upstream[len(j.main.Upstream)-1].Address
	entries, err := j.root.ReadDir(j.at(bridge, ""))
	if err != nil {
		return bridge, skipf("the bridge %s cannot be read: %v", bridge, err)
	}
	for _, e := range entries {
		a, err := pci.ParseAddress(e.Name())
		if err != nil || j.own(a) {
			continue
		}
		if driver := j.driver(a); driver != "" {
			return bridge, skipf("%s (driver %s) is below the bridge %s, too", a, driver, bridge)
		}
		if n := j.number(&pci.Device{Address: a}, "enable"); n > 0 {
			return bridge, skipf("%s, which is enabled, is below the bridge %s, too", a, bridge)
		}
	}
	return bridge, nil
}

// below counts the devices directly below a bridge.
func (j *job) below(bridge pci.Address) (n int) {
	entries, err := j.root.ReadDir(j.at(bridge, ""))
	if err != nil {
		return 0
	}
	for _, e := range entries {
		if _, err := pci.ParseAddress(e.Name()); err == nil {
			n++
		}
	}
	return n
}

func (j *job) own(a pci.Address) bool {
	return slices.ContainsFunc(j.card.Functions, func(f *pci.Device) bool { return f.Address == a })
}

// write selects the kernel's method and resets the function with it. Then it restores the
// selection, in any case.
func (j *job) write(ctx context.Context, f *pci.Device, name string) error {
	attempt, cancel := context.WithTimeout(ctx, j.attempt)
	defer cancel()
	choice := strings.Join(j.methods(f), " ")
	if choice != name {
		forget, err := j.record(&record{Choices: map[string]string{f.Address.String(): choice}})
		if err != nil {
			return err
		}
		defer func() {
			// For a device that is stuck, each write would block.
			undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
			defer cancel()
			if err := j.root.Write(undo, j.file(f, "reset_method"), choice); err == nil {
				forget()
			}
		}()
		if err := j.root.Write(attempt, j.file(f, "reset_method"), name); err != nil {
			return fmt.Errorf("choose %s: %w", name, err)
		}
		if now := j.methods(f); !slices.Equal(now, []string{name}) {
			return fmt.Errorf("choose %s of %s: the kernel has %q", name, f.Address, now)
		}
	}
	return j.root.Write(attempt, j.file(f, "reset"), "1")
}

// old resets with a kernel that chooses the method itself. Which one it will choose is
// known from the capabilities (pci_dev_reset in Linux before 5.15).
func (j *job) old(ctx context.Context, m Method) error {
	chosen := Bus
	switch c := j.main.Config; {
	case c.FLR:
		chosen = FLR
	case c.PM && !c.NoSoftReset:
		chosen = PM
	}
	if m != chosen {
		return skipf("a kernel before 5.15 chooses by itself, here %s", chosen)
	}
	if m == Bus {
		if _, err := j.alone(); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, j.attempt)
	defer cancel()
	return j.root.Write(ctx, j.file(j.main, "reset"), "1")
}
