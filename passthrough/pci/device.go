package pci

// Classes of devices: the upper 16 bits of the class code.
const (
	ClassVGA         = 0x0300
	ClassXGA         = 0x0301
	Class3D          = 0x0302
	ClassDisplay     = 0x0380
	ClassAudio       = 0x0403
	ClassBridge      = 0x0604
	ClassUSB         = 0x0c03
	ClassSerialOther = 0x0c80 // USB Type-C controllers (UCSI) have it
	ClassAccelerator = 0x1200

	baseDisplay     = 0x03
	baseBridge      = 0x06
	baseAccelerator = 0x12
)

// Device is one PCI function.
type Device struct {
	Address                  Address
	VendorID, DeviceID       uint16
	SubVendorID, SubDeviceID uint16
	Class                    uint32 // base class, sub-class and programming interface
	Revision                 uint8
	VendorName, DeviceName   string // from pci.ids of the host, or the ids in digits
	SubsystemName            string // empty: unknown
	Driver                   string // bound driver; empty: none
	DriverOverride           string
	IOMMUGroup               int // -1: none
	NUMANode                 int // -1: unknown
	LocalCPUs                string
	BARs                     []BAR
	ROM                      uint64 // size of the expansion ROM, 0: none
	SRIOV                    *SRIOV // set for a physical function
	PF                       *Address
	Link                     Link
	Removable                string // fixed, removable or unknown
	D3cold                   bool   // it may be powered off
	PowerState               string // D0, D3hot, …
	ResetMethods             []string
	Enabled                  bool
	BootVGA                  bool
	Named                    bool   // a GPU whatever its class (see Scanner.Also)
	VideoMemory              uint64 // reported by the driver, bytes; 0: unknown
	Config                   Config
	Upstream                 []Bridge // from the root port to the nearest port
}

// Dead reports whether the device does not answer although it has power.
func (d *Device) Dead() bool { return d.Config.Dead && d.PowerState != "D3cold" }

// Managed reports whether gpuctl manages the device: by its class, or because it is known
// as a GPU.
func (d *Device) Managed() bool {
	base := d.Class >> 16
	return d.Named || base == baseDisplay || base == baseAccelerator
}

// BAR is a range of addresses of a device (base address register).
type BAR struct {
	Index        int
	Start, Size  uint64
	IO           bool // I/O ports; otherwise memory
	Is64         bool
	Prefetchable bool
}

// SRIOV has the virtual functions of a physical function.
type SRIOV struct {
	TotalVFs, NumVFs int
	VFs              []Address
}

// Link is a PCI Express link. Zero means unknown.
type Link struct {
	Speed, MaxSpeed uint32 // mega-transfers per second
	Width, MaxWidth uint32 // lanes
}

// Bridge is a bridge above a device.
type Bridge struct {
	Address Address
	Config  Config
}

// Card is a PCI device in a slot, with all its functions. They are given to a VM
// together.
type Card struct {
	Address   Address   // address of its first display or accelerator function
	Functions []*Device // sorted by address
	VFs       []*Device // virtual functions of all its functions
	Group     string    // name of the group of devices that can only be given away together
	Shared    []Address // other devices of the group that are not bridges
	Why       string    // why the group is as it is
	Leak      *Leak     // where isolation fails; nil: nowhere, or nothing is shared
}

// Leak is a bridge above a card that does not isolate the devices below it.
type Leak struct {
	Port Address
	Kind string // port, switch or bridge
	Why  string // for example "has no ACS"
}

func (l *Leak) String() string { return l.Kind + " " + l.Port.String() + " " + l.Why }

// Main returns the function that makes the card a GPU.
func (c *Card) Main() *Device {
	for _, f := range c.Functions {
		if f.Address == c.Address {
			return f
		}
	}
	return nil
}
