package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"github.com/gpuctl/gpuctl/internal/wait"
)

const (
	mostUnproven = 8 // of one VM, connections to which no port has answered
	refusedFor   = time.Second
	dialFor      = 8 * time.Second  // less than a carrier waits
	provenFor    = 10 * time.Second // for a port's first byte
	askFor       = 10 * time.Second // for an answer of the VM
	maxID        = 64               // bytes
)

// Host makes the connections of one VM. It is safe for concurrent use.
type Host struct {
	// May returns an error for an address that the VM may not reach, or for what it sends
	// first.
	May func(address string, first []byte) error
	// Open returns a client of the VM's Guest, over a way for bulk transfers or for what
	// must not wait behind them. done is called when the connection has ended, with an error
	// if the VM could not be asked.
	Open func(ctx context.Context, bulk bool) (c *http.Client, done func(error), err error)
	// Dial connects to an address; nil: TCP.
	Dial func(ctx context.Context, address string) (net.Conn, error)
	// URL is that of the VM's server.
	URL string
	Log *slog.Logger

	mu       sync.Mutex
	busy     map[string]bool // by id
	unproven int
	joined   int
	wg       sync.WaitGroup
}

// Take begins to make those of a VM's connections that are new, which go on until ctx ends. It
// returns false if there was no place for all of them: try again later.
func (h *Host) Take(ctx context.Context, all []Wish) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.busy == nil {
		h.busy = map[string]bool{}
	}
	for _, w := range all {
		if w.ID == "" || len(w.ID) > maxID || h.busy[w.ID] {
			continue
		}
		if h.unproven >= mostUnproven || len(h.busy) >= mostJoined {
			return false
		}
		h.busy[w.ID] = true
		h.unproven++
		h.wg.Go(func() { h.serve(ctx, w) })
	}
	return true
}

// Active returns how many connections there are.
func (h *Host) Active() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.joined
}

// Wait returns when all connections have ended. Their contexts must have ended.
func (h *Host) Wait() { h.wg.Wait() }

// serve makes one connection, and passes what comes until its end.
func (h *Host) serve(ctx context.Context, w Wish) {
	var once sync.Once
	prove := func() {
		once.Do(func() {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.unproven--
		})
	}
	if err := h.connect(ctx, w, prove); err != nil {
		h.Log.Warn("a connection of a VM is not made", "address", fmt.Sprintf("%.80s", w.Address), "err", err)
		_ = wait.For(ctx, refusedFor) // a VM cannot ask without end
	}
	prove()
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.busy, w.ID)
}

func (h *Host) connect(ctx context.Context, w Wish, prove func()) error {
	c, done, err := h.Open(ctx, w.Bulk)
	if err != nil {
		return err
	}
	var broken error
	defer func() { done(broken) }()
	out, err := h.dial(ctx, w)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		broken = h.refuse(ctx, c, w, err)
		return errors.Join(err, broken)
	}
	stream, err := h.upgrade(ctx, c, w)
	if err != nil {
		broken = err
		out.Close()
		return err
	}
	h.count(1)
	defer h.count(-1)
	// The port has a while to answer: by then it has judged what came first.
	_ = out.SetReadDeadline(time.Now().Add(provenFor))
	proving := &proving{Conn: out, proven: prove}
	defer context.AfterFunc(ctx, func() {
		_ = out.Close()
		_ = stream.Close()
	})()
	join(proving, stream)
	if !proving.done && ctx.Err() == nil {
		return fmt.Errorf("%s has taken the connection and has not answered", w.Address)
	}
	return nil
}

func (h *Host) count(n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.joined += n
}

// dial connects to the address, and sends what is first.
func (h *Host) dial(ctx context.Context, w Wish) (net.Conn, error) {
	if err := errors.Join(w.Check(), h.May(w.Address, w.First)); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, dialFor)
	defer cancel()
	dial := h.Dial
	if dial == nil {
		dial = func(ctx context.Context, address string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", address)
		}
	}
	conn, err := dial(ctx, w.Address)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Write(w.First); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// request asks the VM about one connection.
func (h *Host) request(ctx context.Context, c *http.Client, w Wish, header, value string) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, h.URL+Path+w.ID, http.NoBody)
	if err != nil {
		return nil, err
	}
	r.Header.Set(header, value)
	if header == "Upgrade" {
		r.Header.Set("Connection", "Upgrade")
	}
	return c.Do(r)
}

// refuse tells the program why there is no connection.
func (h *Host) refuse(ctx context.Context, c *http.Client, w Wish, why error) error {
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	res, err := h.request(ctx, c, w, refusal, reasonOf(why))
	if err != nil {
		return fmt.Errorf("and the VM was not told: %w", err)
	}
	return res.Body.Close()
}

// upgrade makes a stream of the VM the program's connection.
func (h *Host) upgrade(ctx context.Context, c *http.Client, w Wish) (io.ReadWriteCloser, error) {
	asking, cancel := context.WithCancel(ctx)
	timer := time.AfterFunc(askFor, cancel) // the context has to outlive the answer: it is the stream's
	res, err := h.request(asking, c, w, "Upgrade", protocol)
	if !timer.Stop() && err == nil {
		err = context.DeadlineExceeded
		res.Body.Close()
	}
	if err != nil {
		cancel()
		return nil, fmt.Errorf("the VM gives no stream: %w", err)
	}
	stream, ok := res.Body.(io.ReadWriteCloser)
	if res.StatusCode != http.StatusSwitchingProtocols || !ok {
		cancel()
		res.Body.Close()
		return nil, fmt.Errorf("the VM gives no stream: it answers %.80q", res.Status)
	}
	return ending{stream, cancel}, nil
}

// ending is a stream whose request ends with it.
type ending struct {
	io.ReadWriteCloser
	cancel context.CancelFunc
}

func (e ending) Close() error {
	defer e.cancel()
	return e.ReadWriteCloser.Close()
}

// proving is a connection whose first byte shows that the other end has judged it.
type proving struct {
	net.Conn
	proven func()
	done   bool
}

func (p *proving) Read(b []byte) (int, error) {
	n, err := p.Conn.Read(b)
	if n > 0 && !p.done {
		p.done = true
		_ = p.Conn.SetReadDeadline(time.Time{})
		p.proven()
	}
	return n, err
}

// SyscallConn makes it a syscall.Conn, as what it wraps may be one.
func (p *proving) SyscallConn() (syscall.RawConn, error) {
	if s, ok := p.Conn.(syscall.Conn); ok {
		return s.SyscallConn()
	}
	return nil, errors.ErrUnsupported
}
