package ledger

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/size"
)

var (
	// ErrBusy means that a GPU has no room for the claim.
	ErrBusy = reason.New(reason.Busy, "busy")
	// ErrUnknownGPU means that a GPU is not in the ledger.
	ErrUnknownGPU = errors.New("unknown GPU")
)

// Whole is the amount of a claim that shares its GPU with nobody.
const Whole = 0

// Ledger must not be used by several goroutines at once.
type Ledger struct {
	gpus map[string]*account
}

type account struct {
	capacity uint64
	held     map[string]uint64 // by claim: Whole, or bytes
}

// New returns an empty ledger.
func New() *Ledger { return &Ledger{map[string]*account{}} }

// SetGPU adds a GPU, or changes its memory. capacity is in bytes.
func (l *Ledger) SetGPU(gpu string, capacity uint64) {
	if a, ok := l.gpus[gpu]; ok {
		a.capacity = capacity
		return
	}
	l.gpus[gpu] = &account{capacity, map[string]uint64{}}
}

// Reserve gives the claim an amount (bytes, or Whole) of each of the GPUs, or nothing at
// all. If the claim has a part of a GPU already, its amount is changed. Errors wrap
// ErrBusy or ErrUnknownGPU.
func (l *Ledger) Reserve(claim string, gpus []string, amount uint64) error {
	for _, gpu := range gpus {
		a, ok := l.gpus[gpu]
		if !ok {
			return fmt.Errorf("gpu %s: %w", gpu, ErrUnknownGPU)
		}
		if room, free := a.room(claim); amount == Whole && !free || amount != Whole && amount > room {
			return fmt.Errorf("gpu %s: %w: %s", gpu, ErrBusy, a.why(claim, amount))
		}
	}
	for _, gpu := range gpus {
		l.gpus[gpu].held[claim] = amount
	}
	return nil
}

// Retain takes all GPUs from the claim, except those in keep.
func (l *Ledger) Retain(claim string, keep []string) {
	for gpu, a := range l.gpus {
		if !slices.Contains(keep, gpu) {
			delete(a.held, claim)
		}
	}
}

// Holds reports whether the claim has the GPU, and how much of it (bytes, or Whole).
func (l *Ledger) Holds(claim, gpu string) (uint64, bool) {
	if a, ok := l.gpus[gpu]; ok {
		amount, held := a.held[claim]
		return amount, held
	}
	return 0, false
}

// Room returns how many bytes of a GPU the claim can have, including what it has already,
// and whether no other claim has any of it.
func (l *Ledger) Room(claim, gpu string) (bytes uint64, free bool) {
	if a, ok := l.gpus[gpu]; ok {
		return a.room(claim)
	}
	return 0, false
}

// Owners returns the claims that have the GPU, with their amounts (bytes, or Whole).
func (l *Ledger) Owners(gpu string) map[string]uint64 {
	if a, ok := l.gpus[gpu]; ok {
		return maps.Clone(a.held)
	}
	return nil
}

func (a *account) room(claim string) (uint64, bool) {
	room, free := a.capacity, true
	for other, amount := range a.held {
		if other == claim {
			continue
		}
		free = false
		if amount == Whole || amount > room {
			return 0, false
		}
		room -= amount
	}
	return room, free
}

func (a *account) why(claim string, amount uint64) string {
	var others []string
	for _, other := range slices.Sorted(maps.Keys(a.held)) {
		if other == claim {
			continue
		}
		if a.held[other] == Whole {
			return "held by claim " + other
		}
		others = append(others, fmt.Sprintf("%s (%s)", other, size.Format(a.held[other])))
	}
	if amount == Whole {
		return "shared by claims " + strings.Join(others, ", ")
	}
	room, _ := a.room(claim)
	return fmt.Sprintf("%s needed, %s of %s left", size.Format(amount), size.Format(room), size.Format(a.capacity))
}
