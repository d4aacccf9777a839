package pci_test

import (
	"encoding/binary"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
)

func TestParseConfig(t *testing.T) {
	vfs := &pci.SRIOVCapability{InitialVFs: 16, TotalVFs: 32, NumVFs: 3, Offset: 4, Stride: 1, DeviceID: 0x2236}
	full := pcitest.ConfigSpace{
		Vendor: 0x10de, Device: 0x2236, Class: 0x030200, Multifunction: true, FLR: true,
		ACS: pcitest.FullACS(), SRIOV: vfs, Serial: 0x123456789abcdef0,
	}.Bytes()
	for _, c := range []struct {
		name string
		data []byte
		want pci.Config
	}{
		{"everything", full, pci.Config{
			Multifunction: true, FLR: true, NoSoftReset: true, PM: true, Extended: true, ACS: pcitest.FullACS(), SRIOV: vfs, Serial: 0x123456789abcdef0,
		}},
		{"not as root", full[:64], pci.Config{Multifunction: true, Port: pci.PortConventional}},
		{"without the extended part", full[:256], pci.Config{Multifunction: true, FLR: true, NoSoftReset: true, PM: true}},
		{
			"conventional", pcitest.ConfigSpace{Vendor: 1, Device: 1, Conventional: true}.Bytes(),
			pci.Config{Port: pci.PortConventional, NoSoftReset: true, PM: true},
		},
		{"dead", []byte(strings.Repeat("\xff", 4096)), pci.Config{Dead: true, Port: pci.PortConventional}},
		{
			"virtual function", pcitest.ConfigSpace{Vendor: 0xffff, Device: 0xffff, Class: pci.Class3D << 8, FLR: true}.Bytes(),
			pci.Config{FLR: true, NoSoftReset: true, PM: true, Extended: true},
		},
		{"empty", nil, pci.Config{Port: pci.PortConventional}},
	} {
		if d := cmp.Diff(c.want, pci.ParseConfig(c.data)); d != "" {
			t.Errorf("%s: %s", c.name, d)
		}
	}
}

// Registers may hold anything: lists that loop, point at themselves or beyond.
func TestCapabilityLoopsEnd(t *testing.T) {
	b := pcitest.ConfigSpace{Vendor: 1, Device: 1, ACS: pcitest.FullACS()}.Bytes()
	b[0x61] = 0x40 // the second capability leads back to the first
	binary.LittleEndian.PutUint32(b[0x100:], 0x0d|1<<16|0x100<<20)
	if c := pci.ParseConfig(b); c.ACS == nil || !c.PM {
		t.Errorf("a loop hides what comes before it: %+v", c)
	}
}

func TestACSIsolates(t *testing.T) {
	for _, c := range []struct {
		acs  *pci.ACS
		want bool
	}{
		{nil, false},
		{&pci.ACS{}, false},
		{&pci.ACS{Can: 0x1d, Does: 0x1d}, true},
		{&pci.ACS{Can: 0x1d, Does: 0x1c}, false},
		{&pci.ACS{Can: 0x05, Does: 0x05}, true}, // the rest it cannot be asked for
		{&pci.ACS{Can: 0x40, Does: 0x40}, false},
	} {
		if got := c.acs.Isolates(); got != c.want {
			t.Errorf("%+v: %v", c.acs, got)
		}
	}
}

func FuzzParseConfig(f *testing.F) {
	full := pcitest.ConfigSpace{Vendor: 0x10de, Device: 1, FLR: true, ACS: pcitest.FullACS(), SRIOV: &pci.SRIOVCapability{TotalVFs: 3}, Serial: 7}.Bytes()
	f.Add(full)
	f.Add(full[:256])
	f.Add(full[:0x103])
	f.Add(full[:0x67])
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, data []byte) {
		c := pci.ParseConfig(data)
		if (c.ACS != nil || c.SRIOV != nil) && len(data) < 0x104 {
			t.Fatalf("%d bytes have extended capabilities: %+v", len(data), c)
		}
		if c.Dead && (c.PM || c.FLR || c.ACS != nil) {
			t.Fatalf("dead, and yet: %+v", c)
		}
	})
}
