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

const (
	mmioInitrd = "/run/gpuctl-lab/mmio.img"
	mmioUnit   = "mmiolab"
)

// TestMediated gives two guests of real Xen parts of one mediated GPU. One computes, and
// checks every result, while the other does what it may not. Then an exit is measured
// beside one of a function that does nothing, and the process of the GPU is killed.
func TestMediated(t *testing.T) {
	l := Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Minute)
	defer cancel()
	h := l.Hosts()[0]
	must(t, Install(ctx, h, "mmiolab"))
	_, err := h.Run(ctx, "set -e; mkdir -p /run/gpuctl-lab; cd /usr/local/bin; (cat "+kit+"initrd.img; echo mmiolab | cpio --quiet -o -H newc | gzip) >"+mmioInitrd)
	must(t, err)
	good, bad := &Guest{Name: "good", Initrd: mmioInitrd}, &Guest{Name: "bad", Initrd: mmioInitrd}
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
		must(t, good.Resume(ctx))
		must(t, bad.Resume(ctx))
		for _, g := range []*Guest{good, bad} {
			for _, id := range []string{"10de:06d8", "1234:6e75"} {
				_, err := g.WaitDevice(ctx, id)
				must(t, err)
			}
		}
	})
	step("compute beside a hostile guest", func(t *testing.T) {
		attack := make(chan error, 1)
		go func() {
			_, err := bad.Run(ctx, "/mmiolab hostile 2000")
			attack <- err
		}()
		out, err := good.Run(ctx, "/mmiolab compute 2")
		must(t, err)
		t.Log(strings.TrimSpace(out))
		must(t, <-attack)
		must(t, good.Healthy(ctx))
	})
	step("measure", func(t *testing.T) {
		out, err := good.Run(ctx, "/mmiolab measure 500")
		must(t, err)
		var r struct {
			Ratio float64 `json:"ratio"`
		}
		must(t, json.Unmarshal([]byte(out), &r))
		t.Log(strings.TrimSpace(out))
		if r.Ratio > 1.2 {
			t.Errorf("an exit of the mediated GPU takes %.2f times one that does nothing", r.Ratio)
		}
	})
	step("the process dies, and the next tells the guests", func(t *testing.T) {
		_, err := h.Run(ctx, "systemctl kill -s KILL "+mmioUnit+"; while systemctl is-active -q "+mmioUnit+"; do sleep 0.2; done")
		must(t, err)
		read := make(chan string, 1)
		go func() {
			v, err := good.ReadRegister(ctx, "0000:00:1f.0", 0, 0, 4)
			read <- fmt.Sprintf("%#x %v", v, err)
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
