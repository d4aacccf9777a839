package xen

import (
	"context"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/lab"
	"github.com/gpuctl/gpuctl/lab/labtest"
)

// place is a card of a host.
type place struct {
	host *host
	card string
}

func (p place) gpu() string { return p.host.Name + "/" + p.card }

// leg is one migration of a VM that goes round and round.
type leg struct{ verb, card string }

// quick serves both models by the runtime that starts sooner: what is tried is
// the order of things, not the runtimes.
const quick = `mkdir -p /etc/gpuctl/profiles.d && cat > /etc/gpuctl/profiles.d/quick.yaml <<'END'
version: 1
profiles:
  - name: quick-vga
    model: QEMU standard VGA
    match: ["1234:1111"]
    libraries: [libpocl.so.2]
    env: {POCL_DEVICES: basic, POCL_MEMORY_LIMIT: "1"}
    device: 0
END
kill -9 $(cat /run/gpuguest.pid)`

// small is a program that costs an emulated machine little.
var small = labtest.Endure{KiB: 8, Ballast: 1, PauseMS: 200, Seed: 5}

// traveller is a VM under an OpenCL program that goes from card to card.
type traveller struct {
	t     *testing.T
	hosts []*host
	at    place
	guest *labtest.ComputeGuest
	work  *labtest.Endurance
	boot  string
}

// newTraveller starts such a VM on the first host. devices are what its description has besides.
func newTraveller(ctx context.Context, t *testing.T, l *lab.Lab, how labtest.Endure, devices ...string) *traveller {
	t.Helper()
	a, b := pair(ctx, t, l)
	g, err := labtest.NewComputeGuest(ctx, l)
	must(t, err)
	g.Name, g.Extra = "web", strings.Join(devices, "")
	v := &traveller{t: t, hosts: []*host{a, b}, at: place{a, virtio}, guest: g}
	t.Cleanup(v.tell)
	must(t, g.Create(ctx, a.Host, virtio))
	a.has(ctx, "web", virtio)
	_, err = g.Run(ctx, quick)
	must(t, err)
	testkit.Until(a.t, a.Name+": gpuguest serves again", func() error {
		out, err := g.AgentLog(ctx)
		_, again, _ := strings.Cut(out, "gpuguest ended")
		return testkit.Want(strings.Contains(again, "device is ready"), again, err)
	})
	v.work, err = g.StartEndure(ctx, "endure", how)
	must(t, err)
	must(t, v.work.WaitIteration(ctx, 1))
	v.boot, err = g.BootID(ctx)
	must(t, err)
	return v
}

// tell says what everybody has to say of a test that failed.
func (v *traveller) tell() {
	if !v.t.Failed() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	for _, h := range v.hosts {
		out, _ := labtest.Journal(ctx, h.Host, unit)
		v.t.Logf("hostd of %s: %s", h.Name, out[max(0, len(out)-12<<10):])
	}
	if v.guest.Host() != nil {
		out, err := v.guest.AgentLog(ctx)
		v.t.Logf("gpuguest: %s %v", out[max(0, len(out)-4<<10):], err)
	}
}

// next is where a leg leads.
func (v *traveller) next(l leg) place {
	to := place{v.at.host, l.card}
	if l.verb == "migrate" {
		to.host = v.other(v.at.host)
	}
	return to
}

func (v *traveller) other(h *host) *host { return v.hosts[1-slices.Index(v.hosts, h)] }

// begin starts a leg and returns its migration's id.
func (v *traveller) begin(ctx context.Context, l leg, to place) string {
	v.t.Helper()
	v.at.host.must(ctx, l.verb, "web", "--to", to.gpu(), "--no-wait")
	id := v.at.host.last(ctx).ID
	v.t.Logf("%s: %s to %s", id, l.verb, to.gpu())
	return id
}

// over waits for a migration's end.
func (v *traveller) over(ctx context.Context, id string) (m migration) {
	v.t.Helper()
	testkit.Until(v.at.host.t, v.at.host.Name+": "+id+" has ended", func() error {
		m = v.at.host.last(ctx)
		return testkit.Want(m.ID == id && m.State != "running", m.String())
	})
	v.t.Log(m)
	return m
}

// resume does as a held migration's message says once the hosts are back. It is held
// where the destination was away for longer than the two minutes that a migration waits,
// after the VM was sent to it; a slow host boots for longer.
func (v *traveller) resume(ctx context.Context, m migration) migration {
	v.t.Helper()
	command := "migrations resume " + m.ID
	if !strings.Contains(m.Message, "may run there") || !strings.Contains(m.Message, command) {
		v.t.Fatalf("it is held for another reason than a host that is away: %v", m)
	}
	testkit.Until(v.at.host.t, v.at.host.Name+": "+m.ID+" goes on", func() error {
		out, err := v.at.host.gpuctl(ctx, strings.Fields(command)...)
		m = v.over(ctx, m.ID)
		return testkit.Want(m.State != "held", out, err, m)
	})
	return m
}

// ended checks what a migration has left: the VM has the card of its end and no
// other, and its program goes on.
func (v *traveller) ended(ctx context.Context, m migration, to place) (done bool) {
	v.t.Helper()
	switch m.State {
	case "done":
		v.at, done = to, true
	case "rolled_back":
	default:
		v.t.Fatalf("%s ended as %s", m.ID, m.State)
	}
	v.guest.Moved(v.at.host.Host)
	v.at.host.has(ctx, "web", v.at.card)
	for _, h := range v.hosts {
		for _, card := range []string{virtio, bochs} {
			if (place{h, card}) != v.at {
				h.free(ctx, "web", card)
			}
		}
	}
	other := v.other(v.at.host)
	testkit.Until(other.t, other.Name+": nothing of the VM is left on "+other.Name, func() error {
		out := other.run(ctx, "virsh -q list --all --name; xl list")
		return testkit.Want(!strings.Contains(out, "web"), out)
	})
	all, err := v.work.Progress(ctx)
	must(v.t, err)
	must(v.t, v.work.WaitIteration(ctx, uint64(len(all))+1))
	return done
}

// arrive ends the journey: the result is right, and nothing is left of it.
func (v *traveller) arrive(ctx context.Context) {
	v.t.Helper()
	n, err := v.work.Finish(ctx)
	must(v.t, err)
	v.t.Logf("%d iterations, all right", n)
	if now, err := v.guest.BootID(ctx); err != nil || now != v.boot {
		v.t.Errorf("the VM booted anew: %s, %s, %v", v.boot, now, err)
	}
	must(v.t, v.guest.Healthy(ctx))
	must(v.t, v.guest.Destroy(ctx))
	v.at.host.free(ctx, "web", v.at.card)
}

// kindness is how often hostd is killed during one step of a migration: killed
// faster than it does a step it never ends one.
const kindness = 4

// TestMigrateKills moves a VM with its GPU from card to card while an OpenCL
// program runs in it, and kills hostd of either host wherever it can be, as
// often as GPUCTL_LAB_KILLS says. Every migration ends as done or undone.
func TestMigrateKills(t *testing.T) {
	want, err := strconv.Atoi(os.Getenv("GPUCTL_LAB_KILLS"))
	if err != nil {
		t.Skip("takes hours: make lab-chaos KILLS=200")
	}
	ctx := t.Context()
	v := newTraveller(ctx, t, labtest.Start(t), small)
	round := []leg{{"downgrade", bochs}, {"migrate", bochs}, {"upgrade", virtio}, {"migrate", virtio}}
	killed, done, undone := 0, 0, 0
	where := map[string]int{} // kills, by the step that ran
	for i := 0; killed < want; i++ {
		l := round[i%len(round)]
		to := v.next(l)
		if to == v.at { // it was undone before
			continue
		}
		id := v.begin(ctx, l, to)
		struck := map[string]int{} // of this migration, by step
		for {
			m := v.at.host.last(ctx)
			if m.ID != id || m.State != "running" {
				break
			}
			time.Sleep(time.Duration(rand.IntN(3000)) * time.Millisecond) // somewhere in the migration
			if struck[m.Step] >= kindness {
				continue
			}
			struck[m.Step]++
			victim := v.hosts[rand.IntN(2)]
			victim.run(ctx, kill)
			killed++
			where[m.Step]++
			victim.answers(ctx)
		}
		if v.ended(ctx, v.over(ctx, id), to) {
			done++
		} else {
			undone++
		}
		t.Logf("%d kills, by the step that ran: %v; %d migrations done, %d undone", killed, where, done, undone)
	}
	v.arrive(ctx)
}

// fault is what happens during a step of a migration.
type fault struct {
	name string
	leg  leg
	step string
	// begin is what goes wrong, end what repairs it after a while, or when the
	// migration is over.
	begin, end func(ctx context.Context, v *traveller)
	after      time.Duration // 0: when it is over
}

// during runs a command on the VM's host or on the other one.
func during(there bool, command string) func(context.Context, *traveller) {
	return func(ctx context.Context, v *traveller) {
		h := v.at.host
		if there {
			h = v.other(h)
		}
		h.run(ctx, command)
	}
}

func inside(command string) func(context.Context, *traveller) {
	return func(ctx context.Context, v *traveller) {
		_, err := v.guest.Run(ctx, command)
		must(v.t, err)
	}
}

func link(up bool) func(context.Context, *traveller) {
	return func(ctx context.Context, v *traveller) { must(v.t, v.hosts[1].Link(ctx, up)) }
}

// unheard keeps a migration's source from connecting to the destination, which is prepared for
// it, and cuts the network then.
func unheard(ctx context.Context, v *traveller) {
	h := v.other(v.at.host)
	h.run(ctx, "ip rule add priority 1 ipproto tcp sport 49152-49215 blackhole") // libvirt's ports for migrations
	testkit.Until(h.t, h.Name+": it waits for the VM", func() error {
		out := h.run(ctx, "virsh -q list --all --name")
		return testkit.Want(strings.Contains(out, "web"), out)
	})
	link(false)(ctx, v)
}

func heard(ctx context.Context, v *traveller) {
	link(true)(ctx, v)
	for _, h := range v.hosts { // the destination may have become the VM's host
		h.run(ctx, "ip rule del priority 1 || true")
	}
}

// power cuts the destination's, and gives it back with all that runs there.
func power(on bool) func(context.Context, *traveller) {
	return func(ctx context.Context, v *traveller) {
		h := v.other(v.at.host)
		if !on {
			must(v.t, h.PowerOff(ctx))
			return
		}
		must(v.t, h.PowerOn(ctx))
		must(v.t, v.guest.Prepare(ctx, h.Host))
		h.start(ctx)
	}
}

// thief tries to have the card that the migration has reserved, by gpuctl and
// by libvirt.
func thief(ctx context.Context, v *traveller) {
	h := v.other(v.at.host)
	card := v.at.host.last(ctx).Machine.ToGPU[len(h.Name)+1:]
	g := &labtest.Guest{Name: "thief", MemoryMiB: 64}
	h.put(ctx, g, same)
	h.mustVirsh(ctx, "create", "/run/gpuctl-lab/thief.xml")
	h.refused(ctx, "belongs to VM web", "attach", "thief", card, "--accept-care")
	h.mustVirsh(ctx, "destroy", "thief")
	h.put(ctx, g, same, card)
	h.vetoed(ctx, "belongs to VM web", "create", "/run/gpuctl-lab/thief.xml", "--paused")
}

// unplugged takes the destination's card off its bus, and finds it again.
func unplugged(there bool) func(context.Context, *traveller) {
	return func(ctx context.Context, v *traveller) {
		h := v.other(v.at.host)
		if !there {
			h.run(ctx, "echo 1 > /sys/bus/pci/rescan")
			return
		}
		h.run(ctx, "echo 1 > /sys/bus/pci/devices/"+v.at.host.last(ctx).Machine.ToGPU[len(h.Name)+1:]+"/remove")
	}
}

const killLibvirtd = "systemctl kill -s KILL --kill-whom=main libvirtd; systemctl start libvirtd"

// TestMigrateFaults has one thing go wrong during each migration.
func TestMigrateFaults(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 110*time.Minute)
	defer cancel()
	v := newTraveller(ctx, t, labtest.Start(t), small)
	there, back := leg{"migrate", bochs}, leg{"migrate", virtio}
	for i, f := range []fault{
		{"libvirtd of the destination killed", there, "prepare", during(true, killLibvirtd), nil, 0},
		{"libvirtd of the source killed", there, "detach", during(false, killLibvirtd), nil, 0},
		{"libvirtd of the destination killed in the move", there, "move", during(true, killLibvirtd), nil, 0},
		{"another VM wants the destination's card", there, "freeze", thief, nil, 0},
		{"destination's card gone", there, "move", unplugged(true), unplugged(false), 0},
		{"agent hung", there, "prepare", inside("kill -STOP $(cat /run/gpuguest.pid)"), inside("kill -CONT $(cat /run/gpuguest.pid)"), 40 * time.Second},
		{"network cut for 20 s", there, "freeze", link(false), link(true), 20 * time.Second},
		{"network cut for 20 s in the move", there, "move", link(false), link(true), 20 * time.Second},
		{"network cut for longer than anybody waits", there, "move", link(false), link(true), 4 * time.Minute},
		{"network cut before the source connects", there, "detach", unheard, heard, 4 * time.Minute},
		{"destination without power", there, "prepare", power(false), power(true), time.Minute},
		{"destination without power while they are frozen", there, "freeze", power(false), power(true), time.Minute},
		{"destination without power while the card is let go", there, "release", power(false), power(true), time.Minute},
		{"destination without power before the move", there, "detach", power(false), power(true), time.Minute},
		{"destination without power in the move", there, "move", power(false), power(true), time.Minute},
	} {
		ok := t.Run(f.name, func(t *testing.T) {
			v.t = t
			for _, h := range v.hosts {
				h.t = t
			}
			l := f.leg
			if i%2 == 1 { // it came back, or did not go: either card will do
				l = back
			}
			to := v.next(l)
			id := v.begin(ctx, l, to)
			testkit.Until(v.at.host.t, v.at.host.Name+": it is at "+f.step, func() error {
				m := v.at.host.last(ctx)
				if m.ID == id && m.State != "running" {
					t.Fatalf("it has ended before: %v", m)
				}
				return testkit.Want(m.ID == id && m.Step == f.step, m.String())
			})
			f.begin(ctx, v)
			repair := func(now bool) {
				if now && f.end != nil {
					time.Sleep(f.after) // how long the fault lasts
					f.end(ctx, v)
				}
			}
			repair(f.after > 0)
			m := v.over(ctx, id)
			repair(f.after == 0)
			if m.State == "held" {
				m = v.resume(ctx, m)
			}
			t.Logf("done: %v", v.ended(ctx, m, to))
		})
		if !ok {
			break
		}
	}
	v.t = t
	for _, h := range v.hosts {
		h.t = t
	}
	if !t.Failed() {
		v.arrive(ctx)
	}
}
