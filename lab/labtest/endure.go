package labtest

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

func watchDevices() *connect.Request[gpuctlv1.WatchDevicesRequest] {
	return connect.NewRequest(&gpuctlv1.WatchDevicesRequest{})
}

// Endure is how the program endure is run (test/cl/endure.c): integer work on a
// device that checks itself against the processor at every iteration.
type Endure struct {
	KiB        uint32 // that are worked on; a multiple of 8, 0: 8192
	Ballast    uint32 // MiB more that lie on the device
	Seed       uint32
	PauseMS    uint32 // between iterations
	CPU        bool   // uses no OpenCL at all
	Native     bool   // uses PoCL past gpuctl
	Iterations uint64 // 0: until it is told to stop
}

// Endurance is a running endure.
type Endurance struct {
	*Program
	how Endure
}

// Iteration is one that endure found right.
type Iteration struct {
	Number uint64
	At     time.Duration // on the guest's monotonic clock, which stops while a migration stops the guest
}

var (
	iterationLine = regexp.MustCompile(`^iteration (\d+) ok (\d+\.\d+)$`)
	resultLine    = regexp.MustCompile(`^result (OK|WRONG) (\d+) ([0-9a-f]{16})$`)
)

// StartEndure starts endure under a name of its own.
func (g *ComputeGuest) StartEndure(ctx context.Context, name string, how Endure) (*Endurance, error) {
	if how.KiB == 0 {
		how.KiB = 8192
	}
	argv := []string{"endure", "--kib", fmt.Sprint(how.KiB), "--seed", fmt.Sprint(how.Seed), "--ballast", fmt.Sprint(how.Ballast), "--pause", fmt.Sprint(how.PauseMS)}
	if how.Iterations == 0 {
		argv = append(argv, "--until", programOutputs+name+"/stop")
	} else {
		argv = append(argv, "--iterations", fmt.Sprint(how.Iterations))
	}
	if how.CPU {
		argv = append(argv, "--cpu")
	}
	start := g.Start
	if how.Native {
		start = g.StartNative
	}
	p, err := start(ctx, name, argv...)
	if err != nil {
		return nil, err
	}
	return &Endurance{Program: p, how: how}, nil
}

// Progress returns the iterations that were right so far, at most the last few
// thousand.
func (e *Endurance) Progress(ctx context.Context) ([]Iteration, error) {
	out, err := e.Output(ctx)
	if err != nil {
		return nil, err
	}
	return iterations(out), nil
}

func iterations(out string) []Iteration {
	var all []Iteration
	for _, line := range strings.Split(out, "\n") {
		m := iterationLine.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		n, err1 := strconv.ParseUint(m[1], 10, 64)
		at, err2 := strconv.ParseFloat(m[2], 64)
		if err1 == nil && err2 == nil {
			all = append(all, Iteration{n, time.Duration(at * float64(time.Second))})
		}
	}
	return all
}

// WaitIteration waits until n iterations were right.
func (e *Endurance) WaitIteration(ctx context.Context, n uint64) error {
	return e.until(ctx, fmt.Sprintf("iteration %d", n), func(_ bool, _ int, out string) (bool, error) {
		all := iterations(out)
		return len(all) > 0 && all[len(all)-1].Number >= n, nil
	})
}

// Finish tells endure to stop if it waits for that, waits until it has, and
// returns how many iterations it did. A result that is not what this machine
// computes is an error, whatever endure itself thinks of it.
func (e *Endurance) Finish(ctx context.Context) (uint64, error) {
	if e.how.Iterations == 0 {
		if _, err := e.g.Run(ctx, "touch "+e.path("stop")); err != nil {
			return 0, err
		}
	}
	out, err := e.Wait(ctx)
	if err != nil {
		return 0, err
	}
	return e.how.check(out)
}

// check finds the result in the output of endure and checks it.
func (how Endure) check(out string) (uint64, error) {
	lines := strings.Split(strings.TrimSpace(out), "\n")
	m := resultLine.FindStringSubmatch(lines[len(lines)-1])
	if m == nil || m[1] != "OK" {
		return 0, fmt.Errorf("endure has no good result: %s", out)
	}
	n, err := strconv.ParseUint(m[2], 10, 64)
	if err != nil || n == 0 || n > 1<<20 {
		return 0, fmt.Errorf("endure did %s iterations", m[2])
	}
	if how.Iterations != 0 && n != how.Iterations {
		return n, fmt.Errorf("endure did %d iterations of %d", n, how.Iterations)
	}
	if want := fmt.Sprintf("%016x", how.Result(n)); m[3] != want {
		return n, fmt.Errorf("endure says that all was right, but its result is %s and has to be %s: %s", m[3], want, out)
	}
	return n, nil
}

// Result computes what endure's has to be after n iterations.
func (how Endure) Result(n uint64) uint64 {
	words := how.KiB << 7
	a, b := make([]uint32, words), make([]uint32, words)
	for i := range a {
		x := (uint32(i)^how.Seed)*1664525 + 1013904223
		a[i] = x ^ x>>15
	}
	result := uint64(0xcbf29ce484222325)
	fold := func(v uint32) {
		result = (result ^ uint64(v)) * 0x100000001b3
		result ^= result >> 29
	}
	for it := range n {
		k := uint32(it)
		var sums [16]uint32
		other := (k*131 + 1) % words
		for i := range words {
			x := a[i] ^ a[other]*129 ^ (k*2654435761 + i)
			for range 4 {
				x = x*1664525 + 1013904223
				x ^= x >> 13
			}
			b[i] = x
			sums[i%16] += (x ^ i) * (2*(i>>4) + 1)
			if other++; other == words {
				other = 0
			}
		}
		a, b = b, a
		for _, s := range sums {
			fold(s)
		}
	}
	for _, x := range a {
		fold(x)
	}
	return result
}
