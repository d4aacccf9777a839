package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/gpuctl/gpuctl/test/hostile"
	"github.com/gpuctl/gpuctl/test/rig"
)

// figure is one line of the tables.
type figure struct {
	Name   string  `json:"name"`
	Unit   string  `json:"unit"`
	Native float64 `json:"native,omitempty"`
	Ours   float64 `json:"gpuctl"`
	Ratio  float64 `json:"ratio,omitempty"` // ours to native
	Target string  `json:"target,omitempty"`
	Pass   *bool   `json:"pass,omitempty"` // nil: no target on this machine
}

type report struct {
	Time    time.Time `json:"time"`
	Machine string    `json:"machine"`
	Command []string  `json:"command"`
	Device  string    `json:"device"`
	Disk    string    `json:"disk,omitempty"` // file system of the cluster's data
	Figures []figure  `json:"figures"`
	Errors  []string  `json:"errors,omitempty"`
}

func (r *report) add(name, unit string, native, ours float64, target string, pass func() bool) {
	f := figure{Name: name, Unit: unit, Native: native, Ours: ours, Target: target}
	if native != 0 {
		f.Ratio = ours / native
	}
	if pass != nil {
		ok := pass()
		f.Pass = &ok
	}
	r.Figures = append(r.Figures, f)
}

func main() {
	hostile.Main() // in a process that this program starts
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	rounds := fs.Int("rounds", 5, "alternations of native and gpuctl")
	swaps := fs.Int("swaps", 20, "swaps for the stand-still figures")
	mib := fs.Int("mib", 256, "size of the bulk transfers, MiB")
	gib := fs.Int("gib", 16, "state of the big swaps on a real GPU, GiB")
	only := fs.String("only", "", "run only the parts that `NAMES`, with commas between, say: calls, sequences, transfers, compute, programs, swap, suspend, replay, remote, moved, footprint, sharing, cluster, inventory, mmio, gpu, chaos, hostile (the last only if it is named)")
	operations := fs.Int("operations", 200, "operations of the part chaos, of which 30 % are to fail and 10 % are killed")
	together := fs.Int("together", 1, "programs at a time of the part chaos")
	program := fs.String("program", "", "`arguments` of the program of the part chaos, instead of those of four kinds in turns")
	seed := fs.Uint64("seed", uint64(time.Now().Unix()), "of the part chaos")
	soak := fs.Duration("soak", 10*time.Minute, "how long the hostile clients of the part hostile are at work")
	against := fs.String("against", "", "the hostile clients of the part hostile, with commas between: applications, programs, local, port (default: all)")
	card := fs.Int("card", 0, "`index` of the GPU of NVIDIA's that is measured")
	modes := fs.String("modes", "", "`modes` of hashcat that the part compute runs, with commas between (default: six)")
	nvidia := fs.String("nvidia", "", "NVIDIA's OpenCL `library` (default: found in /etc/OpenCL/vendors)")
	traces := fs.String("traces", "", "`folder` with the openb trace, for the inventory part")
	dir := fs.String("out", "bench/out", "`folder` of the JSON file")
	if err := fs.Parse(args); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp("", "gb")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	if err := os.Chmod(tmp, 0o711); err != nil { // the users of executors pass through it
		return err
	}
	b := &bench{out: out, tmp: tmp, rounds: *rounds, swaps: *swaps, mib: *mib, gib: *gib, operations: *operations, together: *together, program: *program, seed: *seed, soak: *soak, against: list(*against), card: *card, modes: list(*modes), nvidia: *nvidia, traces: *traces}
	if b.nvidia == "" {
		b.nvidia = findNVIDIA()
	}
	if b.root, err = rig.Root(); err != nil {
		return err
	}
	b.report = report{Time: time.Now().UTC(), Machine: machine(), Command: os.Args, Device: rig.Pthread}
	if b.nvidia != "" {
		b.report.Device = gpuID
	}
	parts := []struct {
		name, title string
		run         func(context.Context) error
	}{
		{"calls", "Costs of single calls", b.calls},
		{"sequences", "Common sequences of calls", b.sequences},
		{"transfers", "Transfers of clpeak", b.transfers},
		{"compute", "Kernels of clpeak and hashcat", b.compute},
		{"programs", "Whole programs", b.programs},
		{"swap", "Swap, PoCL basic to PoCL pthread and back, 64 MiB live", b.swap},
		{"suspend", "Suspend and resume, 64 MiB", b.suspend},
		{"replay", "Replay after a million calls, 1000 live objects", b.replay},
		{"remote", "GPUs behind a carrier, over loopback", b.remote},
		{"moved", "A run that moves from a remote GPU to a local one", b.moved},
		{"footprint", "Memory that the library adds", b.footprint},
		{"sharing", "Owners that share a GPU", b.sharing},
		{"cluster", "Three hosts on this machine", b.cluster},
		{"inventory", "Inventory of 10 000 hosts with 8 GPUs each, and the openb cluster", b.inventory},
		{"mmio", "Mediated GPU, in process", b.mmio},
		{"gpu", "Real GPU", b.gpu},
		{"chaos", "Right results under failing swaps", b.chaos},
		{"hostile", "Honest clients beside hostile ones", b.hostile},
	}
	for _, p := range parts {
		if *only != "" && !slices.Contains(strings.Split(*only, ","), p.name) || p.name == "gpu" && b.nvidia == "" || p.name == "hostile" && *only == "" {
			continue
		}
		fmt.Fprintf(out, "\n%s\n", p.title)
		from := len(b.report.Figures)
		if err := p.run(ctx); err != nil {
			fmt.Fprintf(out, "  failed: %v\n", err)
			b.report.Errors = append(b.report.Errors, p.name+": "+err.Error())
		}
		table(out, b.report.Figures[from:])
		if p.name == "hostile" {
			for _, f := range b.report.Figures[from:] {
				if f.Pass != nil && !*f.Pass {
					b.report.Errors = append(b.report.Errors, p.name+": missed: "+f.Name)
				}
			}
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	if err := os.MkdirAll(*dir, 0o755); err != nil {
		return err
	}
	data, err := json.MarshalIndent(b.report, "", "  ")
	if err != nil {
		return err
	}
	file := filepath.Join(*dir, "bench-"+b.report.Time.Format("20060102T150405Z")+".json")
	if err := os.WriteFile(file, append(data, '\n'), 0o644); err != nil {
		return err
	}
	fmt.Fprintf(out, "\nwritten to %s\n", file)
	if n := len(b.report.Errors); n > 0 {
		return fmt.Errorf("%d parts failed: %s", n, strings.Join(b.report.Errors, "; "))
	}
	return nil
}

func table(out io.Writer, figures []figure) {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "  figure\tnative\tgpuctl\tunit\tratio\ttarget\t")
	for _, f := range figures {
		native, ratio, verdict := "-", "-", ""
		if f.Native != 0 {
			native, ratio = short(f.Native), fmt.Sprintf("%.3f", f.Ratio)
		}
		if f.Pass != nil {
			verdict = map[bool]string{true: "pass", false: "MISS"}[*f.Pass]
		}
		fmt.Fprintf(w, "  %s\t%s\t%s\t%s\t%s\t%s\t%s\n", f.Name, native, short(f.Ours), f.Unit, ratio, f.Target, verdict)
	}
	_ = w.Flush()
}

func short(v float64) string {
	switch {
	case v >= 1000:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.3f", v)
}

func quantile(v []float64, q float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	s := slices.Sorted(slices.Values(v))
	return s[min(len(s)-1, int(q*float64(len(s))))]
}

func mean(v []float64) float64 {
	sum := 0.0
	for _, x := range v {
		sum += x
	}
	return sum / float64(len(v))
}

func median(v []float64) float64 { return quantile(v, 0.5) }

func machine() string {
	cpu := "unknown CPU"
	text, _ := os.ReadFile("/proc/cpuinfo")
	cores := 0
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			cpu = strings.TrimSpace(value)
			cores++
		}
	}
	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	return fmt.Sprintf("%d x %s, Linux %s", cores, cpu, strings.TrimSpace(string(kernel)))
}

// list splits what commas separate.
func list(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool { return r == ',' })
}

func findNVIDIA() string {
	files, _ := filepath.Glob("/etc/OpenCL/vendors/*.icd")
	for _, f := range files {
		if text, err := os.ReadFile(f); err == nil && strings.Contains(string(text), "nvidia") {
			return strings.TrimSpace(string(text))
		}
	}
	return ""
}
