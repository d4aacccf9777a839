package xen

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/lab/labtest"
)

// softConfig gives a host a mediated GPU with four parts.
const softConfig = `mmio:
  gpus:
    - {name: soft0, memory: 16MiB, vms: 4}
`

// moveTime is what one migration may take: both hosts of the lab have one slow processor, and a
// VM beside computes all the time.
const moveTime = 15 * time.Minute

// part is a VM's part of a host's mediated GPU, as gpuctl shows it.
type part struct {
	Phase       string `json:"phase"`
	MachineName string `json:"machine_name"`
	Claim       string `json:"claim"`
	Message     string `json:"message"`
	Counts      []struct {
		Phase    string      `json:"phase"`
		Exits    json.Number `json:"exits"`
		Commands json.Number `json:"commands"`
	} `json:"counts"`
}

// commands is how many commands the VM has given the GPU there.
func (p part) commands(t *testing.T) (n int64) {
	t.Helper()
	for _, c := range p.Counts {
		if c.Commands == "" {
			continue
		}
		more, err := c.Commands.Int64()
		must(t, err)
		n += more
	}
	return n
}

// parts are those of a VM on the host.
func (h *host) parts(ctx context.Context, machine string) (out []part) {
	h.t.Helper()
	var all struct {
		Cards []struct {
			Slices []part `json:"slices"`
		} `json:"cards"`
	}
	text := h.must(ctx, "cards", "-o", "json")
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		h.t.Fatalf("%v: %s", err, text)
	}
	for _, c := range all.Cards {
		for _, p := range c.Slices {
			if p.MachineName == machine {
				out = append(out, p)
			}
		}
	}
	return out
}

// part waits until a VM has one part on the host that is in a phase, without complaint, and
// whose claim the cluster knows.
func (h *host) part(ctx context.Context, machine, phase string) (p part) {
	h.t.Helper()
	testkit.Until(h.t, h.Name+": "+machine+" has a part that is "+phase, func() error {
		all := h.parts(ctx, machine)
		if len(all) != 1 || all[0].Phase != phase || all[0].Message != "" || all[0].Claim == "" {
			return fmt.Errorf("%+v", all)
		}
		p = all[0]
		out, err := h.gpuctl(ctx, "get", "claims", "-o", "json")
		return testkit.Want(err == nil && strings.Contains(out, p.Claim), out, err)
	})
	return p
}

// noPart waits until a VM has none on the host, and the claim that it had has ended.
func (h *host) noPart(ctx context.Context, machine, claim string) {
	h.t.Helper()
	testkit.Until(h.t, h.Name+": "+machine+" has no part", func() error {
		if all := h.parts(ctx, machine); len(all) > 0 {
			return fmt.Errorf("%+v", all)
		}
		out, err := h.gpuctl(ctx, "get", "claims", "-o", "json")
		return testkit.Want(err == nil && !strings.Contains(out, claim), out, err)
	})
}

// worker is a VM whose driver computes on its part all the time, and checks every result.
type worker struct {
	*labtest.Guest
	boot string
}

// mediatedWorker defines a VM on a host, gives it a part, starts it, and has it compute.
func mediatedWorker(ctx context.Context, h *host, name string) *worker {
	h.t.Helper()
	// While its part's contents are on their way a VM's processor waits in one access: to its
	// kernel that looks like a lockup.
	g := &labtest.Guest{Name: name, Initrd: labtest.MediatedInitrd, CommandLine: "nosoftlockup nokaslr"}
	h.define(ctx, g, func(xml string) string { return xml })
	h.t.Log(h.must(ctx, "attach", name, "soft0", "--profile", "1of4"))
	h.mustVirsh(ctx, "start", name)
	h.ready(ctx, g)
	h.part(ctx, name, "attached")
	ctx, cancel := context.WithTimeout(ctx, moveTime)
	defer cancel()
	_, err := g.Run(ctx, "setsid /mmiolab endure 16 >/endure.out 2>&1 </dev/null & echo $! >/endure.pid")
	must(h.t, err)
	s, err := g.Ping(ctx)
	must(h.t, err)
	w := &worker{g, s.BootID}
	w.reach(ctx, h.t, 3)
	return w
}

// said is the last line that the driver has printed.
func (w *worker) said(ctx context.Context) (line string, all map[string]int, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute) // what is asked while the VM arrives may be lost
	defer cancel()
	line, err = w.Run(ctx, "tail -n 1 /endure.out")
	if err != nil || line == "" {
		return line, nil, err
	}
	if json.Unmarshal([]byte(line), &all) != nil {
		return line, nil, testkit.GiveUp(fmt.Errorf("vm %s: its driver says: %s", w.Name, line))
	}
	return line, all, nil
}

// rounds is how many rounds the driver has done, all of them with the right results.
func (w *worker) rounds(ctx context.Context, t *testing.T) (n int) {
	t.Helper()
	testkit.Until(t, w.Name+" says how far it is", func() error {
		line, all, err := w.said(ctx)
		n = all["round"]
		return testkit.Want(err == nil && line != "", line, err)
	})
	return n
}

// reach waits until the driver has done n rounds.
func (w *worker) reach(ctx context.Context, t *testing.T, n int) {
	t.Helper()
	testkit.Until(t, fmt.Sprintf("%s has computed %d times", w.Name, n), func() error {
		line, all, err := w.said(ctx)
		if err != nil {
			return err
		}
		return testkit.Want(all["round"] >= n, line)
	})
}

// finish ends the driver: all of its results were right, and what lay in the GPU's memory
// all the time is what it was.
func (w *worker) finish(ctx context.Context, t *testing.T) {
	t.Helper()
	_, err := w.Run(ctx, "kill -TERM $(cat /endure.pid)")
	must(t, err)
	testkit.Until(t, w.Name+" has checked all of it", func() error {
		line, all, err := w.said(ctx)
		if err != nil {
			return err
		}
		n, ended := all["right"]
		if ended {
			t.Logf("%s: %d rounds, all right", w.Name, n)
		}
		return testkit.Want(ended, line)
	})
	s, err := w.Ping(ctx)
	must(t, err)
	if s.BootID != w.boot {
		t.Errorf("vm %s has booted anew: %s, %s", w.Name, w.boot, s.BootID)
	}
	must(t, w.Healthy(ctx))
}

// TestMediatedMove moves a VM live to the other host and back while it computes on its part of a
// mediated GPU. Another VM computes on a part of the first host's GPU all the time.
func TestMediatedMove(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 55*time.Minute)
	defer cancel()
	l := labtest.Start(t)
	a, b := pair(ctx, t, l)
	var web, db *worker
	t.Cleanup(func() { tellOfParts(t, []*host{a, b}, web, db) })
	r := rough{t}
	r.step("a mediated GPU on each host", func() {
		for _, h := range []*host{a, b} {
			must(t, labtest.InstallMediated(ctx, h.Host))
			h.stop(ctx)
			h.run(ctx, "cat >> /etc/gpuctl.yaml <<'END'\n"+softConfig+"END")
			h.start(ctx)
		}
		for _, h := range []*host{a, b} {
			testkit.Until(t, h.Name+" has a mediated GPU", func() error {
				out, err := h.gpuctl(ctx, "get", "gpus", "-o", "wide")
				return testkit.Want(err == nil && strings.Contains(out, a.Name+"/soft0") && strings.Contains(out, b.Name+"/soft0"), out, err)
			})
		}
	})
	r.step("a VM beside that stays", func() { db = mediatedWorker(ctx, a, "db") })
	r.step("a VM that moves", func() { web = mediatedWorker(ctx, a, "web") })
	r.step("there", func() { moveWorker(ctx, a, b, web, db) })
	r.step("and back", func() { moveWorker(ctx, b, a, web, db) })
	r.step("the right results", func() {
		web.finish(ctx, t)
		db.finish(ctx, t)
	})
	r.step("nothing is left", func() {
		for _, w := range []*worker{web, db} {
			claim := a.part(ctx, w.Name, "attached").Claim
			must(t, w.Destroy(ctx))
			a.part(ctx, w.Name, "ready") // for its next start
			a.must(ctx, "detach", w.Name, "soft0")
			a.noPart(ctx, w.Name, claim)
			a.mustVirsh(ctx, "undefine", w.Name)
		}
	})
}

// moveWorker moves a VM with its part from one host to the other, and sees to it that the VM
// beside, on its own host, has noticed nothing.
func moveWorker(ctx context.Context, from, to *host, web, db *worker) {
	t := from.t
	t.Helper()
	beside := &host{db.Host(), t}
	had, dbHad := from.part(ctx, "web", "attached"), beside.part(ctx, "db", "attached")
	plan := from.must(ctx, "migrate", "web", "--to", to.Name, "--plan")
	t.Log(plan)
	if !strings.Contains(plan, "park") || !strings.Contains(plan, "restore") {
		t.Fatal("its part does not go along")
	}
	did, dbDid := web.rounds(ctx, t), db.rounds(ctx, t)
	limited, cancel := context.WithTimeout(ctx, moveTime)
	defer cancel()
	out, err := from.Run(limited, fmt.Sprintf("timeout %.0f gpuctl migrate web --to %s 2>&1", moveTime.Seconds(), to.Name))
	if m := from.last(ctx); err != nil || m.State != "done" {
		t.Fatalf("%s: %v: %s", m, err, out)
	}
	m := from.last(ctx)
	t.Log(m)
	var steps []string
	for _, s := range m.Steps {
		steps = append(steps, s.Name)
	}
	if want := []string{"park", "move", "restore", "commit", "drop"}; !slices.Equal(steps, want) {
		t.Errorf("steps %v, want %v", steps, want)
	}
	web.Moved(to.Host)
	to.ready(ctx, web.Guest)

	// The VM has one part, on the host where it is, and has used it there; nothing is left of
	// it where it was, not even a domain that somebody holds on to.
	has := to.part(ctx, "web", "attached")
	if has.Claim == had.Claim {
		t.Errorf("claim %s is for both parts", has.Claim)
	}
	from.noPart(ctx, "web", had.Claim)
	soon, stop := context.WithTimeout(ctx, 3*time.Minute)
	defer stop()
	err = testkit.Poll(soon, "the end of its domain", func() error {
		out, err := from.Run(soon, "virsh -q list --all --name; xl list")
		return testkit.Want(err == nil && !strings.Contains(out, "web") && !strings.Contains(out, "(null)"), out, err)
	})
	if err != nil {
		t.Errorf("%s: %v", from.Name, err)
	}
	arrived := web.rounds(ctx, t)
	web.reach(ctx, t, arrived+3)
	testkit.Until(t, to.Name+" counts what the VM does there", func() error {
		n := to.part(ctx, "web", "attached").commands(t)
		return testkit.Want(n > has.commands(t), n)
	})
	t.Logf("the VM had computed %d times before, %d when it had arrived", did, arrived)

	// Commands of the VM beside went on meanwhile.
	if now := beside.part(ctx, "db", "attached"); now.Claim != dbHad.Claim {
		t.Errorf("the VM beside has claim %s, had %s", now.Claim, dbHad.Claim)
	}
	now := db.rounds(ctx, t)
	t.Logf("the VM beside has computed %d times meanwhile", now-dbDid)
	if now <= dbDid {
		t.Errorf("the VM beside had computed %d times, and has %d times", dbDid, now)
	}
}

// tellOfParts logs what the hosts, their GPUs' processes and the VMs said last, if the test failed.
func tellOfParts(t *testing.T, hosts []*host, workers ...*worker) {
	t.Helper()
	if !t.Failed() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	for _, h := range hosts {
		out, _ := labtest.Journal(ctx, h.Host, unit)
		t.Logf("hostd of %s: %s", h.Name, out[max(0, len(out)-12<<10):])
		out, err := h.Run(ctx, "tail -n 40 /run/gpuctl/mmio/*.log; cat /run/gpuctl/mmio/*.json; timeout 30 gpuctl cards -o wide; timeout 30 gpuctl events")
		t.Logf("parts of %s: %s %v", h.Name, out, err)
		// Where its guests are in their kernel, which is that of the host.
		out, err = h.Run(ctx, "for d in $(xl list | awk 'NR > 2 {print $2}'); do for i in 1 2 3; do xl list $d | tail -n 1; timeout 20 /usr/lib/xen-*/bin/xenctx -s /proc/kallsyms $d 0; sleep 2; done; done 2>&1")
		t.Logf("guests of %s: %s %v", h.Name, out, err)
	}
	for _, w := range workers {
		if w == nil {
			continue
		}
		out, err := w.Run(ctx, "tail -n 3 /endure.out; dmesg | tail -n 20")
		t.Logf("%s on %s: %s %v", w.Name, w.Host().Name, out, err)
	}
}
