package e2e

import (
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/test/rig"
)

// TestChaos swaps, suspends and resumes at random for $GPUCTL_CHAOS; the
// result must be right all the same.
func TestChaos(t *testing.T) {
	length, err := time.ParseDuration(os.Getenv("GPUCTL_CHAOS"))
	if err != nil {
		t.Skip("GPUCTL_CHAOS names no duration; make chaos does")
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	r := start(t)
	s := launchStream(t, r, rig.Basic, "--mib", "1", "--queues", "2", "--events", "--mapped", "--images")
	s.until(t, "iteration 2 ")
	gpus := []string{rig.Basic, rig.Pthread}
	for end := time.Now().Add(length); time.Now().Before(end); {
		to := gpus[random.IntN(len(gpus))]
		if random.IntN(4) == 0 {
			id := session(t, r)
			if _, err := r.Gpuctl(t.Context(), "suspend", id); err != nil {
				t.Fatal(err)
			}
			if _, err := r.Gpuctl(t.Context(), "resume", id, "--to", to); err != nil {
				t.Fatal(err)
			}
		} else {
			// A swap to where it is already may be refused; the result counts.
			_, err := r.Operate(t.Context(), "migrate", session(t, r), "--to", to)
			t.Logf("to %s: %v", to, err)
		}
		time.Sleep(time.Duration(random.IntN(200)) * time.Millisecond)
		s.more(t, 1)
	}
	s.verify(t)
}
