package virt

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"sync"
	"time"

	"github.com/digitalocean/go-libvirt"

	"github.com/gpuctl/gpuctl/internal/patience"
)

// Driver is a hypervisor driver of libvirt.
type Driver string

// The drivers that gpuctl works with.
const (
	Xen  Driver = "xen"
	QEMU Driver = "qemu"
)

// Timeouts are the time limits of calls. A call's context can only shorten them. Zero
// means the default.
type Timeouts struct {
	Connect time.Duration // for connecting and opening; 5 s
	Query   time.Duration // for calls that only read; 10 s
	Change  time.Duration // for calls that change something; 90 s
	Migrate time.Duration // for a live migration without a limit of its own; 1 h
	Silence time.Duration // in which a migration may send nothing, before it is known how long that takes; 2 min
	Abort   time.Duration // for aborting a job, and for the aborted call to return; 10 s
	Ping    time.Duration // interval of checks whether libvirtd answers; 10 s
	Backoff time.Duration // longest pause between attempts to connect; 5 s
}

func (t *Timeouts) fill() {
	for _, f := range []struct {
		d *time.Duration
		v time.Duration
	}{
		{&t.Connect, 5 * time.Second},
		{&t.Query, 10 * time.Second},
		{&t.Change, 90 * time.Second},
		{&t.Migrate, time.Hour},
		{&t.Silence, 2 * time.Minute},
		{&t.Abort, 10 * time.Second},
		{&t.Ping, 10 * time.Second},
		{&t.Backoff, 5 * time.Second},
	} {
		if *f.d <= 0 {
			*f.d = f.v
		}
	}
}

// Option is an option of Open.
type Option func(*Client)

// WithSocket sets the path of libvirtd's socket.
func WithSocket(path string) Option {
	return func(c *Client) { c.sockets = []string{path} }
}

// WithTimeouts sets the time limits.
func WithTimeouts(t Timeouts) Option {
	return func(c *Client) { c.limits = t }
}

// WithDialer sets the function that connects to libvirtd.
func WithDialer(dial func(context.Context) (net.Conn, error)) Option {
	return func(c *Client) { c.dial = dial }
}

const (
	mostIdle = 4  // idle connections that are kept for later calls
	mostOpen = 32 // most calls at a time; libvirtd's own limit of clients is in the thousands
	backoff  = 50 * time.Millisecond
)

// Client is a client of libvirt on this host. It connects automatically, and again
// whenever the connection is lost. It is safe for concurrent use.
type Client struct {
	uri     string
	driver  Driver
	sockets []string
	limits  Timeouts
	dial    func(context.Context) (net.Conn, error)
	silent  *patience.Patience // how long migrations send nothing, by destination

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	work   sync.WaitGroup
	slots  chan struct{}
	check  chan struct{} // requests a check whether libvirtd answers

	mu      sync.Mutex
	closed  bool
	idle    []*link
	open    map[*link]struct{}
	up      bool
	down    error         // why it is not up; nil before the first attempt
	changed chan struct{} // closed when up or down changes
	subs    map[*Subscription]struct{}
}

// Open returns a client of xen:///system or qemu:///system. It does not wait for the
// connection; Ready does.
func Open(uri string, opts ...Option) (*Client, error) {
	u, err := url.Parse(uri)
	if err != nil {
		return nil, fmt.Errorf("libvirt URI: %w", err)
	}
	c := &Client{
		uri: uri, driver: Driver(u.Scheme),
		slots: make(chan struct{}, mostOpen), check: make(chan struct{}, 1),
		open: map[*link]struct{}{}, changed: make(chan struct{}), subs: map[*Subscription]struct{}{},
	}
	switch {
	case c.driver != Xen && c.driver != QEMU, u.Host != "", u.Path != "/system":
		return nil, fmt.Errorf("libvirt URI %.60q: %w: use xen:///system or qemu:///system", uri, ErrUnsupported)
	case c.driver == Xen:
		c.sockets = []string{"/run/libvirt/virtxend-sock", "/run/libvirt/libvirt-sock"}
	default:
		c.sockets = []string{"/run/libvirt/virtqemud-sock", "/run/libvirt/libvirt-sock"}
	}
	c.dial = c.dialSocket
	for _, o := range opts {
		o(c)
	}
	c.limits.fill()
	c.silent = patience.New(c.limits.Silence, c.limits.Migrate)
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.work.Go(c.monitor)
	return c, nil
}

// dialSocket connects to the first socket on which a process listens: that of the
// driver's own daemon, or libvirtd's.
func (c *Client) dialSocket(ctx context.Context) (net.Conn, error) {
	var errs several
	for _, path := range c.sockets {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
		if err == nil {
			return conn, nil
		}
		errs = append(errs, err)
	}
	return nil, fmt.Errorf("is libvirtd running? %w", errs)
}

// Driver returns the hypervisor driver.
func (c *Client) Driver() Driver { return c.driver }

// Ready waits until libvirtd answers or ctx ends.
func (c *Client) Ready(ctx context.Context) error {
	began := time.Now()
	for {
		c.mu.Lock()
		closed, up, down, changed := c.closed, c.up, c.down, c.changed
		c.mu.Unlock()
		o := op{name: "connect", object: c.uri}
		switch {
		case closed:
			return o.failed(ErrClosed)
		case up:
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			why := append([]error{ErrDisconnected}, ended(ctx, time.Since(began))...)
			if down != nil {
				why = append(why, down)
			}
			return o.failed(why...)
		}
	}
}

// Up reports whether libvirtd answers. If it does not, the error says why.
func (c *Client) Up() (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.up, c.down
}

// Close ends all connections, calls and subscriptions, and waits for their end.
func (c *Client) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	c.cancel()
	close(c.changed)
	c.changed = make(chan struct{})
	for l := range c.open {
		l.end(ErrClosed)
	}
	for s := range c.subs {
		s.end()
	}
	clear(c.subs)
	c.idle = nil
	c.mu.Unlock()
	c.work.Wait()
	return nil
}

// setUp sets whether libvirtd answers.
func (c *Client) setUp(down error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	was := c.up
	c.up, c.down = down == nil, down
	close(c.changed)
	c.changed = make(chan struct{})
	switch {
	case !c.up: // idle connections do not work either
		for _, l := range c.idle {
			l.end(down)
		}
		c.idle = nil
	case !was:
		for s := range c.subs {
			s.put(Event{Kind: Resync})
		}
	}
}

// monitor keeps the connection that receives events.
func (c *Client) monitor() {
	pause := backoff
	for c.ctx.Err() == nil {
		began := time.Now()
		err := c.watch()
		if c.ctx.Err() != nil {
			return
		}
		c.setUp(err)
		if time.Since(began) > c.limits.Connect+c.limits.Backoff {
			pause = backoff // it had worked for some time
		}
		select {
		case <-c.ctx.Done():
		case <-time.After(pause/2 + rand.N(pause)): //nolint:gosec // only spreads attempts
		}
		pause = min(2*pause, c.limits.Backoff)
	}
}

// watch connects and registers for events. It returns why the connection has ended.
func (c *Client) watch() error {
	ctx, cancel := context.WithTimeoutCause(c.ctx, c.limits.Connect, errLimit)
	defer cancel()
	began := time.Now()
	l, err := c.connect(ctx, c.publish)
	if err != nil {
		return err
	}
	defer c.drop(l)
	registered := make(chan error, 1)
	c.work.Go(func() { registered <- register(l.rpc) })
	select {
	case err = <-registered:
	case <-ctx.Done():
		err = several(ended(ctx, time.Since(began)))
	}
	if err != nil {
		return fmt.Errorf("register for events: %w", err)
	}
	c.setUp(nil)
	for {
		select {
		case <-c.ctx.Done():
			return c.ctx.Err()
		case <-l.dead:
			return l.why()
		case <-c.check:
		case <-time.After(c.limits.Ping):
		}
		pong := make(chan error, 1)
		c.work.Go(func() {
			_, err := l.rpc.ConnectGetLibVersion()
			pong <- err
		})
		select {
		case <-c.ctx.Done():
			return c.ctx.Err()
		case err := <-pong:
			if err != nil {
				return several{ErrDisconnected, err}
			}
		case <-time.After(c.limits.Connect):
			return fmt.Errorf("libvirtd hangs: %w", expired(c.limits.Connect))
		}
	}
}

// register registers for events. Only lifecycle events are required: old daemons and the
// libxl driver do not have all others.
func register(rpc *libvirt.Libvirt) error {
	if _, err := rpc.ConnectDomainEventCallbackRegisterAny(int32(libvirt.DomainEventIDLifecycle), nil); err != nil {
		return err
	}
	for _, id := range []libvirt.DomainEventID{
		libvirt.DomainEventIDDeviceRemoved, libvirt.DomainEventIDDeviceAdded, libvirt.DomainEventIDDeviceRemovalFailed,
		libvirt.DomainEventIDMigrationIteration, libvirt.DomainEventIDJobCompleted,
	} {
		_, err := rpc.ConnectDomainEventCallbackRegisterAny(int32(id), nil)
		if refused := (libvirt.Error{}); err != nil && !errors.As(err, &refused) && !errors.Is(err, libvirt.ErrUnsupported) {
			return err
		}
	}
	return nil
}

// connect makes a connection and opens libvirt on it.
func (c *Client) connect(ctx context.Context, event func(uint32, []byte)) (*link, error) {
	began := time.Now()
	conn, err := c.dial(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return nil, several(append([]error{ErrDisconnected}, ended(ctx, time.Since(began))...))
		}
		return nil, fmt.Errorf("%w: %w", ErrDisconnected, err)
	}
	g := newGuard(conn, event)
	l := &link{guard: g, rpc: libvirt.NewWithDialer(given{g})}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		g.end(ErrClosed)
		return nil, ErrClosed
	}
	c.open[l] = struct{}{}
	opened := make(chan error, 1)
	c.work.Go(func() {
		err := l.rpc.ConnectToURI(libvirt.ConnectURI(c.uri))
		close(g.returned)
		opened <- err
	})
	c.mu.Unlock()
	select {
	case err = <-opened:
		if err != nil {
			err = c.refused(l, err)
		}
	case <-ctx.Done():
		err = several(append([]error{fmt.Errorf("%w: libvirtd accepted the connection and then kept silent", ErrDisconnected)},
			ended(ctx, time.Since(began))...))
	}
	if err != nil {
		c.drop(l)
		return nil, err
	}
	return l, nil
}

// refused returns why libvirt could not be opened.
func (c *Client) refused(l *link, err error) error {
	if why := l.why(); why != nil && !errors.Is(why, net.ErrClosed) {
		return why
	}
	if e := (op{name: "open", object: c.uri}).answered(err); e != nil {
		e.why = append(e.why, ErrDisconnected)
		return e
	}
	return fmt.Errorf("%w: %w", ErrDisconnected, err)
}

// drop closes a connection.
func (c *Client) drop(l *link) {
	l.end(net.ErrClosed)
	c.mu.Lock()
	delete(c.open, l)
	c.mu.Unlock()
}

// borrow returns a connection for one call. The caller holds a slot.
func (c *Client) borrow(ctx context.Context) (l *link, fresh bool, err error) {
	for {
		c.mu.Lock()
		closed, up, down, changed := c.closed, c.up, c.down, c.changed
		for len(c.idle) > 0 && l == nil {
			last := len(c.idle) - 1
			l, c.idle = c.idle[last], c.idle[:last]
			if l.why() != nil {
				delete(c.open, l)
				l = nil
			}
		}
		c.mu.Unlock()
		switch {
		case closed:
			return nil, false, ErrClosed
		case l != nil:
			return l, false, nil
		case up:
			l, err := c.connect(ctx, nil)
			if err != nil {
				c.doubt()
			}
			return l, true, err
		case down != nil:
			if !errors.Is(down, ErrDisconnected) {
				down = fmt.Errorf("%w: %w", ErrDisconnected, down)
			}
			return nil, false, down
		}
		select { // the first attempt is in progress
		case <-changed:
		case <-ctx.Done():
			return nil, false, several(append([]error{ErrDisconnected}, ended(ctx, c.limits.Connect)...))
		}
	}
}

// giveBack keeps a connection for later calls.
func (c *Client) giveBack(l *link) {
	c.mu.Lock()
	if !c.closed && c.up && len(c.idle) < mostIdle && l.why() == nil {
		c.idle = append(c.idle, l)
		l = nil
	}
	c.mu.Unlock()
	if l != nil {
		c.drop(l)
	}
}

// doubt makes the monitor check whether libvirtd answers.
func (c *Client) doubt() {
	select {
	case c.check <- struct{}{}:
	default:
	}
}

// op describes a call.
type op struct {
	name, object string
	limit        time.Duration
	change       bool
	job          *Domain // the domain whose job is aborted when the time is over
}

// do makes one call.
func do[T any](ctx context.Context, c *Client, o op, f func(*libvirt.Libvirt) (T, error)) (T, error) {
	began := time.Now()
	ctx, cancel := context.WithTimeoutCause(ctx, o.limit, errLimit)
	defer cancel()
	var none T
	select {
	case c.slots <- struct{}{}:
		defer func() { <-c.slots }()
	case <-ctx.Done():
		return none, o.failed(append(ended(ctx, time.Since(began)), errors.New("all connections are taken by calls that hang"))...)
	}
	for {
		v, again, err := try(ctx, c, o, began, f)
		if !again {
			return v, err
		}
	}
}

// try makes a call once, and reports whether to try again: if an idle connection was
// closed already, and the call only reads or was never sent.
func try[T any](ctx context.Context, c *Client, o op, began time.Time, f func(*libvirt.Libvirt) (T, error)) (v T, again bool, err error) {
	l, fresh, err := c.borrow(ctx)
	if err != nil {
		return v, false, o.failed(err)
	}
	type answer struct {
		v   T
		err error
	}
	before := l.written()
	answers := make(chan answer, 1)
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		c.drop(l)
		return v, false, o.failed(ErrClosed)
	}
	c.work.Go(func() {
		v, err := f(l.rpc)
		answers <- answer{v, err}
	})
	c.mu.Unlock()
	select {
	case a := <-answers:
		again, err := c.settle(l, o, l.written() > before, fresh, a.err)
		return a.v, again, err
	case <-ctx.Done():
	}

	why := ended(ctx, time.Since(began))
	if o.job != nil {
		refused := make(chan error, 1)
		aborting, cancel := context.WithTimeoutCause(c.ctx, c.limits.Abort, errLimit)
		defer cancel()
		c.mu.Lock()
		if c.closed {
			refused <- ErrClosed
		} else {
			c.work.Go(func() { refused <- c.abortAll(aborting, *o.job) })
		}
		c.mu.Unlock()
		select {
		case a := <-answers:
			_, err := c.settle(l, o, true, true, a.err)
			if e := (*Error)(nil); errors.As(err, &e) {
				e.why = append(e.why, why...)
			}
			return a.v, false, err
		case err := <-refused:
			why = append(why, fmt.Errorf("it could not be aborted: %w", err))
		}
	}
	l.end(ErrTimeout)
	c.drop(l)
	c.doubt()
	if o.change && l.written() > before {
		why = append(why, ErrUnknownOutcome)
	}
	return v, false, o.failed(why...)
}

// settle evaluates the end of a call, and keeps or closes its connection.
func (c *Client) settle(l *link, o op, sent, fresh bool, err error) (again bool, _ error) {
	if err == nil {
		c.giveBack(l)
		return false, nil
	}
	if e := o.answered(err); e != nil {
		c.giveBack(l)
		return false, e
	}
	why := l.why()
	c.drop(l)
	switch {
	case why == nil && !sent:
		return false, o.failed(err) // the call could not be encoded
	case why == nil:
		why = fmt.Errorf("%w: %w", ErrProtocol, err)
	case errors.Is(why, ErrClosed):
	case !fresh && (!sent || !o.change):
		return true, nil
	default:
		c.doubt()
		if !errors.Is(why, ErrDisconnected) {
			why = fmt.Errorf("%w: %w", ErrDisconnected, why)
		}
	}
	if o.change && sent {
		return false, o.failed(why, ErrUnknownOutcome)
	}
	return false, o.failed(why)
}

// abortAll aborts a domain's job repeatedly until ctx ends, because the job may not have
// begun yet. It returns why that is of no use.
func (c *Client) abortAll(ctx context.Context, d Domain) error {
	for {
		err := c.abort(ctx, d)
		if errors.Is(err, ErrUnsupported) || errors.Is(err, ErrDenied) || errors.Is(err, ErrDisconnected) || errors.Is(err, ErrNotFound) {
			return err
		}
		select {
		case <-ctx.Done():
			why := ended(ctx, c.limits.Abort)
			if err != nil { // otherwise the job was aborted, and has not ended yet
				why = append(why, err)
			}
			return several(why)
		case <-time.After(c.limits.Abort / 100):
		}
	}
}

// abort aborts a domain's job. It needs no slot, because the calls to be aborted may have
// all of them.
func (c *Client) abort(ctx context.Context, d Domain) error {
	o := op{name: "domjobabort", object: d.Name, limit: c.limits.Abort}
	if c.driver == Xen {
		return o.failed(fmt.Errorf("%w: the libxl driver aborts no job; cut the migration's network instead, or let it end", ErrUnsupported))
	}
	began := time.Now()
	ctx, cancel := context.WithTimeoutCause(ctx, o.limit, errLimit)
	defer cancel()
	for {
		_, again, err := try(ctx, c, o, began, func(rpc *libvirt.Libvirt) (struct{}, error) {
			return struct{}{}, rpc.DomainAbortJob(d.raw())
		})
		if !again {
			return err
		}
	}
}
