package xen

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/lab/labtest"
)

// place is a card of a host.
type place struct {
	host *host
	card string
}

func (p place) gpu() string { return p.host.Name + "/" + p.card }

// round is where a VM goes, again and again: every verb, both ways.
var round = []struct{ verb, card string }{{"downgrade", bochs}, {"migrate", bochs}, {"upgrade", virtio}, {"migrate", virtio}}

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

// TestMigrateKills moves a VM with its GPU from card to card while an OpenCL
// program runs in it, and kills hostd of either host wherever it can be, as
// often as GPUCTL_LAB_KILLS says. Every migration ends as done or undone, the
// VM has the card of that end and no other, and the program goes on.
func TestMigrateKills(t *testing.T) {
	want, err := strconv.Atoi(os.Getenv("GPUCTL_LAB_KILLS"))
	if err != nil {
		t.Skip("takes hours: make lab-chaos, KILLS=200")
	}
	l := labtest.Start(t)
	ctx := t.Context()
	a, b := pair(ctx, t, l)
	g, err := labtest.NewComputeGuest(ctx, l)
	must(t, err)
	g.Name = "web"
	must(t, g.Create(ctx, a.Host, virtio))
	a.has(ctx, "web", virtio)
	_, err = g.Run(ctx, quick)
	must(t, err)
	e, err := g.StartEndure(ctx, "endure", labtest.Endure{KiB: 64, Ballast: 1, PauseMS: 200, Seed: 5})
	must(t, err)
	must(t, e.WaitIteration(ctx, 1))
	boot, err := g.BootID(ctx)
	must(t, err)

	at := place{a, virtio}
	hosts := []*host{a, b}
	killed, done, undone := 0, 0, 0
	where := map[string]int{} // kills, by the step that ran
	for i := 0; killed < want && !t.Failed(); i++ {
		leg := round[i%len(round)]
		to := place{at.host, leg.card}
		if leg.verb == "migrate" {
			to.host = hosts[1-slices.Index(hosts, at.host)]
		}
		if to == at { // it was undone before
			continue
		}
		out := at.host.must(ctx, leg.verb, "web", "--to", to.gpu(), "--no-wait")
		id := at.host.last(ctx).ID
		t.Logf("%s %s to %s: %s", id, leg.verb, to.gpu(), out)
		for {
			m := at.host.last(ctx)
			if m.ID != id || m.State != "running" {
				break
			}
			time.Sleep(time.Duration(rand.IntN(4000)) * time.Millisecond)
			victim := hosts[rand.IntN(2)]
			victim.run(ctx, kill)
			killed++
			where[m.Step]++
			victim.answers(ctx)
		}
		var m migration
		at.host.until(ctx, 30*time.Minute, id+" has ended", func() (bool, string) {
			m = at.host.last(ctx)
			return m.ID == id && m.State != "running", m.String()
		})
		t.Logf("%d kills: %s", killed, m)
		switch m.State {
		case "done":
			at = to
			done++
		case "rolled_back":
			undone++
		default:
			t.Errorf("%s ended as %s", id, m.State)
			continue
		}
		g.Moved(at.host.Host)
		at.host.has(ctx, "web", at.card)
		for _, h := range hosts {
			for _, card := range []string{virtio, bochs} {
				if (place{h, card}) != at {
					h.free(ctx, "web", card)
				}
			}
		}
		all, err := e.Progress(ctx)
		must(t, err)
		must(t, e.WaitIteration(ctx, uint64(len(all))+1))
	}
	t.Logf("%d kills, by the step that ran: %v; %d migrations done, %d undone", killed, fmt.Sprint(where), done, undone)
	n, err := e.Finish(ctx)
	must(t, err)
	t.Logf("%d iterations, all right", n)
	if now, err := g.BootID(ctx); err != nil || now != boot {
		t.Errorf("the VM booted anew: %s, %s, %v", boot, now, err)
	}
	must(t, g.Healthy(ctx))
	must(t, g.Destroy(ctx))
	at.host.free(ctx, "web", at.card)
}
