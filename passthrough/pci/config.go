package pci

import "encoding/binary"

// PortType is the device/port type of a PCI Express function.
type PortType uint8

// Types that matter for isolation. The values are those of the PCI Express capability.
const (
	PortEndpoint       PortType = 0x0
	PortLegacyEndpoint PortType = 0x1
	PortRoot           PortType = 0x4
	PortUpstream       PortType = 0x5
	PortDownstream     PortType = 0x6
	PortPCIBridge      PortType = 0x7 // PCI Express to PCI
	PortExpressBridge  PortType = 0x8 // PCI to PCI Express
	PortRootEndpoint   PortType = 0x9 // integrated into the root complex
	PortEventCollector PortType = 0xa
	PortConventional   PortType = 0xff // not a PCI Express function
)

const (
	capPowerManagement = 0x01
	capExpress         = 0x10
	capAdvanced        = 0x13
	extSerial          = 0x03
	extACS             = 0x0d
	extSRIOV           = 0x10

	acsSourceValidation = 1 << 0
	acsRequestRedirect  = 1 << 2
	acsReplyRedirect    = 1 << 3
	acsUpstreamForward  = 1 << 4
	// Controls that isolate the functions below a port from each other, as in Linux
	// (REQ_ACS_FLAGS).
	acsIsolates = acsSourceValidation | acsRequestRedirect | acsReplyRedirect | acsUpstreamForward

	maxCapabilities    = 48 // as many as fit into 192 bytes
	maxExtCapabilities = 960
	extStart           = 0x100
	configSize         = 4096
)

// Config is the content of a function's configuration space.
type Config struct {
	Dead          bool // it reads as all ones: the device does not answer
	Multifunction bool
	Port          PortType
	FLR           bool // function level reset, of PCI Express or Advanced Features
	NoSoftReset   bool // a change of power state does not reset the device
	PM            bool // it has power management
	Extended      bool // the extended configuration space could be read
	ACS           *ACS
	SRIOV         *SRIOVCapability
	Serial        uint64 // 0: none
}

// ACS is the Access Control Services capability.
type ACS struct {
	Can, Does uint16 // capability bits and control bits
}

// Isolates reports whether the port isolates the devices below it from each other: all
// controls that it supports are enabled. Controls that it does not support are not
// required.
func (a *ACS) Isolates() bool {
	return a != nil && a.Does&acsIsolates == a.Can&acsIsolates && a.Can&acsIsolates != 0
}

// SRIOVCapability contains how a physical function numbers its virtual functions.
type SRIOVCapability struct {
	InitialVFs, TotalVFs, NumVFs uint16
	Offset, Stride               uint16 // of their routing ids
	DeviceID                     uint16
}

// ParseConfig parses a configuration space of any length. It never fails: what is
// truncated or invalid counts as absent.
func ParseConfig(data []byte) Config {
	c := Config{Port: PortConventional}
	data = data[:min(len(data), configSize)]
	space := configSpace(data)
	if len(data) < 4 {
		return c
	}
	// The ids of a virtual function read as all ones; they are in its physical function
	// (PCI Express Base 6.0, 9.3.4.1). Its class is valid.
	if id := space.u32(0); id == 0xffffffff && (len(data) < 12 || space.u32(8) == 0xffffffff) || id == 0 {
		c.Dead = true
		return c
	}
	c.Multifunction = space.u8(0x0e)&0x80 != 0
	if space.u16(0x06)&0x10 != 0 {
		space.capabilities(func(id uint8, at int) { c.capability(space, id, at) })
	}
	// Only PCI Express functions have an extended space. For others, reads there repeat
	// the first space or return garbage.
	if c.Port != PortConventional && len(data) >= extStart+4 {
		c.Extended = space.u32(extStart) != 0xffffffff
		space.extended(func(id uint16, at int) { c.extCapability(space, id, at) })
	}
	return c
}

func (c *Config) capability(s configSpace, id uint8, at int) {
	switch id {
	case capPowerManagement:
		c.PM = true
		c.NoSoftReset = s.u16(at+4)&0x8 != 0
	case capExpress:
		if at+4 <= len(s) {
			c.Port = PortType(s.u16(at+2) >> 4 & 0xf)
		}
		c.FLR = c.FLR || s.u32(at+4)&(1<<28) != 0
	case capAdvanced:
		c.FLR = c.FLR || s.u8(at+3)&0x2 != 0
	}
}

func (c *Config) extCapability(s configSpace, id uint16, at int) {
	switch {
	case id == extACS && c.ACS == nil && at+8 <= len(s):
		c.ACS = &ACS{s.u16(at + 4), s.u16(at + 6)}
	case id == extSRIOV && c.SRIOV == nil && at+0x1c <= len(s):
		c.SRIOV = &SRIOVCapability{
			InitialVFs: s.u16(at + 0x0c), TotalVFs: s.u16(at + 0x0e), NumVFs: s.u16(at + 0x10),
			Offset: s.u16(at + 0x14), Stride: s.u16(at + 0x16), DeviceID: s.u16(at + 0x1a),
		}
	case id == extSerial && at+12 <= len(s):
		c.Serial = uint64(s.u32(at+8))<<32 | uint64(s.u32(at+4))
	}
}

// configSpace reads zero beyond its end.
type configSpace []byte

func (s configSpace) u8(at int) uint8 {
	if at < 0 || at >= len(s) {
		return 0
	}
	return s[at]
}

func (s configSpace) u16(at int) uint16 {
	if at < 0 || at+2 > len(s) {
		return 0
	}
	return binary.LittleEndian.Uint16(s[at:])
}

func (s configSpace) u32(at int) uint32 {
	if at < 0 || at+4 > len(s) {
		return 0
	}
	return binary.LittleEndian.Uint32(s[at:])
}

// capabilities visits each capability once, because the device's registers may contain a
// loop.
func (s configSpace) capabilities(visit func(id uint8, at int)) {
	var seen [256]bool
	at := int(s.u8(0x34)) &^ 3
	for range maxCapabilities {
		if at < 0x40 || at+2 > len(s) || seen[at] {
			return
		}
		seen[at] = true
		id := s.u8(at)
		if id == 0xff {
			return
		}
		visit(id, at)
		at = int(s.u8(at+1)) &^ 3
	}
}

func (s configSpace) extended(visit func(id uint16, at int)) {
	seen := map[int]bool{}
	at := extStart
	for range maxExtCapabilities {
		if at < extStart || at+4 > len(s) || seen[at] {
			return
		}
		seen[at] = true
		header := s.u32(at)
		if header == 0 || header == 0xffffffff {
			return
		}
		visit(uint16(header), at)
		at = int(header>>20) &^ 3
	}
}
