package platform

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/passthrough/domxml"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// What is stored must start.
func TestStore(t *testing.T) {
	const hvm, pvh, pv = "<type arch='x86_64' machine='xenfv'>hvm</type>", "<type arch='x86_64' machine='xenpvh'>xenpvh</type>", "<type>linux</type>"
	for _, c := range []struct{ name, os, memory, refused string }{
		{"hvm", hvm, "", ""},
		{"pvh", pvh, "", "it is a PVH guest"},
		{"pv", pv, "", "it is a PV guest"},
		{"memory on demand", hvm, "<currentMemory unit='MiB'>128</currentMemory>", "128 MiB of its 256 MiB"},
	} {
		t.Run(c.name, func(t *testing.T) {
			doc, err := domxml.Parse(fmt.Appendf(nil, "<domain type='xen'><name>web</name><memory unit='MiB'>256</memory>%s<os>%s</os><features><acpi/></features><devices></devices></domain>", c.memory, c.os))
			if err != nil {
				t.Fatal(err)
			}
			card := []pci.Address{{Bus: 4}, {Bus: 4, Function: 1}}
			for range 2 { // repeating it changes nothing
				err = store(doc, card)
			}
			if c.refused != "" {
				if !errors.Is(err, cards.ErrRefused) || !strings.Contains(err.Error(), c.refused) {
					t.Errorf("%v, not %q", err, c.refused)
				}
				return
			}
			if err != nil || len(doc.HostDevices()) != 2 || !doc.Passthrough() {
				t.Errorf("%v: %s", err, doc.Bytes())
			}
		})
	}
}
