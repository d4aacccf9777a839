package xen

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/lab/labtest"
)

// TestPassthrough is the life of cards on one host of real Xen.
func TestPassthrough(t *testing.T) {
	l := labtest.Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 25*time.Minute)
	defer cancel()
	h := install(ctx, t, l.Hosts()[0], "10.77.0.1")
	h.must(ctx, "cluster", "init")
	g := &labtest.Guest{Name: "web"}
	other := &labtest.Guest{Name: "db"}
	t.Cleanup(func() {
		if t.Failed() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			out, _ := labtest.Journal(ctx, h.Host, unit)
			t.Logf("hostd: %s", out[max(0, len(out)-12<<10):])
		}
	})
	step := func(name string, run func()) {
		t.Helper()
		if t.Failed() {
			return
		}
		began := time.Now()
		run()
		t.Logf("== %s: %.1f s", name, time.Since(began).Seconds())
	}
	step("discovery", func() {
		cards := h.cards(ctx)
		for _, address := range []string{bochs, sound, virtio, lonely} {
			if cards[address].Phase != "free" {
				t.Errorf("%s: %+v", address, cards[address])
			}
		}
		if n := len(cards[sound].Functions); n != 2 {
			t.Errorf("%s has %d functions", sound, n)
		}
		if out := h.must(ctx, "describe", "gpu", virtio, "--isolation"); !strings.Contains(out, "may be given away") || !strings.Contains(out, "Xen 4.17") {
			t.Errorf("%s", out)
		}
		if out := h.must(ctx, "describe", "gpu", lonely, "--isolation"); !strings.Contains(out, "may not be given away") {
			t.Errorf("%s", out)
		}
	})
	step("start with a card", func() {
		must(t, g.Create(ctx, h.Host, virtio))
		h.has(ctx, "web", virtio)
		d, err := g.WaitDevice(ctx, "1af4:1050")
		must(t, err)
		t.Logf("inside: %+v", d)
	})
	step("refusals", func() {
		h.refused(ctx, "belongs to VM web", "attach", "web", virtio, "--plan")
		h.refused(ctx, `vm "nobody": not found on this host`, "attach", "nobody", bochs)
		h.refused(ctx, "has no reset of its own", "attach", "web", lonely)
		h.refused(ctx, "gpuguest", "detach", "web", virtio)
		if err := other.Create(ctx, h.Host, virtio); err == nil || !strings.Contains(err.Error(), "belongs to VM web") {
			t.Errorf("a second owner started: %v", err)
		} else {
			t.Logf("the operator reads: %v", err)
		}
	})
	step("detach", func() {
		h.must(ctx, "detach", "web", virtio, "--unconfirmed")
		must(t, g.WaitGone(ctx, "1af4:1050"))
		h.free(ctx, virtio, "virtio-pci")
	})
	step("another model", func() {
		h.must(ctx, "attach", "web", bochs)
		h.has(ctx, "web", bochs)
		d, err := g.WaitDevice(ctx, "1234:1111")
		must(t, err)
		if v, err := g.ReadRegister(ctx, d.Address, 2, 0x500, 2); err != nil || v != 0xb0c5 {
			t.Errorf("its register reads %#x, %v", v, err)
		}
	})
	step("hostd dies", func() {
		h.restart(ctx)
		h.has(ctx, "web", bochs)
	})
	step("a card of two functions", func() {
		h.must(ctx, "detach", "web", bochs, "--unconfirmed")
		must(t, g.WaitGone(ctx, "1234:1111"))
		h.free(ctx, bochs, "")
		h.must(ctx, "attach", "web", sound)
		h.has(ctx, "web", sound)
		if _, err := g.WaitDevice(ctx, "8086:2668"); err != nil {
			t.Error(err)
		}
	})
	step("libvirtd dies", func() {
		h.run(ctx, "systemctl kill -s KILL libvirtd; systemctl start libvirtd")
		h.until(ctx, 3*time.Minute, "the VM is listed again", func() (bool, string) {
			out, err := h.gpuctl(ctx, "vms")
			return err == nil && strings.Contains(out, "web"), out
		})
		h.has(ctx, "web", sound)
	})
	step("the VM ends", func() {
		must(t, g.Destroy(ctx))
		h.free(ctx, sound, "")
	})
	step("healthy", func() {
		if out := h.run(ctx, "xl list | grep -c null || true"); strings.TrimSpace(out) != "0" {
			t.Errorf("domains that cannot end: %s", out)
		}
	})
}
