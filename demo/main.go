package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/demo/timeline"
	"github.com/gpuctl/gpuctl/test/rig"
)

// The two models of one vendor. One compute unit each: with more, x264's
// output differs from run to run on these devices by itself.
const config = `version: 1
discover: false
virtualDevice:
  name: gpuctl virtual GPU
  type: gpu
gpus:
  - id: small
    runtime: pocl
    env: {POCL_DEVICES: pthread, POCL_MAX_PTHREAD_COUNT: "1", POCL_MEMORY_LIMIT: "1"}
    model: PoCL 1 GiB
  - id: large
    runtime: pocl
    env: {POCL_DEVICES: pthread, POCL_MAX_PTHREAD_COUNT: "1", POCL_MEMORY_LIMIT: "4"}
    model: PoCL 4 GiB
  - id: other-vendor
    library: ` + rig.OclgrindLibrary + `
    model: Oclgrind 128 MiB
models:
  - {name: PoCL 4 GiB, rank: 3}
  - {name: PoCL 1 GiB, rank: 2}
  - {name: Oclgrind 128 MiB, rank: 1}
`

var errDiffers = errors.New("the results differ")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "demo failed:", err)
		os.Exit(1)
	}
}

type demo struct {
	out    io.Writer
	dir    string // for what we make
	frames int
	rig    *rig.Rig
}

func run(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("demo", flag.ContinueOnError)
	dir := fs.String("dir", ".demo", "`folder` for the clip, the results and the timeline")
	frames := fs.Int("frames", 600, "length of the clip")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if err := os.MkdirAll(*dir, 0o755); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp("", "gd")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	d := &demo{out: out, dir: *dir, frames: *frames}
	begin := time.Now()
	d.heading("1. A host with three GPU models",
		"hostd finds OpenCL runtimes and takes each device for a GPU. Here they are three CPU\n"+
			"runtimes of two vendors, set up as different models; real GPUs work the same way.")
	if d.rig, err = rig.Start(ctx, rig.Options{Dir: tmp, Config: config}); err != nil {
		return err
	}
	defer d.rig.Close()
	table, err := d.gpuctl(ctx, "inventory")
	if err != nil {
		return err
	}
	fmt.Fprint(out, indent(table))
	same, err := d.encoder(ctx)
	if err != nil {
		return err
	}
	crossed, err := d.vendors(ctx)
	if err != nil {
		return err
	}
	d.heading("Verdict", "")
	fmt.Fprintf(out, "  x264, downgraded and upgraded:        %s\n", verdict(same))
	fmt.Fprintf(out, "  stream, PoCL to Oclgrind to PoCL:     %s\n", verdict(crossed))
	fmt.Fprintf(out, "  the whole demo took %.0f s\n", time.Since(begin).Seconds())
	if !same || !crossed {
		return errDiffers
	}
	return nil
}

func verdict(same bool) string {
	if same {
		return "bit-identical to the undisturbed run"
	}
	return "DIFFERENT from the undisturbed run"
}

func (d *demo) heading(title, text string) {
	fmt.Fprintf(d.out, "\n%s\n%s\n", title, strings.Repeat("─", len([]rune(title))))
	if text != "" {
		fmt.Fprintln(d.out, text)
	}
}

func indent(text []byte) string {
	return "  " + strings.ReplaceAll(strings.TrimRight(string(text), "\n"), "\n", "\n  ") + "\n"
}

// gpuctl runs a command as the user would type it, and shows it.
func (d *demo) gpuctl(ctx context.Context, args ...string) ([]byte, error) {
	fmt.Fprintf(d.out, "  $ gpuctl %s\n", strings.Join(args, " "))
	return d.rig.Gpuctl(ctx, args...)
}

// operate shows the command and runs it for its figures.
func (d *demo) operate(ctx context.Context, verb string, args ...string) (rig.Swap, error) {
	fmt.Fprintf(d.out, "  $ gpuctl %s %s\n", verb, strings.Join(args, " "))
	s, err := d.rig.Operate(ctx, verb, args...)
	if err == nil && (s.RolledBack || s.Refused) {
		err = fmt.Errorf("%s: %s", verb, s.Error)
	}
	if err == nil {
		fmt.Fprintf(d.out, "    downtime %.1f ms of %.0f ms\n", ms(s.Stopped), ms(s.Total))
	}
	return s, err
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func (d *demo) encoder(ctx context.Context) (bool, error) {
	d.heading("2. x264 encodes a clip, undisturbed",
		"The encoder from Debian, unmodified, with its --opencl lookahead on the larger model.")
	clip := filepath.Join(d.dir, "clip.y4m")
	gen := exec.CommandContext(ctx, "ffmpeg", "-v", "error", "-y", "-f", "lavfi", "-i", "testsrc2=size=640x360:rate=25",
		"-frames:v", strconv.Itoa(d.frames), "-pix_fmt", "yuv420p", clip)
	if text, err := gen.CombinedOutput(); err != nil {
		return false, fmt.Errorf("ffmpeg: %w: %s", err, text)
	}
	plain, swapped := filepath.Join(d.dir, "undisturbed.264"), filepath.Join(d.dir, "swapped.264")
	// The first run also compiles the kernels; the cache file keeps them.
	if _, err := d.encode(ctx, clip, plain, nil); err != nil {
		return false, err
	}
	d.heading("3. The same, with the GPU exchanged twice",
		"A third of the way the GPU is downgraded, at two thirds it is upgraded back.")
	tl, err := d.encode(ctx, clip, swapped, []change{{1.0 / 3, "downgrade", "small"}, {2.0 / 3, "upgrade", "large"}})
	if err != nil {
		return false, err
	}
	fmt.Fprintln(d.out)
	tl.Draw(d.out, "frames")
	svg := filepath.Join(d.dir, "timeline.svg")
	if err := os.WriteFile(svg, tl.SVG("x264 --opencl: frames per second while the GPU is exchanged"), 0o644); err != nil {
		return false, err
	}
	fmt.Fprintf(d.out, "  the same as a drawing: %s\n", svg)
	a, err := digest(plain)
	if err != nil {
		return false, err
	}
	b, err := digest(swapped)
	if err != nil {
		return false, err
	}
	fmt.Fprintf(d.out, "  undisturbed  sha256 %s\n  swapped      sha256 %s\n", a, b)
	return a == b, nil
}

func digest(file string) (string, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%x", sha256.Sum256(data)), nil
}

// change is a verb to run when a part of the clip is done.
type change struct {
	at   float64
	verb string
	to   string
}

// encode runs x264 below gpuctl. The clip goes through a pipe, frame by frame,
// so that the frames taken can be counted.
func (d *demo) encode(ctx context.Context, clip, out string, changes []change) (*timeline.Timeline, error) {
	ctx, cancel := context.WithTimeout(ctx, 150*time.Second)
	defer cancel()
	f, err := os.Open(clip)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	cmd := d.rig.Command(ctx, "large", "x264", "--opencl", "--opencl-clbin", filepath.Join(d.dir, "x264.clbin"), "--threads", "1", "--lookahead-threads", "1",
		"--demuxer", "y4m", "--no-progress", "-o", out, "-")
	var text bytes.Buffer
	cmd.Stdout, cmd.Stderr = &text, &text
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	tl := timeline.New()
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	fed := make(chan error, 1)
	feedCtx, done := context.WithCancel(ctx)
	defer done()
	go func() { fed <- feed(f, stdin, tl); done() }()
	changed := d.exchange(feedCtx, tl, changes)
	err = cmd.Wait()
	if feedErr := <-fed; err == nil {
		err = feedErr
	}
	if err != nil {
		return nil, fmt.Errorf("x264: %w: %s", err, text.String())
	}
	if changed != nil {
		return nil, changed
	}
	if !strings.Contains(text.String(), "OpenCL acceleration enabled") {
		return nil, fmt.Errorf("x264 does not use the GPU: %s", text.String())
	}
	tl.Finish()
	fmt.Fprintf(d.out, "  %d frames in %.1f s, %.0f frames/s\n", tl.Count(), tl.Length().Seconds(), float64(tl.Count())/tl.Length().Seconds())
	return tl, nil
}

func (d *demo) exchange(ctx context.Context, tl *timeline.Timeline, changes []change) error {
	for _, c := range changes {
		for tl.Count() < int(c.at*float64(d.frames)) {
			select {
			case <-ctx.Done():
				return fmt.Errorf("%s: the clip ended at frame %d: %w", c.verb, tl.Count(), ctx.Err())
			case <-time.After(10 * time.Millisecond):
			}
		}
		id, err := d.rig.Session(ctx)
		if err != nil {
			return err
		}
		from := tl.Now()
		s, err := d.operate(ctx, c.verb, id, "--to", c.to)
		if err != nil {
			return err
		}
		tl.Mark(timeline.Band{From: from, To: tl.Now(), Stopped: s.Stopped, Verb: c.verb})
	}
	return nil
}

// feed writes the clip and notes every frame.
func feed(f io.Reader, w io.WriteCloser, tl *timeline.Timeline) error {
	defer w.Close()
	r := bufio.NewReaderSize(f, 1<<20)
	header, err := r.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("clip: %w", err)
	}
	m := regexp.MustCompile(` W(\d+) H(\d+)`).FindSubmatch(header)
	if m == nil {
		return fmt.Errorf("clip: no size in %q", header)
	}
	width, _ := strconv.Atoi(string(m[1]))
	height, _ := strconv.Atoi(string(m[2]))
	if _, err := w.Write(header); err != nil {
		return fmt.Errorf("x264: %w", err)
	}
	for {
		line, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("clip: %w", err)
		}
		if _, err := w.Write(line); err != nil {
			return fmt.Errorf("x264: %w", err)
		}
		if _, err := io.CopyN(w, r, int64(width*height*3/2)); err != nil {
			return fmt.Errorf("x264: %w", err)
		}
		tl.Frame()
	}
}

var checksum = regexp.MustCompile(`checksum \d+ [0-9a-f]{16}`)

func (d *demo) vendors(ctx context.Context) (bool, error) {
	d.heading("4. From one vendor's runtime to another's, and back",
		"A program of integer kernels, atomics and images starts on PoCL, goes on with Oclgrind (another\n"+
			"compiler, another binary format, an interpreter) and ends on PoCL.")
	args := []string{"--kib", "32", "--buffers", "2", "--images", "--verbose"}
	program := append([]string{d.rig.Program("stream")}, args...)
	ctx, cancel := context.WithTimeout(ctx, 100*time.Second)
	defer cancel()
	cmd := d.rig.Command(ctx, "large", append(program, "--stdin")...)
	stdin, err := cmd.StdinPipe() // its end ends the program
	if err != nil {
		return false, err
	}
	text := &lines{}
	cmd.Stdout, cmd.Stderr = text, text
	if err := cmd.Start(); err != nil {
		return false, err
	}
	changed := func() error {
		for _, step := range []struct {
			after int
			to    string
		}{{1, "other-vendor"}, {3, "large"}} {
			base := text.count()
			for text.count() < base+step.after {
				select {
				case <-ctx.Done():
					return ctx.Err()
				case <-time.After(2 * time.Millisecond):
				}
			}
			id, err := d.rig.Session(ctx)
			if err != nil {
				return err
			}
			if _, err := d.operate(ctx, "migrate", id, "--to", step.to); err != nil {
				return err
			}
		}
		return nil
	}()
	_ = stdin.Close()
	if err := cmd.Wait(); err != nil {
		return false, errors.Join(fmt.Errorf("stream: %w: %s", err, text.String()), changed)
	}
	if changed != nil {
		return false, changed
	}
	got := checksum.FindString(text.String())
	if got == "" {
		return false, fmt.Errorf("stream: no checksum in its output: %s", text.String())
	}
	out, err := d.rig.Command(ctx, "large", append(program, "--iterations", strings.Fields(got)[1])...).CombinedOutput()
	if err != nil {
		return false, fmt.Errorf("stream: %w: %s", err, out)
	}
	want := checksum.Find(out)
	fmt.Fprintf(d.out, "  undisturbed  %s\n  swapped      %s\n", want, got)
	return got == string(want) && got != "", nil
}

// lines collects a program's output.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// count is the number of iterations done.
func (l *lines) count() int { return strings.Count(l.String(), "iteration ") }
