package nvml

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// Program is the file name of the helper process.
const Program = "hostd-nvml"

var (
	// ErrNoDriver means that this host has no NVIDIA driver, or that it is not loaded.
	ErrNoDriver = errors.New("no NVIDIA driver")
	// ErrNoHelper means that hostd-nvml is not installed.
	ErrNoHelper = errors.New("hostd-nvml is not installed")
	// ErrReleased means that Release was called, and Resume not yet.
	ErrReleased = errors.New("NVML is released")
	// ErrUnhealthy means that the helper crashed or did not answer. It is started again
	// after a pause.
	ErrUnhealthy = errors.New("NVML does not work")
	// ErrClosed means that the client is closed.
	ErrClosed = errors.New("NVML client is closed")
)

// Config has the settings of a Client. A zero time means its default.
type Config struct {
	Path       string        // path of the helper; empty: beside this program, or in PATH
	Env        []string      // environment of the helper; nil: this process's
	Log        *slog.Logger  // nil: no log
	Timeout    time.Duration // time limit for a request
	EndTimeout time.Duration // time limit for the helper to end after it was released or killed
	Backoff    time.Duration // pause after the first failure; it doubles with each further one
	MaxBackoff time.Duration
	LookAgain  time.Duration // pause if there was no driver or no helper
}

func (c Config) withDefaults() Config {
	set := func(d *time.Duration, to time.Duration) {
		if *d <= 0 {
			*d = to
		}
	}
	set(&c.Timeout, 30*time.Second) // the first call initializes the driver for all cards
	set(&c.EndTimeout, 10*time.Second)
	set(&c.Backoff, time.Second)
	set(&c.MaxBackoff, 5*time.Minute)
	set(&c.LookAgain, 5*time.Minute)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Client sends requests to the helper, one after the other. It is safe for concurrent
// use.
type Client struct {
	config Config
	turn   chan struct{} // held by the caller that uses the helper

	// Only the holder of turn uses these.
	helper   *helper
	failures int
	lastWord error // error for callers until notUntil
	notUntil time.Time
	number   uint64

	mu       sync.Mutex
	released int
	closed   bool
	working  bool
}

// New returns a client. It starts the helper at the first request.
func New(c Config) *Client {
	return &Client{config: c.withDefaults(), turn: make(chan struct{}, 1)}
}

// Available reports whether the last request was answered and NVML is not
// released.
func (c *Client) Available() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.working && c.released == 0 && !c.closed
}

// List returns all properties of all GPUs. Errors wrap ErrNoDriver, ErrNoHelper,
// ErrReleased, ErrUnhealthy or ErrClosed.
func (c *Client) List(ctx context.Context) (*Response, error) { return c.ask(ctx, List) }

// Facts returns what changes often, of all GPUs. Errors are those of List.
func (c *Client) Facts(ctx context.Context) (*Response, error) { return c.ask(ctx, Facts) }

// Release makes the helper close the driver and end. When it has returned without an
// error, no process of NVML has the driver open, and none will until Resume has been
// called as often as Release. After an error, nothing has changed for other callers: the
// helper may still have the driver open.
func (c *Client) Release(ctx context.Context) error {
	c.hold(1)
	err := c.withTurn(ctx, func() error {
		if c.helper == nil {
			return nil
		}
		if c.helper.ended() {
			c.helper = nil
			return nil
		}
		ctx, cancel := context.WithTimeout(ctx, c.config.EndTimeout)
		defer cancel()
		c.number++
		// Whatever the helper answers, it must end.
		_, askErr := c.helper.ask(ctx, Request{Version, c.number, Release})
		if err := c.end(ctx, askErr != nil); err != nil {
			return fmt.Errorf("release NVML: %w", err)
		}
		c.config.Log.Info("nvml released")
		return nil
	})
	if err != nil {
		c.hold(-1)
	}
	return err
}

// Resume undoes one Release.
func (c *Client) Resume() { c.hold(-1) }

func (c *Client) hold(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.released = max(0, c.released+n)
	c.working = c.working && c.released == 0
}

// Close ends the helper. Requests fail with ErrClosed afterwards.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed, c.working = true, false
	c.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), c.config.Timeout+c.config.EndTimeout)
	defer cancel()
	return c.withTurn(ctx, func() error { return c.end(ctx, false) })
}

func (c *Client) withTurn(ctx context.Context, f func() error) error {
	select {
	case c.turn <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("wait for hostd-nvml: %w", ctx.Err())
	}
	defer func() { <-c.turn }()
	return f()
}

func (c *Client) refused() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return ErrClosed
	case c.released > 0:
		return ErrReleased
	}
	return nil
}

func (c *Client) ask(ctx context.Context, op Op) (answer *Response, err error) {
	err = c.withTurn(ctx, func() error {
		answer, err = c.askNow(ctx, op)
		return err
	})
	if err != nil {
		return nil, err
	}
	return answer, nil
}

func (c *Client) askNow(ctx context.Context, op Op) (*Response, error) {
	if err := c.refused(); err != nil {
		return nil, err
	}
	if err := c.start(); err != nil {
		return nil, err
	}
	limited, cancel := context.WithTimeout(ctx, c.config.Timeout)
	defer cancel()
	c.number++
	answer, err := c.helper.ask(limited, Request{Version, c.number, op})
	switch {
	case err != nil && ctx.Err() != nil:
		// The caller has left. The next caller must not get this answer.
		_ = c.end(ctx, true)
		return nil, fmt.Errorf("ask hostd-nvml: %w", ctx.Err())
	case err != nil:
		return nil, c.failed(fmt.Errorf("%w: hostd-nvml: %w", ErrUnhealthy, c.bury(ctx, err)))
	case answer.Status == NoDriver:
		_ = c.end(ctx, false) // the helper is idle
		return nil, c.absent(fmt.Errorf("%w: %s", ErrNoDriver, answer.Message))
	case answer.Status != OK:
		_ = c.end(ctx, false)
		return nil, c.failed(fmt.Errorf("%w: %s", ErrUnhealthy, answer.Message))
	}
	c.failures, c.lastWord = 0, nil
	if c.setWorking(true) {
		c.config.Log.Info("nvml available", "driver", answer.Driver, "gpus", len(answer.GPUs))
	}
	return answer, nil
}

// bury ends a helper that did not answer, and returns why it failed.
func (c *Client) bury(ctx context.Context, err error) error {
	h := c.helper
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = fmt.Errorf("no answer in %v", c.config.Timeout)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.EPIPE):
		// It is ending. Wait a moment for its exit status.
		wait := time.NewTimer(min(time.Second, c.config.EndTimeout))
		defer wait.Stop()
		select {
		case <-h.done:
			c.helper = nil
			return fmt.Errorf("it ended: %s", h.why())
		case <-wait.C:
		}
	}
	if end := c.end(ctx, true); end != nil {
		return fmt.Errorf("%w; %w", err, end)
	}
	if said := h.stderr.String(); said != "" {
		return fmt.Errorf("%w; it said: %s", err, said)
	}
	return err
}

// failed stores an error for callers until the pause is over. The pause grows with each
// failure.
func (c *Client) failed(err error) error {
	pause := c.config.MaxBackoff
	if c.failures < 20 {
		pause = min(pause, c.config.Backoff<<c.failures)
	}
	c.failures++
	c.lastWord, c.notUntil = err, time.Now().Add(pause)
	c.setWorking(false)
	c.config.Log.Warn("nvml failed", "err", err, "pause", pause)
	return err
}

// absent stores that there is no driver or no helper. That is not a fault: it is logged
// once, at a low level, and checked again rarely.
func (c *Client) absent(err error) error {
	if c.setWorking(false) || c.lastWord == nil || c.lastWord.Error() != err.Error() {
		c.config.Log.Info("nvml not available", "reason", err)
	}
	c.failures = 0
	c.lastWord, c.notUntil = err, time.Now().Add(c.config.LookAgain)
	return err
}

func (c *Client) setWorking(now bool) (changed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now = now && c.released == 0 && !c.closed
	changed, c.working = c.working != now, now
	return changed
}

// start starts the helper if it does not run.
func (c *Client) start() error {
	if c.helper != nil {
		if !c.helper.ended() && !c.helper.killed {
			return nil
		}
		if !c.helper.ended() {
			return fmt.Errorf("%w: hostd-nvml (process %d) was killed and the kernel has not let it go yet", ErrUnhealthy, c.helper.pid())
		}
		died := c.helper
		c.helper = nil
		if !died.killed { // it ended between two requests
			return c.failed(fmt.Errorf("%w: hostd-nvml ended: %s", ErrUnhealthy, died.why()))
		}
	}
	if c.lastWord != nil && time.Now().Before(c.notUntil) {
		return c.lastWord
	}
	path, err := c.find()
	if err != nil {
		return c.absent(err)
	}
	if c.helper, err = start(path, c.config.Env); err != nil {
		return c.failed(fmt.Errorf("%w: %w", ErrUnhealthy, err))
	}
	return nil
}

func (c *Client) find() (string, error) {
	if c.config.Path != "" {
		if _, err := os.Stat(c.config.Path); err != nil {
			return "", fmt.Errorf("%w: %w", ErrNoHelper, err)
		}
		return filepath.Abs(c.config.Path)
	}
	if self, err := os.Executable(); err == nil {
		if beside := filepath.Join(filepath.Dir(self), Program); isProgram(beside) {
			return beside, nil
		}
	}
	path, err := exec.LookPath(Program)
	if err != nil {
		return "", ErrNoHelper
	}
	return path, nil
}

func isProgram(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

// end ends the helper: by closing its input, or by killing it. The helper is forgotten
// only after it has ended.
func (c *Client) end(ctx context.Context, kill bool) error {
	h := c.helper
	if h == nil {
		return nil
	}
	h.closePipes()
	if !kill {
		wait := time.NewTimer(c.config.EndTimeout)
		defer wait.Stop()
		select {
		case <-h.done:
			c.helper = nil
			return nil
		case <-wait.C:
		case <-ctx.Done():
		}
	}
	h.kill()
	// The caller may have left. Killing takes only a moment, so it is done nevertheless.
	wait := time.NewTimer(c.config.EndTimeout)
	defer wait.Stop()
	select {
	case <-h.done:
		c.helper = nil
		return nil
	case <-wait.C:
		return fmt.Errorf("process %d was killed and does not end", h.pid())
	}
}

// helper is one process of hostd-nvml.
type helper struct {
	cmd    *exec.Cmd
	in     *os.File // its standard input
	out    *os.File // its standard output
	stderr *words
	done   chan struct{} // closed when the process has ended
	err    error         // how it ended, after done
	killed bool
}

func start(path string, env []string) (*helper, error) {
	theirIn, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	out, theirOut, err := os.Pipe()
	if err != nil {
		_ = theirIn.Close()
		_ = in.Close()
		return nil, err
	}
	h := &helper{cmd: exec.Command(path), in: in, out: out, stderr: &words{}, done: make(chan struct{})}
	h.cmd.Env = env
	h.cmd.Stdin, h.cmd.Stdout, h.cmd.Stderr = theirIn, theirOut, h.stderr
	h.cmd.Dir = "/"
	h.cmd.WaitDelay = time.Second // another process that has its stderr open must not delay Wait
	err = h.cmd.Start()
	_ = theirIn.Close()
	_ = theirOut.Close()
	if err != nil {
		h.closePipes()
		return nil, fmt.Errorf("start hostd-nvml: %w", err)
	}
	go func() {
		h.err = h.cmd.Wait()
		close(h.done)
	}()
	return h, nil
}

func (h *helper) pid() int { return h.cmd.Process.Pid }

func (h *helper) ended() bool {
	select {
	case <-h.done:
		return true
	default:
		return false
	}
}

func (h *helper) why() string {
	text := "exit status 0"
	if h.err != nil {
		text = h.err.Error()
	}
	if said := h.stderr.String(); said != "" {
		text += "; it said: " + said
	}
	return text
}

func (h *helper) closePipes() {
	_ = h.in.Close()
	_ = h.out.Close()
}

func (h *helper) kill() {
	h.killed = true
	_ = h.cmd.Process.Kill() // fails only if it has ended already
}

// ask sends one request and returns its answer. It fails when ctx ends.
func (h *helper) ask(ctx context.Context, r Request) (*Response, error) {
	cut := make(chan struct{})
	deadline := func(t time.Time) {
		_ = h.in.SetWriteDeadline(t)
		_ = h.out.SetReadDeadline(t)
	}
	stop := context.AfterFunc(ctx, func() {
		defer close(cut)
		deadline(time.Unix(1, 0))
	})
	defer func() {
		if !stop() { // ctx has ended; a late answer must not be taken for the next request's
			<-cut
			deadline(time.Time{})
		}
	}()
	if err := WriteMessage(h.in, r, MaxRequest); err != nil {
		return nil, err
	}
	answer := &Response{}
	if err := ReadMessage(h.out, answer, MaxResponse); err != nil {
		return nil, err
	}
	if answer.Version != Version {
		return nil, fmt.Errorf("%w: version %d, this is %d: install hostd and hostd-nvml of one release", ErrProtocol, answer.Version, Version)
	}
	if answer.Number != r.Number {
		return nil, fmt.Errorf("%w: answer %d to request %d", ErrProtocol, answer.Number, r.Number)
	}
	return answer, nil
}

// words keeps the first and the last part of what a helper writes. A crash is described
// at the beginning, other failures at the end.
type words struct {
	mu          sync.Mutex
	first, last []byte
}

const maxWords = 512

func (w *words) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := min(len(p), maxWords-len(w.first))
	w.first = append(w.first, p[:n]...)
	rest := p[n:]
	w.last = append(w.last, rest[max(0, len(rest)-maxWords):]...)
	w.last = append([]byte(nil), w.last[max(0, len(w.last)-maxWords):]...)
	return len(p), nil
}

func (w *words) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.last) == maxWords {
		return printable(string(w.first)) + " … " + printable(string(w.last))
	}
	return printable(string(w.first) + string(w.last))
}
