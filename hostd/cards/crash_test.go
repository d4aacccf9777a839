package cards

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// TestEndAtEveryCall ends hostd at every call of every scenario, before and
// after the call has its effect, and looks what a new one makes of it.
func TestEndAtEveryCall(t *testing.T) {
	for name, do := range scenarios {
		for _, after := range []bool{false, true} {
			for n := 1; ; n++ {
				w := newWorld(t)
				w.crashAt, w.after = n, after
				do(w)
				w.keeper.work.Wait()
				ended := w.crashed
				w.restart()
				w.settled()
				if t.Failed() {
					t.Fatalf("%s ended at call %d (effect: %v); events %v", name, n, after, w.events)
				}
				if !ended {
					if n < 4 {
						t.Fatalf("%s makes %d calls only", name, n)
					}
					break
				}
			}
		}
	}
}

// TestAnySequence does random things, ends hostd at random calls, and checks
// what must hold after every one.
func TestAnySequence(t *testing.T) {
	rounds := 40
	if testing.Short() {
		rounds = 10
	}
	for seed := range rounds {
		r := rand.New(rand.NewPCG(uint64(seed), 1))
		w := newWorld(t)
		var did []string
		for range 12 {
			if r.IntN(3) == 0 {
				w.calls, w.crashAt, w.after = 0, 1+r.IntN(6), r.IntN(2) == 0
			}
			vm := []string{"one", "two"}[r.IntN(2)]
			uuid := map[string]string{"one": uuid1, "two": uuid2}[vm]
			gpu := []string{"nvidia-0", "0000:06:00.0"}[r.IntN(2)]
			functions := map[string][]pci.Address{"nvidia-0": card4, "0000:06:00.0": card1}[gpu]
			what := r.IntN(6)
			did = append(did, fmt.Sprintf("%d %s %s crash at %d", what, vm, gpu, w.crashAt))
			switch what {
			case 0, 1:
				_ = w.attach(vm, gpu, what == 0)
			case 2:
				_ = w.detach(vm, gpu)
			case 3:
				w.stop(uuid)
				w.keeper.Stopped(uuid)
			case 4:
				w.stop(uuid)
				w.keeper.Stopped(uuid)
				if w.prepare(uuid, functions[0]) == nil && !w.crashed {
					w.run(uuid, functions...)
				}
			case 5:
				w.deaf[uuid] = !w.deaf[uuid]
			}
			w.keeper.work.Wait()
			if w.crashed || r.IntN(4) == 0 {
				w.restart()
			}
			w.crashAt = 0
			w.settled()
			w.mu.Lock()
			for _, m := range w.machines {
				m.State = "running"
			}
			w.mu.Unlock()
			if t.Failed() {
				t.Fatalf("seed %d: %s", seed, strings.Join(did, "; "))
			}
		}
	}
}
