package xenstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"
)

var (
	// ErrConnection means that the connection to xenstore was lost, or could not be made,
	// before an answer came. Whether the request took effect is unknown.
	ErrConnection = errors.New("no connection to xenstore")
	// ErrClosed means that the client was closed.
	ErrClosed = errors.New("xenstore client is closed")
)

const (
	defaultTimeout = 10 * time.Second
	maxOutstanding = 64
	firstBackoff   = 50 * time.Millisecond
	lastBackoff    = 5 * time.Second
)

// Client is a connection to xenstore. It is safe for concurrent use. Each call ends with
// its context, or after WithTimeout's time if its context has no deadline.
type Client struct {
	path    string
	timeout time.Duration
	log     *slog.Logger
	stop    context.CancelFunc
	done    chan struct{}
	slots   chan struct{} // limits the requests in progress
	helpers sync.WaitGroup

	mu       sync.Mutex
	conn     *conn
	changed  chan struct{} // closed when conn or lastErr changes
	lastErr  error
	closed   bool
	watches  map[string]*Watch // by token
	lastName uint64
}

// Option is an option of Dial.
type Option func(*Client)

// WithTimeout limits calls whose context has no deadline; default ten seconds.
func WithTimeout(d time.Duration) Option { return func(c *Client) { c.timeout = d } }

// Dial connects to xenstored's socket or to the kernel's xenbus device, whichever path
// is. It returns after the first connection was made.
func Dial(ctx context.Context, path string, opts ...Option) (*Client, error) {
	c := &Client{
		path: path, timeout: defaultTimeout, log: slog.New(slog.DiscardHandler), done: make(chan struct{}),
		slots: make(chan struct{}, maxOutstanding), changed: make(chan struct{}), watches: map[string]*Watch{},
	}
	for _, o := range opts {
		o(c)
	}
	first, err := c.dial(ctx)
	if err != nil {
		return nil, err
	}
	run, stop := context.WithCancel(context.Background())
	c.stop = stop
	c.publish(first, nil)
	go c.run(run, first)
	return c, nil
}

// Close ends the connection, the calls in progress and all watches.
func (c *Client) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		<-c.done
		return nil
	}
	c.closed = true
	conn, watches := c.conn, c.watches
	c.watches = map[string]*Watch{}
	c.mu.Unlock()
	c.stop()
	if conn != nil {
		conn.close(ErrClosed)
	}
	for _, w := range watches {
		w.end()
	}
	<-c.done
	return nil
}

// lost returns an error that wraps ErrConnection. It contains the system's error as text
// only, because "no such socket" must not be taken for "no such node".
func lost(cause error) error {
	return fmt.Errorf("%w: %s", ErrConnection, cause.Error())
}

func (c *Client) dial(ctx context.Context) (*conn, error) {
	info, err := os.Stat(c.path)
	if err != nil {
		return nil, lost(err)
	}
	var stream io.ReadWriteCloser
	switch {
	case info.Mode()&os.ModeSocket != 0:
		var d net.Dialer
		stream, err = d.DialContext(ctx, "unix", c.path)
	case info.Mode()&os.ModeCharDevice != 0:
		stream, err = os.OpenFile(c.path, os.O_RDWR, 0)
	default:
		err = fmt.Errorf("%s is neither a socket nor a device", c.path)
	}
	if err != nil {
		return nil, lost(err)
	}
	return newConn(stream), nil
}

// run reads messages, and connects again when the connection is lost.
func (c *Client) run(ctx context.Context, cn *conn) {
	defer close(c.done)
	defer c.helpers.Wait()
	backoff := firstBackoff
	for {
		if cn != nil {
			backoff = firstBackoff
			err := cn.read(c.event)
			cn.close(fmt.Errorf("%w: %w", ErrConnection, err))
			c.publish(nil, err)
			if ctx.Err() == nil {
				c.log.Warn("the connection to xenstore broke", "path", c.path, "err", err)
			}
			cn = nil
		}
		select {
		case <-ctx.Done():
			c.publish(nil, ErrClosed)
			return
		case <-time.After(backoff):
		}
		dial, cancel := context.WithTimeout(ctx, c.timeout)
		next, err := c.dial(dial)
		cancel()
		if err != nil {
			backoff = min(2*backoff, lastBackoff)
			c.publish(nil, err)
			continue
		}
		if !c.publish(next, nil) {
			next.close(ErrClosed)
			continue
		}
		cn = next
		c.helpers.Go(func() { c.rewatch(ctx, next) })
	}
}

// publish makes cn the present connection. It returns false if the client was closed
// meanwhile.
func (c *Client) publish(cn *conn, err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conn, c.lastErr = cn, err
	close(c.changed)
	c.changed = make(chan struct{})
	return !c.closed
}

// connection waits for a connection until ctx ends.
func (c *Client) connection(ctx context.Context) (*conn, error) {
	for {
		c.mu.Lock()
		cn, changed, lastErr, closed := c.conn, c.changed, c.lastErr, c.closed
		c.mu.Unlock()
		if closed {
			return nil, ErrClosed
		}
		if cn != nil && cn.reason() == nil {
			return cn, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			if lastErr != nil && !errors.Is(lastErr, ErrConnection) {
				lastErr = lost(lastErr)
			}
			return nil, errors.Join(ctx.Err(), lastErr)
		}
	}
}

// do sends a request on cn, or on the present connection if cn is nil, and returns the
// answer.
func (c *Client) do(ctx context.Context, cn *conn, op Op, tx uint32, path string, payload []byte) ([]byte, error) {
	if len(payload) > MaxPayload {
		return nil, &Error{op, path, syscall.E2BIG}
	}
	if _, has := ctx.Deadline(); !has {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.timeout)
		defer cancel()
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("xenstore: %s %q: %w", op, path, err)
	}
	select {
	case c.slots <- struct{}{}:
		defer func() { <-c.slots }()
	case <-ctx.Done():
		return nil, fmt.Errorf("xenstore: %s %q: %d requests are under way and none is answered: %w", op, path, maxOutstanding, ctx.Err())
	}
	var answer Message
	var err error
	if cn != nil {
		answer, err = cn.call(ctx, op, tx, payload)
	} else {
		for {
			if cn, err = c.connection(ctx); err != nil {
				break
			}
			if answer, err = cn.call(ctx, op, tx, payload); !errors.Is(err, errUnsent) {
				break
			}
		}
	}
	if err != nil {
		return nil, fmt.Errorf("xenstore: %s %q: %w", op, path, err)
	}
	if answer.Op == OpError {
		return nil, &Error{op, path, ParseErrno(answer.Payload)}
	}
	return answer.Payload, nil
}

// Tx has the operations on nodes. The changes of a transaction become visible together at
// its end.
type Tx struct {
	client *Client
	conn   *conn // connection of the transaction
	tx     uint32
}

// tx returns a Tx outside of any transaction.
func (c *Client) tx() Tx { return Tx{client: c} }

func (o Tx) do(ctx context.Context, op Op, path string, rest ...string) ([]byte, error) {
	if err := checkPath(path); err != nil {
		return nil, err
	}
	return o.client.do(ctx, o.conn, op, o.tx, path, joined(append([]string{path}, rest...)...))
}

// Read returns the value of a node.
func (o Tx) Read(ctx context.Context, path string) (string, error) {
	b, err := o.do(ctx, OpRead, path)
	return string(b), err
}

// Write sets the value of a node. It makes the node, and those above it, if they do not
// exist.
func (o Tx) Write(ctx context.Context, path, value string) error {
	if err := checkPath(path); err != nil {
		return err
	}
	_, err := o.client.do(ctx, o.conn, OpWrite, o.tx, path, append(joined(path), value...)) // the value is not terminated by a zero byte
	return err
}

// Mkdir makes a node. If it exists, it is not changed.
func (o Tx) Mkdir(ctx context.Context, path string) error {
	_, err := o.do(ctx, OpMkdir, path)
	return err
}

// Remove removes a node and all nodes below it. If the node does not exist, but its
// parent does, there is no error.
func (o Tx) Remove(ctx context.Context, path string) error {
	_, err := o.do(ctx, OpRm, path)
	return err
}

// Permissions returns the access list of a node.
func (o Tx) Permissions(ctx context.Context, path string) ([]Permission, error) {
	b, err := o.do(ctx, OpGetPerms, path)
	if err != nil {
		return nil, err
	}
	var out []Permission
	for _, s := range Strings(b) {
		p, err := ParsePermission(s)
		if err != nil {
			return nil, fmt.Errorf("xenstore: permissions of %q: %w", path, err)
		}
		out = append(out, p)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("xenstore: permissions of %q: %w: none", path, ErrProtocol)
	}
	return out, nil
}

// SetPermissions replaces the access list of a node.
func (o Tx) SetPermissions(ctx context.Context, path string, perms ...Permission) error {
	var rest []string
	for _, p := range perms {
		rest = append(rest, p.String())
	}
	_, err := o.do(ctx, OpSetPerms, path, rest...)
	return err
}

const (
	maxChildren      = 16 << 20 // most bytes of the names of a node's children
	maxListRestarts  = 32
	maxDirectoryPart = 3 * maxChildren / MaxPayload // most answers for one list
)

// List returns the names of the nodes below a node, in xenstore's order. A list that is
// too long for one message is read in parts. If it changes meanwhile, List starts again.
func (o Tx) List(ctx context.Context, path string) ([]string, error) {
	b, err := o.do(ctx, OpDirectory, path)
	if err == nil {
		return Strings(b), nil
	}
	if !errors.Is(err, syscall.E2BIG) {
		return nil, err
	}
	for range maxListRestarts {
		names, again, err := o.listParts(ctx, path)
		if err != nil || !again {
			return names, err
		}
	}
	return nil, fmt.Errorf("xenstore: list %q: changed %d times while it was read: %w", path, maxListRestarts, syscall.EAGAIN)
}

func (o Tx) listParts(ctx context.Context, path string) (names []string, again bool, err error) {
	var generation string
	offset := 0
	for range maxDirectoryPart {
		b, err := o.do(ctx, OpDirectoryPart, path, strconv.Itoa(offset))
		if errors.Is(err, syscall.ENOSYS) {
			return nil, false, fmt.Errorf("%w: the list is longer than a message, and oxenstored does not give it in parts", err)
		} else if err != nil {
			return nil, false, err
		}
		part, err := parsePart(b)
		if err != nil {
			return nil, false, fmt.Errorf("xenstore: list %q: %w", path, err)
		}
		if generation != "" && part.generation != generation {
			return nil, true, nil
		}
		generation = part.generation
		names = append(names, part.names...)
		offset += part.size
		if part.last {
			return names, false, nil
		}
		if part.size == 0 || offset > maxChildren {
			break
		}
	}
	return nil, false, fmt.Errorf("xenstore: list %q: %w: the parts have no end", path, ErrProtocol)
}

type part struct {
	generation string
	names      []string
	size       int // bytes of the names in the list
	last       bool
}

// parsePart parses a generation and names, each terminated by a zero byte. An empty name
// is the end of the list.
func parsePart(b []byte) (part, error) {
	if len(b) == 0 || b[len(b)-1] != 0 {
		return part{}, fmt.Errorf("%w: a part of a list without its end", ErrProtocol)
	}
	fields := Strings(b)
	p := part{generation: fields[0]}
	if p.generation == "" {
		return part{}, fmt.Errorf("%w: a part of a list without generation", ErrProtocol)
	}
	for i, name := range fields[1:] {
		if name == "" {
			if i != len(fields)-2 {
				return part{}, fmt.Errorf("%w: an empty name", ErrProtocol)
			}
			p.last = true
			break
		}
		p.names = append(p.names, name)
		p.size += len(name) + 1
	}
	return p, nil
}

// Read returns the value of a node.
func (c *Client) Read(ctx context.Context, path string) (string, error) {
	return c.tx().Read(ctx, path)
}

// Write sets the value of a node. It makes the node, and those above it, if they do not
// exist.
func (c *Client) Write(ctx context.Context, path, value string) error {
	return c.tx().Write(ctx, path, value)
}

// Mkdir makes a node. If it exists, it is not changed.
func (c *Client) Mkdir(ctx context.Context, path string) error { return c.tx().Mkdir(ctx, path) }

// Remove removes a node and all nodes below it. If the node does not exist, but its
// parent does, there is no error.
func (c *Client) Remove(ctx context.Context, path string) error { return c.tx().Remove(ctx, path) }

// List returns the names of the nodes below a node.
func (c *Client) List(ctx context.Context, path string) ([]string, error) {
	return c.tx().List(ctx, path)
}

// Permissions returns the access list of a node.
func (c *Client) Permissions(ctx context.Context, path string) ([]Permission, error) {
	return c.tx().Permissions(ctx, path)
}

// SetPermissions replaces the access list of a node.
func (c *Client) SetPermissions(ctx context.Context, path string, perms ...Permission) error {
	return c.tx().SetPermissions(ctx, path, perms...)
}

// DomainPath returns the path of a domain, such as "/local/domain/7".
func (c *Client) DomainPath(ctx context.Context, domain uint16) (string, error) {
	id := strconv.Itoa(int(domain))
	b, err := c.do(ctx, nil, OpGetDomainPath, 0, id, joined(id))
	if err != nil {
		return "", err
	}
	s := Strings(b)
	if len(s) != 1 || checkPath(s[0]) != nil {
		return "", fmt.Errorf("xenstore: path of domain %d: %w: %.80q", domain, ErrProtocol, b)
	}
	return s[0], nil
}

// Introduced reports whether xenstored serves a domain. Only a control domain may ask.
func (c *Client) Introduced(ctx context.Context, domain uint16) (bool, error) {
	id := strconv.Itoa(int(domain))
	b, err := c.do(ctx, nil, OpIsIntroduced, 0, id, joined(id))
	if err != nil {
		return false, err
	}
	return string(b) == "T\x00", nil
}

const (
	conflictFirst = time.Millisecond
	conflictLast  = 100 * time.Millisecond
)

// Transaction calls f and makes all its changes visible together, or none if f fails. If
// what f has read was changed by others, it calls f again, until ctx ends. So f must not
// have any other effects. f must not use the transaction after it has returned.
//
// If the connection is lost while the transaction ends, the error wraps ErrConnection,
// and it is unknown whether the transaction took effect.
func (c *Client) Transaction(ctx context.Context, f func(Tx) error) error {
	if _, has := ctx.Deadline(); !has {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.timeout)
		defer cancel()
	}
	pause := conflictFirst
	for tries := 1; ; tries++ {
		err := c.transact(ctx, f)
		if !errors.Is(err, errConflict) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("xenstore: transaction: others were faster %d times: %w", tries, ctx.Err())
		case <-time.After(pause):
			pause = min(2*pause, conflictLast)
		}
	}
}

var errConflict = errors.New("conflict")

func (c *Client) transact(ctx context.Context, f func(Tx) error) error {
	cn, err := c.connection(ctx)
	if err != nil {
		return fmt.Errorf("xenstore: transaction: %w", err)
	}
	b, err := c.do(ctx, cn, OpTransactionStart, 0, "", []byte{0})
	if err != nil {
		return err
	}
	s := Strings(b)
	id, err := strconv.ParseUint(s0(s), 10, 32)
	if err != nil || id == 0 {
		cn.close(fmt.Errorf("%w: transaction %.20q", ErrProtocol, b))
		return fmt.Errorf("xenstore: transaction: %w: its id is %.20q", ErrProtocol, b)
	}
	tx := Tx{c, cn, uint32(id)}
	committed := false
	defer func() {
		if !committed { // f failed or panicked
			end, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.timeout)
			defer cancel()
			_, _ = c.do(end, cn, OpTransactionEnd, tx.tx, "", joined("F"))
		}
	}()
	if err := f(tx); err != nil {
		return err
	}
	committed = true
	_, err = c.do(ctx, cn, OpTransactionEnd, tx.tx, "", joined("T"))
	if answer, ok := errors.AsType[*Error](err); ok && answer.Errno == syscall.EAGAIN {
		return errConflict
	}
	return err
}

func s0(s []string) string {
	if len(s) == 0 {
		return ""
	}
	return s[0]
}
