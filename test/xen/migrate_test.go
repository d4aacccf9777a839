package xen

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/lab"
	"github.com/gpuctl/gpuctl/lab/labtest"
)

// migration is a migration as gpuctl shows it.
type migration struct {
	ID        string `json:"id"`
	State     string `json:"state"`
	Step      string `json:"step"`
	Message   string `json:"message"`
	StoppedNs int64  `json:"stopped_ns"`
	Machine   struct {
		PredictedNs     int64  `json:"predicted_ns"`
		PredictedStopNs int64  `json:"predicted_stop_ns"`
		ToGPU           string `json:"to_gpu"`
		FarGPU          string `json:"far_gpu"`
		FarClaim        string `json:"far_claim"`
	} `json:"machine"`
	Steps []struct {
		Name   string `json:"name"`
		TookNs int64  `json:"took_ns"`
		Undo   bool   `json:"undo"`
		Error  string `json:"error"`
	} `json:"steps"`
}

// last is the migration that began last.
func (h *host) last(ctx context.Context) migration {
	h.t.Helper()
	var all struct {
		Items []json.RawMessage `json:"items"`
	}
	out := h.must(ctx, "get", "migrations", "-o", "json")
	var list []json.RawMessage
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		if err := json.Unmarshal([]byte(out), &all); err != nil {
			h.t.Fatalf("%v: %s", err, out)
		}
		list = all.Items
	}
	var newest migration
	started := int64(-1)
	for _, raw := range list {
		var m struct {
			migration
			Started any   `json:"started"`
			At      int64 `json:"started_unix_ms"`
		}
		if err := json.Unmarshal(raw, &m); err != nil {
			h.t.Fatalf("%v: %s", err, raw)
		}
		if m.At > started {
			newest, started = m.migration, m.At
		}
	}
	return newest
}

func (m migration) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s, stood still %.1f s (predicted %.1f s): %s;", m.ID, m.State, float64(m.StoppedNs)/1e9, float64(m.Machine.PredictedStopNs)/1e9, m.Message)
	for _, s := range m.Steps {
		name := s.Name
		if s.Undo {
			name = "undo " + name
		}
		fmt.Fprintf(&b, " %s %.2f", name, float64(s.TookNs)/1e9)
		if s.Error != "" {
			fmt.Fprintf(&b, " (%s)", s.Error)
		}
	}
	return b.String()
}

// pair installs both hosts and joins them in a cluster.
func pair(ctx context.Context, t *testing.T, l *lab.Lab) (a, b *host) {
	t.Helper()
	a, b = install(ctx, t, l.Hosts()[0]), install(ctx, t, l.Hosts()[1])
	a.must(ctx, "cluster", "init")
	out := a.must(ctx, "cluster", "token", "create", "--name", b.Name)
	_, token, found := strings.Cut(out, "gpuctl-join-v1.")
	if !found {
		t.Fatalf("no token: %s", out)
	}
	b.must(ctx, "cluster", "join", "gpuctl-join-v1."+strings.Fields(token)[0])
	return a, b
}

// TestMigrate moves a VM with its GPU while an OpenCL program runs in it: to a
// lower model, to the other host, to a higher model.
func TestMigrate(t *testing.T) {
	l := labtest.Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 28*time.Minute)
	defer cancel()
	a, b := pair(ctx, t, l)
	g, err := labtest.NewComputeGuest(ctx, l)
	must(t, err)
	g.Name = "web"
	t.Cleanup(func() { tellOfFailure(t, g, a, b) })
	step := func(name string, run func()) {
		t.Helper()
		if t.Failed() {
			return
		}
		began := time.Now()
		run()
		t.Logf("== %s: %.1f s", name, time.Since(began).Seconds())
	}
	var e *labtest.Endurance
	var boot string
	step("a VM with a GPU", func() {
		must(t, g.Create(ctx, a.Host, virtio))
		a.has(ctx, "web", virtio)
		e, err = g.StartEndure(ctx, "endure", labtest.Endure{KiB: 8, Ballast: 1, PauseMS: 3000, Seed: 3})
		must(t, err)
		must(t, e.WaitIteration(ctx, 2))
		boot, err = g.BootID(ctx)
		must(t, err)
	})
	goesOn := func() {
		t.Helper()
		all, err := e.Progress(ctx)
		must(t, err)
		must(t, e.WaitIteration(ctx, uint64(len(all))+2))
	}
	show := func(h *host) {
		t.Helper()
		m := h.last(ctx)
		t.Log(m)
		if m.State != "done" {
			t.Errorf("it ended as %s", m.State)
		}
	}
	step("plan", func() {
		t.Log(b.must(ctx, "downgrade", "web", "--plan"))
		t.Log(b.must(ctx, "migrate", "web", "--plan"))
	})
	step("downgrade", func() {
		t.Log(a.must(ctx, "downgrade", "web", "--to", "xena/"+bochs))
		show(a)
		a.has(ctx, "web", bochs)
		a.free(ctx, "web", virtio)
		goesOn()
	})
	step("migrate", func() {
		t.Log(a.must(ctx, "migrate", "web", "--to", "xenb/"+bochs))
		g.Moved(b.Host)
		show(b)
		b.has(ctx, "web", bochs)
		a.free(ctx, "web", bochs)
		goesOn()
	})
	step("a domain that libvirt has forgotten", func() { // as a libvirtd leaves it that is killed while a VM arrives
		id := strings.TrimSpace(b.run(ctx, "virsh domuuid web"))
		a.run(ctx, `xl create -p -q /dev/null 'name="web"' 'uuid="`+id+`"' 'type="hvm"' 'memory=32'`)
		testkit.Until(t, "xena: the domain is ended", func() error {
			out := a.run(ctx, "xl list")
			return testkit.Want(!strings.Contains(out, "web"), out)
		})
		b.has(ctx, "web", bochs)
		goesOn()
	})
	step("upgrade", func() {
		t.Log(a.must(ctx, "upgrade", "web")) // asked of the host where it is no more
		show(b)
		b.has(ctx, "web", virtio)
		b.free(ctx, "web", bochs)
		goesOn()
	})
	step("the right result", func() {
		n, err := e.Finish(ctx)
		must(t, err)
		t.Logf("%d iterations", n)
		if now, err := g.BootID(ctx); err != nil || now != boot {
			t.Errorf("the VM booted anew: %s, %s, %v", boot, now, err)
		}
		must(t, g.Healthy(ctx))
	})
	step("the timeline", func() {
		m := b.last(ctx)
		svg := b.must(ctx, "describe", "migration", m.ID, "-o", "svg")
		if !strings.HasPrefix(svg, "<svg") {
			t.Errorf("%.100s", svg)
		}
		if dir := os.Getenv("GPUCTL_LAB_OUT"); dir != "" {
			must(t, os.WriteFile(filepath.Join(dir, m.ID+".svg"), []byte(svg), 0o644))
		}
		t.Log(b.must(ctx, "describe", "migration", m.ID))
		t.Log(a.must(ctx, "get", "gpus"))
	})
	must(t, g.Destroy(ctx))
	b.free(ctx, "web", virtio)
}

// tellOfFailure logs what the hosts and the VM said last, if the test failed.
func tellOfFailure(t *testing.T, g *labtest.ComputeGuest, a, b *host) {
	t.Helper()
	if !t.Failed() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	for _, h := range []*host{a, b} {
		out, _ := labtest.Journal(ctx, h.Host, unit)
		t.Logf("hostd of %s: %s", h.Name, out[max(0, len(out)-8<<10):])
	}
	if g.Host() == nil {
		return
	}
	out, err := g.AgentLog(ctx)
	t.Logf("gpuguest: %s %v", out[max(0, len(out)-4<<10):], err)
}
