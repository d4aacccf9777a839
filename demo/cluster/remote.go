package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	away     = 5 * time.Second       // how long the application computes on the other host
	home     = 5 * time.Second       // and how long on its own afterwards
	patience = 30 * time.Minute      // building x264's programs takes ten of them where much else runs, on each GPU
	width    = 72                    // columns of the timeline
	frame    = 20 * time.Millisecond // least time from one frame of the video to the next
)

// work is a program whose result depends on its input alone.
type work struct {
	command []string
	output  string         // file with its result; empty: what it prints
	result  *regexp.Regexp // of what it prints
	tick    string         // begins each sign of life that it prints; empty: it is what it reads
	gpu     string         // says in what it prints that it uses the GPU
	// feed writes the program's input until more returns false.
	feed func(w io.Writer, more func() bool) error
	// again returns the command that does the same in one go.
	again func(result string) []string
}

// stream is this repository's own test program. It ends when its input does.
func stream(program string) work {
	sum := regexp.MustCompile(`checksum (\d+) [0-9a-f]+`)
	return work{
		command: []string{program, "--kib", "256", "--stdin", "--verbose"}, result: sum, tick: "iteration ",
		again: func(result string) []string {
			return []string{program, "--kib", "256", "--iterations", sum.FindStringSubmatch(result)[1]}
		},
	}
}

// x264 encodes a video that it reads frame by frame.
func x264(program, dir string) work {
	out := filepath.Join(dir, "out.264")
	w := work{output: out, gpu: "OpenCL acceleration enabled", feed: video}
	w.command = []string{
		program, "--opencl", "--opencl-clbin", filepath.Join(dir, "x264.clbin"), "--threads", "1", "--lookahead-threads", "1",
		"--demuxer", "y4m", "--no-progress", "-o", out, "-",
	}
	w.again = func(string) []string { return w.command }
	return w
}

// video writes frames of moving noise (YUV4MPEG2, 4:2:0).
func video(w io.Writer, more func() bool) error {
	const wide, high, size = 320, 240, 320 * 240 * 3 / 2
	if _, err := fmt.Fprintf(w, "YUV4MPEG2 W%d H%d F25:1 Ip A1:1 C420jpeg\n", wide, high); err != nil {
		return err
	}
	rng := rand.New(rand.NewPCG(1, 1)) //nolint:gosec // the same video each time
	noise := make([]byte, 3*size)
	for i := range noise {
		noise[i] = byte(i/7) ^ byte(rng.UintN(32))
	}
	for n := 0; more(); n++ {
		time.Sleep(frame)
		at := n * wide / 4 % (2 * size)
		if _, err := w.Write(append([]byte("FRAME\n"), noise[at:at+size]...)); err != nil {
			return err
		}
	}
	return nil
}

// pulse is when the application gave signs of life.
type pulse struct {
	start time.Time

	mu    sync.Mutex
	beats []time.Duration
	marks []mark
	all   strings.Builder
}

type mark struct {
	at   time.Duration
	what string
}

func (p *pulse) mark(what string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.marks = append(p.marks, mark{time.Since(p.start), what})
}

func (p *pulse) beat() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.beats = append(p.beats, time.Since(p.start))
}

func (p *pulse) printed() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.all.String()
}

func (p *pulse) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.beats)
}

// read follows what the application prints.
func (p *pulse) read(r io.Reader, tick string) {
	for lines := bufio.NewScanner(r); lines.Scan(); {
		if tick != "" && strings.HasPrefix(lines.Text(), tick) {
			p.beat()
			continue
		}
		p.mu.Lock()
		p.all.WriteString(lines.Text() + "\n")
		p.mu.Unlock()
	}
}

// draw writes the rate of the signs of life over time, and what happened when.
func (p *pulse) draw(w io.Writer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	end := time.Since(p.start)
	at := func(d time.Duration) int { return min(width-1, int(float64(width)*d.Seconds()/end.Seconds())) }
	rate, top := make([]float64, width), 1.0
	for _, b := range p.beats {
		rate[at(b)] += width / end.Seconds()
		top = max(top, rate[at(b)])
	}
	blocks := []rune(" ▁▂▃▄▅▆▇█")
	const rows = 6
	for row := rows - 1; row >= 0; row-- {
		line := make([]rune, width)
		for i, r := range rate {
			line[i] = blocks[max(0, min(8, int(r/top*rows*8)-row*8))]
		}
		label := ""
		if row == rows-1 {
			label = strconv.Itoa(int(top)) + "/s"
		}
		fmt.Fprintf(w, "  %8s│%s\n", label, string(line))
	}
	axis := []rune(strings.Repeat("─", width))
	for _, m := range p.marks {
		axis[at(m.at)] = '▲'
	}
	fmt.Fprintf(w, "          └%s %.1f s\n", string(axis), end.Seconds())
	for _, m := range p.marks {
		fmt.Fprintf(w, "  ▲ %6.2f s  %s\n", m.at.Seconds(), m.what)
	}
}

// lend shows a session that starts on a GPU of another host and comes home.
func (d *demo) lend(ctx context.Context, program, encoder, dir string) error {
	a, b := d.hosts[0], d.hosts[1]
	w := stream(program)
	if path, err := exec.LookPath(encoder); encoder != "" && err == nil {
		w = x264(path, dir)
	}
	d.say("two hosts with a GPU each become one cluster; GPUs are lent")
	if err := d.print(ctx, a, "cluster", "init"); err != nil {
		return err
	}
	token, err := a.gpuctl(ctx, "cluster", "token", "create", "--name", b.name)
	if err != nil {
		return err
	}
	if _, err := b.gpuctl(ctx, "cluster", "join", strings.TrimSpace(token)); err != nil {
		return err
	}
	if err := d.until(ctx, "both GPUs are known", func() (bool, error) {
		text, err := a.gpuctl(ctx, "get", "gpus", "-o", "name")
		return strings.Count(text, "\n") >= 2, err
	}); err != nil {
		return err
	}
	d.say("somebody has the GPU of %s", a.name)
	if err := d.print(ctx, a, "claim", "create", "somebody", "--on", a.name, "--wait"); err != nil {
		return err
	}
	d.say("an application starts on %s: %s", a.name, strings.Join(w.command, " "))
	p := &pulse{start: time.Now()}
	fed, err := d.run(ctx, a, w, p, w.command, func(ctx context.Context) error { return d.follow(ctx, p) })
	if err != nil {
		return err
	}
	d.say("the timeline of its signs of life")
	p.draw(d.out)
	if err := d.print(ctx, a, "get", "links"); err != nil {
		return err
	}
	return d.compare(ctx, a, w, p, fed)
}

// run runs a program on a host's GPUs, or others', and feeds it until meanwhile returns. It
// returns how much of its input it has read.
func (d *demo) run(ctx context.Context, h *host, w work, p *pulse, command []string, meanwhile func(context.Context) error) (fed int, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	app := h.command(ctx, append([]string{"run", "--wait", "--device-type", "gpu", "--"}, command...)...)
	in, err := app.StdinPipe()
	if err != nil {
		return 0, err
	}
	r, out := io.Pipe()
	app.Stdout, app.Stderr = out, out
	if err := app.Start(); err != nil {
		return 0, err
	}
	var wg sync.WaitGroup
	wg.Go(func() { p.read(r, w.tick) })
	stop := make(chan struct{})
	wg.Go(func() {
		defer in.Close()
		if w.feed == nil {
			<-stop
			return
		}
		_ = w.feed(in, func() bool { // an error is the end of the program, which is seen below
			select {
			case <-stop:
				return false
			default:
			}
			fed++
			p.beat()
			return true
		})
	})
	ended := make(chan error, 1)
	go func() {
		ended <- app.Wait()
		cancel() // nothing is waited for that would not come any more
	}()
	err = meanwhile(ctx)
	close(stop)
	if end := <-ended; end != nil {
		err = fmt.Errorf("the application failed: %w: %s", end, p.printed())
	}
	_ = out.Close()
	wg.Wait()
	if err == nil && !strings.Contains(p.printed(), w.gpu) {
		err = fmt.Errorf("the application does not use the GPU: %s", p.printed())
	}
	return fed, err
}

// where is a session: on which GPU, what it has launched there and elsewhere, and what it
// does if not compute.
type where struct {
	ID       string `json:"id"`
	GPU      string `json:"gpu"`
	Launches uint64 `json:"launches"`
	State    string `json:"state"`
	Message  string `json:"message"`
}

func (w where) String() string {
	return strings.TrimSuffix(fmt.Sprintf("session %s is %s on %s after %d launches: %s", w.ID, w.State, w.GPU, w.Launches, w.Message), ": ")
}

// on returns the session of a host.
func (d *demo) on(ctx context.Context, h *host) (where, error) {
	text, err := h.gpuctl(ctx, "sessions", "-o", "json")
	if err != nil {
		return where{}, err
	}
	var all []where
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return where{}, err
	}
	if len(all) == 0 {
		return where{}, nil
	}
	return all[0], nil
}

// follow waits until the session is on the other host's GPU, frees the local one, and
// waits until the session has come home.
func (d *demo) follow(ctx context.Context, p *pulse) error {
	a, b := d.hosts[0], d.hosts[1]
	var s where
	is := func(gpu string) func() (bool, error) {
		return func() (bool, error) {
			var err error
			if s, err = d.on(ctx, a); err == nil && s.GPU != gpu {
				err = errors.New(s.String()) // said if it is waited for too long
			}
			return err == nil, err
		}
	}
	if err := d.until(ctx, "the session is on "+b.name, is(b.name+"/small")); err != nil {
		return err
	}
	p.mark("it computes on " + b.name + "/small, over the network")
	for _, x := range []struct {
		h    *host
		args []string
	}{{a, []string{"sessions"}}, {b, []string{"inventory"}}} {
		if err := d.print(ctx, x.h, x.args...); err != nil {
			return err
		}
	}
	if err := d.compute(ctx, p, a, away); err != nil {
		return err
	}
	d.say("the GPU of %s becomes free: the session comes home by itself", a.name)
	p.mark("the GPU of " + a.name + " becomes free")
	if err := d.print(ctx, a, "claim", "delete", "somebody"); err != nil {
		return err
	}
	if err := d.until(ctx, "the session is home", is("small")); err != nil {
		return err
	}
	p.mark("it computes on " + a.name + "/small")
	if err := d.print(ctx, a, "describe", "session", s.ID); err != nil {
		return err
	}
	return d.compute(ctx, p, a, home)
}

// compute waits until the application launches kernels and gives signs of life, and then so
// long. Signs of life alone are too little: it may read its input while its programs are
// built still, which takes minutes where much else runs.
func (d *demo) compute(ctx context.Context, p *pulse, h *host, long time.Duration) error {
	was, count := where{}, p.count()
	if err := d.until(ctx, "the application computes", func() (bool, error) {
		s, err := d.on(ctx, h)
		if err != nil {
			return false, err
		}
		if was.ID == "" {
			was = s
		}
		if s.Launches <= was.Launches || p.count() <= count+8 {
			return false, errors.New(s.String())
		}
		return true, nil
	}); err != nil {
		return err
	}
	select {
	case <-time.After(long):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// compare runs the program again with the same input, on the host's own GPU alone.
func (d *demo) compare(ctx context.Context, h *host, w work, p *pulse, fed int) error {
	result := func(p *pulse) (string, error) {
		if w.output == "" {
			return w.result.FindString(p.printed()), nil
		}
		data, err := os.ReadFile(w.output)
		return string(data), err
	}
	got, err := result(p)
	if err != nil || got == "" {
		return errors.Join(err, fmt.Errorf("no result: %s", p.printed()))
	}
	d.say("the same again, on the GPU of %s alone", h.name)
	alone, full := &pulse{start: time.Now()}, make(chan struct{})
	if feed := w.feed; feed != nil {
		w.feed = func(to io.Writer, more func() bool) error {
			defer close(full)
			n := 0
			return feed(to, func() bool { n++; return n <= fed && more() })
		}
	} else {
		close(full)
	}
	if _, err := d.run(ctx, h, w, alone, w.again(got), func(ctx context.Context) error {
		select {
		case <-full:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}); err != nil {
		return err
	}
	want, err := result(alone)
	switch {
	case err != nil:
		return err
	case got != want:
		return fmt.Errorf("the results differ: %d bytes and %d", len(got), len(want))
	}
	fmt.Fprintf(d.out, "the result is identical (%d bytes)\n", len(got))
	return nil
}

func (d *demo) until(ctx context.Context, what string, ok func() (bool, error)) error {
	var last error
	for end := time.Now().Add(patience); time.Now().Before(end); {
		var done bool
		if done, last = ok(); done && last == nil {
			return nil
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return errors.Join(fmt.Errorf("%s: not after %v", what, patience), last)
}
