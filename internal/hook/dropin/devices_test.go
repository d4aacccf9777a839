package dropin

import (
	"strings"
	"testing"
	"testing/fstest"
)

// No XML makes the hook fall over, or take what has no host device for a domain
// that has one.
func FuzzManaged(f *testing.F) {
	const gpu = `<domain><devices><hostdev type='pci'><source><address domain='0' bus='0x65' slot='0' function='0'/></source></hostdev></devices></domain>`
	for _, s := range []string{
		gpu, gpu[:60], "", "<domain>", "<!DOCTYPE a [<!ENTITY x 'y'>]><domain>&x;</domain>", "<?xml version='1.0' encoding='x'?><domain/>",
		"<\xd8" + strings.Repeat("\xd8", 600) + "><hostdev/>",
		`<domain><devices><hostdev type='mdev'><source><address uuid='../x'/></source></hostdev></devices></domain>`,
		`<domain><devices><interface type='hostdev'><source><address type='pci' bus='101'/></source></interface></devices></domain>`,
	} {
		f.Add(s)
	}
	k := known{root: fstest.MapFS{"sys/bus/pci/devices/0000:65:00.0/class": &fstest.MapFile{Data: []byte("0x030200\n")}}}
	if len(k.managed([]byte(gpu))) != 1 {
		f.Fatal("the seed has no GPU")
	}
	f.Fuzz(func(t *testing.T, xml string) {
		ours := k.managed([]byte(xml))
		if len(ours) > 0 && !strings.Contains(xml, "hostdev") || len(ours) > maxDevices {
			t.Fatalf("%q", ours)
		}
		for _, d := range ours {
			if len(d) > 300 {
				t.Fatalf("%d bytes: %q", len(d), d)
			}
		}
	})
}
