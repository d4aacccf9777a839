package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// compute runs what keeps a card busy and hardly calls: where it differs from
// native, the kernels do.
func (b *bench) compute(ctx context.Context) error {
	r, err := b.start(ctx)
	if err != nil {
		return err
	}
	defer r.Close()
	// compare runs a program in turns and reports each figure that read finds.
	compare := func(name, unit string, target float64, read func([]byte) ([]string, map[string]float64), argv ...string) error {
		var names []string
		got := map[bool]map[string][]float64{false: {}, true: {}}
		err := b.pair(ctx, r, func(cmd *exec.Cmd, ours bool) error {
			if argv[0] == "hashcat" {
				cmd.Env = append(cmd.Env, "HOME="+filepath.Join(b.tmp, fmt.Sprint("hashcat", ours))) // where it keeps built kernels
			}
			out, err := output(cmd)
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			found, v := read(out)
			if len(found) == 0 {
				return fmt.Errorf("%w: %s", errNoFigures, out)
			}
			names = found
			for k, x := range v {
				got[ours][k] = append(got[ours][k], x)
			}
			return nil
		}, argv...)
		from := len(b.report.Figures)
		for _, k := range names {
			n, o := median(got[false][k]), median(got[true][k])
			b.report.add(name+k, unit, n, o, fmt.Sprintf("%g x native", target), func() bool { return o >= target*n })
		}
		for _, f := range b.report.Figures[from:] {
			fmt.Fprintf(b.out, "  %s: %s natively, %s through gpuctl\n", f.Name, short(f.Native), short(f.Ours))
		}
		return err
	}
	fmt.Fprintln(b.out, "  each takes seconds to minutes")
	var failed []error
	if _, err := exec.LookPath("clpeak"); err == nil {
		for _, t := range []struct{ flag, title, unit string }{
			{"--global-bandwidth", "Global memory bandwidth", "GB/s"},
			{"--compute-sp", "Single-precision compute", "GFLOP/s"},
			{"--compute-integer", "Integer compute (GIOPS)", "GIOP/s"},
		} {
			read := func(out []byte) ([]string, map[string]float64) { return tableOf(out, t.title) }
			failed = append(failed, compare("clpeak "+strings.ToLower(t.title)+", ", t.unit, 0.99, read, "clpeak", t.flag))
		}
	}
	if _, err := exec.LookPath("hashcat"); err == nil {
		// MD5, NTLM, SHA-256, SHA-512, a wireless network's PBKDF2, and bcrypt, whose
		// kernel shows how it was built. Processors take minutes to compile some.
		modes := []string{"0", "1000", "1400", "1700", "22000", "3200"}
		if b.device() != gpuID {
			modes = modes[:2]
		}
		if len(b.modes) > 0 {
			modes = b.modes
		}
		read := func(out []byte) ([]string, map[string]float64) {
			fmt.Fprintf(b.out, "  %s\n", speed.Find(out)) // the sizes that it chose belong to the figure
			return hashes(out)
		}
		for _, mode := range modes {
			failed = append(failed, compare("hashcat -m "+mode, "MH/s", 0.997, read,
				"hashcat", "-b", "-m", mode, "--force", "-D", "1,2", "--backend-ignore-cuda", "--quiet", "--session", fmt.Sprint("bench", os.Getpid())))
		}
	}
	return errors.Join(failed...)
}

// speed is what hashcat prints of its first device, as
// "Speed.#1.........:   379.7 MH/s (4.94ms) @ Accel:1024 Loops:1024 Thr:1 Vec:16".
var speed = regexp.MustCompile(`(?m)^Speed\.#1\.*: *([0-9.]+) ([kMGT]?)H/s.*$`)

// hashes reads hashcat's speed.
func hashes(out []byte) ([]string, map[string]float64) {
	m := speed.FindSubmatch(out)
	if m == nil {
		return nil, nil
	}
	v, err := strconv.ParseFloat(string(m[1]), 64)
	if err != nil {
		return nil, nil
	}
	unit := map[string]float64{"": 1e-6, "k": 1e-3, "M": 1, "G": 1e3, "T": 1e6}
	return []string{""}, map[string]float64{"": v * unit[string(m[2])]}
}

var errNoFigures = errors.New("no figures")

var figureLine = regexp.MustCompile(`^ +(\S.*?) *: *([0-9.]+)$`)

// tableOf reads the first device's table of clpeak with that title.
func tableOf(out []byte, title string) (names []string, v map[string]float64) {
	v = map[string]float64{}
	_, table, _ := strings.Cut(string(out), title)
	for line := range strings.Lines(table) {
		if m := figureLine.FindStringSubmatch(strings.TrimRight(line, "\n")); m != nil {
			f, err := strconv.ParseFloat(m[2], 64)
			if _, again := v[m[1]]; err != nil || again {
				break
			}
			names, v[m[1]] = append(names, m[1]), f
		}
	}
	return names, v
}
