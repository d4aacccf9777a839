package e2e

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/test/chaos"
	"github.com/gpuctl/gpuctl/test/lossy"
	"github.com/gpuctl/gpuctl/test/rig"
)

// pulls are how often, and for how long in all, the cable was pulled.
type pulls struct {
	n    int
	long int // of them, for more than 5 s
	gone time.Duration
}

// pull pulls the cable at random until ctx ends: mostly for a moment, one time in eight for
// up to 30 s. The cable is in when it returns.
func pull(ctx context.Context, l *lossy.Link, random *rand.Rand) (p pulls) {
	defer l.Cut(false)
	wait := func(d time.Duration) bool {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(d):
			return true
		}
	}
	for wait(time.Duration(random.Int64N(int64(20 * time.Second)))) {
		most := []time.Duration{200 * time.Millisecond, 200 * time.Millisecond, time.Second, time.Second, time.Second, 5 * time.Second, 5 * time.Second, 30 * time.Second}[random.IntN(8)]
		d := time.Duration(random.Int64N(int64(most)))
		began := time.Now()
		l.Cut(true)
		wait(d)
		l.Cut(false)
		p.n++
		p.gone += time.Since(began)
		if time.Since(began) > 5*time.Second {
			p.long++
		}
	}
	return p
}

// endless is a program that checks itself and ends when it is told to.
type endless struct {
	argv []string
	file string // it ends when that is there; empty: when its standard input ends
}

func programs(r *rig.Rig, dir string, random *rand.Rand) endless {
	seed := strconv.Itoa(random.IntN(1e6))
	model := []string{r.Program("model"), "--seed", seed}
	switch random.IntN(4) {
	case 0:
		file := filepath.Join(dir, "over"+seed)
		return endless{[]string{r.Program("endure"), "--kib", "4096", "--ballast", "16", "--seed", seed, "--pause", "20", "--until", file}, file}
	case 1:
		return endless{argv: append(model, "--threads", "3")}
	case 2:
		return endless{argv: append(model, "--kib", "16384", "--no-images")}
	}
	return endless{argv: model}
}

func (p endless) end(stdin io.Closer) error {
	if p.file == "" {
		return stdin.Close()
	}
	return os.WriteFile(p.file, nil, 0o600)
}

// TestSoakRemote runs for $GPUCTL_SOAK_REMOTE. Programs that check themselves compute on remote
// and local GPUs in turn, are suspended and resumed, and the cable is pulled at random.
func TestSoakRemote(t *testing.T) {
	length, err := time.ParseDuration(os.Getenv("GPUCTL_SOAK_REMOTE"))
	if err != nil {
		t.Skip("GPUCTL_SOAK_REMOTE names no duration; make soak-remote does")
	}
	t.Setenv("GPUCTL_TEST_CARRIER_OUTAGE", "3m")
	r, l := startLossy(t, "roam", lossy.Quality{Loss: 0.002, Delay: 200 * time.Microsecond, Jitter: 200 * time.Microsecond, Reorder: 0.01}, "GPUCTL_FAULTS=1")
	seed := uint64(time.Now().UnixNano())
	random := rand.New(rand.NewPCG(seed, 2))
	var all chaos.Result
	var pulled pulls
	n := 0
	began := time.Now()
	for end := began.Add(length); time.Now().Before(end) && !t.Failed(); n++ {
		res, p := soakOne(t, r, l, random, earlier(end, time.Now().Add(2*time.Minute)))
		all.Operations, all.Done, all.Failed, all.Broken = all.Operations+res.Operations, all.Done+res.Done, all.Failed+res.Failed, all.Broken+res.Broken
		all.Worst = max(all.Worst, res.Worst)
		pulled = pulls{pulled.n + p.n, pulled.long + p.long, pulled.gone + p.gone}
		// Each line may be the last that somebody sees.
		t.Logf("%v, %d programs were right; operations: %d, %d done, %d made to fail, %d undone as the network broke; cable pulled %d times, %d of them for more than 5 s, %v in all; seed %d",
			time.Since(began).Round(time.Second), n+1, all.Operations, all.Done, all.Failed, all.Broken, pulled.n, pulled.long, pulled.gone.Round(time.Second), seed)
	}
	if c := l.Counts(); pulled.n == 0 || c.Cut == 0 || c.Passed == 0 {
		t.Errorf("the cable was pulled %d times: %+v", pulled.n, c)
	}
	if all.Done == 0 {
		t.Error("no operation was done: that says nothing of swaps")
	}
}

// soakOne runs one program.
func soakOne(t *testing.T, r *rig.Rig, l *lossy.Link, random *rand.Rand, until time.Time) (chaos.Result, pulls) {
	t.Helper()
	gpus := []string{rig.Basic, rig.Pthread}
	// The claim of the program before ends a moment after it.
	testkit.Until(t, "all GPUs are free", func() error {
		out, err := r.Gpuctl(t.Context(), "inventory", "--where", "free", "-o", "json")
		for _, gpu := range gpus {
			err = errors.Join(err, testkit.Want(bytes.Contains(out, []byte(`"`+gpu+`"`)), string(out)))
		}
		return err
	})
	p := programs(r, t.TempDir(), random)
	cmd := r.Command(t.Context(), gpus[random.IntN(2)], p.argv...)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	a := launch(t, cmd)
	a.until(t, map[bool]string{true: "ops ", false: "iteration 1 ok"}[p.file == ""])

	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var pulled pulls
	pulling := rand.New(rand.NewPCG(random.Uint64(), 3))
	wg.Go(func() { pulled = pull(ctx, l, pulling) })
	res, err := chaos.Run(t.Context(), r, chaos.Options{
		GPUs: gpus, Until: until, Fail: 15, Seed: random.Uint64(), Network: true, Log: t.Logf,
	})
	cancel()
	wg.Wait()
	if err != nil {
		t.Errorf("%v: %v\n%s", p.argv, err, tail(a.output(), 2000))
	}
	if err := p.end(stdin); err != nil {
		t.Fatal(err)
	}
	if err := a.wait(t); err != nil {
		t.Errorf("%v: %v: %s", p.argv, err, tail(a.output(), 2000))
	}
	for _, line := range chaos.Wrong(a.output()) {
		t.Error(line)
	}
	return res, pulled
}
