package regs

import "fmt"

// Size is how many bytes of BAR0 the table speaks of.
const Size = 16 << 20

// Refused is what a VM reads where it may not read: what the hardware says of a
// hole.
const Refused uint32 = 0xbad00100

// Class is how the mediator treats a register.
type Class uint8

// The classes. The zero value denies.
const (
	Deny     Class = iota // refused: reads get [Refused], writes do nothing
	Virtual               // the VM has its own, which the hardware never sees
	Const                 // always the same for a VM; writes do nothing and are no fault
	Relocate              // holds or reaches an address of the VM's, which is checked and moved into its partition
	Latch                 // kept until a trigger uses it
	Trigger               // a write does something, within the VM's own channels
	Scan                  // a write makes the mediator read the VM's tables, now or at the next use
)

func (c Class) String() string {
	switch c {
	case Deny:
		return "deny"
	case Virtual:
		return "virtual"
	case Const:
		return "const"
	case Relocate:
		return "relocate"
	case Latch:
		return "latch"
	case Trigger:
		return "trigger"
	case Scan:
		return "scan"
	}
	return fmt.Sprintf("class %d", uint8(c))
}

// ID names a register, or an array of them. The zero value is what the table does
// not have.
type ID uint8

// The registers.
const (
	None ID = iota
	PMCID
	PMCIntr
	PMCIntrEnable
	PMCEnable
	PMCSubfifoEnable
	Phase
	Window
	BAR1Instance
	BAR3Instance
	PeepholeConfig
	PFIFOIntr
	PFIFOIntrEnable
	PFIFOControl
	PFIFOSubfifos
	PFIFOEngines
	BAR1Base
	PlaylistAddress
	PlaylistLength
	PlaylistStatus
	FaultSource
	EngineFault
	EngineFreeze
	Kick
	FaultInfo
	PlaylistIntr
	ChannelInstance
	ChannelState
	Bypass
	TimeLow
	TimeHigh
	Units
	Subfifo
	Peephole
	Flush
	TLBStatus
	TLBSpace
	TLBTrigger
	CopyEngines
	Daemon
	MemorySize
	MemoryPart
	Controllers
	GraphIntr
	GraphTrap
	GraphCommand
	GraphStatus
	ContextData
	ContextCommand
	ContextStatus
	ContextCurrent
	GPCBroadcast
	Display
	Aperture

	IDs = iota // how many there are, with None
)

// Register is a row of the table: Count dwords, Stride bytes from each to the next.
type Register struct {
	ID     ID
	Name   string
	Offset uint32
	Count  uint32 // 1 or more
	Stride uint32 // bytes
	Class  Class
	Write  bool   // a VM may write it; else a write is refused (but see Const)
	Doc    string // what it does for a VM, or why it may not have it
}

// Table answers what a dword is. It does not change.
type Table struct {
	rows  []Register
	pages [Size >> 12]*[1024]ID // nil: all None
	whole [Size >> 12]ID        // where a page is one array of consecutive dwords
}

// New returns the table. An error says that rows overlap or leave BAR0: a
// fault of the table.
func New() (*Table, error) { return build(rows()) }

func build(rows []Register) (*Table, error) {
	t := &Table{rows: make([]Register, IDs)}
	for _, r := range rows {
		if r.ID == None || r.ID >= IDs || t.rows[r.ID].Count != 0 {
			return nil, fmt.Errorf("register %s: its number %d is taken or unknown", r.Name, r.ID)
		}
		if r.Count == 0 || r.Stride%4 != 0 || r.Stride == 0 || r.Offset%4 != 0 || uint64(r.Offset)+uint64(r.Count-1)*uint64(r.Stride)+4 > Size {
			return nil, fmt.Errorf("register %s at %#x, %d with %d bytes between, can't be", r.Name, r.Offset, r.Count, r.Stride)
		}
		t.rows[r.ID] = r
		for i := range r.Count {
			at := r.Offset + i*r.Stride
			if other := t.At(at); other != None {
				return nil, fmt.Errorf("register %s: %#x is %s", r.Name, at, t.rows[other].Name)
			}
			t.set(at, r)
		}
	}
	return t, nil
}

func (t *Table) set(at uint32, r Register) {
	if r.Stride == 4 && r.Offset <= at&^4095 && r.Offset+r.Count*4 >= at&^4095+4096 {
		if t.pages[at>>12] == nil {
			t.whole[at>>12] = None // until its last dword, so that an overlap is seen
			if at&4095 == 4092 {
				t.whole[at>>12] = r.ID
			}
			return
		}
	}
	if t.pages[at>>12] == nil {
		t.pages[at>>12] = new([1024]ID)
	}
	t.pages[at>>12][at>>2&1023] = r.ID
}

// At returns what is at an offset, which is rounded down to a dword.
func (t *Table) At(offset uint32) ID {
	if offset >= Size {
		return None
	}
	if p := t.pages[offset>>12]; p != nil {
		return p[offset>>2&1023]
	}
	return t.whole[offset>>12]
}

// Row returns a register's row; that of None has the class Deny.
func (t *Table) Row(id ID) *Register {
	if id >= IDs {
		id = None
	}
	return &t.rows[id]
}

// Index returns which of an array's dwords is at an offset.
func (r *Register) Index(offset uint32) uint32 {
	if r.Stride == 0 {
		return 0
	}
	return (offset - r.Offset) / r.Stride
}

// Rows returns all rows in the order of the table.
func (t *Table) Rows() []Register { return rows() }
