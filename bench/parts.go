package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpuctl/gpuctl/test/rig"
)

const (
	gpuID   = "nvidia"
	otherID = "nvidia-other" // a second card
)

type bench struct {
	out                     io.Writer
	tmp, root, nvidia       string
	traces                  string // folder with the openb trace
	rounds, swaps, mib, gib int
	operations              int           // of chaos
	together                int           // programs of chaos at a time
	program                 string        // its arguments, if they are given
	seed                    uint64        // of chaos
	soak                    time.Duration // of hostile
	against                 []string      // the hostile clients of hostile, if not all
	card                    int           // the GPU of NVIDIA's that is measured, by its index
	modes                   []string      // hashcat's, if not all
	report                  report
	rigs                    int
	rounds1ms               int // of the part sharing: so many take 1 ms
}

func (b *bench) start(ctx context.Context) (*rig.Rig, error) {
	o, err := b.options()
	if err != nil {
		return nil, err
	}
	return rig.Start(ctx, o)
}

// options returns those of a rig with the GPUs that are measured.
func (b *bench) options() (rig.Options, error) {
	memory, err := rig.TestMemory()
	if err != nil {
		return rig.Options{}, err
	}
	gpus := []rig.GPU{{ID: discreteID, Library: filepath.Join(b.root, "test/cl/bin/gpushim.so"), Env: discreteEnv(), Model: "discrete", Rank: 1}}
	if b.nvidia != "" {
		gpus = []rig.GPU{b.nvidiaGPU(gpuID, b.card)}
		if other, ok := b.otherCard(); ok {
			gpus = append(gpus, b.nvidiaGPU(otherID, other))
		}
	}
	b.rigs++
	return rig.Options{Dir: filepath.Join(b.tmp, fmt.Sprint("r", b.rigs)), Config: rig.Config(b.root, memory, gpus...)}, nil
}

// nvidiaGPU is one of NVIDIA's GPUs.
func (b *bench) nvidiaGPU(id string, i int) rig.GPU {
	return rig.GPU{ID: id, Library: b.nvidia, Device: i, Model: "NVIDIA", Rank: 9}
}

// otherCard is a second GPU of NVIDIA's, if there is one.
func (b *bench) otherCard() (index int, ok bool) {
	cards, _ := filepath.Glob("/dev/nvidia[0-9]*")
	return (b.card + 1) % max(1, len(cards)), len(cards) > 1
}

// device is the GPU that calls and programs are measured on.
func (b *bench) device() string { return b.report.Device }

func (b *bench) native(gpu string) ([]string, error) {
	if gpu == discreteID {
		return rig.Vendor(filepath.Join(b.tmp, "native-discrete"), filepath.Join(b.root, "test/cl/bin/gpushim.so"), discreteEnv())
	}
	if gpu == gpuID {
		return rig.Vendor(filepath.Join(b.tmp, "native-nvidia"), b.nvidia, []string{fmt.Sprint("CUDA_VISIBLE_DEVICES=", b.card)})
	}
	return rig.Native(b.tmp, gpu)
}

// discreteEnv makes a card with memory of its own of PoCL.
func discreteEnv() []string {
	return []string{"GPUSHIM_MEMORY=discrete", "POCL_DEVICES=pthread", "POCL_MEMORY_LIMIT=4"}
}

// pair runs a program natively and through gpuctl in turns.
func (b *bench) pair(ctx context.Context, r *rig.Rig, run func(*exec.Cmd, bool) error, argv ...string) error {
	env, err := b.native(b.device())
	if err != nil {
		return err
	}
	for range b.rounds {
		cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
		cmd.Env = append(os.Environ(), env...)
		if err := run(cmd, false); err != nil {
			return fmt.Errorf("natively: %s: %w", argv[0], err)
		}
		if err := run(r.Command(ctx, b.device(), argv...), true); err != nil {
			return fmt.Errorf("through gpuctl: %s: %w", argv[0], err)
		}
	}
	return nil
}

// numbers runs a program that prints a JSON object natively and through gpuctl in turns. Its numbers are in got, by whether
// that was gpuctl and by name; names has the names in their order.
func (b *bench) numbers(ctx context.Context, program string, args ...string) (got map[bool]map[string][]float64, names []string, err error) {
	r, err := b.start(ctx)
	if err != nil {
		return nil, nil, err
	}
	defer r.Close()
	got = map[bool]map[string][]float64{false: {}, true: {}}
	err = b.pair(ctx, r, func(cmd *exec.Cmd, ours bool) error {
		text, err := output(cmd)
		if err != nil {
			return err
		}
		var v map[string]any
		if err := json.Unmarshal(text, &v); err != nil {
			return fmt.Errorf("%w: %s", err, text)
		}
		for k, x := range v {
			if f, ok := x.(float64); ok {
				got[ours][k] = append(got[ours][k], f)
			}
		}
		names = slices.SortedFunc(maps.Keys(v), func(x, y string) int {
			return cmp.Compare(bytes.Index(text, []byte(strconv.Quote(x))), bytes.Index(text, []byte(strconv.Quote(y))))
		})
		return nil
	}, append([]string{r.Program(program)}, args...)...)
	return got, names, err
}

// sequences measures common sequences of calls.
func (b *bench) sequences(ctx context.Context) error {
	got, names, err := b.numbers(ctx, "sequences")
	if err != nil {
		return err
	}
	logs := 0.0
	for _, name := range names {
		native, ours := median(got[false][name]), median(got[true][name])
		b.report.add(name+", p50", "µs", native, ours, "", nil)
		logs += math.Log(ours / native)
	}
	b.report.add("all, to native: geometric mean", "", 1, math.Exp(logs/float64(len(names))), "", nil)
	return nil
}

func (b *bench) calls(ctx context.Context) error {
	got, _, err := b.numbers(ctx, "clbench", "--mib", strconv.Itoa(b.mib))
	if err != nil {
		return err
	}
	n, o := func(k string) float64 { return median(got[false][k]) }, func(k string) float64 { return median(got[true][k]) }
	real := b.device() == gpuID
	limit := map[bool]float64{true: 2, false: 5}[real]
	b.report.add("null kernel + clFinish, p50", "µs", n("null_us_p50"), o("null_us_p50"), fmt.Sprintf("native + %.0f", limit), func() bool { return o("null_us_p50") <= n("null_us_p50")+limit })
	b.report.add("null kernel + clFinish, p99", "µs", n("null_us_p99"), o("null_us_p99"), "", nil)
	if real {
		b.report.add("pipelined null kernels", "1/s", n("pipelined_per_s"), o("pipelined_per_s"), "0.9 x native", func() bool { return o("pipelined_per_s") >= 0.9*n("pipelined_per_s") })
	} else {
		b.report.add("pipelined null kernels", "1/s", n("pipelined_per_s"), o("pipelined_per_s"), "500000", func() bool { return o("pipelined_per_s") >= 500e3 })
	}
	for _, k := range []string{"write", "read"} {
		b.report.add(fmt.Sprintf("blocking %s, %d MiB", k, b.mib), "GB/s", n(k+"_gbs"), o(k+"_gbs"), "0.9 x native", func() bool { return o(k+"_gbs") >= 0.9*n(k+"_gbs") })
	}
	target, near := "", (func() bool)(nil)
	if real {
		target, near = "clFinish + 150", func() bool { return o("callback_us_p50") <= o("takes_us_p50")+150 }
	}
	b.report.add("kernel of 0.3 ms until the callback of its end, p50", "µs", n("callback_us_p50"), o("callback_us_p50"), target, near)
	for _, k := range []string{"takes_us", "write4_us", "read4_us", "set_arg_us", "buffer_us"} {
		b.report.add(map[string]string{"takes_us": "kernel of 0.3 ms + clFinish, p50", "write4_us": "blocking write, 4 B, p50", "read4_us": "blocking read, 4 B, p50", "set_arg_us": "clSetKernelArg, p50", "buffer_us": "create and release a buffer, p50"}[k],
			"µs", n(k+"_p50"), o(k+"_p50"), "", nil)
	}
	b.report.add("build of a small program", "ms", n("build_ms"), o("build_ms"), "", nil)
	return nil
}

func (b *bench) programs(ctx context.Context) error {
	r, err := b.start(ctx)
	if err != nil {
		return err
	}
	defer r.Close()
	programs := [][]string{{r.Program("stream"), "--iterations", "40", "--mib", "4"}}
	if _, err := exec.LookPath("ffmpeg"); err == nil {
		clip := filepath.Join(b.tmp, "clip.y4m")
		if _, err := output(exec.CommandContext(ctx, "ffmpeg", "-v", "error", "-y", "-f", "lavfi", "-i", "testsrc2=size=640x360:rate=25", "-frames:v", "300", "-pix_fmt", "yuv420p", clip)); err != nil {
			return err
		}
		if _, err := exec.LookPath("x264"); err == nil {
			programs = append(programs, []string{"x264", "--opencl", "--opencl-clbin", filepath.Join(b.tmp, "x264.clbin"), "--quiet", "-o", os.DevNull, clip})
		}
		for _, filter := range []string{"unsharp_opencl", "erosion_opencl"} {
			programs = append(programs, []string{"ffmpeg", "-v", "error", "-y", "-init_hw_device", "opencl=gpu:0.0", "-filter_hw_device", "gpu", "-i", clip, "-vf", "format=yuv420p,hwupload," + filter + ",hwdownload,format=yuv420p", "-f", "null", "-"})
		}
	}
	for _, t := range []string{"clblast_test_xaxpy", "clblast_test_xgemv", "clblast_test_xgemm"} {
		if _, err := exec.LookPath(t); err == nil {
			programs = append(programs, []string{t})
		}
	}
	product, count := 1.0, 0
	for _, argv := range programs {
		times := map[bool][]float64{}
		first := map[bool]bool{}
		round := func(cmd *exec.Cmd, ours bool) error {
			if argv[0] == "x264" && !ours && b.device() != gpuID { // it takes GPUs only
				env, err := rig.Vendor(filepath.Join(b.tmp, "shim"), filepath.Join(b.root, "test/cl/bin/gpushim.so"), nil)
				if err != nil {
					return err
				}
				cmd.Env = append(cmd.Env, env...)
			}
			if argv[0] == "x264" { // each side has its own cache: the devices differ
				cmd.Args = slices.Clone(cmd.Args)
				for i, a := range cmd.Args {
					if strings.HasSuffix(a, "x264.clbin") {
						cmd.Args[i] = fmt.Sprint(a, ours)
					}
				}
			}
			if !first[ours] { // compilers' caches are warm on both sides
				first[ours] = true
				warm := exec.CommandContext(ctx, cmd.Args[0], cmd.Args[1:]...)
				warm.Env = cmd.Env
				if _, err := output(warm); err != nil {
					return err
				}
			}
			begin := time.Now()
			_, err := output(cmd)
			times[ours] = append(times[ours], time.Since(begin).Seconds())
			return err
		}
		if err := b.pair(ctx, r, round, argv...); err != nil {
			return err
		}
		name := filepath.Base(argv[0])
		if i := slices.Index(argv, "-vf"); i > 0 {
			name += " " + strings.Split(argv[i+1], ",")[2]
		}
		n, o := median(times[false]), median(times[true])
		b.report.add(name, "s", n, o, "", nil)
		product *= o / n
		count++
	}
	mean := math.Pow(product, 1/float64(count))
	b.report.add(fmt.Sprintf("geometric mean of %d", count), "x", 1, mean, "1.01", func() bool { return mean <= 1.01 })
	return nil
}

// piped starts a program that is talked to. What it writes to standard error is in
// errs once it has been waited for.
func piped(cmd *exec.Cmd) (stdin io.WriteCloser, lines *bufio.Reader, errs *bytes.Buffer, err error) {
	if stdin, err = cmd.StdinPipe(); err != nil {
		return nil, nil, nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, nil, nil, err
	}
	errs = new(bytes.Buffer)
	cmd.Stderr = errs
	return stdin, bufio.NewReader(stdout), errs, cmd.Start()
}

// live starts a program and waits for a line that contains the text.
func live(cmd *exec.Cmd, text string) (stdin io.WriteCloser, wait func() (string, error), err error) {
	stdin, lines, errs, err := piped(cmd)
	if err != nil {
		return nil, nil, err
	}
	for {
		line, err := lines.ReadString('\n')
		if strings.Contains(line, text) {
			break
		}
		if err != nil {
			_ = cmd.Wait()
			return nil, nil, fmt.Errorf("%s ended early: %s", cmd.Path, errs.String())
		}
	}
	last := make(chan string, 1)
	go func() {
		var line string
		for {
			l, err := lines.ReadString('\n')
			if l != "" {
				line = l
			}
			if err != nil {
				last <- line
				return
			}
		}
	}()
	return stdin, func() (string, error) {
		line := <-last
		if err := cmd.Wait(); err != nil {
			return line, fmt.Errorf("%w: %s", err, errs.String())
		}
		return strings.TrimSpace(line), nil
	}, nil
}

var checksum = regexp.MustCompile(`^checksum (\d+) ([0-9a-f]+)$`)

// stillness swaps a running stream between two GPUs and compares its checksum with an unswapped run's.
func (b *bench) stillness(ctx context.Context, r *rig.Rig, swaps int, gpus [2]string, args ...string) ([]rig.Swap, error) {
	cmd := r.Command(ctx, gpus[0], append([]string{r.Program("stream"), "--verbose", "--stdin"}, args...)...)
	stdin, wait, err := live(cmd, "iteration 2 ")
	if err != nil {
		return nil, err
	}
	id, err := r.Session(ctx)
	if err != nil {
		return nil, err
	}
	var results []rig.Swap
	for i := range swaps {
		s, err := r.Operate(ctx, "migrate", id, "--to", gpus[(i+1)%2])
		if err != nil {
			return results, err
		}
		results = append(results, s)
	}
	_ = stdin.Close()
	line, err := wait()
	if err != nil {
		return results, err
	}
	m := checksum.FindStringSubmatch(line)
	if m == nil {
		return results, fmt.Errorf("no checksum: %q", line)
	}
	env, err := b.native(gpus[0])
	if err != nil {
		return results, err
	}
	same := exec.CommandContext(ctx, r.Program("stream"), append([]string{"--iterations", m[1]}, args...)...)
	same.Env = append(os.Environ(), env...)
	text, err := output(same)
	if err != nil {
		return results, err
	}
	equal := strings.TrimSpace(string(text)) == line
	b.report.add("result bit-identical to an unswapped native run", "", 0, map[bool]float64{true: 1}[equal], "1", func() bool { return equal })
	return results, nil
}

func (b *bench) swap(ctx context.Context) error {
	r, err := b.start(ctx)
	if err != nil {
		return err
	}
	defer r.Close()
	results, err := b.stillness(ctx, r, b.swaps, [2]string{rig.Basic, rig.Pthread}, "--mib", "8", "--buffers", "8")
	b.stops("time stood still, 64 MiB", results, 50)
	return err
}

func (b *bench) stops(name string, swaps []rig.Swap, limit float64) {
	var ms, total []float64
	for _, s := range swaps {
		ms = append(ms, float64(s.Stopped)/1e6)
		total = append(total, float64(s.Total)/1e6)
	}
	if len(ms) == 0 {
		return
	}
	b.report.add(name+", p50", "ms", 0, median(ms), fmt.Sprint(limit), func() bool { return median(ms) <= limit })
	b.report.add(name+", p99", "ms", 0, quantile(ms, 0.99), "", nil)
	b.report.add(name+", max", "ms", 0, slices.Max(ms), "", nil)
	b.report.add("whole swap, p50", "ms", 0, median(total), "", nil)
}

func (b *bench) suspend(ctx context.Context) error {
	r, err := b.start(ctx)
	if err != nil {
		return err
	}
	defer r.Close()
	return b.suspendOn(ctx, r, rig.Pthread, 0, "--mib", "8", "--buffers", "8")
}

// suspendOn suspends to memory and resumes; limit in ms for both without the start-up of the new executor, 0 for none.
func (b *bench) suspendOn(ctx context.Context, r *rig.Rig, gpu string, limit float64, args ...string) error {
	_, wait, err := live(r.Command(ctx, gpu, append([]string{r.Program("stream"), "--verbose", "--seconds", "8"}, args...)...), "iteration 2 ")
	if err != nil {
		return err
	}
	id, err := r.Session(ctx)
	if err != nil {
		return err
	}
	s, err := r.Operate(ctx, "suspend", id)
	if err != nil {
		return err
	}
	u, err := r.Operate(ctx, "resume", id, "--to", gpu)
	if err != nil {
		return err
	}
	startup := u.Steps["start"] + u.Steps["check"]
	sum := float64(s.Total+u.Total-startup) / 1e6
	b.report.add("suspend to host memory", "ms", 0, float64(s.Total)/1e6, "", nil)
	b.report.add("resume", "ms", 0, float64(u.Total)/1e6, "", nil)
	var pass func() bool
	target := ""
	if limit > 0 {
		target, pass = fmt.Sprint(limit), func() bool { return sum <= limit }
	}
	b.report.add("both, beside the resume's start-up", "ms", 0, sum, target, pass)
	_, err = wait()
	return err
}

func (b *bench) replay(ctx context.Context) error {
	r, err := b.start(ctx)
	if err != nil {
		return err
	}
	defer r.Close()
	stdin, wait, err := live(r.Command(ctx, rig.Basic, r.Program("replay"), "--mib", "4"), "ready:")
	if err != nil {
		return err
	}
	id, err := r.Session(ctx)
	if err != nil {
		return err
	}
	var ms, stop []float64
	for i := range 6 {
		s, err := r.Operate(ctx, "migrate", id, "--to", []string{rig.Pthread, rig.Basic}[i%2])
		if err != nil {
			return err
		}
		ms = append(ms, float64(s.Steps["prepare"])/1e6)
		stop = append(stop, float64(s.Stopped)/1e6)
	}
	b.report.add("time stood still, p50", "ms", 0, median(stop), "20", func() bool { return median(stop) <= 20 })
	b.report.add("prepare (objects made anew, programs built), p50", "ms", 0, median(ms), "", nil)
	_ = stdin.Close()
	line, err := wait()
	if err == nil && line != "ok" {
		err = fmt.Errorf("the program says %q", line)
	}
	return err
}

func (b *bench) footprint(ctx context.Context) error {
	r, err := b.start(ctx)
	if err != nil {
		return err
	}
	defer r.Close()
	got := map[bool][]float64{}
	err = b.pair(ctx, r, func(cmd *exec.Cmd, ours bool) error {
		text, err := output(cmd)
		if err != nil {
			return err
		}
		var v struct {
			Added float64 `json:"added_kib"`
		}
		if err := json.Unmarshal(text, &v); err != nil {
			return fmt.Errorf("%w: %s", err, text)
		}
		got[ours] = append(got[ours], v.Added)
		return nil
	}, r.Program("footprint"))
	if err != nil {
		return err
	}
	ours := median(got[true])
	b.report.add("memory added, without the shared arena", "KiB", median(got[false]), ours, "4096", func() bool { return ours <= 4096 })
	return nil
}

// gpu is what only a real GPU can show.
func (b *bench) gpu(ctx context.Context) error {
	r, err := b.start(ctx)
	if err != nil {
		return err
	}
	defer r.Close()
	big := []string{"--mib", "1024", "--buffers", strconv.Itoa(b.gib)}
	few := []string{"--mib", "256", "--buffers", strconv.Itoa(2 * b.gib), "--write-percent", "5"}
	results, err := b.stillness(ctx, r, 3, [2]string{gpuID, gpuID}, big...)
	b.stops(fmt.Sprintf("%d GiB, same GPU", b.gib), results, 600)
	if err != nil {
		return err
	}
	results, err = b.stillness(ctx, r, 5, [2]string{gpuID, gpuID}, few...)
	b.stops(fmt.Sprintf("%d GiB, 5 %% written", b.gib/2), results, 50)
	if err != nil {
		return err
	}
	if _, ok := b.otherCard(); ok {
		results, err = b.stillness(ctx, r, 4, [2]string{gpuID, otherID}, big...)
		b.stops(fmt.Sprintf("%d GiB, from one GPU to another", b.gib), results, 600)
		if err != nil {
			return err
		}
	}
	if err := b.suspendOn(ctx, r, gpuID, 1000, big...); err != nil {
		return err
	}
	results, err = b.stillness(ctx, r, 4, [2]string{gpuID, rig.Pthread}, "--mib", "8", "--buffers", "8")
	b.stops("NVIDIA and PoCL, 64 MiB", results, 50)
	return err
}

func output(cmd *exec.Cmd) ([]byte, error) {
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		text := errs.String()
		if len(text) > 2000 {
			text = text[len(text)-2000:]
		}
		return out, fmt.Errorf("%w: %s", err, strings.TrimSpace(text))
	}
	return out, nil
}
