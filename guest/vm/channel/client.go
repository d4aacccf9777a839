package channel

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/hashicorp/yamux"
	"golang.org/x/sys/unix"
)

// BaseURL is the beginning of URLs for requests to a guest.
const BaseURL = "http://guest"

const (
	defaultDeadAfter = 20 * time.Second
	defaultWait      = 10 * time.Second
	leastRetry       = 20 * time.Millisecond
	mostRetry        = 500 * time.Millisecond // short, as a VM that has migrated should not wait longer
	longEnough       = 5 * time.Second
	lastWords        = 500 * time.Millisecond
	maxStreams       = 32
	maxHeaders       = 64 << 10 // bytes of a response's headers
	maxMessage       = 4 << 20  // bytes of one message
	lockSuffix       = ".lock"
)

// ErrBusy means that another process uses the channel's socket. A second client of a
// socket would be accepted and never answered.
var ErrBusy = errors.New("another process uses this channel")

// State is the state of a client.
type State struct {
	Up          bool
	Since       time.Time     // when Up changed last
	Instance    uint64        // of the guest's agent, while Up; another value: the agent was restarted
	Connections uint64        // number of connections so far
	RoundTrip   time.Duration // smoothed; zero: not measured
	Err         error         // why it is not Up
}

// Client is the host's end of a VM's channel. It connects automatically, and again
// whenever the connection is lost.
type Client struct {
	path      string
	log       *slog.Logger
	deadAfter time.Duration
	wait      time.Duration
	lock      *os.File
	http      *http.Client
	transport *http.Transport
	cancel    context.CancelFunc
	over      chan struct{} // closed when run has returned

	mu      sync.Mutex
	state   State
	link    *link
	mux     *yamux.Session
	changed chan struct{}
	closed  bool
}

// Option is an option of a client or a server.
type Option func(*options)

type options struct {
	log       *slog.Logger
	deadAfter time.Duration
	wait      time.Duration
	hangUp    func()
	locks     string
}

func gather(opts []Option) options {
	o := options{log: slog.New(slog.DiscardHandler), deadAfter: defaultDeadAfter, wait: defaultWait, hangUp: func() {}}
	for _, set := range opts {
		set(&o)
	}
	return o
}

// WithLogger sets the log for connections and their ends.
func WithLogger(l *slog.Logger) Option { return func(o *options) { o.log = l } }

// WithDeadAfter sets after which silence of the other side the connection is closed;
// default 20 s. A guest waits three times as long.
func WithDeadAfter(d time.Duration) Option { return func(o *options) { o.deadAfter = d } }

// WithWait sets how long a request waits for a connection; default 10 s. Then it fails
// with ErrDown.
func WithWait(d time.Duration) Option { return func(o *options) { o.wait = d } }

// WithHangUp makes the server call f when the channel's port hangs up: the VM was
// migrated or, with virtio-serial, the host has disconnected.
func WithHangUp(f func()) Option { return func(o *options) { o.hangUp = f } }

// WithLocks sets the folder for the lock file of a channel. Only this process's user may
// write to it. By default the lock file is beside the socket, where the VM's process may
// have the right to write.
func WithLocks(dir string) Option { return func(o *options) { o.locks = dir } }

// Open locks a channel's socket for this process, and begins to connect. The error wraps
// ErrBusy if another process has locked it. The socket need not exist yet. Without
// WithLocks, its folder must exist.
func Open(path string, opts ...Option) (*Client, error) {
	o := gather(opts)
	named := path + lockSuffix
	if o.locks != "" {
		named = filepath.Join(o.locks, "channel-"+url.PathEscape(path)+lockSuffix)
	}
	lock, err := takeLock(named)
	if err != nil {
		return nil, fmt.Errorf("channel %s: %w", path, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	c := &Client{
		path: path, log: o.log.With("channel", path), deadAfter: o.deadAfter, wait: o.wait, lock: lock,
		cancel: cancel, over: make(chan struct{}), changed: make(chan struct{}),
		state: State{Since: time.Now(), Err: ErrDown},
	}
	c.transport = newTransport(c.stream)
	c.http = newHTTP(c.transport)
	go c.run(ctx)
	return c, nil
}

// newTransport returns a transport that sends each request over a stream to a guest.
func newTransport(stream func(context.Context) (net.Conn, error)) *http.Transport {
	return &http.Transport{
		DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return stream(ctx) },
		MaxConnsPerHost:        maxStreams,
		MaxIdleConnsPerHost:    4,
		IdleConnTimeout:        time.Minute,
		MaxResponseHeaderBytes: maxHeaders,
		DisableCompression:     true,
	}
}

func newHTTP(t *http.Transport) *http.Client {
	return &http.Client{
		Transport: t,
		CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse // a guest must not redirect requests
		},
	}
}

// Dial does the same as Open, and waits for the first connection until ctx ends.
func Dial(ctx context.Context, path string, opts ...Option) (*Client, error) {
	c, err := Open(path, opts...)
	if err != nil {
		return nil, err
	}
	if _, err := c.Wait(ctx); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// HTTP returns a client for requests to the guest. The host in the URL is ignored, so
// BaseURL can be used. It may be used while there is no connection; see WithWait.
func (c *Client) HTTP() *http.Client { return c.http }

// ConnectOptions limit what a guest may answer.
func ConnectOptions() []connect.ClientOption {
	// No compression: a few compressed bytes of a guest could keep this host busy for
	// long, and compression is of little use on a channel.
	return []connect.ClientOption{connect.WithReadMaxBytes(maxMessage), connect.WithAcceptCompression("gzip", nil, nil)}
}

// State returns the state of the client.
func (c *Client) State() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.state
	if c.link != nil {
		c.link.mu.Lock()
		s.RoundTrip = c.link.srtt
		c.link.mu.Unlock()
	}
	return s
}

// Wait waits for a connection. If ctx ends before, the error wraps ErrDown and contains
// why the last attempt failed.
func (c *Client) Wait(ctx context.Context) (State, error) {
	for {
		c.mu.Lock()
		s, changed, closed := c.state, c.changed, c.closed
		c.mu.Unlock()
		switch {
		case closed:
			return s, fmt.Errorf("channel %s: %w", c.path, ErrClosed)
		case s.Up:
			return s, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			s := c.State()
			err := ErrDown
			if s.Err != nil && !errors.Is(s.Err, ErrDown) {
				err = fmt.Errorf("%w (%w)", ErrDown, s.Err)
			}
			return s, fmt.Errorf("channel %s: %w: %w", c.path, err, context.Cause(ctx))
		}
	}
}

// Close closes the connection and unlocks the socket.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.cancel()
	<-c.over
	c.transport.CloseIdleConnections()
	dropLock(c.lock)
	return nil
}

// stream opens a stream to the guest.
func (c *Client) stream(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, c.wait)
	defer cancel()
	if _, err := c.Wait(ctx); err != nil {
		return nil, err
	}
	c.mu.Lock()
	mux := c.mux
	c.mu.Unlock()
	if mux == nil {
		return nil, fmt.Errorf("channel %s: %w", c.path, ErrDown)
	}
	s, err := mux.OpenStream()
	if err != nil {
		return nil, fmt.Errorf("channel %s: %w: %w", c.path, ErrDown, err)
	}
	return fair{s}, nil
}

func (c *Client) run(ctx context.Context) {
	defer close(c.over)
	retry := leastRetry
	for {
		before, began := c.State().Connections, time.Now()
		err := c.connect(ctx)
		if ctx.Err() != nil {
			err = ErrClosed
		}
		wasUp := c.State().Connections != before
		c.set(nil, nil, err)
		c.transport.CloseIdleConnections()
		if ctx.Err() != nil {
			return
		}
		if wasUp {
			c.log.Info("connection to the guest lost", "err", err)
			// If a guest ends each connection at once, wait longer between attempts.
			if time.Since(began) > longEnough {
				retry = leastRetry
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(retry):
		}
		retry = min(2*retry, mostRetry)
	}
}

func (c *Client) set(l *link, mux *yamux.Session, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	up := mux != nil
	was := c.state.Up
	c.link, c.mux = l, mux
	c.state.Up, c.state.Err, c.state.Instance = up, err, 0
	if up {
		c.state.Connections++
		c.state.Instance = l.instance
	}
	if was != up || c.closed {
		c.state.Since = time.Now()
		close(c.changed)
		c.changed = make(chan struct{})
	}
}

// connect makes one connection, and returns why it has ended.
func (c *Client) connect(ctx context.Context) error {
	dctx, cancel := context.WithTimeout(ctx, c.wait)
	var d net.Dialer
	conn, err := d.DialContext(dctx, "unix", c.path)
	cancel()
	if err != nil {
		return err
	}
	p := newPort(conn)
	l := newLink(number(), fromHost, 0, p.poke)
	p.use(l)
	quiet, wrote := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		l.fail(p.read(fromHost, func(f *frame) {
			if f.conn == l.conn {
				l.handle(time.Now(), f)
			}
		}))
	})
	wg.Go(func() {
		defer close(wrote)
		if err := p.write(fromHost, quiet); err != nil {
			l.fail(err)
		}
	})
	wg.Go(func() { watchSilence(l, c.deadAfter) })
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()

	var mux *yamux.Session
	if l.waitOpened() == nil {
		if mux, err = hostMux(l); err == nil {
			c.set(l, mux, nil)
			c.log.Info("connected to the guest")
			<-l.done
		} else {
			l.fail(err)
		}
	}
	_ = conn.SetWriteDeadline(time.Now().Add(lastWords))
	close(quiet)
	<-wrote
	_ = conn.Close()
	err = l.reason()
	if mux != nil {
		_ = mux.Close()
	}
	wg.Wait()
	return err
}

// watchSilence ends a link if the other side sends nothing, even after it was asked to.
func watchSilence(l *link, dead time.Duration) {
	t := time.NewTicker(max(dead/8, time.Millisecond))
	defer t.Stop()
	for {
		select {
		case <-l.done:
			return
		case now := <-t.C:
			switch silent := l.silence(now); {
			case silent >= dead:
				l.fail(fmt.Errorf("%w: nothing heard for %v", ErrDown, silent.Round(time.Second)))
				return
			case silent >= dead/4:
				l.probe()
			}
		}
	}
}

// takeLock locks a lock file. The process that has locked it removes it at the end.
func takeLock(path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			_ = f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, ErrBusy
			}
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		ours, err1 := f.Stat()
		named, err2 := os.Stat(path)
		if err1 == nil && err2 == nil && os.SameFile(ours, named) {
			return f, nil
		}
		_ = f.Close() // the other process has just removed it
		if err2 != nil && !errors.Is(err2, fs.ErrNotExist) {
			return nil, err2
		}
	}
}

func dropLock(f *os.File) {
	_ = os.Remove(f.Name())
	_ = f.Close()
}
