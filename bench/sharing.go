package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/test/rig"
)

// A GPU whose kernels take their time by the clock: see test/cl/gpushim.c. Where there is a GPU of
// NVIDIA's, that is shared, and kernels compute for so long.
const clockID = "clock"

const (
	shareTime   = 10 * time.Second
	shareWindow = 500 * time.Millisecond
	// shareLearns is left out at the beginning: programs start one after the other, and policies that
	// learn have had a period.
	shareLearns = 2 * time.Second
	// aloneRounds is how often a program runs alone and beside an idle one, by turns.
	aloneRounds = 3
)

// tenants are the programs that share a GPU, by the length of their kernels in µs, and their weights.
type tenants struct {
	us     []int
	weight []int
}

// interval is when a kernel ran, in ns of the device's clock.
type interval struct{ start, end int64 }

// sharing measures how owners share a GPU: time on it in windows, and how busy it is.
func (b *bench) sharing(ctx context.Context) error {
	if err := b.calibrate(ctx); err != nil {
		return err
	}
	two := tenants{[]int{1000, 10000}, []int{100, 100}}
	for _, p := range []string{"fair", "fifo", "credit", "band"} {
		f, err := b.share(ctx, p, two)
		if err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
		target, ok := "", func(bool) func() bool { return nil }
		if p == "fair" {
			ok = func(v bool) func() bool { return func() bool { return v } }
			target = "0.99"
		}
		b.report.add(p+", kernels of 1 and 10 ms: Jain's index, mean of 500 ms", "", 0, f.jain, target, ok(f.jain >= 0.99))
		b.report.add(p+": worst window", "", 0, f.worst, "", nil)
		if p == "fair" {
			target = "90"
		}
		b.report.add(p+": GPU busy", "%", 0, 100*f.busy, target, ok(f.busy >= 0.9))
		b.report.add(p+": GPU idle between two kernels of one owner, mean", "us", 0, micros(f.same), "", nil)
		b.report.add(p+": GPU idle from one owner's kernel to another's, mean", "us", 0, micros(f.other), "", nil)
	}
	f, err := b.share(ctx, "fair", tenants{[]int{1000, 10000}, []int{100, 300}})
	if err != nil {
		return err
	}
	b.report.add("fair, weights 1:3: Jain's index of time by weight", "", 0, f.jain, "0.99", func() bool { return f.jain >= 0.99 })
	b.report.add("fair, weights 1:3: GPU busy", "%", 0, 100*f.busy, "90", func() bool { return f.busy >= 0.9 })
	if err := b.short(ctx); err != nil {
		return err
	}
	return b.alone(ctx)
}

// short measures what is left of the rate of short kernels, each of which is waited for, where two owners share a GPU.
func (b *bench) short(ctx context.Context) error {
	const us = 20
	one, err := b.share(ctx, "fair", tenants{[]int{us}, []int{100}})
	if err != nil {
		return err
	}
	two, err := b.share(ctx, "fair", tenants{[]int{us, us}, []int{100, 100}})
	if err != nil {
		return err
	}
	b.report.add("fair, 2 owners of kernels of 20 us: kernels a second, to one alone", "1/s", one.rate, two.rate, "0.7 x alone", func() bool { return two.rate >= 0.7*one.rate })
	b.report.add("fair, 2 owners of kernels of 20 us: Jain's index", "", 0, two.jain, "", nil)
	return nil
}

func (b *bench) clockRig(ctx context.Context, policy string) (*rig.Rig, error) {
	gpu := rig.GPU{
		ID: clockID, Library: filepath.Join(b.root, "test/cl/bin/gpushim.so"), Model: "clock",
		Env: []string{"GPUSHIM_CLOCK=1", "POCL_DEVICES=pthread", "POCL_MEMORY_LIMIT=4"},
	}
	if b.nvidia != "" {
		gpu = b.nvidiaGPU(gpuID, b.card)
	}
	config := fmt.Sprintf("version: 1\ndiscover: false\ngpus:\n  - %s\nsharing: {policy: %s}\n", gpu.YAML(), policy)
	b.rigs++
	return rig.Start(ctx, rig.Options{Dir: filepath.Join(b.tmp, fmt.Sprint("r", b.rigs)), Config: config})
}

// tenant starts a program in the name of an owner.
func (b *bench) tenant(ctx context.Context, r *rig.Rig, owner string, weight int, argv ...string) *exec.Cmd {
	args := []string{"run", "--min-memory", "64MiB", "--owner", owner, "--weight", strconv.Itoa(weight), "--", r.Program("tenant")}
	cmd := exec.CommandContext(ctx, r.Bin("gpuctl"), append(args, argv...)...)
	cmd.Env = r.Env()
	cmd.Stderr = os.Stderr
	return cmd
}

// shares is how tenants shared a GPU.
type shares struct {
	jain, worst float64 // Jain's index: mean and least of the windows
	busy        float64 // the part of the time for which the GPU was
	rate        float64 // kernels a second
	// Means of how long the GPU was idle before a kernel: of the owner that ran last, and of another one.
	same, other time.Duration
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// share runs tenants together.
func (b *bench) share(ctx context.Context, policy string, t tenants) (shares, error) {
	r, err := b.clockRig(ctx, policy)
	if err != nil {
		return shares{}, err
	}
	defer r.Close()
	all := make([][]interval, len(t.us))
	errs := make([]error, len(t.us))
	var begin sync.WaitGroup
	begin.Add(len(t.us))
	var wg sync.WaitGroup
	for i, us := range t.us {
		wg.Go(func() {
			argv := b.kernel(us)
			cmd := b.tenant(ctx, r, fmt.Sprint("tenant-", i), t.weight[i], append(argv, "--think-us", "0", "--seconds", strconv.Itoa(int(time.Hour/time.Second)), "--seed", strconv.Itoa(i+1))...)
			all[i], errs[i] = played(cmd, &begin)
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return shares{}, err
	}
	return windows(all, t.weight)
}

// calibrate finds out how long kernels compute on a real GPU.
func (b *bench) calibrate(ctx context.Context) error {
	if b.nvidia == "" {
		return nil
	}
	r, err := b.clockRig(ctx, "fair")
	if err != nil {
		return err
	}
	defer r.Close()
	text, err := output(b.tenant(ctx, r, "a", 100, "--calibrate", "1000"))
	if err != nil {
		return err
	}
	b.rounds1ms, err = strconv.Atoi(strings.TrimSpace(string(text)))
	return err
}

// kernel returns the arguments for a kernel of a length in µs.
func (b *bench) kernel(us int) []string {
	if b.nvidia == "" {
		return []string{"--us", strconv.Itoa(us)}
	}
	return []string{"--iterations", strconv.Itoa(b.rounds1ms * us / 1000)}
}

// played runs a tenant for shareTime from when all of them are ready on, and returns when its
// kernels ran.
func played(cmd *exec.Cmd, begin *sync.WaitGroup) ([]interval, error) {
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		begin.Done()
		return nil, err
	}
	lines := bufio.NewReader(out)
	_, err = lines.ReadString('\n') // ready
	begin.Done()
	if err == nil {
		begin.Wait()
		time.Sleep(shareTime)
	}
	_ = in.Close()
	text, rerr := io.ReadAll(lines)
	if err := errors.Join(err, rerr, cmd.Wait()); err != nil {
		return nil, fmt.Errorf("tenant: %w", err)
	}
	return intervals(string(text))
}

// intervals reads what a tenant prints.
func intervals(text string) (all []interval, err error) {
	for line := range strings.Lines(text) {
		var x interval
		if _, err := fmt.Sscanf(line, "K %d %d", &x.start, &x.end); err != nil {
			return nil, fmt.Errorf("tenant says %q: %w", line, err)
		}
		all = append(all, x)
	}
	if len(all) == 0 {
		return nil, errors.New("a tenant has run nothing")
	}
	return all, nil
}

// windows returns the figures of the time for which all ran.
func windows(all [][]interval, weight []int) (f shares, err error) {
	var from, to int64
	for i, runs := range all {
		if s := runs[0].start; i == 0 || s > from {
			from = s
		}
		if e := runs[len(runs)-1].end; i == 0 || e < to {
			to = e
		}
	}
	from += shareLearns.Nanoseconds()
	n := (to - from) / shareWindow.Nanoseconds()
	if n < 4 {
		return shares{}, fmt.Errorf("they ran together for %v only", time.Duration(to-from))
	}
	f.worst = 1
	for w := range n {
		begin := from + w*shareWindow.Nanoseconds()
		end := begin + shareWindow.Nanoseconds()
		var sum, squares float64
		for i, runs := range all {
			x := float64(covered(runs, begin, end)) / float64(weight[i])
			sum += x
			squares += x * x
		}
		j := 0.0
		if squares > 0 {
			j = sum * sum / (float64(len(all)) * squares)
		}
		f.jain += j / float64(n)
		f.worst = min(f.worst, j)
	}
	end := from + n*shareWindow.Nanoseconds()
	f.busy = float64(covered(slices.Concat(all...), from, end)) / float64(end-from)
	runs := within(all, from, end)
	f.rate = float64(len(runs)) / time.Duration(end-from).Seconds()
	f.same, f.other = gaps(runs)
	return f, nil
}

// kernelRun is when a kernel of a program ran.
type kernelRun struct {
	interval
	of int
}

// within returns the kernels of all programs in a time, in the order in which they began.
func within(all [][]interval, from, to int64) (runs []kernelRun) {
	for i, of := range all {
		for _, x := range of {
			if x.start >= from && x.end <= to {
				runs = append(runs, kernelRun{x, i})
			}
		}
	}
	slices.SortFunc(runs, func(a, b kernelRun) int { return cmp.Compare(a.start, b.start) })
	return runs
}

// gaps returns the means of how long nothing ran before a kernel that follows one of the same
// program, and of another one. They are 0 where kernels overlap, and where there are none.
func gaps(runs []kernelRun) (same, other time.Duration) {
	var idle, n [2]int64
	for i := 1; i < len(runs); i++ {
		k := 0
		if runs[i].of != runs[i-1].of {
			k = 1
		}
		idle[k] += max(runs[i].start-runs[i-1].end, 0)
		n[k]++
	}
	return time.Duration(idle[0] / max(n[0], 1)), time.Duration(idle[1] / max(n[1], 1))
}

// covered returns how much of a time intervals cover together.
func covered(runs []interval, from, to int64) (sum int64) {
	sorted := slices.Clone(runs)
	slices.SortFunc(sorted, func(a, b interval) int { return int(a.start - b.start) })
	at := from
	for _, r := range sorted {
		s, e := max(r.start, at), min(r.end, to)
		if e > s {
			sum += e - s
			at = e
		}
	}
	return sum
}

// alone measures what sharing costs a session that has its GPU for itself, and one beside another
// that does nothing.
func (b *bench) alone(ctx context.Context) error {
	r, err := b.clockRig(ctx, "fair")
	if err != nil {
		return err
	}
	defer r.Close()
	run := func() ([]interval, error) {
		cmd := b.tenant(ctx, r, "a", 100, append(b.kernel(1000), "--seconds", "4", "--think-us", "0")...)
		stdin, open, err := os.Pipe() // a tenant ends with its standard input
		if err != nil {
			return nil, err
		}
		defer stdin.Close()
		defer open.Close()
		cmd.Stdin = stdin
		text, err := output(cmd)
		if err != nil {
			return nil, err
		}
		_, lines, _ := strings.Cut(string(text), "\n") // ready
		return intervals(lines)
	}
	var single, beside int
	var idles time.Duration
	for range aloneRounds {
		one, err := run()
		if err != nil {
			return err
		}
		idle := b.tenant(ctx, r, "b", 100, append(b.kernel(10), "--seconds", "3600", "--think-us", "1e9")...)
		in, lines, _, err := piped(idle)
		if err != nil {
			return err
		}
		_, err = lines.ReadString('\n')
		var two []interval
		if err == nil {
			two, err = run()
		}
		_ = in.Close()
		if err := errors.Join(err, idle.Wait()); err != nil {
			return err
		}
		single, beside = single+len(one), beside+len(two)
		same, _ := gaps(within([][]interval{one}, 0, math.MaxInt64))
		idles += same
	}
	n, m := float64(single)/(4*aloneRounds), float64(beside)/(4*aloneRounds)
	b.report.add("kernels of 1 ms a second beside an idle session, to alone", "1/s", n, m, "0.97 x alone", func() bool { return m >= 0.97*n })
	b.report.add("alone: GPU idle between two kernels, mean", "us", 0, micros(idles/aloneRounds), "", nil)
	return nil
}
