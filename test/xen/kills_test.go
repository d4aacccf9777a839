package xen

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/gpuctl/gpuctl/lab/labtest"
)

// moment is when hostd is killed: some seconds after a step has begun, or after
// the command, if no step is named.
type moment struct {
	step  string
	after float64
}

// moments are when hostd is killed.
type moments struct {
	attach, detach []moment
	start          []float64
}

// between any two steps, once.
var between = moments{
	attach: []moment{{"", 0.4}, {"take", 0.1}, {"reset", 0.4}, {"attach", 0.7}},
	detach: []moment{{"detach", 0.7}, {"reset", 0}, {"return", 0.1}},
	start:  []float64{1.5, 4},
}

// more of them, for a longer run.
var more = moments{
	attach: []moment{
		{"", 0.4}, {"", 1}, {"take", 0}, {"take", 0.1}, {"take", 0.4}, {"reset", 0}, {"reset", 0.4}, {"attach", 0}, {"attach", 0.7}, {"attach", 1.4},
	},
	detach: []moment{
		{"", 0.8}, {"detach", 0}, {"detach", 0.7}, {"detach", 1.5}, {"reset", 0}, {"reset", 0.4}, {"return", 0}, {"return", 0.1},
	},
	start: []float64{0.6, 1.5, 2.5, 4, 6},
}

// TestPassthroughKills is the longer run of what TestPassthrough does on one of
// its hosts.
func TestPassthroughKills(t *testing.T) {
	if os.Getenv("GPUCTL_LAB_KILLS") == "" {
		t.Skip("part of make lab-chaos")
	}
	h := install(t.Context(), t, labtest.Start(t).Hosts()[1])
	h.must(t.Context(), "cluster", "init")
	must(t, kills(t.Context(), h, more).Destroy(t.Context()))
}

// kills ends hostd while cards come and go. Whatever it was at, soon after it
// is back its record, Xen, the drivers and the inventory agree. The VM that had
// them goes on.
func kills(ctx context.Context, h *host, when moments) *labtest.Guest {
	t := h.t
	r := rough{t}
	g := &labtest.Guest{Name: "victim"}
	n := 0
	r.step("a VM is created", func() {
		h.put(ctx, g, same)
		h.mustVirsh(ctx, "create", "/run/gpuctl-lab/victim.xml")
		g.Moved(h.Host)
	})
	r.step("kills during starts", func() { // while it comes up
		late := &labtest.Guest{Name: "late", MemoryMiB: 64}
		h.put(ctx, late, same, functions[sound]...)
		for _, after := range when.start {
			n++
			out := h.run(ctx, fmt.Sprintf("timeout 200 virsh -q create /run/gpuctl-lab/late.xml --paused >/run/gpuctl-lab/create.log 2>&1 & p=$!; sleep %v; %s; wait $p; echo $?; cat /run/gpuctl-lab/create.log", after, kill))
			started := strings.HasPrefix(out, "0\n")
			h.answers(ctx)
			has := h.settled(ctx, "late", sound)
			t.Logf("kill %d, %.1f s after a start: it runs %v (%s)", n, after, started, strings.Join(strings.Fields(out), " "))
			if has != started {
				t.Errorf("it runs %v and has its card %v", started, has)
			}
			if started {
				h.mustVirsh(ctx, "destroy", "late")
			}
			h.free(ctx, "late", sound)
		}
	})
	r.step("the VM is up", func() { h.ready(ctx, g) })
	for i, address := range []string{virtio, bochs} {
		r.step("kills with "+address, func() {
			has := false
			// Every other moment is for the other card.
			attaches, detaches := every(when.attach, i), every(when.detach, i)
			for len(attaches)+len(detaches) > 0 && !t.Failed() {
				verb, at := "attach", &attaches
				if has {
					verb, at = "detach", &detaches
				}
				if len(*at) == 0 {
					h.must(ctx, verb, "victim", address, unconfirmed(verb))
					has = !has
					continue
				}
				m := (*at)[0]
				*at = (*at)[1:]
				n++
				out := h.killed(ctx, verb, address, m)
				now := h.settled(ctx, "victim", address)
				t.Logf("kill %d, %.1f s after %s of %s %s: it has it %v, before %v (%s)", n, m.after, or(m.step, "the call"), verb, address, now, has, out)
				has = now
			}
			if has {
				h.must(ctx, "detach", "victim", address, "--unconfirmed")
			}
			h.free(ctx, "victim", address)
		})
	}
	r.step("the VM is well", func() { must(t, g.Healthy(ctx)) })
	t.Logf("%d kills", n)
	return g
}

func every(all []moment, from int) (out []moment) {
	for i := from; i < len(all); i += 2 {
		out = append(out, all[i])
	}
	return out
}

func or(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

// unconfirmed is the option that a detach needs where there is no agent.
func unconfirmed(verb string) string {
	if verb == "detach" {
		return "--unconfirmed"
	}
	return "--accept-care"
}

// killed kills hostd during a change, and waits until it is back. It returns
// the last that gpuctl said.
func (h *host) killed(ctx context.Context, verb, address string, m moment) string {
	h.t.Helper()
	wait := ""
	if m.step != "" {
		wait = fmt.Sprintf(`until grep -q '"step": *"%s"' $o || ! kill -0 $p 2>/dev/null; do sleep 0.02; done; `, m.step)
	}
	out := h.run(ctx, fmt.Sprintf("o=/run/gpuctl-lab/change.log; timeout 200 gpuctl %s victim %s %s -o json >$o 2>&1 & p=$!; %s sleep %v; %s; wait $p; tail -n 1 $o",
		verb, address, unconfirmed(verb), "o=/run/gpuctl-lab/change.log; "+wait, m.after, kill))
	h.answers(ctx)
	return strings.TrimSpace(out)
}
