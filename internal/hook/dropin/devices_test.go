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
	const vm = "8f9c9f2e-0000-4000-8000-000000000001"
	f.Add("<domain><uuid>" + vm + "</uuid></domain>")
	f.Add("<domain><devices><uuid>" + vm + "</uuid></devices></domain>")
	f.Add("<domain><uuid>" + vm[:8] + "</uuid><uuid/></domain>")
	k.vms = []string{vm}
	if len(k.managed([]byte(gpu))) != 1 {
		f.Fatal("the seed has no GPU")
	}
	f.Fuzz(func(t *testing.T, xml string) {
		ours := k.managed([]byte(xml))
		if len(ours) > 0 && !strings.Contains(xml, "hostdev") && !strings.Contains(xml, "uuid") || len(ours) > maxDevices {
			t.Fatalf("%q", ours)
		}
		for _, d := range ours {
			if len(d) > 300 {
				t.Fatalf("%d bytes: %q", len(d), d)
			}
		}
	})
}

// A VM with a part of a mediated GPU is known by its UUID, as nothing else tells.
func TestVMWithAPartIsManaged(t *testing.T) {
	const vm = "8f9c9f2e-0000-4000-8000-000000000001"
	k := known{root: fstest.MapFS{}, vms: []string{vm}}
	for xml, want := range map[string]int{
		"<domain type='xen'><name>a</name><uuid> " + strings.ToUpper(vm) + "\n</uuid><devices/></domain>": 1,
		"<domain type='xen'><name>a</name><uuid>8f9c9f2e-0000-4000-8000-000000000002</uuid></domain>":     0,
		"<domain type='xen'><metadata><uuid>" + vm + "</uuid></metadata></domain>":                        0,
		"<domain type='xen'><name>" + vm + "</name></domain>":                                             0,
	} {
		if got := k.managed([]byte(xml)); len(got) != want {
			t.Errorf("%s: %q", xml, got)
		}
	}
}
