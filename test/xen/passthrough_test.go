package xen

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/lab/labtest"
)

// same leaves a domain's XML as it is.
func same(xml string) string { return xml }

// rebooting has a guest start anew when it reboots.
func rebooting(xml string) string {
	return strings.Replace(xml, "<on_reboot>destroy<", "<on_reboot>restart<", 1)
}

// TestPassthrough is the life of cards on real Xen: first two hosts in one
// cluster; then on one of them all that people do, and on the other hostd is
// killed wherever it can be, cards are cut, and hostd is down.
func TestPassthrough(t *testing.T) {
	l := labtest.Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Minute)
	defer cancel()
	hosts := make([]*host, 2)
	t.Run("install", func(t *testing.T) {
		for i, h := range l.Hosts() {
			t.Run(h.Name, func(t *testing.T) {
				t.Parallel()
				hosts[i] = install(ctx, t, h)
			})
		}
	})
	if t.Failed() {
		return
	}
	a, b := hosts[0].on(t), hosts[1].on(t)
	t.Cleanup(func() {
		if t.Failed() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			for _, h := range hosts {
				out, _ := labtest.Journal(ctx, h.Host, unit)
				t.Logf("hostd of %s: %s", h.Name, out[max(0, len(out)-12<<10):])
			}
		}
	})
	rough{t}.step("two hosts in a cluster", func() { together(ctx, t, a, b) })
	if t.Failed() {
		return
	}
	// They end before this does, and with it the context.
	t.Run("each", func(t *testing.T) {
		t.Run("life", func(t *testing.T) {
			t.Parallel()
			life(ctx, a.on(t))
		})
		t.Run("kills", func(t *testing.T) {
			t.Parallel()
			h := b.on(t)
			g := kills(ctx, h, between)
			r := rough{t}
			r.step("virtual functions", func() { h.virtualFunctions(ctx, g) })
			r.step("the VM is destroyed", func() { must(t, g.Destroy(ctx)) })
			r.step("hostd is down", func() { h.down(ctx) })
			r.step("healthy", func() { h.healthy(ctx) })
		})
	})
}

// together discovers the cards of both hosts from each of them, and leaves two
// clusters of a host, so that the death of one's hostd is not the other's loss
// of a majority.
func together(ctx context.Context, t *testing.T, a, b *host) {
	a.must(ctx, "cluster", "init")
	token := strings.Fields(a.must(ctx, "cluster", "token", "create"))
	b.must(ctx, "cluster", "join", token[len(token)-1])
	for _, h := range []*host{a, b} {
		testkit.Until(h.t, h.Name+": both hosts' cards are in the inventory", func() error {
			out := h.must(ctx, "get", "gpus", "-o", "json")
			for _, host := range []*host{a, b} {
				for _, address := range []string{bochs, sound, virtio, lonely} {
					if !strings.Contains(out, fmt.Sprintf("%q", host.Name+"/"+address)) {
						return errors.New(out)
					}
				}
			}
			return nil
		})
	}
	for _, h := range []*host{a, b} {
		out := b.must(ctx, "cards", "--on", h.Name, "-o", "wide")
		for _, model := range []string{"QEMU standard VGA", "virtio GPU"} {
			if !strings.Contains(out, model) {
				t.Errorf("%s has no %s:\n%s", h.Name, model, out)
			}
		}
		t.Logf("cards of %s\n%s", h.Name, out)
	}
	if out := b.must(ctx, "describe", "gpu", a.Name+"/"+virtio, "--isolation"); !strings.Contains(out, "may be given away") || !strings.Contains(out, "Xen 4.17") {
		t.Errorf("%s", out)
	}
	b.stop(ctx)
	a.must(ctx, "cluster", "remove", b.Name, "--force", "--yes")
	b.run(ctx, "rm -rf /var/lib/gpuctl")
	b.start(ctx)
	b.must(ctx, "cluster", "init")
}

// life is all that people do with cards on one host.
func life(ctx context.Context, h *host) {
	t := h.t
	r := rough{t}
	web := &labtest.Guest{Name: "web"}
	var boot string

	r.step("discovery", func() { h.discovers(ctx) })
	r.step("start with a stored card", func() {
		h.define(ctx, web, rebooting)
		h.refused(ctx, "VM web is shutoff: start it", "attach", "web", bochs)
		h.must(ctx, "attach", "web", bochs, "--stored")
		if out := h.mustVirsh(ctx, "dumpxml", "web", "--inactive"); !strings.Contains(out, "bus='0x03' slot='0x00' function='0x0'") {
			t.Errorf("it is not stored: %s", out)
		}
		h.mustVirsh(ctx, "start", "web")
		h.has(ctx, "web", bochs)
		h.vetoAfterPrepare(ctx)
	})
	r.step("bad input", func() { h.badInput(ctx) })
	r.step("a second owner", func() {
		thief := &labtest.Guest{Name: "thief"}
		h.put(ctx, thief, same, bochs)
		h.vetoed(ctx, "belongs to VM web", "create", "/run/gpuctl-lab/thief.xml")
		h.refused(ctx, "it would be refused", "attach", "web", bochs, "--plan")
		h.refused(ctx, "gpuguest", "detach", "web", bochs)
	})
	r.step("the card inside the VM", func() { // which has come up meanwhile
		h.ready(ctx, web)
		h.readsBochs(ctx, web)
		s, err := web.Ping(ctx)
		must(t, err)
		boot = s.BootID
	})
	r.step("detach, reset, another model", func() { h.changesModel(ctx, web) })
	r.step("a card of two functions", func() {
		h.refused(ctx, "give it to the VM before it starts", "attach", "web", sound)
		part := &labtest.Guest{Name: "part"}
		h.put(ctx, part, same, sound)
		h.vetoed(ctx, "the VM has not got function 0000:04:00.1", "create", "/run/gpuctl-lab/part.xml")
		t.Logf("attach: %v", h.change(ctx, "attach", "web", bochs))
		h.has(ctx, "web", bochs)
		h.refused(ctx, "name one of them", "detach", "web", "--unconfirmed")
		t.Logf("detach: %v", h.change(ctx, "detach", "web", bochs, "--unconfirmed"))
		h.gone(ctx, web, "1234:1111")
		h.free(ctx, "web", bochs)
		h.free(ctx, "part", sound)
	})
	r.step("behind our back", func() {
		must(t, web.Attach(ctx, bochs))
		h.has(ctx, "web", bochs)
		if out := h.must(ctx, "events"); !strings.Contains(out, "Adopted") {
			t.Errorf("no event: %s", out)
		}
		h.readsBochs(ctx, web)
		must(t, web.Detach(ctx, bochs))
		h.reattach(ctx, bochs)
		h.free(ctx, "web", bochs)
	})
	r.step("the VM reboots", func() {
		h.attach(ctx, "web", bochs) // only while it runs
		_, _ = web.Run(ctx, "reboot -f")
		web.Moved(h.Host)
		testkit.Until(h.t, h.Name+": it is up again", func() error {
			ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
			defer cancel()
			s, err := web.Ping(ctx)
			return testkit.Want(err == nil && s.BootID != boot, s, err)
		})
		h.has(ctx, "web", virtio)
		h.readsVirtio(ctx, web)
		h.free(ctx, "web", bochs) // it was not stored
		must(t, web.Healthy(ctx))
	})
	r.step("paused", func() {
		h.mustVirsh(ctx, "suspend", "web")
		h.refused(ctx, "VM web is paused: start it", "attach", "web", bochs)
		h.refused(ctx, "resume it, or stop it", "detach", "web", virtio, "--unconfirmed")
		h.mustVirsh(ctx, "resume", "web")
	})
	r.step("libvirtd dies under load", func() { h.libvirtDies(ctx) })
	r.step("the VM ends", func() {
		h.mustVirsh(ctx, "destroy", "web")
		for _, address := range []string{virtio, bochs, sound} {
			h.free(ctx, "web", address)
		}
		t.Logf("gpuctl cards -o wide\n%s", h.must(ctx, "cards", "-o", "wide"))
	})
	r.step("healthy", func() { h.healthy(ctx) })
}

func (h *host) discovers(ctx context.Context) {
	cards := h.cards(ctx)
	for _, address := range []string{bochs, sound, virtio, lonely} {
		if cards[address].Phase != "free" {
			h.t.Errorf("%s: %+v", address, cards[address])
		}
	}
	if n := len(cards[sound].Functions); n != 2 {
		h.t.Errorf("%s has %d functions", sound, n)
	}
	if out := h.must(ctx, "describe", "gpu", lonely, "--isolation"); !strings.Contains(out, "may not be given away") {
		h.t.Errorf("%s", out)
	}
	h.t.Logf("gpuctl cards %s, gpuctl version %s", h.times(ctx, 3, "gpuctl cards"), h.times(ctx, 3, "gpuctl version"))
	const program = "/etc/libvirt/hooks/libxl.d/50-gpuctl"
	h.t.Logf("hook, with its process %s, the process alone %s", h.times(ctx, 10, program+" none reconnect begin -"), h.times(ctx, 10, program+" --version"))
}

func (h *host) changesModel(ctx context.Context, web *labtest.Guest) {
	h.t.Logf("detach: %v", h.change(ctx, "detach", "web", bochs, "--unconfirmed", "--persistent"))
	h.gone(ctx, web, "1234:1111")
	h.free(ctx, "web", bochs)
	if c := h.cards(ctx)[bochs]; c.ResetMethod == "" {
		h.t.Errorf("how it was reset is not told: %+v", c)
	}
	h.t.Logf("gpuctl cards -o wide\n%s", h.must(ctx, "cards", "-o", "wide"))
	h.t.Logf("attach: %v", h.change(ctx, "attach", "web", virtio, "--persistent"))
	h.has(ctx, "web", virtio)
	h.readsVirtio(ctx, web)
	if out := h.mustVirsh(ctx, "dumpxml", "web", "--inactive"); !strings.Contains(out, "bus='0x05'") || strings.Contains(out, "bus='0x03'") {
		h.t.Errorf("the stored definition does not follow: %s", out)
	}
}

// healthy says that no domain is left half-way and that hostd is whole.
func (h *host) healthy(ctx context.Context) {
	h.t.Helper()
	if out := h.run(ctx, "xl list | grep -c null || true"); strings.TrimSpace(out) != "0" {
		h.t.Errorf("domains that cannot end: %s", out)
	}
	out, err := labtest.Journal(ctx, h.Host, unit)
	must(h.t, err)
	if strings.Contains(out, "panic:") || strings.Contains(out, "DATA RACE") {
		h.t.Errorf("hostd: %s", out)
	}
	h.t.Logf("hooks as hostd saw them:\n%s", h.hooks(ctx))
}

// attach is gpuctl attach that must succeed, for all to see.
func (h *host) attach(ctx context.Context, machine, address string) {
	h.t.Helper()
	h.must(ctx, "attach", machine, address)
	h.has(ctx, machine, address)
}

// times runs a command several times; its median and longest times.
func (h *host) times(ctx context.Context, n int, command string) string {
	h.t.Helper()
	out := h.run(ctx, fmt.Sprintf("for i in $(seq %d); do a=$(date +%%s%%N); %s </dev/null >/dev/null; b=$(date +%%s%%N); echo $((b-a)); done", n, command))
	var all []time.Duration
	for _, f := range strings.Fields(out) {
		var d time.Duration
		if _, err := fmt.Sscan(f, (*int64)(&d)); err != nil {
			h.t.Fatalf("%s: %v", out, err)
		}
		all = append(all, d)
	}
	return fmt.Sprintf("median %.0f ms, longest %.0f ms", median(all).Seconds()*1000, slices.Max(all).Seconds()*1000)
}

func median(all []time.Duration) time.Duration {
	all = slices.Sorted(slices.Values(all))
	return all[len(all)/2]
}

// hooks lists what libvirt asked and how long hostd took.
func (h *host) hooks(ctx context.Context) string {
	return h.run(ctx, "journalctl -q --no-pager -o cat -u "+unit+" | grep msg=hook | sed 's/.*driver=libxl //' | tail -n 40")
}

// vetoAfterPrepare has another hook refuse a start that ours has prepared:
// libvirt does not tell us. The card is back after a while, which is looked at
// by the end of the VM.
func (h *host) vetoAfterPrepare(ctx context.Context) {
	h.t.Helper()
	h.run(ctx, `printf '#!/bin/sh\n[ "$1$2" = vetoedprepare ] && { echo "not today" >&2; exit 1; }\nexit 0\n' > /etc/libvirt/hooks/libxl.d/90-veto && chmod +x /etc/libvirt/hooks/libxl.d/90-veto`)
	vetoed := &labtest.Guest{Name: "vetoed"}
	h.put(ctx, vetoed, same, functions[sound]...)
	h.vetoed(ctx, "not today", "create", "/run/gpuctl-lab/vetoed.xml")
	if c := h.cards(ctx)[sound]; c.Phase != "ready" || c.MachineName != "vetoed" {
		h.t.Errorf("after a veto that nobody tells of: %+v", c)
	}
	h.run(ctx, "rm /etc/libvirt/hooks/libxl.d/90-veto")
}

// badInput is what cannot be; each has a message that says what to do.
func (h *host) badInput(ctx context.Context) {
	h.refused(ctx, `vm "nobody": not found on this host`, "attach", "nobody", virtio)
	h.refused(ctx, "gpu 0000:77:00.0: not found", "attach", "web", "0000:77:00.0")
	h.refused(ctx, "gpu 0000:04:00.7: not found", "attach", "web", "0000:04:00.7")
	h.refused(ctx, "it is a device of class 00ff", "attach", "web", edu)
	h.refused(ctx, "not found", "attach", "web", "nvidia-0")
	h.refused(ctx, "has no reset of its own", "attach", "web", lonely)
	h.refused(ctx, "exclude each other", "attach", "web", virtio, "--persistent", "--stored")
	h.refused(ctx, "it does not have", "detach", "web", virtio, "--unconfirmed")
	h.refused(ctx, "belongs to VM web", "reset", bochs)

	// Guests that cannot have a card. They need not come up.
	hvm := &labtest.Guest{Name: "plain"}
	h.put(ctx, hvm, func(xml string) string {
		return strings.Replace(xml, "<xen><passthrough state='on'/></xen>", "", 1)
	})
	pvh := &labtest.Guest{Name: "pvh", PVH: true}
	h.put(ctx, pvh, same)
	pv := &labtest.Guest{Name: "pv", PVH: true}
	h.put(ctx, pv, func(xml string) string {
		xml = strings.Replace(xml, "<type arch='x86_64' machine='xenpvh'>xenpvh</type>", "<type arch='x86_64' machine='xenpv'>linux</type>", 1)
		return strings.Replace(xml, "<features><acpi/></features>", "", 1)
	})
	for _, c := range []struct{ name, words string }{
		{"plain", "passthrough state='on'"}, {"pvh", "PVH guest"}, {"pv", "PV guest"},
	} {
		h.mustVirsh(ctx, "create", "/run/gpuctl-lab/"+c.name+".xml")
		h.refused(ctx, c.words, "attach", c.name, virtio)
		h.refused(ctx, "has no stored definition", "attach", c.name, virtio, "--stored")
		h.mustVirsh(ctx, "destroy", c.name)
	}
}

// reattach gives functions back to dom0 that libvirt has bound: it says that it
// does so itself, but pciback remembers the slot and takes it again.
func (h *host) reattach(ctx context.Context, functions ...string) {
	h.t.Helper()
	for _, f := range functions {
		h.run(ctx, strings.ReplaceAll(`virsh -q nodedev-reattach pci_$(echo @ | tr :. __)
if [ -e /sys/bus/pci/drivers/pciback/@ ]; then
	echo > /sys/bus/pci/devices/@/driver_override
	echo @ > /sys/bus/pci/drivers/pciback/unbind
	echo @ > /sys/bus/pci/drivers/pciback/remove_slot
fi
true`, "@", f))
	}
}

// libvirtDies kills libvirtd again and again while cards come and go. What
// libvirt forgets that way Xen keeps, so the VM is not used after that.
func (h *host) libvirtDies(ctx context.Context) {
	h.t.Helper()
	h.run(ctx, `cat > /run/gpuctl-lab/load <<'END'
while [ -e /run/gpuctl-lab/loaded ]; do
	timeout 100 gpuctl attach web 0000:03:00.0
	timeout 100 gpuctl vms
	timeout 100 gpuctl detach web 0000:03:00.0 --unconfirmed
	timeout 100 virsh -q list
done > /run/gpuctl-lab/load.log 2>&1
END
touch /run/gpuctl-lab/loaded; systemd-run -q --unit=gpuctl-load sh /run/gpuctl-lab/load`)
	for _, pause := range []string{"3", "4.5", "2.2"} {
		h.run(ctx, "sleep "+pause+"; systemctl kill -s KILL --kill-whom=main libvirtd; systemctl start libvirtd")
		testkit.Until(h.t, h.Name+": the VM is listed again", func() error {
			out, err := h.gpuctl(ctx, "vms")
			return testkit.Want(err == nil && strings.Contains(out, "web"), out)
		})
	}
	h.run(ctx, "rm /run/gpuctl-lab/loaded; while systemctl -q is-active gpuctl-load; do sleep 0.3; done")
	h.t.Logf("meanwhile:\n%s", h.run(ctx, "tail -n 60 /run/gpuctl-lab/load.log"))
	for _, address := range []string{bochs, virtio} {
		h.t.Logf("%s is with the VM: %v", address, h.settled(ctx, "web", address))
	}
}

// down starts VMs without a hostd, as each policy has it.
func (h *host) down(ctx context.Context) {
	h.t.Helper()
	g := &labtest.Guest{Name: "early", MemoryMiB: 64}
	h.put(ctx, g, same, functions[sound]...)
	plain := &labtest.Guest{Name: "other", PVH: true}
	h.put(ctx, plain, same)
	policy := func(p string) {
		h.run(ctx, "mkdir -p /etc/gpuctl && echo on-unreachable: "+p+" > /etc/gpuctl/hook.yaml")
	}
	h.stop(ctx)
	h.refused(ctx, "hostd", "cards")
	h.vetoed(ctx, "domain early has GPU "+sound, "create", "/run/gpuctl-lab/early.xml", "--paused")
	h.mustVirsh(ctx, "create", "/run/gpuctl-lab/other.xml", "--paused") // no GPU: not ours
	h.mustVirsh(ctx, "destroy", "other")
	policy("deny")
	h.vetoed(ctx, "on-unreachable is deny", "create", "/run/gpuctl-lab/other.xml", "--paused")
	policy("allow")
	h.mustVirsh(ctx, "create", "/run/gpuctl-lab/early.xml", "--paused")
	h.start(ctx)
	h.has(ctx, "early", sound)
	h.mustVirsh(ctx, "destroy", "early")
	testkit.Until(h.t, h.Name+": hostd has the card back", func() error {
		c := h.cards(ctx)[sound]
		return testkit.Want(c.Phase == "free", c)
	})
	h.reattach(ctx, functions[sound]...) // libvirt had bound it
	h.free(ctx, "early", sound)
	h.run(ctx, "rm /etc/gpuctl/hook.yaml")
}
