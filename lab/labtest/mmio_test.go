package labtest

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/lab"
)

const mmioUnit = "mmiolab"

// TestMediated gives two guests of real Xen parts of one mediated GPU. One computes, and
// checks every result, while the other does what it may not. Then an exit is measured
// beside one of a function that does nothing, and the process of the GPU is killed.
func TestMediated(t *testing.T) {
	l := Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Minute)
	defer cancel()
	h := l.Hosts()[0]
	must(t, InstallMediated(ctx, h))
	good, bad := &Guest{Name: "good", Initrd: MediatedInitrd}, &Guest{Name: "bad", Initrd: MediatedInitrd}
	step := func(name string, run func(*testing.T)) {
		t.Helper()
		if t.Failed() {
			return
		}
		t.Run(name, func(t *testing.T) {
			began := time.Now()
			run(t)
			t.Logf("%s: %.1f s", name, time.Since(began).Seconds())
		})
	}
	step("create, paused", func(t *testing.T) {
		must(t, good.CreatePaused(ctx, h))
		must(t, bad.CreatePaused(ctx, h))
	})
	step("parts", func(t *testing.T) { serveParts(t, ctx, h, good, bad) })
	step("boot", func(t *testing.T) {
		for _, g := range []*Guest{good, bad} { // one after the other: they share a processor
			began := time.Now()
			must(t, g.Resume(ctx))
			t.Logf("%s has booted in %.1f s", g.Name, time.Since(began).Seconds())
		}
		for _, g := range []*Guest{good, bad} {
			for _, id := range []string{"10de:06d8", "1234:6e75"} {
				_, err := g.WaitDevice(ctx, id)
				must(t, err)
			}
		}
	})
	var exit time.Duration // what one took that does the least
	step("measure", func(t *testing.T) { exit = measure(t, ctx, good) })
	step("compute beside a hostile guest", func(t *testing.T) { computeBeside(t, ctx, good, bad, exit) })
	step("the process dies, and the next tells the guests", func(t *testing.T) {
		_, err := h.Run(ctx, "systemctl kill -s KILL "+mmioUnit+"; while systemctl is-active -q "+mmioUnit+"; do sleep 0.2; done")
		must(t, err)
		read := make(chan string, 1)
		go func() {
			out, err := good.Run(ctx, "/mmiolab read") // it has as long as the next process needs to be there
			read <- fmt.Sprintf("%s %v", strings.TrimSpace(out), err)
		}()
		must(t, StartUnit(ctx, h, mmioUnit, "/usr/local/bin/mmiolab serve /run/mmiolab"))
		if v := <-read; v != "0xffffffff <nil>" {
			t.Errorf("the guest reads %s", v)
		}
	})
	for _, g := range []*Guest{good, bad} {
		_ = g.Destroy(ctx)
	}
}

const (
	measured   = 60   // reads of each function
	mostExits  = 2000 // of a round of computing: some 500, and what it polls while the GPU works
	mostRatio  = 1.5  // in emulation, where other work of the machine is in it; the aim is 1.2
	slowerThan = 10   // times as long may each exit take later, beside another guest
)

// measure returns how long an exit takes, beside one that does nothing.
func measure(t *testing.T, ctx context.Context, g *Guest) time.Duration {
	t.Helper()
	out, err := g.Run(ctx, fmt.Sprintf("/mmiolab measure %d", measured))
	must(t, err)
	var r struct {
		Ratio float64 `json:"ratio"`
		P90   float64 `json:"mediated_p90_us"`
	}
	must(t, json.Unmarshal([]byte(out), &r))
	t.Log(strings.TrimSpace(out))
	if r.Ratio > mostRatio {
		t.Errorf("an exit of the mediated GPU takes %.2f times one that does nothing", r.Ratio)
	}
	return time.Duration(r.P90 * float64(time.Microsecond))
}

// computeBeside has one guest compute while the other does what it may not. How long that
// may take comes from what an exit has taken.
func computeBeside(t *testing.T, ctx context.Context, good, bad *Guest, exit time.Duration) {
	t.Helper()
	limit := 2*time.Minute + mostExits*exit*slowerThan
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	t.Logf("an exit takes some %v: a round is some %v, and both have %v", exit, 500*exit, limit)
	attack := make(chan error, 1)
	go func() {
		_, err := bad.Run(ctx, "/mmiolab hostile 300")
		attack <- err
	}()
	for round := range 2 {
		out, err := good.Run(ctx, "/mmiolab compute 1")
		must(t, err)
		t.Logf("round %d: %s", round, strings.TrimSpace(out))
	}
	must(t, <-attack)
	must(t, good.Healthy(ctx))
}

// serveParts starts the process of the GPU, with a part for each guest.
func serveParts(t *testing.T, ctx context.Context, h *lab.Host, guests ...*Guest) {
	t.Helper()
	command := "/usr/local/bin/mmiolab serve /run/mmiolab"
	for _, g := range guests {
		command += " " + domid(t, ctx, g)
	}
	must(t, StartUnit(ctx, h, mmioUnit, command))
	testkit.Until(t, "the GPU is ready", func() error {
		out, err := Journal(ctx, h, mmioUnit)
		must(t, err)
		return testkit.Want(strings.Contains(out, "ready"), out)
	})
}
