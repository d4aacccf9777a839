package xen

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/lab/labtest"
)

// rounds are how often gpuctl and libvirt alone take turns.
const rounds = 9

// TestBenchAttach compares attach and detach with libvirt alone: the same card,
// the same VM, by turns. virsh's own time is without its process and its
// connection.
func TestBenchAttach(t *testing.T) {
	ctx := t.Context()
	h := install(ctx, t, labtest.Start(t).Hosts()[0])
	h.must(ctx, "cluster", "init")
	g := &labtest.Guest{Name: "web"}
	h.define(ctx, g, same)
	h.mustVirsh(ctx, "start", "web")
	h.ready(ctx, g)
	xml, err := labtest.HostdevXML(bochs)
	must(t, err)
	must(t, h.PutReader(ctx, strings.NewReader(strings.ReplaceAll(xml, "managed='yes'", "managed='no'")), "/run/gpuctl-lab/bochs.xml", 0o600))
	bare := func(verb string) time.Duration {
		out := h.mustVirsh(ctx, "--timing", verb, "web", "/run/gpuctl-lab/bochs.xml", "--live")
		var ms float64
		_, text, _ := strings.Cut(out, "(Time: ")
		if _, err := fmt.Sscanf(text, "%f ms)", &ms); err != nil {
			t.Fatalf("%s: %v", out, err)
		}
		return time.Duration(ms * float64(time.Millisecond))
	}
	all := times{}
	for range rounds {
		began := time.Now()
		s := h.change(ctx, "attach", "web", bochs)
		all.add("attach with all", time.Since(began))
		for name, d := range s {
			all.add("attach: "+name, d)
		}
		h.readsBochs(ctx, g)
		began = time.Now()
		s = h.change(ctx, "detach", "web", bochs, "--unconfirmed")
		all.add("detach with all", time.Since(began))
		for name, d := range s {
			all.add("detach: "+name, d)
		}
		h.gone(ctx, g, "1234:1111")

		h.run(ctx, "virsh -q nodedev-detach pci_0000_03_00_0 --driver xen")
		all.add("virsh attach", bare("attach-device"))
		h.readsBochs(ctx, g)
		all.add("virsh detach", bare("detach-device"))
		h.gone(ctx, g, "1234:1111")
		h.reattach(ctx, bochs)
		h.free(ctx, "web", bochs)
	}
	all.log(t)
	for _, verb := range []string{"attach", "detach"} {
		t.Logf("the step %s takes %.2f of what libvirt takes alone", verb, all.ratio(verb+": "+verb, "virsh "+verb))
	}
}

// TestBenchMigrate compares a migration with the same done by hand: detach,
// virsh migrate, attach. Each VM goes there and back; the one that is moved by
// hand knows nothing of gpuctl, and tells faults of the lab from ours.
func TestBenchMigrate(t *testing.T) {
	ctx := t.Context()
	l := labtest.Start(t)
	all := times{}
	timed := func(name string, do func() error) time.Duration {
		began := time.Now()
		must(t, do())
		took := time.Since(began)
		all.add(name, took)
		return took
	}
	for _, h := range l.Hosts() {
		(&host{h, t}).run(ctx, "("+clean+") >/dev/null 2>&1")
	}
	g, err := labtest.NewComputeGuest(ctx, l)
	must(t, err)
	g.Name = "control"
	must(t, g.Create(ctx, l.Hosts()[0], virtio))
	work, err := g.StartEndure(ctx, "control", labtest.Endure{KiB: 256, PauseMS: 200, Seed: 7, CPU: true})
	must(t, err)
	must(t, work.WaitIteration(ctx, 1))
	for _, to := range []int{1, 0} {
		sum := timed("by hand: detach", func() error { return g.Detach(ctx, virtio) })
		sum += timed("by hand: migrate", func() error { return g.Migrate(ctx, l.Hosts()[to]) })
		sum += timed("by hand: attach", func() error { return g.Attach(ctx, virtio) })
		all.add("by hand", sum)
		_, err := g.WaitDevice(ctx, "1af4:1050")
		must(t, err)
	}
	_, err = work.Finish(ctx)
	must(t, err)
	must(t, g.Healthy(ctx))
	must(t, g.Destroy(ctx))
	all.log(t)

	v := newTraveller(ctx, t, l, labtest.Endure{KiB: 256, Ballast: 64, PauseMS: 200, Seed: 5})
	for range 2 {
		to := v.next(leg{"migrate", virtio})
		before, err := v.work.Progress(ctx)
		must(t, err)
		timed("gpuctl migrate", func() error {
			_, err := v.at.host.gpuctl(ctx, "migrate", "web", "--to", to.gpu())
			return err
		})
		m := v.at.host.last(ctx)
		t.Log(m)
		v.ended(ctx, m, to)
		after, err := v.work.Progress(ctx)
		must(t, err)
		all.add("longest between two results", longest(after[max(0, len(before)-1):]))
		all.add("downtime", time.Duration(m.StoppedNs))
		all.add("predicted downtime", time.Duration(m.Machine.PredictedStopNs))
		all.add("predicted, all of it", time.Duration(m.Machine.PredictedNs))
		beyond := time.Duration(m.StoppedNs)
		for _, s := range m.Steps {
			all.add("step "+s.Name, time.Duration(s.TookNs))
			switch s.Name {
			case "detach", "move", "attach":
				beyond -= time.Duration(s.TookNs)
			}
		}
		all.add("beyond libvirt's own steps", beyond)
	}
	log, err := v.guest.AgentLog(ctx)
	must(t, err)
	t.Logf("gpuguest: %s", log[max(0, len(log)-16<<10):])
	v.arrive(ctx)
	all.log(t)
	t.Logf("gpuctl migrate takes %.2f of what is done by hand", all.ratio("gpuctl migrate", "by hand"))
}

// longest is the longest time between two results, by the VM's clock.
func longest(all []labtest.Iteration) (gap time.Duration) {
	for i := range all[min(1, len(all)):] {
		gap = max(gap, all[i+1].At-all[i].At)
	}
	return gap
}

// times are measurements, by name.
type times map[string][]time.Duration

func (all times) add(name string, d time.Duration) { all[name] = append(all[name], d) }

func (all times) ratio(a, b string) float64 { return float64(median(all[a])) / float64(median(all[b])) }

func (all times) log(t *testing.T) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		var each []string
		for _, d := range all[name] {
			each = append(each, fmt.Sprintf("%.0f", d.Seconds()*1000))
		}
		t.Logf("%-26s median %7.0f ms of %s", name, median(all[name]).Seconds()*1000, strings.Join(each, " "))
	}
}
