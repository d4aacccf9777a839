package reset

import (
	"encoding/json"
	"testing"

	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
)

// Registers may hold anything before and after.
func FuzzVerify(f *testing.F) {
	good := pcitest.ConfigSpace{Vendor: 0x10de, Device: 0x2236, Class: 0x030200, FLR: true}.Bytes()[:256]
	f.Add(good, good, false)
	f.Add(good, good[:64], true)
	f.Add([]byte{}, good, false)
	f.Add(make([]byte, 64), make([]byte, 64), false)
	d := &pci.Device{VendorID: 0x10de, DeviceID: 0x2236, BARs: []pci.BAR{{Index: 0, Start: 0xd0000000}, {Index: 1, Start: 0x206000000000, Is64: true}, {Index: 5, Start: 1}}}
	f.Fuzz(func(t *testing.T, before, after []byte, vf bool) {
		// read lets nothing shorter through.
		cut := func(b []byte) []byte {
			if len(b) < header {
				return nil
			}
			return b
		}
		b, a := snapshot{cut(before), vf}, snapshot{cut(after), vf}
		a.fatal()
		if !a.alive() {
			return
		}
		_ = same(d, b, a)
		if changed(d, b, a) == "" {
			return
		}
		h := headerOf(d, b, a)
		if len(h) != header || h[regStatus] != 0 || h[regStatus+1] != 0 || h[regBIST] != 0 {
			t.Fatalf("% x would clear or start something", h)
		}
		// Who takes what is written has lost nothing.
		if again := (snapshot{h, vf}); again.alive() && a.u32(0) == again.u32(0) {
			if why := changed(d, b, again); why != "" && b.alive() {
				t.Fatalf("written back: %s", why)
			}
		}
	})
}

func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"boot":"x","choices":{"0000:65:00.0":"flr bus"}}`))
	f.Add([]byte(`{"bridge":"0000:00:01.0","controls":{"0000:00:01.0":"on"},"autoprobe":"1","functions":[{"address":"0000:65:00.0","driver":"pciback","override":"pciback"}]}`))
	f.Add([]byte(`{"functions":[{"address":"../.."}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := parseRecord(data)
		if err != nil {
			return
		}
		if len(r.Functions) > 0 && r.Bridge == nil {
			t.Fatal("functions without a bridge")
		}
		if _, err := json.Marshal(r); err != nil {
			t.Fatal(err)
		}
	})
}
