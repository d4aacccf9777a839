package pci

// Classes of devices, the upper sixteen bits of the class code.
const (
	ClassVGA         = 0x0300
	ClassXGA         = 0x0301
	Class3D          = 0x0302
	ClassDisplay     = 0x0380
	ClassAudio       = 0x0403
	ClassBridge      = 0x0604
	ClassUSB         = 0x0c03
	ClassSerialOther = 0x0c80 // where UCSI controllers are
	ClassAccelerator = 0x1200

	baseDisplay     = 0x03
	baseBridge      = 0x06
	baseAccelerator = 0x12
)

// Device is one function.
type Device struct {
	Address                  Address
	VendorID, DeviceID       uint16
	SubVendorID, SubDeviceID uint16
	Class                    uint32 // base, sub-class and programming interface
	Revision                 uint8
	VendorName, DeviceName   string // from the machine's pci.ids, else the ids in digits
	SubsystemName            string // empty: not known
	Driver                   string // bound; empty: none
	DriverOverride           string
	IOMMUGroup               int // -1: none
	NUMANode                 int // -1: not known
	LocalCPUs                string
	BARs                     []BAR
	ROM                      uint64 // size of the expansion ROM, 0: none
	SRIOV                    *SRIOV // of a physical function
	PF                       *Address
	Link                     Link
	Removable                string // fixed, removable or unknown
	D3cold                   bool   // may be powered off
	PowerState               string // D0, D3hot, …
	ResetMethods             []string
	Enabled                  bool
	BootVGA                  bool
	Named                    bool   // a GPU whatever its class (Scanner.Also)
	VideoMemory              uint64 // as the driver says, bytes; 0: it does not
	Config                   Config
	Upstream                 []Bridge // from the root port to the port above
}

// Dead says that the device does not answer though it has power.
func (d *Device) Dead() bool { return d.Config.Dead && d.PowerState != "D3cold" }

// Managed says that gpuctl manages the device: by its class, or as somebody has
// said that it is a GPU.
func (d *Device) Managed() bool {
	base := d.Class >> 16
	return d.Named || base == baseDisplay || base == baseAccelerator
}

// BAR is a range of addresses that a device answers to.
type BAR struct {
	Index        int
	Start, Size  uint64
	IO           bool // ports; otherwise memory
	Is64         bool
	Prefetchable bool
}

// SRIOV is what a physical function says of its virtual ones.
type SRIOV struct {
	TotalVFs, NumVFs int
	VFs              []Address
}

// Link is a PCI Express link; zeros are not known.
type Link struct {
	Speed, MaxSpeed uint32 // mega-transfers per second
	Width, MaxWidth uint32 // lanes
}

// Bridge is a port above a device.
type Bridge struct {
	Address Address
	Config  Config
}

// Card is what sits in one slot: all functions of a physical device. They are
// given away together.
type Card struct {
	Address   Address   // of its first display or accelerator function
	Functions []*Device // by address
	VFs       []*Device // virtual functions of any of them
	Group     string    // what can only be given away together
	Shared    []Address // other devices of the group that are no bridges
	Why       string    // how the group came about
	Leak      *Leak     // where the group leaks; nil: nowhere, or not looked at as nothing is shared
}

// Leak is a bridge above a card that does not keep what is below it apart.
type Leak struct {
	Port Address
	Kind string // port, switch or bridge
	Why  string // "has no ACS"
}

func (l *Leak) String() string { return l.Kind + " " + l.Port.String() + " " + l.Why }

// Main is the function that makes the card a GPU.
func (c *Card) Main() *Device {
	for _, f := range c.Functions {
		if f.Address == c.Address {
			return f
		}
	}
	return nil
}
