package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/test/lossy"
	"github.com/gpuctl/gpuctl/test/rig"
)

// remote measures GPUs behind a carrier on this machine, beside the raw socket: the round
// trip of a small message, and the rate of a stream.
func (b *bench) remote(ctx context.Context) error {
	trip, err := roundTrips(20000)
	if err != nil {
		return err
	}
	stream, err := rawStream(b.mib << 20)
	if err != nil {
		return err
	}
	got := map[string]map[string][]float64{}
	for _, way := range []string{"", "tcp", "tls"} {
		if got[way], err = b.clbench(ctx, way); err != nil {
			return fmt.Errorf("clbench over %q: %w", way, err)
		}
	}
	v := func(way, k string) float64 { return median(got[way][k]) }
	b.report.add("raw round trip of a socket, p50", "µs", 0, trip, "", nil)
	b.report.add("null kernel + clFinish on a local GPU, p50", "µs", 0, v("", "null_us_p50"), "", nil)
	for _, way := range []string{"tcp", "tls"} {
		added := v(way, "null_us_p50") - v("", "null_us_p50") - trip
		b.report.add("null kernel + clFinish over "+way+", p50", "µs", v("", "null_us_p50"), v(way, "null_us_p50"), "", nil)
		b.report.add("of it added to the local GPU and the round trip", "µs", 0, added, "10", func() bool { return added <= 10 })
		b.report.add("pipelined null kernels over "+way, "1/s", v("", "pipelined_per_s"), v(way, "pipelined_per_s"), "200000", func() bool { return v(way, "pipelined_per_s") >= 200e3 })
		for _, k := range []string{"write_gbs", "read_gbs"} {
			ratio := v(way, k) / stream
			name := fmt.Sprintf("%s of %d MiB over %s; native: the raw stream", k[:len(k)-4], b.mib, way)
			target, pass := "0.85 x the stream", func() bool { return ratio >= 0.85 }
			if way == "tls" { // the raw stream is not encrypted
				target, pass = "", nil
			}
			b.report.add(name, "GB/s", stream, v(way, k), target, pass)
		}
		b.report.add(fmt.Sprintf("map of %d MiB over %s", b.mib, way), "ms", v("", "map_ms"), v(way, "map_ms"), "", nil)
		b.report.add("its unmap, after one page was written", "ms", v("", "unmap_page_ms"), v(way, "unmap_page_ms"), "", nil)
		b.report.add("1024 regions of 1 KiB mapped, written and unmapped over "+way, "ms", v("", "regions_ms"), v(way, "regions_ms"), "", nil)
	}
	if err := b.goHome(ctx, stream, "1000 live objects, 10⁶ past calls", "--mib", "4"); err != nil {
		return err
	}
	if err := b.goHome(ctx, stream, "1024 regions of 1 KiB", "--calls", "5000", "--live", "1142", "--mib", "1"); err != nil { // 1024 of them are buffers
		return err
	}
	if err := b.delays(ctx); err != nil {
		return err
	}
	if err := b.bringHome(ctx, stream, "tcp", "mixed"); err != nil {
		return err
	}
	return b.bringHome(ctx, stream, "tls", "roam")
}

// bringHome moves much that is written all the time from a remote GPU to a local one, and back.
// The rate is that of what is copied in the downtime, by all of the downtime.
func (b *bench) bringHome(ctx context.Context, stream float64, over, mode string) error {
	r, err := b.startCarried(ctx, mode)
	if err != nil {
		return err
	}
	defer r.Close()
	gpus, buffers := b.ends(), b.mib*4/64
	if b.device() == gpuID {
		buffers = b.gib * 1024 / 64
	}
	results, err := b.stillness(ctx, r, 4, gpus, "--mib", "64", "--buffers", strconv.Itoa(buffers))
	if err != nil {
		return err
	}
	var rates [2][]float64
	for i, x := range results {
		rates[i%2] = append(rates[i%2], float64(x.Frozen)/x.Stopped.Seconds()/1e9)
	}
	for i, way := range []string{"remote to local", "local to remote"} {
		rate, target, pass := median(rates[i]), "", (func() bool)(nil)
		if i == 0 && over == "tcp" {
			target, pass = "0.8 x the stream", func() bool { return rate >= 0.8*stream }
		}
		b.report.add(fmt.Sprintf("%s over %s, %d MiB written all the time; native: the raw stream", way, over, 64*buffers), "GB/s", stream, rate, target, pass)
	}
	return nil
}

// clbench runs clbench on the GPUs of a rig whose executors are reached in that way.
func (b *bench) clbench(ctx context.Context, way string) (map[string][]float64, error) {
	r, err := b.startCarried(ctx, way)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	got := map[string][]float64{}
	for range b.rounds {
		text, err := output(r.Command(ctx, b.device(), r.Program("clbench"), "--mib", strconv.Itoa(b.mib)))
		if err != nil {
			return nil, err
		}
		var v map[string]any
		if err := json.Unmarshal(text, &v); err != nil {
			return nil, fmt.Errorf("%w: %s", err, text)
		}
		for k, x := range v {
			if f, ok := x.(float64); ok {
				got[k] = append(got[k], f)
			}
		}
	}
	return got, nil
}

// startCarried starts a rig whose GPUs are reached in that way: see rig.Options.
func (b *bench) startCarried(ctx context.Context, way string) (*rig.Rig, error) {
	o, err := b.options()
	if err != nil {
		return nil, err
	}
	o.Carriers = way
	return rig.Start(ctx, o)
}

// ends returns the GPU that is to be remote and the local one: two cards, where there are two.
func (b *bench) ends() [2]string {
	if b.device() != gpuID {
		return [2]string{rig.Basic, rig.Pthread}
	}
	if _, ok := b.otherCard(); ok {
		return [2]string{gpuID, otherID}
	}
	return [2]string{gpuID, gpuID}
}

// goHome moves a session from a remote GPU to a local one, and back, a few times. What the
// bytes that were copied in the downtime take on the raw stream is not counted.
func (b *bench) goHome(ctx context.Context, stream float64, what string, args ...string) error {
	r, err := b.startCarried(ctx, "mixed")
	if err != nil {
		return err
	}
	defer r.Close()
	moves, err := b.moves(ctx, r, 6, args...)
	if err != nil {
		return err
	}
	var beyond [2][]float64
	for i, s := range moves {
		beyond[i%2] = append(beyond[i%2], float64(s.Stopped)/1e6-float64(s.Frozen)/stream/1e6)
	}
	home, away := median(beyond[0]), median(beyond[1])
	b.report.add("remote to local, "+what+": downtime beyond dirty bytes / stream, p50", "ms", 0, home, "20", func() bool { return home <= 20 })
	b.report.add("local to remote, "+what+": the same", "ms", 0, away, "", nil)
	return nil
}

// moves moves a session between a GPU that is remote first, and another one.
func (b *bench) moves(ctx context.Context, r *rig.Rig, n int, args ...string) (all []rig.Swap, err error) {
	gpus := b.ends()
	stdin, wait, err := live(r.Command(ctx, gpus[0], append([]string{r.Program("replay")}, args...)...), "ready:")
	if err != nil {
		return nil, err
	}
	id, err := r.Session(ctx)
	if err != nil {
		return nil, err
	}
	for i := range n {
		s, err := r.Operate(ctx, "migrate", id, "--to", gpus[(i+1)%2])
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	_ = stdin.Close()
	line, err := wait()
	if err == nil && line != "ok" {
		err = fmt.Errorf("the program says %q", line)
	}
	return all, err
}

// delays measures how many round trips a small session stands still when it moves between a remote
// and a local GPU over a network with a delay, in namespaces of its own.
func (b *bench) delays(ctx context.Context) error {
	const delay = 20 * time.Millisecond // each way
	var ms [2][2]float64                // by delay, remote to local first
	for i, d := range []time.Duration{0, delay} {
		l, err := lossy.New(lossy.Quality{Delay: d})
		if errors.Is(err, lossy.ErrMissing) {
			fmt.Fprintln(os.Stderr, "no network with a delay:", err)
			return nil
		}
		if err != nil {
			return err
		}
		defer l.Close()
		o, err := b.options()
		if err != nil {
			return err
		}
		o.Carriers = "roam"
		r, err := rig.StartOver(ctx, l, o)
		if err != nil {
			return err
		}
		moves, err := b.moves(ctx, r, 8, "--calls", "1000", "--live", "100", "--mib", "1")
		r.Close()
		if err != nil {
			return err
		}
		var stopped [2][]float64
		for k, s := range moves {
			stopped[k%2] = append(stopped[k%2], float64(s.Stopped)/1e6)
		}
		ms[i] = [2]float64{median(stopped[0]), median(stopped[1])}
	}
	trip := 2 * float64(delay) / 1e6
	for k, way := range []string{"remote to local", "local to remote"} {
		b.report.add(fmt.Sprintf("%s, a small session over TLS, %.0f ms there and back: downtime; native: without that delay", way, trip), "ms", ms[0][k], ms[1][k], "", nil)
		b.report.add("of it, round trips", "", 0, (ms[1][k]-ms[0][k])/trip, "", nil)
	}
	return nil
}

// sockets returns the two ends of a connection over loopback, which block.
func sockets() (a, b *os.File, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return nil, nil, err
	}
	defer c.Close()
	d, err := l.Accept()
	if err != nil {
		return nil, nil, err
	}
	defer d.Close()
	var out [2]*os.File
	for i, x := range []net.Conn{c, d} {
		tcp, ok := x.(*net.TCPConn)
		if !ok {
			return nil, nil, errors.New("not TCP")
		}
		if out[i], err = tcp.File(); err != nil {
			return nil, nil, err
		}
		if err := unix.SetNonblock(int(out[i].Fd()), false); err != nil {
			return nil, nil, err
		}
	}
	return out[0], out[1], nil
}

const message = 64 // bytes, about as long as a launch

// roundTrips returns the median of the time in which a message comes back, in µs.
func roundTrips(n int) (float64, error) {
	a, b, err := sockets()
	if err != nil {
		return 0, err
	}
	defer a.Close()
	go func() {
		runtime.LockOSThread()
		defer b.Close()
		buf := make([]byte, message)
		for {
			if _, err := io.ReadFull(b, buf); err != nil {
				return
			}
			if _, err := b.Write(buf); err != nil {
				return
			}
		}
	}()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	buf, took := make([]byte, message), make([]float64, 0, n)
	for range n {
		t := time.Now()
		if _, err := a.Write(buf); err != nil {
			return 0, err
		}
		if _, err := io.ReadFull(a, buf); err != nil {
			return 0, err
		}
		took = append(took, float64(time.Since(t).Nanoseconds())/1e3)
	}
	slices.Sort(took)
	return median(took), nil
}

// rawStream returns the rate of a stream of n bytes, the median of five, in GB/s.
func rawStream(n int) (float64, error) {
	a, b, err := sockets()
	if err != nil {
		return 0, err
	}
	defer a.Close()
	go func() {
		runtime.LockOSThread()
		defer b.Close()
		buf := make([]byte, 1<<20)
		for {
			for got := 0; got < n; {
				k, err := b.Read(buf[:min(len(buf), n-got)])
				if err != nil {
					return
				}
				got += k
			}
			if _, err := b.Write(buf[:1]); err != nil {
				return
			}
		}
	}()
	var rates []float64
	buf := make([]byte, 1<<20)
	for range 5 {
		t := time.Now()
		for left := n; left > 0; {
			k, err := a.Write(buf[:min(len(buf), left)])
			if err != nil {
				return 0, err
			}
			left -= k
		}
		if _, err := io.ReadFull(a, buf[:1]); err != nil {
			return 0, err
		}
		rates = append(rates, float64(n)/time.Since(t).Seconds()/1e9)
	}
	return median(rates), nil
}
