package labtest

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/gpuctl/gpuctl/internal/wait"
)

// fakeCUDA is the folder of the fake of NVIDIA's driver in a guest (test/cuda).
const fakeCUDA = "/run/fakecuda/"

// CUDA makes a card with this vendor:device ID one of NVIDIA's, too, for the guest's programs: by
// the fake of NVIDIA's driver, with so many MiB of memory. It is to be called before Create.
func (g *ComputeGuest) CUDA(id string, mib int) {
	g.CommandLine = strings.TrimSpace(fmt.Sprintf("%s lab.cuda=%s,%d", g.CommandLine, id, mib))
}

// WaitCUDA waits until the fake has a card.
func (g *ComputeGuest) WaitCUDA(ctx context.Context) error {
	for {
		out, err := g.Run(ctx, "grep ^gpu "+fakeCUDA+"config || true")
		if err != nil || out != "" {
			return err
		}
		if err := wait.For(ctx, lookEvery); err != nil {
			return fmt.Errorf("guest %s: the fake of NVIDIA's driver has no card: %w", g.Name, err)
		}
	}
}

// CUDACards returns the lines about each card that the fake has had so far, the present one
// last. A card that comes again is another one.
func (g *ComputeGuest) CUDACards(ctx context.Context) ([]string, error) {
	out, err := g.Run(ctx, "grep ^gpu /var/log/fakecard.log || true")
	if err != nil || out == "" {
		return nil, err
	}
	return strings.Split(strings.TrimSpace(out), "\n"), nil
}

// CUDAFails has the fake refuse a call, as "lock", with the card that comes next.
func (g *ComputeGuest) CUDAFails(ctx context.Context, call string) error {
	all, err := g.CUDACards(ctx)
	if err == nil {
		_, err = g.Run(ctx, fmt.Sprintf("echo fail %s - 999 >%splug-%d", call, fakeCUDA, len(all)+1))
	}
	return err
}

// CUDAViolations returns what somebody did that NVIDIA's driver forbids, one a line.
func (g *ComputeGuest) CUDAViolations(ctx context.Context) (string, error) {
	return g.Run(ctx, "cat "+fakeCUDA+"violations 2>/dev/null || true")
}

// CUDALoop is a running cudaloop (test/cuda/cudaloop.c): integer work on a GPU that checks itself.
type CUDALoop struct{ *Program }

// cudaWords is how many numbers cudaloop works on.
const cudaWords = 1024

// StartCUDALoop starts cudaloop under a name of its own, with so many MiB of memory on the GPU.
func (g *ComputeGuest) StartCUDALoop(ctx context.Context, name string, mib int, pause time.Duration) (*CUDALoop, error) {
	// It works until its input has a line: a pipe that it has open for writing, too, never ends.
	p, err := g.Start(ctx, name, "GPUCTL_FAKE_CUDA="+strings.TrimSuffix(fakeCUDA, "/"), "LD_LIBRARY_PATH=/usr/lib/fakecuda", "sh", "-c",
		fmt.Sprintf("rm -f in; mkfifo in && exec cudaloop --words %d --mib %d --pause %d --say 1 <>in", cudaWords, mib, pause.Microseconds()))
	if err != nil {
		return nil, err
	}
	return &CUDALoop{p}, nil
}

var (
	roundLine = regexp.MustCompile(`(?m)^round (\d+)$`)
	loopLine  = regexp.MustCompile(`^ok (\d+) ([0-9a-f]{8})$`)
)

// Rounds returns how many rounds it has done.
func (c *CUDALoop) Rounds(ctx context.Context) (int, error) {
	out, err := c.Output(ctx)
	return rounds(out), err
}

func rounds(out string) int {
	all := roundLine.FindAllStringSubmatch(out, -1)
	if len(all) == 0 {
		return 0
	}
	n, err := strconv.Atoi(all[len(all)-1][1])
	if err != nil {
		return 0
	}
	return n
}

// WaitRound waits until it has done n rounds.
func (c *CUDALoop) WaitRound(ctx context.Context, n int) error {
	return c.until(ctx, fmt.Sprintf("round %d", n), func(_ bool, _ int, out string) (bool, error) { return rounds(out) >= n, nil })
}

// Finish ends cudaloop and returns how many rounds it did. A result that is not what this
// machine computes is an error, whatever cudaloop itself thinks of it.
func (c *CUDALoop) Finish(ctx context.Context) (int, error) {
	if _, err := c.g.Run(ctx, "echo >"+c.path("in")); err != nil {
		return 0, err
	}
	out, err := c.Wait(ctx)
	if err != nil {
		return 0, err
	}
	return checkLoop(out)
}

// checkLoop finds the result in the output of cudaloop and checks it.
func checkLoop(out string) (int, error) {
	lines := strings.Split(strings.TrimSpace(out), "\n")
	m := loopLine.FindStringSubmatch(lines[len(lines)-1])
	if m == nil {
		return 0, fmt.Errorf("cudaloop has no good result: %s", out)
	}
	n, err := strconv.Atoi(m[1])
	if err != nil || n == 0 || n > 1<<20 {
		return 0, fmt.Errorf("cudaloop did %s rounds", m[1])
	}
	if want := fmt.Sprintf("%08x", loopResult(n)); m[2] != want {
		return n, fmt.Errorf("cudaloop says that all was right, but its result is %s and has to be %s: %s", m[2], want, out)
	}
	return n, nil
}

// loopResult computes what cudaloop's has to be after n rounds.
func loopResult(n int) uint32 {
	var sum uint32
	for i := range uint32(cudaWords) {
		x := i * 2654435761
		for round := range uint32(n) {
			x = x*1664525 + 1013904223 + round + i
		}
		sum = sum*31 + x
	}
	return sum
}
