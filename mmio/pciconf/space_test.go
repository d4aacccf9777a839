package pciconf_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/pciconf"
)

func function() mmio.Function {
	return mmio.Function{
		Vendor: 0x10de, Device: 0x06d8, Class: 0x030000, Revision: 0xa3, MSI: true,
		BARs: [6]mmio.Window{0: {Size: 1 << 25}, 1: {Size: 1 << 27, Prefetchable: true}, 3: {Size: 1 << 26, Prefetchable: true}},
	}
}

func space(t testing.TB) *pciconf.Space {
	t.Helper()
	s, err := pciconf.New(function())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func read(t testing.TB, s *pciconf.Space, at uint64, size int) uint32 {
	t.Helper()
	v, ok := s.Read(at, size)
	if !ok {
		t.Fatalf("no register of %d bytes at %#x", size, at)
	}
	return v
}

func TestDriverFindsIdsAndSizes(t *testing.T) {
	s := space(t)
	if v := read(t, s, 0, 4); v != 0x06d810de {
		t.Errorf("ids %#x", v)
	}
	if v := read(t, s, 8, 4); v != 0x030000a3 {
		t.Errorf("class %#x", v)
	}
	for bar, size := range map[uint64]uint32{0: 1 << 25, 1: 1 << 27, 2: 0, 3: 1 << 26, 4: 0, 5: 0} {
		was := read(t, s, 0x10+4*bar, 4)
		s.Write(0x10+4*bar, 4, 0xffffffff)
		v := read(t, s, 0x10+4*bar, 4) &^ 0xf
		if ^v+1 != size {
			t.Errorf("BAR %d: size %#x, want %#x", bar, ^v+1, size)
		}
		s.Write(0x10+4*bar, 4, was)
	}
	if s.Write(0x30, 4, 0xffffffff); read(t, s, 0x30, 4) != 0 {
		t.Error("it has a ROM")
	}
}

func TestWindowsFollowCommandAndAddress(t *testing.T) {
	s := space(t)
	if moved, _ := s.Write(0x10, 4, 0xf0000000); moved {
		t.Error("a BAR moved that is not enabled")
	}
	if moved, ok := s.Write(4, 2, 2); !moved || !ok {
		t.Error("enabling memory moved nothing")
	}
	if w := s.Windows(); len(w) != 1 || w[0] != (pciconf.Window{BAR: 0, Start: 0xf0000000, Size: 1 << 25}) {
		t.Fatalf("windows %+v", w)
	}
	for _, c := range []struct {
		addr uint64
		size int
		ok   bool
	}{
		{0xf0000000, 4, true},
		{0xf1fffffc, 4, true},
		{0xf1fffffd, 4, false},
		{0xeffffffc, 8, false},
		{0xf2000000, 1, false},
		{^uint64(0), 8, false},
		{0xf0000000, 0, false},
		{0xf0000000, -1, false},
	} {
		if _, off, ok := s.Find(c.addr, c.size); ok != c.ok || ok && off != c.addr-0xf0000000 {
			t.Errorf("%d bytes at %#x: %v", c.size, c.addr, ok)
		}
	}
	s.Write(0x10, 4, 0xffffffff)
	if w := s.Windows(); len(w) != 0 {
		t.Errorf("while its size is asked for, the BAR is at %+v", w)
	}
}

func TestReadOnlyBitsStay(t *testing.T) {
	s := space(t)
	fresh := s.Save()
	for at := uint64(0); at < pciconf.Size; at += 4 {
		s.Write(at, 4, 0xffffffff)
	}
	if read(t, s, 0, 4) != 0x06d810de || read(t, s, 8, 4) != 0x030000a3 || read(t, s, 0x34, 1) != 0x40 || read(t, s, 0x40, 1) != 5 {
		t.Error("a VM has changed what the function is")
	}
	s.Reset()
	if !bytes.Equal(s.Save(), fresh) {
		t.Error("a reset left something")
	}
}

func TestWideBAR(t *testing.T) {
	f := function()
	f.BARs[1].Wide, f.BARs[1].Size, f.MSI = true, 1<<34, false
	s, err := pciconf.New(f)
	if err != nil {
		t.Fatal(err)
	}
	s.Write(4, 2, 2)
	s.Write(0x14, 4, 0xffffffff)
	s.Write(0x18, 4, 0xffffffff)
	if lo, hi := read(t, s, 0x14, 4), read(t, s, 0x18, 4); lo != 0xc || hi != 0xfffffffc {
		t.Errorf("size %#x %#x", hi, lo)
	}
	s.Write(0x14, 4, 0)
	s.Write(0x18, 4, 0x100)
	if bar, off, ok := s.Find(0x103_0000_0008, 8); !ok || bar != 1 || off != 0x3_0000_0008 {
		t.Errorf("BAR %d, offset %#x, %v: windows %+v", bar, off, ok, s.Windows())
	}
	if read(t, s, 0x34, 1) != 0 || read(t, s, 6, 2) != 0 {
		t.Error("it has a capability")
	}
	f.BARs[2].Size = 4096
	if _, err := pciconf.New(f); !errors.Is(err, pciconf.ErrFunction) {
		t.Errorf("a BAR in the upper half of another: %v", err)
	}
}

func TestMSI(t *testing.T) {
	s := space(t)
	if _, _, ok := s.MSI(); ok || !s.INTx() {
		t.Error("MSI is on after a reset")
	}
	s.Write(0x44, 4, 0xfee01000)
	s.Write(0x48, 4, 1)
	s.Write(0x4c, 2, 0x4041)
	s.Write(0x42, 2, 1)
	if _, _, ok := s.MSI(); ok {
		t.Error("MSI without the right to write to memory")
	}
	s.Write(4, 2, 6)
	if addr, data, ok := s.MSI(); !ok || addr != 0x1fee01000 || data != 0x4041 || s.INTx() {
		t.Errorf("MSI %#x %#x %v", addr, data, ok)
	}
}

func TestImpossibleFunctionsAreRefused(t *testing.T) {
	for _, size := range []uint64{1, 8, 4097, 3 << 12, 1 << 31, ^uint64(0)} {
		f := function()
		f.BARs[5].Size = size
		if _, err := pciconf.New(f); !errors.Is(err, pciconf.ErrFunction) {
			t.Errorf("BAR of %d bytes: %v", size, err)
		}
	}
}

func TestRestoreTakesNoOtherFunction(t *testing.T) {
	a := space(t)
	a.Write(0x10, 4, 0xe0000000)
	a.Write(4, 2, 2)
	b := space(t)
	if err := b.Restore(a.Save()); err != nil || len(b.Windows()) != 1 {
		t.Errorf("%v, %+v", err, b.Windows())
	}
	other := a.Save()
	other[0] ^= 1
	before := b.Save()
	if err := b.Restore(other); !errors.Is(err, pciconf.ErrFunction) || !bytes.Equal(before, b.Save()) {
		t.Errorf("another vendor's: %v", err)
	}
	if err := b.Restore(other[:10]); !errors.Is(err, pciconf.ErrFunction) {
		t.Errorf("a short one: %v", err)
	}
}

// FuzzSpace writes anything anywhere. What the function is stays, windows are aligned and
// of their size, and what was saved can be restored.
func FuzzSpace(f *testing.F) {
	f.Add([]byte{0x10, 4, 0, 0, 0, 0xf0, 4, 2, 2, 0, 0, 0})
	f.Add([]byte{0x42, 2, 1, 0, 0, 0, 0xff, 4, 1, 2, 3, 4})
	f.Fuzz(func(t *testing.T, ops []byte) {
		s := space(t)
		for ; len(ops) >= 6; ops = ops[6:] {
			s.Write(uint64(ops[0]), int(ops[1]), uint32(ops[2])|uint32(ops[3])<<8|uint32(ops[4])<<16|uint32(ops[5])<<24)
			s.Read(uint64(ops[5])<<8|uint64(ops[0]), int(ops[1]))
			for _, w := range s.Windows() {
				if w.Start%w.Size != 0 || w.Size != function().BARs[w.BAR].Size {
					t.Fatalf("window %+v", w)
				}
			}
		}
		if read(t, s, 0, 4) != 0x06d810de {
			t.Fatal("other ids")
		}
		if err := space(t).Restore(s.Save()); err != nil {
			t.Fatal(err)
		}
	})
}
