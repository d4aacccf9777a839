package mediate

import (
	"errors"
	"fmt"
	"time"

	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

// GuestPA is an address in what a VM believes to be the GPU's memory: from 0 to the
// size of its partition.
type GuestPA uint64

// HostPA is an address in the GPU's memory.
type HostPA = nvc0.HostPA

// Hardware is what a mediator needs of the GPU. [nvc0.GPU] is one.
type Hardware interface {
	Size() uint64
	Tag(at HostPA, size uint64, from, to nvc0.Owner, use nvc0.Use) error
	Load(on nvc0.Owner, at HostPA, p []byte)
	Store(on nvc0.Owner, at HostPA, p []byte)
	ReadRegister(at uint32) uint32
	WriteRegister(at, v uint32)
	SetOwner(channel int, o nvc0.Owner)
	Doorbell(channel int, put uint32)
	Stop(channel int)
	Position(channel int) nvc0.Position
	SetPosition(channel int, p nvc0.Position)
	Hold(channel int)
	Busy() bool
	Now() time.Duration // never after what Advance was told
	Advance(to time.Duration, most int)
	NextEvent() (time.Duration, bool)
	Take() []nvc0.Event
}

// Mode is how the shadow of a VM's page tables is kept.
type Mode string

// The modes.
const (
	// Eager reads the VM's tables at each flush of the TLB.
	Eager Mode = "eager"
	// Lazy only notes the flush, and reads the tables before their next use.
	Lazy Mode = "lazy"
	// Para has no tables of the VM's: it asks for each entry, many with one exit.
	Para Mode = "para"
)

// Errors.
var (
	ErrConfig    = errors.New("not a possible configuration")
	ErrExists    = errors.New("the VM has a VGPU")
	ErrNoVGPU    = errors.New("the VM has no VGPU")
	ErrExhausted = errors.New("the GPU has too little left")
	ErrBusy      = errors.New("a command of the VM runs")
	ErrState     = errors.New("not a state that was saved")
)

// Config is how a [GPU] works.
type Config struct {
	Hardware Hardware

	// Clock is the time since an epoch of the user's choice. It never goes back.
	Clock func() time.Duration

	// Policy is how commands of VMs share the GPU.
	Policy timeshare.Config

	// Reserve is how much memory, in bytes, the mediator keeps for its shadows.
	Reserve uint64

	// Work is how many page table entries an exit looks at before it leaves the rest to
	// later ones. 0: [DefaultWork].
	Work int

	// Events is told what happens to VMs. It is called while the GPU is locked and
	// may not call it. nil: nobody.
	Events func(Event)
}

// DefaultWork is the usual [Config].Work: some 100 µs.
const DefaultWork = 16384

// Request is what a VGPU is to be.
type Request struct {
	VM       mmio.VM
	Name     string // for events
	Memory   uint64 // bytes, a multiple of 1 MiB
	Channels int
	Weight   int // of its share of the GPU's time; 0: 1
	Mode     Mode

	// Tables is how many frames (4 KiB) of the mediator's memory its shadows may take.
	Tables int

	// Pending is how many commands may wait each on their own; those beyond are
	// joined to the last one of their channel. 0: 64.
	Pending int

	Guest mmio.Guest
	Stats *mmio.Stats // nil: its own
}

const (
	defaultPending = 64
	megabyte       = 1 << 20
	maxMemory      = 1 << 30
	// channelFrames are those of each channel: its instance block and its USERD page.
	channelFrames   = 2
	directoryFrames = nvc0.DirectorySize / nvc0.PageSize
)

func (r *Request) check() error {
	if r.Weight == 0 {
		r.Weight = 1
	}
	if r.Pending == 0 {
		r.Pending = defaultPending
	}
	if r.Stats == nil {
		r.Stats = &mmio.Stats{}
	}
	switch {
	case r.Memory == 0 || r.Memory%megabyte != 0 || r.Memory > maxMemory:
		return fmt.Errorf("VM %d: %d bytes of memory: %w: take a multiple of 1 MiB up to 1 GiB", r.VM, r.Memory, ErrConfig)
	case r.Channels < 1 || r.Channels > nvc0.Channels:
		return fmt.Errorf("VM %d: %d channels: %w: take 1 to %d", r.VM, r.Channels, ErrConfig, nvc0.Channels)
	case r.Weight < 1 || r.Weight > timeshare.MaxWeight:
		return fmt.Errorf("VM %d: weight %d: %w: take 1 to %d", r.VM, r.Weight, ErrConfig, timeshare.MaxWeight)
	case r.Mode != Eager && r.Mode != Lazy && r.Mode != Para:
		return fmt.Errorf("VM %d: mode %q: %w: take %s, %s or %s", r.VM, r.Mode, ErrConfig, Eager, Lazy, Para)
	case r.Tables < directoryFrames || r.Tables > 1<<20:
		return fmt.Errorf("VM %d: %d frames of tables: %w: take %d or more", r.VM, r.Tables, ErrConfig, directoryFrames)
	case r.Pending < 1 || r.Pending > 4096:
		return fmt.Errorf("VM %d: %d pending commands: %w: take 1 to 4096", r.VM, r.Pending, ErrConfig)
	case r.Guest == nil:
		return fmt.Errorf("VM %d: no guest: %w", r.VM, ErrConfig)
	}
	return nil
}

// Event is something that happened to a VM.
type Event struct {
	VM     mmio.VM
	Name   string
	Reason mmio.Reason // why something was refused; 0: it was not
	Text   string
	Count  uint64 // how often the same was refused so far: told at 1, 2, 4, 8 and so on
}

func (e Event) String() string {
	if e.Reason == 0 {
		return fmt.Sprintf("%s (VM %d): %s", e.Name, e.VM, e.Text)
	}
	return fmt.Sprintf("%s (VM %d): refused, %v: %s (%d so far)", e.Name, e.VM, e.Reason, e.Text, e.Count)
}
