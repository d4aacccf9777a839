package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/gpuctl/gpuctl/test/rig"
)

// discreteID is PoCL that behaves like a card with memory of its own.
const discreteID = "discrete"

// windowMiB is the arena memory that a session keeps for transfers, and what
// it may take beside that.
const windowMiB = 256 + 64

// transfers runs clpeak's transfers, 2 GB each on a large card and up to twenty
// under way, and the making of large objects with content, natively and through
// gpuctl in turns.
func (b *bench) transfers(ctx context.Context) error {
	clpeak, err := exec.LookPath("clpeak")
	if err != nil {
		return fmt.Errorf("clpeak: %w: install the package, or carry the program and its libraries in the folder programs", err)
	}
	r, err := b.start(ctx)
	if err != nil {
		return err
	}
	defer r.Close()
	devices := []string{b.device()}
	if b.device() != gpuID {
		devices = append(devices, discreteID)
	}
	for _, d := range devices {
		for _, args := range [][]string{{clpeak, "--transfer-bandwidth"}, {r.Program("content")}} {
			if err := b.bandwidth(ctx, r, d, args...); err != nil {
				return fmt.Errorf("%s: %w", d, err)
			}
		}
	}
	return nil
}

// bandwidth runs a program that prints a table of GB/s.
func (b *bench) bandwidth(ctx context.Context, r *rig.Rig, device string, args ...string) error {
	env, err := b.native(device)
	if err != nil {
		return err
	}
	var lines []string
	speeds := map[bool]map[string][]float64{false: {}, true: {}}
	most := map[bool]float64{}
	for range min(b.rounds, 3) {
		for _, ours := range []bool{false, true} {
			cmd := exec.CommandContext(ctx, args[0], args[1:]...)
			cmd.Env = append(os.Environ(), env...)
			if ours {
				cmd = r.Command(ctx, device, args...)
			}
			out, mib, err := measured(cmd, r.Pid())
			if err != nil {
				return err
			}
			names, got := tableOf(out, "Transfer bandwidth")
			if len(names) == 0 {
				return fmt.Errorf("%s: %w: %s", args[0], errNoFigures, out)
			}
			lines = names
			for k, v := range got {
				speeds[ours][k] = append(speeds[ours][k], v)
			}
			most[ours] = max(most[ours], mib)
		}
	}
	for _, k := range lines {
		n, o := median(speeds[false][k]), median(speeds[true][k])
		pass, target := func() bool { return o >= 0.95*n }, "0.95 x native"
		if device == discreteID || strings.Contains(k, "Map") || strings.Contains(k, "Unmap") {
			// What stands for the card's own copying is done by the same two
			// processors; and where nothing is copied, a call is all there is.
			if device != gpuID {
				pass, target = nil, ""
			}
		}
		b.report.add(device+": "+k, "GB/s", n, o, target, pass)
	}
	pass, target := func() bool { return most[true] <= most[false]+windowMiB }, fmt.Sprintf("native + %d", windowMiB)
	if device == gpuID || device == discreteID { // a card's driver maps memory that counts as nobody's
		pass, target = nil, target+" + what is mapped"
	}
	b.report.add(device+": memory of "+filepath.Base(args[0])+" and executor, most", "MiB", most[false], most[true], target, pass)
	return nil
}

// measured runs a program and returns its output and the most memory, in MiB,
// that it and what hostd has started had at once beyond what hostd's had before.
func measured(cmd *exec.Cmd, hostd int) (out []byte, mib float64, err error) {
	before := residentMiB(hostd)
	var text, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &text, &errs
	if err := cmd.Start(); err != nil {
		return nil, 0, err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	var most float64
	for {
		select {
		case err := <-done:
			if err != nil {
				err = fmt.Errorf("%s: %w: %s", cmd.Path, err, strings.TrimSpace(errs.String()))
			}
			return text.Bytes(), most - before, err
		case <-time.After(50 * time.Millisecond):
			most = max(most, residentMiB(cmd.Process.Pid, hostd))
		}
	}
}

// residentMiB is the memory in MiB that process trees have in common: their own,
// and the shared memory of the one that has most of it, since all of a session
// have the same.
func residentMiB(roots ...int) float64 {
	children := map[int][]int{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, f := range stats {
		text, err := os.ReadFile(f)
		_, rest, ok := bytes.Cut(text, []byte(") "))
		fields := strings.Fields(string(rest))
		if err != nil || !ok || len(fields) < 2 {
			continue
		}
		pid, _ := strconv.Atoi(strings.Split(f, "/")[2])
		parent, _ := strconv.Atoi(fields[1])
		children[parent] = append(children[parent], pid)
	}
	var own, shared float64
	for todo := roots; len(todo) > 0; {
		pid := todo[0]
		todo = append(todo[1:len(todo):len(todo)], children[pid]...)
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		for line := range strings.Lines(string(text)) {
			name, value, _ := strings.Cut(line, ":")
			kib, _ := strconv.ParseFloat(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")), 64)
			switch name {
			case "RssAnon":
				own += kib / 1024
			case "RssShmem":
				shared = max(shared, kib/1024)
			}
		}
	}
	return own + shared
}
