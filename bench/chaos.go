package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/gpuctl/gpuctl/test/chaos"
	"github.com/gpuctl/gpuctl/test/rig"
)

// chaos is not about speed: programs that carry a model of themselves are
// swapped at random between the GPUs, with failures and kills in between, and
// what they read must be right. The seed is printed.
func (b *bench) chaos(ctx context.Context) error {
	rounds := [][]string{
		{"--kib", "4096"},
		{"--kib", "1024", "--threads", "3"},
		{"--kib", "49152", "--no-images"},
		{"--kib", "16384", "--threads", "2"},
	}
	if b.program != "" {
		rounds = [][]string{strings.Fields(b.program)}
	}
	const share = 25 // operations of one program
	var mu sync.Mutex
	var all chaos.Result
	var wrong []string
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(b.together)
	for i := range (b.operations + share - 1) / share {
		n, seed, args := min(share, b.operations-i*share), uint64(i)+b.seed, rounds[i%len(rounds)]
		group.Go(func() error {
			begin := time.Now()
			res, lines, err := b.disturb(ctx, n, seed, args)
			mu.Lock()
			defer mu.Unlock()
			all.Operations += res.Operations
			all.Done += res.Done
			all.Failed += res.Failed
			all.Killed += res.Killed
			all.Broken += res.Broken
			all.Worst = max(all.Worst, res.Worst)
			wrong = append(wrong, lines...)
			fmt.Fprintf(b.out, "  %s, seed %d: %d operations in %.0f s, %d done; so far %d, of which %d were to fail and %d were killed, %d lines wrong\n",
				strings.Join(args, " "), seed, res.Operations, time.Since(begin).Seconds(), res.Done, all.Operations, all.Failed, all.Killed, len(wrong))
			for _, l := range lines {
				fmt.Fprintln(b.out, "   ", l)
			}
			if err != nil && ctx.Err() == nil {
				fmt.Fprintf(b.out, "  seed %d: %v\n", seed, err)
				return fmt.Errorf("seed %d: %w", seed, err)
			}
			return nil
		})
	}
	err := group.Wait()
	none := func() bool { return len(wrong) == 0 }
	b.report.add(fmt.Sprintf("%d operations, %d to fail, %d killed", all.Operations, all.Failed, all.Killed), "lines wrong", 0, float64(len(wrong)), "0", none)
	if all.Broken > 0 {
		b.report.add("operations that failed as their connections broke", "", 0, float64(all.Broken), "", nil)
	}
	b.report.add("longest stand-still of one that was done", "ms", 0, float64(all.Worst.Milliseconds()), "", nil)
	return err
}

// disturb runs one program under n operations, on a hostd of its own.
func (b *bench) disturb(ctx context.Context, n int, seed uint64, args []string) (res chaos.Result, wrong []string, err error) {
	config, gpus, err := b.chaosConfig()
	if err != nil {
		return res, nil, err
	}
	if b.nvidia != "" && slices.Contains(args, "--threads") {
		// PoCL 5 aborts under several threads, natively too (docs/testing.md).
		gpus = slices.DeleteFunc(gpus, func(id string) bool { return id == rig.Pthread })
	}
	r, err := rig.Start(ctx, rig.Options{Dir: filepath.Join(b.tmp, fmt.Sprint("c", seed)), Config: config, Env: chaos.Env(seed)})
	if err != nil {
		return res, nil, err
	}
	defer r.Close()
	cmd := r.Command(ctx, gpus[0], append([]string{r.Program("model"), "--seed", strconv.FormatUint(seed, 10)}, args...)...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	stop, err := cmd.StdinPipe()
	if err != nil {
		return res, nil, err
	}
	if err := cmd.Start(); err != nil {
		return res, nil, err
	}
	var log bytes.Buffer
	// What breaks connections dies with gpuguest, whose next one has other ports.
	breaks, kill := slices.Contains([]string{"break", "cut"}, os.Getenv(rig.CarrierVariable)), 10
	if breaks {
		kill = 0
	}
	suspend := 0
	if seed/4%4 == 3 { // of each kind of program
		suspend = chaos.Hasty
	}
	res, err = chaos.Run(ctx, r, chaos.Options{
		GPUs: gpus, Operations: n, Fail: 30, Kill: kill, Suspend: suspend, Seed: seed, Network: breaks,
		Log: func(format string, args ...any) { fmt.Fprintf(&log, "    "+format+"\n", args...) },
	})
	if err != nil {
		fmt.Fprintf(&log, "%v\n%s", err, executorLogs(r.Dir))
	}
	_ = stop.Close()
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case e := <-ended:
		err = errors.Join(err, e)
	case <-time.After(2 * time.Minute):
		err = errors.Join(err, errors.New("the program does not end"), cmd.Process.Kill())
		<-ended
	}
	wrong = chaos.Wrong(out.String())
	if err != nil && len(wrong) == 0 {
		return res, nil, fmt.Errorf("%w; it printed %s; done to it:\n%s\nhostd: %s", err, ending(out.String(), 500), log.String(), ending(r.Log(), 4000))
	}
	if len(wrong) > 0 {
		wrong = append(wrong, "done to it:\n"+log.String(), "hostd: "+ending(r.Log(), 20000))
	}
	return res, wrong, nil
}

// executorLogs is what the executors below a folder said last.
func executorLogs(dir string) string {
	var all strings.Builder
	_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.Contains(filepath.Base(path), "log") {
			if text, err := os.ReadFile(path); err == nil && len(text) > 0 {
				fmt.Fprintf(&all, "%s:\n%s\n", path, ending(string(text), 20000))
			}
		}
		return nil
	})
	return all.String()
}

// ending is the last n bytes of a text.
func ending(s string, n int) string { return s[max(0, len(s)-n):] }

// chaosConfig is every GPU of NVIDIA's that there is, and PoCL.
func (b *bench) chaosConfig() (config string, gpus []string, err error) {
	memory, err := rig.TestMemory()
	if err != nil {
		return "", nil, err
	}
	gpus = []string{rig.Pthread, rig.Basic}
	if b.nvidia == "" {
		return rig.Config(b.root, memory), gpus, nil
	}
	gpus = gpus[:1]
	var more []rig.GPU
	cards, _ := filepath.Glob("/dev/nvidia[0-9]*")
	for i := range max(1, len(cards)) {
		g := b.nvidiaGPU(fmt.Sprint(gpuID, i), i)
		more = append(more, g)
		gpus = append([]string{g.ID, g.ID}, gpus...) // mostly there
	}
	return rig.Config(b.root, memory, more...), gpus, nil
}
