package mmio

import (
	"fmt"
	"sync/atomic"
)

// Phase is what a VM's driver is about, by its own word (a register that only
// labels counters), or by that of who measures.
type Phase uint8

// The phases.
const (
	Other Phase = iota
	Init
	Copy
	Launch
	Close

	Phases = iota // how many there are
)

func (p Phase) String() string {
	switch p {
	case Other:
		return "other"
	case Init:
		return "init"
	case Copy:
		return "copy"
	case Launch:
		return "launch"
	case Close:
		return "close"
	}
	return fmt.Sprintf("phase %d", uint8(p))
}

// Reason is why something that a VM did was refused. The zero value is none.
type Reason uint8

// The reasons.
const (
	NoDevice        Reason = 1 + iota // the VM has none
	NoBAR                             // the function has no such BAR
	BadSize                           // neither 1, 2, 4 nor 8 bytes, or not what the register takes
	Unaligned                         // the offset is no multiple of the size
	OutOfBAR                          // beyond its end
	Resetting                         // the device is being reset
	UnknownRegister                   // not in the table
	DeniedRegister                    // in the table, and not for VMs
	ReadOnly                          // a write of what can only be read
	BadTarget                         // an address of a kind that this field does not take
	OutOfPartition                    // an address beyond the VM's memory
	BadChannel                        // a channel that the VM does not have
	BadTable                          // a page directory or table that can't be
	BadEntry                          // a page table's entry that can't be
	OverQuota                         // more tables, frames or commands than the VM may have
	BadCall                           // a para-virtual call that can't be
	BadCommand                        // a push buffer that can't be: the channel is stopped
	Overdue                           // a command that ran too long: the channel is stopped

	Reasons = iota + 1 // how many there are, with none
)

var reasonNames = [Reasons]string{ //nolint:gochecknoglobals // a table
	"none", "no_device", "no_bar", "bad_size", "unaligned", "out_of_bar", "resetting", "unknown_register", "denied_register",
	"read_only", "bad_target", "out_of_partition", "bad_channel", "bad_table", "bad_entry", "over_quota", "bad_call", "bad_command", "overdue",
}

func (r Reason) String() string {
	if int(r) < len(reasonNames) {
		return reasonNames[r]
	}
	return fmt.Sprintf("reason %d", uint8(r))
}

// Counters is what was counted in a phase.
type Counters struct {
	Reads, Writes [MaxBARs]uint64 // exits, by BAR
	Refused       [Reasons]uint64 // by reason
	Scans         uint64          // shadow updates: an address space was read from the guest's tables
	Entries       uint64          // page table entries looked at
	Hypercalls    uint64          // para-virtual calls
	Doorbells     uint64          // commands submitted
	Deferred      uint64          // exits that left work for later ones
}

// Exits is how many accesses were trapped.
func (c Counters) Exits() (n uint64) {
	for i := range c.Reads {
		n += c.Reads[i] + c.Writes[i]
	}
	return n
}

// Refusals is how many things were refused.
func (c Counters) Refusals() (n uint64) {
	for _, r := range c.Refused {
		n += r
	}
	return n
}

// Add adds another phase's counters.
func (c *Counters) Add(o Counters) {
	for i := range c.Reads {
		c.Reads[i] += o.Reads[i]
		c.Writes[i] += o.Writes[i]
	}
	for i := range c.Refused {
		c.Refused[i] += o.Refused[i]
	}
	c.Scans += o.Scans
	c.Entries += o.Entries
	c.Hypercalls += o.Hypercalls
	c.Doorbells += o.Doorbells
	c.Deferred += o.Deferred
}

type counters struct {
	reads, writes                                     [MaxBARs]atomic.Uint64
	refused                                           [Reasons]atomic.Uint64
	scans, entries, hypercalls, doorbells, deferredOf atomic.Uint64
}

// Stats counts, for one VM and by phase. Its zero value is ready; it may be used
// by several goroutines.
type Stats struct {
	phase atomic.Uint32
	by    [Phases]counters
}

// SetPhase says in which phase is counted from now on. An unknown one is [Other].
func (s *Stats) SetPhase(p Phase) {
	if p >= Phases {
		p = Other
	}
	s.phase.Store(uint32(p))
}

// Phase returns the present one.
func (s *Stats) Phase() Phase { return Phase(s.phase.Load()) }

func (s *Stats) now() *counters { return &s.by[s.phase.Load()] }

// Exit counts an access.
func (s *Stats) Exit(a Access) {
	if a.BAR >= MaxBARs {
		return
	}
	if a.Write {
		s.now().writes[a.BAR].Add(1)
	} else {
		s.now().reads[a.BAR].Add(1)
	}
}

// Refuse counts a refusal.
func (s *Stats) Refuse(r Reason) {
	if r < Reasons {
		s.now().refused[r].Add(1)
	}
}

// Scan counts a shadow update.
func (s *Stats) Scan() { s.now().scans.Add(1) }

// Entries counts entries of page tables.
func (s *Stats) Entries(n int) { s.now().entries.Add(uint64(n)) }

// Hypercall counts a para-virtual call.
func (s *Stats) Hypercall() { s.now().hypercalls.Add(1) }

// Doorbell counts a submitted command.
func (s *Stats) Doorbell() { s.now().doorbells.Add(1) }

// Defer counts an exit that left work for later ones.
func (s *Stats) Defer() { s.now().deferredOf.Add(1) }

// Counters returns what was counted in a phase.
func (s *Stats) Counters(p Phase) (c Counters) {
	if p >= Phases {
		return c
	}
	from := &s.by[p]
	for i := range from.reads {
		c.Reads[i], c.Writes[i] = from.reads[i].Load(), from.writes[i].Load()
	}
	for i := range from.refused {
		c.Refused[i] = from.refused[i].Load()
	}
	c.Scans, c.Entries, c.Hypercalls = from.scans.Load(), from.entries.Load(), from.hypercalls.Load()
	c.Doorbells, c.Deferred = from.doorbells.Load(), from.deferredOf.Load()
	return c
}

// Total returns what was counted in all phases.
func (s *Stats) Total() (c Counters) {
	for p := range Phase(Phases) {
		c.Add(s.Counters(p))
	}
	return c
}
