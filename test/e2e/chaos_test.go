package e2e

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/test/chaos"
	"github.com/gpuctl/gpuctl/test/rig"
)

// disturb runs the model of a program and disturbs it.
func disturb(t *testing.T, gpus []string, o chaos.Options, args ...string) {
	t.Helper()
	r := start(t, chaos.Env(o.Seed)...)
	o.GPUs, o.Log = gpus, t.Logf
	args = append([]string{r.Program("model"), "--seed", strconv.FormatUint(o.Seed%1e6, 10)}, args...)
	cmd := r.Command(t.Context(), gpus[0], args...)
	stop, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	a := launch(t, cmd)
	a.until(t, "ops ")
	res, err := chaos.Run(t.Context(), r, o)
	t.Logf("seed %d: %+v", o.Seed, res)
	if err != nil {
		t.Errorf("%v\n%s", err, tail(a.output(), 2000))
	}
	_ = stop.Close()
	if err := a.wait(t); err != nil {
		t.Errorf("%v: %s", err, tail(a.output(), 2000))
	}
	for _, l := range chaos.Wrong(a.output()) {
		t.Error(l)
	}
}

// After swaps that failed, were cancelled or killed at any step, several in a
// row, the application computes what it would have computed without them.
func TestFailedSwapsDoNotShow(t *testing.T) {
	for name, x := range map[string]struct {
		args    []string
		suspend int
	}{
		"one thread":    {},
		"three threads": {args: []string{"--threads", "3", "--kib", "256"}},
		"large":         {args: []string{"--kib", "49152", "--no-images"}}, // transfers in phases, several chunks of dirty memory
		"suspended":     {suspend: chaos.Hasty},                            // again before the program has made a call
	} {
		t.Run(name, func(t *testing.T) {
			disturb(t, []string{rig.Basic, rig.Pthread}, chaos.Options{
				Operations: 24, Fail: 35, Kill: 15, Suspend: x.suspend, Seed: uint64(time.Now().UnixNano()),
			}, x.args...)
		})
	}
}

// TestChaos does the same for $GPUCTL_CHAOS.
func TestChaos(t *testing.T) {
	length, err := time.ParseDuration(os.Getenv("GPUCTL_CHAOS"))
	if err != nil {
		t.Skip("GPUCTL_CHAOS names no duration; make chaos does")
	}
	seed := uint64(time.Now().UnixNano())
	random := rand.New(rand.NewPCG(seed, 1))
	for end := time.Now().Add(length); time.Now().Before(end) && !t.Failed(); {
		args := [][]string{nil, {"--threads", "3"}, {"--kib", "49152", "--no-images"}, {"--threads", "2", "--kib", "4096"}}[random.IntN(4)]
		disturb(t, []string{rig.Basic, rig.Pthread}, chaos.Options{
			Until: earlier(end, time.Now().Add(time.Minute)), Fail: 30, Kill: 10, Suspend: []int{0, 0, chaos.Hasty}[random.IntN(3)], Seed: random.Uint64(),
		}, args...)
	}
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
