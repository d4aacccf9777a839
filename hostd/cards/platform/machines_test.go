package platform

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/virt/virttest"
	"github.com/gpuctl/gpuctl/passthrough/domxml"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/xen"
)

// A card goes where the VM had its card, if that is free and can be plugged in alone.
func TestPlace(t *testing.T) {
	doc, err := domxml.Parse([]byte(`<domain type='kvm'><name>web</name><devices>
  <controller type='pci' index='1' model='pcie-root-port'><address type='pci' domain='0x0000' bus='0x00' slot='0x02' function='0x1' multifunction='on'/></controller>
  <interface type='network'><address type='pci' domain='0x0000' bus='0x01' slot='0x00' function='0x0'/></interface>
  <hostdev mode='subsystem' type='pci' managed='no'><source><address domain='0x0000' bus='0x65' slot='0x00' function='0x0'/></source><address type='pci' domain='0x0000' bus='0x03' slot='0x00' function='0x0'/></hostdev>
  <disk type='file'><address type='drive' controller='0' bus='2' target='0' unit='0'/></disk></devices></domain>`))
	if err != nil {
		t.Fatal(err)
	}
	if at := guestAddress(doc, pci.Address{Bus: 0x65}); at == nil || *at != (pci.Address{Bus: 3}) {
		t.Errorf("it has it at %v", at)
	}
	if at := guestAddress(doc, pci.Address{Bus: 0x66}); at != nil {
		t.Errorf("it has another one at %v", at)
	}
	for _, c := range []struct {
		at   pci.Address
		free bool
	}{
		{pci.Address{Bus: 2}, true}, {pci.Address{Bus: 1}, false}, {pci.Address{Bus: 3}, false}, {pci.Address{Device: 2}, false}, {pci.Address{Bus: 2, Function: 1}, false},
	} {
		if at := place(doc, c.at); (at != nil) != c.free || at != nil && *at != c.at {
			t.Errorf("%s: it goes to %v", c.at, at)
		}
	}
}

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

// A VM that libvirt on Xen leaves paused in name is running, so that it can be moved again.
func TestVMThatLibvirtLeavesPausedRuns(t *testing.T) {
	for driver, want := range map[string]string{"xen": "running", "qemu": "paused"} {
		t.Run(driver, func(t *testing.T) {
			s := virttest.Start(t, driver)
			c, err := virt.Open(driver+":///system", virt.WithSocket(s.Socket()))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			d, err := c.Define(t.Context(), []byte("<domain type='"+driver+"'><name>web</name><uuid>11111111-2222-4333-8444-555555555501</uuid><memory unit='MiB'>64</memory></domain>"))
			if err == nil {
				_, err = c.Start(t.Context(), d)
			}
			if err != nil {
				t.Fatal(err)
			}
			s.Leave("web")
			if m, err := (vms{c}).Find(t.Context(), "web"); err != nil || m.State != want {
				t.Errorf("%v, %v", m.State, err)
			}
			s.Next("domjobinfo", virttest.Fault{Code: 39, Message: "unknown procedure: 298"})
			if m, err := (vms{c}).Find(t.Context(), "web"); driver == "xen" && err == nil {
				t.Errorf("it is not known whether a job runs: %v", m.State)
			}
		})
	}
}

// A VM that ends while all are asked has nothing, and hides nobody else's card.
func TestOwnersAreKnownThoughAVMEndsMeanwhile(t *testing.T) {
	s := virttest.Start(t, "qemu")
	c, err := virt.Open("qemu:///system", virt.WithSocket(s.Socket()))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for i, name := range []string{"db", "web"} {
		d, err := c.Define(t.Context(), fmt.Appendf(nil, `<domain type='kvm'><name>%s</name><uuid>11111111-2222-4333-8444-55555555550%d</uuid><memory unit='MiB'>64</memory><devices>
<hostdev mode='subsystem' type='pci' managed='no'><source><address domain='0x0000' bus='0x6%d' slot='0x00' function='0x0'/></source></hostdev></devices></domain>`, name, i, i))
		if err == nil {
			_, err = c.Start(t.Context(), d)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	const noDomain = 42 // VIR_ERR_NO_DOMAIN
	s.Next("dumpxml", virttest.Fault{Code: noDomain, Message: "Domain not found"})
	if owners, err := (kvmHypervisor{c}).Owners(t.Context()); err != nil || len(owners) != 1 {
		t.Errorf("%v, %v", owners, err)
	}
	s.Next("dumpxml", virttest.Fault{Code: noDomain, Message: "Domain not found"})
	if owners, err := (mediated{c}).Owners(t.Context()); err != nil || len(owners) != 0 {
		t.Errorf("%v, %v", owners, err)
	}
}

// A domain is being made until it has run.
func TestADomainIsBeingMade(t *testing.T) {
	const uuid = "11111111-2222-4333-8444-555555555501"
	for name, c := range map[string]struct {
		domain xen.Domain
		want   bool
	}{
		"being made": {xen.Domain{ID: 3, UUID: uuid, Paused: true}, true}, "it runs": {xen.Domain{ID: 3, UUID: uuid, Ran: true}, false},
		"it is paused": {xen.Domain{ID: 3, UUID: uuid, Ran: true, Paused: true}, false}, "it could not be made": {xen.Domain{ID: 3, UUID: uuid, Dying: true}, false},
		"another one": {xen.Domain{ID: 3, UUID: "11111111-2222-4333-8444-555555555502"}, false},
	} {
		if id, got := unstarted([]xen.Domain{{ID: 0}, c.domain}, uuid); got != c.want || got && id != c.domain.ID {
			t.Errorf("%s: %v, domain %d", name, got, id)
		}
	}
}
