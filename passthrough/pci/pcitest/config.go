package pcitest

import (
	"encoding/binary"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// ConfigSpace describes a configuration space with its capabilities.
type ConfigSpace struct {
	Vendor, Device uint16
	Class          uint32
	Multifunction  bool
	Conventional   bool         // no PCI Express capability, 256 bytes
	Port           pci.PortType // type of a PCI Express function
	FLR            bool
	ACS            *pci.ACS
	SRIOV          *pci.SRIOVCapability
	Serial         uint64
}

// Bytes returns the space, 4096 or 256 bytes.
func (c ConfigSpace) Bytes() []byte {
	b := make([]byte, 4096)
	le := binary.LittleEndian
	le.PutUint16(b[0:], c.Vendor)
	le.PutUint16(b[2:], c.Device)
	le.PutUint16(b[6:], 0x10)
	le.PutUint32(b[8:], c.Class<<8)
	if c.Multifunction {
		b[0x0e] |= 0x80
	}
	if c.Class>>8 == pci.ClassBridge {
		b[0x0e] |= 1
	}
	b[0x34] = 0x40
	b[0x40], b[0x41] = 0x01, 0x60 // power management
	b[0x44] = 0x08
	if c.Conventional {
		b[0x41] = 0
		return b[:256]
	}
	b[0x60] = 0x10
	le.PutUint16(b[0x62:], uint16(c.Port)<<4|2)
	if c.FLR {
		le.PutUint32(b[0x64:], 1<<28)
	}
	at, last := 0x100, 0
	add := func(id uint16, size int, fill func([]byte)) {
		le.PutUint32(b[at:], uint32(id)|1<<16)
		if last != 0 {
			le.PutUint32(b[last:], le.Uint32(b[last:])&0xfffff|uint32(at)<<20)
		}
		fill(b[at:])
		last, at = at, at+size
	}
	if c.ACS != nil {
		add(0x0d, 8, func(b []byte) {
			le.PutUint16(b[4:], c.ACS.Can)
			le.PutUint16(b[6:], c.ACS.Does)
		})
	}
	if c.Serial != 0 {
		add(0x03, 12, func(b []byte) { le.PutUint64(b[4:], c.Serial) })
	}
	if v := c.SRIOV; v != nil {
		add(0x10, 0x40, func(b []byte) {
			for at, n := range map[int]uint16{0x0c: v.InitialVFs, 0x0e: v.TotalVFs, 0x10: v.NumVFs, 0x14: v.Offset, 0x16: v.Stride, 0x1a: v.DeviceID} {
				le.PutUint16(b[at:], n)
			}
		})
	}
	return b
}
