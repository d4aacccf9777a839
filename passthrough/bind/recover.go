package bind

import (
	"context"
	"errors"
	"fmt"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Outcome is what Recover did with a record.
type Outcome string

// Outcomes of Recover.
const (
	Kept     Outcome = "kept"     // bound to the driver for which it was taken
	Undone   Outcome = "undone"   // an interrupted take was undone, or a function that has lost its driver was returned
	Finished Outcome = "finished" // an interrupted return was finished
	Rebooted Outcome = "rebooted" // after a reboot, the kernel has chosen a driver, which stays
	Replaced Outcome = "replaced" // another device is at its address
	Missing  Outcome = "missing"  // not on the bus; the record is kept until the next boot
	Failed   Outcome = "failed"   // see Err; the record is kept
)

// Recovered is the outcome for one function.
type Recovered struct {
	Function pci.Address
	Outcome  Outcome
	Driver   string // present driver
	Err      error
}

// Recover compares the journal with the real state, and finishes or undoes what was
// interrupted: by a killed process, a kernel that did not return, or a driver that
// refused. Call it at the start, and again while records fail. The error is that of the
// failed records; the others are done.
func (b *Binder) Recover(ctx context.Context) ([]Recovered, error) {
	end, err := b.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	var out []Recovered
	var errs []error
	for _, r := range b.journal.Records() {
		if err := ctx.Err(); err != nil {
			return out, errors.Join(append(errs, err)...)
		}
		done, err := b.recover(ctx, r)
		if err != nil {
			done, err = Failed, fmt.Errorf("recover %s (%s %s): %w", r.Function, r.Phase, r.Driver, err)
			errs = append(errs, err)
		}
		now, _ := b.read(r.Function)
		out = append(out, Recovered{r.Function, done, now.driver, err})
	}
	return out, errors.Join(errs...)
}

func (b *Binder) recover(ctx context.Context, r Record) (Outcome, error) {
	if err := b.settled(ctx, r.Function); err != nil {
		return "", err
	}
	now, err := b.read(r.Function)
	switch {
	case errors.Is(err, ErrNotFound) && r.Boot != b.boot():
		return Missing, b.journal.update(nil, r.Function)
	case errors.Is(err, ErrNotFound):
		return Missing, nil
	case err != nil:
		return "", err
	case now.vendor != r.Vendor || now.device != r.Device:
		return Replaced, b.journal.update(nil, r.Function)
	}
	if boot := b.boot(); r.Boot != boot {
		switch {
		case r.Phase == Held && now.driver == r.Driver:
			// After this boot, as after the last one. So are the native driver and the
			// override.
			r.Boot = boot
			return Kept, b.journal.update([]Record{r})
		case now.driver != "" && now.driver != r.Driver:
			return Rebooted, b.journal.update(nil, r.Function)
		}
		r.Boot = boot
	}
	outcome := Undone
	switch r.Phase {
	case Held:
		if now.driver == r.Driver {
			if now.override != r.Driver {
				return Kept, b.override(ctx, r.Function, r.Driver)
			}
			return Kept, nil
		}
		if now.driver != "" && now.driver != r.Native {
			return "", fmt.Errorf("%w to %s: unbind it, or bind it to %s again", ErrForeign, now.driver, r.Driver)
		}
		if other := b.sibling(r); other != "" {
			return "", fmt.Errorf("%w: it has lost its driver, and %s, of the same card, has not: take the card again, or return it", ErrPartial, other)
		}
		r.Phase = Returning
	case Returning:
		outcome = Finished
	case Taking:
		// The driver for which it was taken before counts only if the card is still taken
		// for it.
		if !r.alive(now) && b.sibling(r) == "" {
			r.Before = ""
		}
	}
	var lose []pci.Address
	if driver, _ := r.target(); now.driver != "" && now.driver != driver {
		lose = append(lose, r.Function)
	}
	resume, err := b.clear(ctx, lose)
	if err != nil {
		return "", err
	}
	defer resume()
	if r.Phase == Taking {
		return outcome, b.undo(ctx, []Record{r})
	}
	return outcome, b.finish(ctx, []Record{r})
}

// alive reports whether a function is bound to a driver for which it was taken, or is
// being moved between two of them. A device that was unplugged and plugged in again is
// not.
func (r Record) alive(now state) bool {
	switch r.Phase {
	case Held:
		return now.driver == r.Driver
	case Taking:
		at := now.driver
		if at == "" {
			at = now.override
		}
		return r.Before != "" && (at == r.Before || at == r.Driver)
	default:
		return false
	}
}

// sibling returns another function of the same card that is alive; empty: there is none.
func (b *Binder) sibling(r Record) string {
	if b.isVF(r.Function) {
		return ""
	}
	for _, other := range b.journal.Records() {
		if other.Function == r.Function || other.Function.Slot() != r.Function.Slot() || b.isVF(other.Function) {
			continue
		}
		if now, err := b.read(other.Function); err == nil && other.alive(now) {
			return other.Function.String()
		}
	}
	return ""
}
