package labtest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/lab"
)

// model is how a test tells that a card works inside a guest.
type model struct {
	slot, id string // in dom0
	bar      int
	offset   int64
	width    int
	value    uint64
}

var (
	edu   = model{"0000:01:00.0", "1234:11e8", 0, 0, 4, 0x010000ed}
	bochs = model{"0000:03:00.0", "1234:1111", 2, 0x500, 2, 0xb0c5}
)

// TestLab goes once through what everything else builds on.
func TestLab(t *testing.T) {
	l := Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 18*time.Minute)
	defer cancel()
	a, b := l.Hosts()[0], l.Hosts()[1]
	g := &Guest{Name: "passenger"}
	step := func(name string, run func(*testing.T, context.Context)) {
		t.Helper()
		if t.Failed() {
			return
		}
		t.Run(name, func(t *testing.T) {
			began := time.Now()
			run(t, ctx)
			t.Logf("%s: %.1f s", name, time.Since(began).Seconds())
		})
	}
	step("hosts", func(t *testing.T, ctx context.Context) {
		for i, h := range l.Hosts() {
			hosts(t, ctx, h, l.Hosts()[1-i])
		}
	})
	step("cards", func(t *testing.T, ctx context.Context) {
		for _, h := range l.Hosts() {
			cards(t, ctx, h)
		}
	})
	step("virtual functions", func(t *testing.T, ctx context.Context) { virtualFunctions(t, ctx, a) })
	step("create", func(t *testing.T, ctx context.Context) { must(t, g.Create(ctx, a)) })
	step("arithmetic", func(t *testing.T, ctx context.Context) { arithmetic(t, ctx, a) })
	step("first model", func(t *testing.T, ctx context.Context) { inAndOut(t, ctx, g, edu) })
	step("second model", func(t *testing.T, ctx context.Context) { inAndOut(t, ctx, g, bochs) })
	step("migrate", func(t *testing.T, ctx context.Context) {
		before, err := g.Ping(ctx)
		must(t, err)
		must(t, g.Migrate(ctx, b))
		after, err := g.Ping(ctx)
		must(t, err)
		if before.BootID != after.BootID {
			t.Fatalf("the guest booted anew: %s before, %s after", before.BootID, after.BootID)
		}
		if after.HangUps <= before.HangUps {
			t.Errorf("its channel hung up %d times before the migration and %d after", before.HangUps, after.HangUps)
		}
	})
	step("first model on the other host", func(t *testing.T, ctx context.Context) { inAndOut(t, ctx, g, edu) })
	step("healthy", func(t *testing.T, ctx context.Context) { must(t, g.Healthy(ctx)) })
	step("destroy", func(t *testing.T, ctx context.Context) {
		must(t, g.Destroy(ctx))
		out, err := Virsh(ctx, b, "list", "--all", "--name")
		must(t, err)
		if strings.Contains(out, g.Name) {
			t.Errorf("it is still there: %s", out)
		}
	})
	step("cut network", func(t *testing.T, ctx context.Context) { cut(t, ctx, a, b) })
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// hosts checks that a host is Xen with all of libvirt that is needed, and knows
// its place.
func hosts(t *testing.T, ctx context.Context, h, other *lab.Host) {
	t.Helper()
	out, err := h.Run(ctx, "hostname; cat /sys/hypervisor/type; xl info virt_caps; systemctl is-system-running; date +%s")
	must(t, err)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != 5 || lines[0] != h.Name || lines[1] != "xen" || lines[3] != "running" {
		t.Fatalf("%s is no healthy Xen host:\n%s", h.Name, out)
	}
	for _, want := range []string{"hvm", "hvm_directio", "hap"} {
		if !slices.Contains(strings.Fields(lines[2]), want) {
			t.Errorf("%s: Xen lacks %s: %s", h.Name, want, lines[2])
		}
	}
	var now int64
	if _, err := fmt.Sscan(lines[4], &now); err != nil || time.Since(time.Unix(now, 0)).Abs() > time.Minute {
		t.Errorf("%s: its clock says %s", h.Name, lines[4])
	}
	if out, err := Virsh(ctx, h, "capabilities"); err != nil || !strings.Contains(out, "xenfv") {
		t.Errorf("%s: libvirt's driver offers no HVM: %v\n%s", h.Name, err, out)
	}
	out, err = h.Run(ctx, "timeout 20 virsh -q -c xen+tcp://"+other.Name+"/system hostname")
	if err != nil || strings.TrimSpace(out) != other.Name {
		t.Errorf("%s does not reach the libvirt of %s: %v %s", h.Name, other.Name, err, out)
	}
}

// cards checks that dom0 has every card that package lab promises, with its
// BARs programmed.
func cards(t *testing.T, ctx context.Context, h *lab.Host) {
	t.Helper()
	for _, c := range lab.Cards() {
		for i, id := range c.IDs {
			at := fmt.Sprintf("%s.%d", c.Slot[:len(c.Slot)-2], i)
			out, err := h.Run(ctx, "cd /sys/bus/pci/devices/"+at+" && cat vendor device && head -6 resource && cat reset_method 2>/dev/null; true")
			must(t, err)
			f := strings.Fields(out)
			if len(f) < 20 || strings.TrimPrefix(f[0], "0x")+":"+strings.TrimPrefix(f[1], "0x") != id {
				t.Errorf("%s: %s is not %s but\n%s", h.Name, at, id, out)
				continue
			}
			programmed := false
			for bar := range 6 {
				programmed = programmed || strings.Trim(f[2+3*bar], "0x") != ""
			}
			if !programmed {
				t.Errorf("%s: %s has no BAR with an address:\n%s", h.Name, at, out)
			}
			if resets := f[20:]; c.Behind && i == 0 && len(c.IDs) == 1 && len(resets) == 0 {
				t.Errorf("%s: nothing resets %s", h.Name, at)
			}
		}
	}
}

// virtualFunctions makes SR-IOV functions and removes them.
func virtualFunctions(t *testing.T, ctx context.Context, h *lab.Host) {
	t.Helper()
	const pf = "/sys/bus/pci/devices/0000:06:00.0"
	out, err := h.Run(ctx, "set -e; cd "+pf+"; cat sriov_totalvfs; echo 0 >sriov_drivers_autoprobe; echo 2 >sriov_numvfs; readlink virtfn0 virtfn1; echo 0 >sriov_numvfs; ls -d virtfn* 2>/dev/null || echo none")
	must(t, err)
	if want := "4\n../0000:06:00.1\n../0000:06:00.2\nnone\n"; out != want {
		t.Errorf("virtual functions: %q, want %q", out, want)
	}
}

// arithmetic checks that dom0 computes right while a guest runs: with a wrong
// processor model, Xen under emulation mixes up their vector registers.
func arithmetic(t *testing.T, ctx context.Context, h *lab.Host) {
	t.Helper()
	const program = `import hashlib, time
data = bytes(range(256)) * 256
want, end, n, bad = "7daca2095d0438260fa849183dfc67faa459fdf4936e1bc91eec6b281b27e4c2", time.time() + 8, 0, 0
while time.time() < end:
    n += 1
    bad += hashlib.sha256(data).hexdigest() != want
print(n, bad)
`
	out, err := h.Run(ctx, "python3 -c "+lab.Quote(program))
	must(t, err)
	var sums, bad int
	if _, err := fmt.Sscan(out, &sums, &bad); err != nil || sums == 0 {
		t.Fatalf("%q: %v", out, err)
	}
	if bad != 0 {
		t.Errorf("%s: %d of %d sums of the same data came out wrong", h.Name, bad, sums)
	}
}

// inAndOut plugs a card into a guest, uses it there and takes it back.
func inAndOut(t *testing.T, ctx context.Context, g *Guest, m model) {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	must(t, g.Attach(ctx, m.slot))
	d, err := g.WaitDevice(ctx, m.id)
	must(t, err)
	got, err := g.ReadRegister(ctx, d.Address, m.bar, m.offset, m.width)
	must(t, err)
	if got != m.value {
		t.Errorf("%s %s in the guest: BAR %d reads %#x at %#x, want %#x", m.id, d.Address, m.bar, got, m.offset, m.value)
	}
	if m == edu { // its liveness register answers the complement of what it is told
		must(t, g.WriteRegister(ctx, d.Address, 0, 4, 4, 0x12345678))
		got, err := g.ReadRegister(ctx, d.Address, 0, 4, 4)
		must(t, err)
		if want := uint64(^uint32(0x12345678)); got != want {
			t.Errorf("edu: wrote 0x12345678 to its liveness register and read %#x, want %#x", got, want)
		}
	}
	must(t, g.Detach(ctx, m.slot))
	must(t, g.WaitGone(ctx, m.id))
	out, err := g.Host().Run(ctx, "xl pci-list "+lab.Quote(g.Name))
	must(t, err)
	if strings.Contains(out, m.slot) {
		t.Errorf("Xen still gives %s to %s:\n%s", m.slot, g.Name, out)
	}
}

// cut takes the network between the hosts away and gives it back.
func cut(t *testing.T, ctx context.Context, a, b *lab.Host) {
	t.Helper()
	const ping = "ping -c 1 -W 2 "
	_, err := a.Run(ctx, ping+b.Address)
	must(t, err)
	must(t, b.Link(ctx, false))
	if _, err := a.Run(ctx, ping+b.Address); err == nil {
		t.Error("the network is cut, but a ping comes through")
	}
	must(t, b.Link(ctx, true))
	_, err = a.Run(ctx, "for i in 1 2 3 4 5; do "+ping+b.Address+" && exit 0; done; exit 1")
	must(t, err)
}
