package pci_test

import (
	"io/fs"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
)

// counted counts how often files are opened.
type counted struct {
	fs.ReadLinkFS

	mu    sync.Mutex
	scans int // lists of devices
	names int // pci.ids
	then  func()
}

func (c *counted) Open(name string) (fs.File, error) {
	c.mu.Lock()
	then := c.then
	if strings.HasSuffix(name, "pci.ids") {
		c.names++
	}
	if name == "sys/bus/pci/devices" {
		c.scans++
		c.then = nil
	}
	c.mu.Unlock()
	if name == "sys/bus/pci/devices" && then != nil {
		then()
	}
	return c.ReadLinkFS.Open(name)
}

func TestScannerRemembersUntilToldOfAChange(t *testing.T) {
	tree := pcitest.New(t).Add(pcitest.NVIDIACard("0000:01:00", "", 1, 0)...)
	tree.Write("usr/share/misc/pci.ids", "10de  NVIDIA Corporation\n")
	root := &counted{ReadLinkFS: tree.FS().(fs.ReadLinkFS)}
	s := pci.NewScanner(root)
	look := func(scans, cards int) {
		t.Helper()
		got, err := s.Cards()
		if err != nil {
			t.Fatal(err)
		}
		if len(got) != cards || root.scans != scans {
			t.Fatalf("%d cards and %d scans, want %d and %d", len(got), root.scans, cards, scans)
		}
		if cards > 0 && got[0].Main().VendorName != "NVIDIA Corporation" {
			t.Fatalf("vendor is %q", got[0].Main().VendorName)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		look(1, 1)
		look(2, 1) // nobody tells it of changes
		s.Hears(true)
		look(3, 1)
		look(3, 1)
		tree.Add(pcitest.AMDCard("0000:10", "0000:11", "0000:12", "", 2, pcitest.FullACS())...)
		look(3, 1) // as nobody has told
		s.Changed()
		look(4, 2)
		if _, err := s.Scan(); err != nil {
			t.Fatal(err)
		}
		look(5, 2)
		time.Sleep(time.Minute)
		look(6, 2)
		root.then = s.Changed // while it looks
		s.Changed()
		look(7, 2)
		look(8, 2)
		look(8, 2)
		s.Hears(false)
		look(9, 2)
		look(10, 2)
	})
	if root.names != 2 {
		t.Errorf("pci.ids was read %d times, want once for either vendor", root.names)
	}
}
