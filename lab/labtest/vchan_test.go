package labtest

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/lab"
)

const (
	vchanPath   = "data/vchanperf"
	vchanInitrd = "/run/gpuctl-lab/vchan.img"
	vchanUnit   = "vchanhold"
)

// TestVchan moves bytes between dom0 and a guest through shared memory, and
// migrates the guest with and without warning.
func TestVchan(t *testing.T) {
	l := Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 18*time.Minute)
	defer cancel()
	a, b := l.Hosts()[0], l.Hosts()[1]
	for _, h := range l.Hosts() {
		must(t, Install(ctx, h, "vchanperf"))
		// The guest's program comes with its initrd; both hosts start its device model with it.
		_, err := h.Run(ctx, "set -e; mkdir -p /run/gpuctl-lab; cd /usr/local/bin; (cat "+kit+"initrd.img; echo vchanperf | cpio --quiet -o -H newc | gzip) >"+vchanInitrd)
		must(t, err)
	}
	g := &Guest{Name: "ferry", Initrd: vchanInitrd}
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
	step("create", func(t *testing.T) { must(t, g.Create(ctx, a)) })
	step("first host", func(t *testing.T) {
		serveVchan(t, ctx, g)
		tryVchan(t, ctx, g)
		tryVchan(t, ctx, g) // with a new ring
	})
	step("close, migrate, listen anew", func(t *testing.T) {
		stopVchan(t, ctx, g)
		must(t, g.Migrate(ctx, b))
		must(t, g.Healthy(ctx))
		serveVchan(t, ctx, g)
		tryVchan(t, ctx, g)
	})
	step("migrate while a client is connected", func(t *testing.T) {
		must(t, StartUnit(ctx, b, vchanUnit, "/usr/local/bin/vchanperf hold "+domid(t, ctx, g)+" "+vchanPath))
		testkit.Until(t, "the client is connected", func() error {
			out, err := Journal(ctx, b, vchanUnit)
			must(t, err)
			return testkit.Want(strings.Contains(out, "connected"), out)
		})
		must(t, g.Migrate(ctx, a))
		testkit.Until(t, "the client knows", func() error {
			out, err := Journal(ctx, b, vchanUnit)
			must(t, err)
			return testkit.Want(strings.Contains(out, "ended:") && strings.Contains(out, "has moved or is gone"), out)
		})
		testkit.Until(t, "nothing is left of the guest on "+b.Name, func() error {
			out, err := b.Run(ctx, "xl list")
			must(t, err)
			return testkit.Want(!strings.Contains(out, "(null)") && !strings.Contains(out, g.Name), out)
		})
		tryVchan(t, ctx, g)
		must(t, g.Healthy(ctx))
	})
	step("the end of a program that a migration surprised", func(t *testing.T) {
		// Linux has no way to close the channel that was lost; this only writes
		// down what it does.
		out, err := g.Run(ctx, "dmesg -c >/dev/null; kill -9 $(cat /tmp/vchanperf.pid); sleep 5; dmesg; [ ! -d /proc/$(cat /tmp/vchanperf.pid) ] || echo the process is still there")
		t.Logf("%v\n%s", err, out)
	})
	step("destroy", func(t *testing.T) { must(t, g.Destroy(ctx)) })
}

func domid(t *testing.T, ctx context.Context, g *Guest) string {
	t.Helper()
	out, err := g.Host().Run(ctx, "xl domid "+lab.Quote(g.Name))
	must(t, err)
	return strings.TrimSpace(out)
}

// serveVchan starts the server in the guest.
func serveVchan(t *testing.T, ctx context.Context, g *Guest) {
	t.Helper()
	_, err := g.Run(ctx, "setsid /vchanperf serve "+vchanPath+" >/tmp/vchanperf.log 2>&1 </dev/null & echo $! >/tmp/vchanperf.pid")
	must(t, err)
}

// stopVchan ends the server and with it all that it has of Xen.
func stopVchan(t *testing.T, ctx context.Context, g *Guest) {
	t.Helper()
	_, err := g.Run(ctx, "p=$(cat /tmp/vchanperf.pid); kill $p; for i in 1 2 3 4 5 6 7 8 9 10; do [ -d /proc/$p ] || exit 0; sleep 1; done; exec >&2; grep State /proc/$p/status; kill -QUIT $p; sleep 1; cat /tmp/vchanperf.log; exit 1")
	must(t, err)
}

// tryVchan has dom0 move bytes to the guest, from it and through it. Every one is
// checked.
func tryVchan(t *testing.T, ctx context.Context, g *Guest) {
	t.Helper()
	out, err := g.Host().Run(ctx, "timeout 240 /usr/local/bin/vchanperf try --wait 60s --bytes 16777216 "+domid(t, ctx, g)+" "+vchanPath)
	if err != nil {
		log, lerr := g.Run(ctx, "cat /tmp/vchanperf.log; ls -l /dev/xen; dmesg | tail -n 20")
		t.Fatalf("%v\nthe server says: %s %v", err, log, lerr)
	}
	var r struct {
		ToGuest     float64 `json:"to_guest_mb_per_s"`
		FromGuest   float64 `json:"from_guest_mb_per_s"`
		Echo        float64 `json:"echo_mb_per_s"`
		RoundTripMS float64 `json:"round_trip_ms"`
	}
	must(t, json.Unmarshal([]byte(out), &r))
	t.Logf("%s: %.1f MB/s to the guest, %.1f MB/s from it, %.1f MB/s both at once, %.2f ms there and back",
		g.Host().Name, r.ToGuest, r.FromGuest, r.Echo, r.RoundTripMS)
	if min(r.ToGuest, r.FromGuest) < 1 { // a PV channel has half of it at best
		t.Error("that is no faster than a console")
	}
}
