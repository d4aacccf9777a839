package executor

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/portable"
)

// What the runtime prints, mostly kernels' printf, is written to a pipe of this process,
// and goes to the application's library, which writes it to its own standard output. The
// library takes it only during the application's calls. If a kernel prints more than fits
// into the ring and the pipe, it waits for such a call.

// outputMode is where printed text goes.
type outputMode int

const (
	outputDropped outputMode = iota // the session is not served here yet: another executor prints it
	outputFlows                     // to the application
	outputHeld                      // frozen: it stays in the pipe
)

const (
	outputChunk = 64 << 10
	outputPause = time.Millisecond       // more may be printed in this time, and is then taken together
	outputRetry = 100 * time.Millisecond // while the application takes nothing
)

// output is what this executor prints. A nil output prints nothing.
type output struct {
	ring   printer
	pipe   *os.File
	raw    syscall.RawConn
	prints atomic.Bool // something that prints runs, or may run

	mu   sync.Mutex
	turn *sync.Cond // mode has changed
	mode outputMode
	over bool
	buf  []byte
	rest []byte // part of buf: read from the pipe, and not yet in the ring
}

// printer is the part of transport that output uses.
type printer interface {
	Print(p []byte) (int, error)
	WakeWaiting()
	AwaitPrint(timeout time.Duration)
}

// captureOutput makes a pipe the standard output of this process.
func captureOutput(ring printer) (*output, error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, fmt.Errorf("standard output: %w", err)
	}
	err := unix.Dup3(fds[1], 1, 0)
	_ = unix.Close(fds[1])
	if err == nil {
		err = cl.Unbuffer()
	}
	if err != nil {
		_ = unix.Close(fds[0])
		return nil, fmt.Errorf("standard output: %w", err)
	}
	return newOutput(ring, fds[0])
}

// newOutput returns an output that reads from the end of a pipe.
func newOutput(ring printer, end int) (*output, error) {
	if err := unix.SetNonblock(end, true); err != nil {
		_ = unix.Close(end)
		return nil, fmt.Errorf("standard output: %w", err)
	}
	o := &output{ring: ring, pipe: os.NewFile(uintptr(end), "standard output"), buf: make([]byte, outputChunk)}
	o.turn = sync.NewCond(&o.mu)
	var err error
	if o.raw, err = o.pipe.SyscallConn(); err != nil {
		o.pipe.Close()
		return nil, fmt.Errorf("standard output: %w", err)
	}
	go o.run()
	return o, nil
}

// run moves printed text that nobody waits for.
func (o *output) run() {
	for {
		o.mu.Lock()
		for o.mode == outputHeld && !o.over {
			o.turn.Wait()
		}
		over := o.over
		o.mu.Unlock()
		if over || o.raw.Read(func(uintptr) bool { return o.waiting() > 0 }) != nil {
			return
		}
		o.mu.Lock()
		done := true
		switch o.mode {
		case outputDropped:
			o.drop()
		case outputFlows:
			o.prints.Store(true)
			done = o.move()
		}
		o.mu.Unlock()
		if done {
			time.Sleep(outputPause)
		} else {
			o.ring.AwaitPrint(outputRetry)
		}
	}
}

// waiting returns how many bytes are in the pipe.
func (o *output) waiting() int {
	n := 0
	_ = o.raw.Control(func(fd uintptr) {
		if got, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ); err == nil {
			n = got
		}
	})
	return n
}

// move moves what is in the pipe now to the ring, and reports whether there was room for
// all of it. The caller holds o.mu.
func (o *output) move() bool {
	moved := false
	for left := o.waiting(); ; {
		for len(o.rest) > 0 {
			n, err := o.ring.Print(o.rest)
			if err != nil { // the client has caused this, and only it loses text
				n = len(o.rest)
			}
			if n == 0 {
				o.ring.WakeWaiting()
				return false
			}
			o.rest = o.rest[n:]
			moved = true
		}
		if left <= 0 {
			if moved {
				o.ring.WakeWaiting()
			}
			return true
		}
		n := o.read(o.buf[:min(left, len(o.buf))])
		if n <= 0 {
			left = 0
			continue
		}
		left -= n
		o.rest = o.buf[:n]
	}
}

// drop discards what is in the pipe. The caller holds o.mu.
func (o *output) drop() {
	o.rest = nil
	for left := o.waiting(); left > 0; {
		n := o.read(o.buf[:min(left, len(o.buf))])
		if n <= 0 {
			return
		}
		left -= n
	}
}

func (o *output) read(b []byte) (n int) {
	_ = o.raw.Control(func(fd uintptr) { n, _ = unix.Read(int(fd), b) })
	return n
}

// offer gives the application everything that was printed so far, and reports whether there
// was room for all of it. It does not wait.
func (o *output) offer() bool {
	if o == nil || !o.prints.Load() {
		return true
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.mode != outputFlows || o.move()
}

// deliver does the same as offer, but waits for room. So text is delivered before the end
// of the kernel that has printed it. It gives up when stop is closed.
func (o *output) deliver(stop <-chan struct{}) {
	for !o.offer() {
		select {
		case <-stop:
			return
		default:
			o.ring.AwaitPrint(outputRetry)
		}
	}
}

// begin sends text to the application that is printed from now on. If another executor has
// served the session until now, text that this one has printed before is discarded.
func (o *output) begin() {
	if o == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.mode == outputDropped {
		o.drop()
	}
	o.mode = outputFlows
	o.turn.Broadcast()
}

// hold delivers what was printed when the device is idle, and keeps later text in the pipe.
// It reports whether everything was delivered in time. If not, nothing has changed.
func (o *output) hold(ctx context.Context, deadline time.Time) bool {
	if o == nil {
		return true
	}
	for {
		o.mu.Lock()
		if o.mode != outputFlows || o.move() {
			o.mode = outputHeld
			o.mu.Unlock()
			return true
		}
		o.mu.Unlock()
		left := time.Until(deadline)
		if left <= 0 || ctx.Err() != nil {
			return false
		}
		o.ring.AwaitPrint(min(left, outputRetry))
	}
}

func (o *output) close() {
	if o == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.over = true
	o.turn.Broadcast()
	o.pipe.Close()
}

// expect is called before something runs; prints means that it may print.
func (o *output) expect(prints bool) {
	if o != nil && prints {
		o.prints.Store(true)
	}
}

// spliced matches a line that C continues on the next line.
var spliced = regexp.MustCompile(`\\[ \t]*\r?\n`)

// printing matches the function's name, and text that could produce it. If a use is missed,
// its text is only late: it is taken as soon as it is seen in the pipe.
var printing = regexp.MustCompile(`printf|##|#\s*include`)

func mayPrintText(b []byte) bool { return printing.Match(spliced.ReplaceAll(b, nil)) }

// mayPrint reports whether a program's kernels may print.
func mayPrint(x *portable.Program) bool {
	if x.Kind == portable.IL || len(x.IL) > 0 || mayPrintText(x.Source) || mayPrintText([]byte(x.Options)) {
		return true
	}
	for i := range x.Headers {
		if mayPrint(&x.Headers[i].Program) {
			return true
		}
	}
	for i := range x.Inputs {
		if mayPrint(&x.Inputs[i]) {
			return true
		}
	}
	return false
}
