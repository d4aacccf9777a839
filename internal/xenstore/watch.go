package xenstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"syscall"
)

// maxPending is how many different paths a watch keeps for an owner that does not read
// them.
const maxPending = 1024

// Watch reports changes of a node and of everything below it.
type Watch struct {
	client *Client
	path   string
	token  string

	mu      sync.Mutex
	pending []string
	known   map[string]bool
	ended   bool
	ready   chan struct{} // has room for one
}

// Watch begins to watch a node, which need not exist, or one of the names
// "@introduceDomain" and "@releaseDomain". The first Next returns at once, because
// xenstored sends an event for each new watch.
func (c *Client) Watch(ctx context.Context, path string) (*Watch, error) {
	if err := checkPath(path); err != nil {
		return nil, err
	}
	w := &Watch{client: c, path: path, known: map[string]bool{}, ready: make(chan struct{}, 1)}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, fmt.Errorf("xenstore: watch %q: %w", path, ErrClosed)
	}
	c.lastName++
	w.token = "gpuctl" + strconv.FormatUint(c.lastName, 10)
	c.mu.Unlock()
	cn, err := c.connection(ctx)
	if err != nil {
		return nil, fmt.Errorf("xenstore: watch %q: %w", path, err)
	}
	// Registered first: events may arrive before the answer.
	c.mu.Lock()
	c.watches[w.token] = w
	c.mu.Unlock()
	// EEXIST: the connection was made again just now, with this watch.
	if _, err := c.do(ctx, cn, OpWatch, 0, path, joined(path, w.token)); err != nil && !errors.Is(err, syscall.EEXIST) {
		c.forget(w)
		w.end()
		return nil, err
	}
	return w, nil
}

// Next waits for a change and returns the path of the node. Several changes of one node
// before a Next are reported once. If there were too many changes, or the connection was
// lost meanwhile, it returns the watched path: the caller must read everything again. If
// the watch or client was closed, it returns ErrClosed. It must be used by one goroutine
// only.
func (w *Watch) Next(ctx context.Context) (string, error) {
	for {
		w.mu.Lock()
		if len(w.pending) > 0 {
			path := w.pending[0]
			w.pending = w.pending[1:]
			delete(w.known, path)
			w.mu.Unlock()
			return path, nil
		}
		ended := w.ended
		w.mu.Unlock()
		if ended {
			return "", fmt.Errorf("xenstore: watch %q: %w", w.path, ErrClosed)
		}
		select {
		case <-w.ready:
		case <-ctx.Done():
			return "", fmt.Errorf("xenstore: watch %q: %w", w.path, ctx.Err())
		}
	}
}

// Close ends the watch. If ctx ends before xenstored has answered, the connection is
// replaced by a new one without the watch.
func (w *Watch) Close(ctx context.Context) error {
	c := w.client
	c.forget(w)
	if !w.end() {
		return nil
	}
	c.mu.Lock()
	cn := c.conn
	c.mu.Unlock()
	if cn == nil { // nothing is registered
		return nil
	}
	_, err := c.do(ctx, cn, OpUnwatch, 0, w.path, joined(w.path, w.token))
	if errors.Is(err, ErrConnection) || errors.Is(err, ErrClosed) || errors.Is(err, syscall.ENOENT) {
		return nil
	}
	return err
}

// end ends the watch and wakes Next. It returns false if the watch had ended already.
func (w *Watch) end() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended {
		return false
	}
	w.ended = true
	close(w.ready)
	return true
}

func (w *Watch) add(path string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended || w.known[path] {
		return
	}
	if len(w.pending) >= maxPending {
		clear(w.known)
		w.pending, path = nil, w.path
	}
	w.pending = append(w.pending, path)
	w.known[path] = true
	select {
	case w.ready <- struct{}{}:
	default:
	}
}

func (c *Client) forget(w *Watch) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.watches, w.token)
}

// event dispatches an event. An unknown token belongs to a watch that has just ended.
func (c *Client) event(path, token string) {
	c.mu.Lock()
	w := c.watches[token]
	c.mu.Unlock()
	if w != nil {
		w.add(path)
	}
}

// rewatch registers all watches on a new connection.
func (c *Client) rewatch(ctx context.Context, cn *conn) {
	c.mu.Lock()
	watches := slices.Collect(maps.Values(c.watches))
	c.mu.Unlock()
	for _, w := range watches {
		_, err := c.do(ctx, cn, OpWatch, 0, w.path, joined(w.path, w.token))
		_, refused := errors.AsType[*Error](err)
		switch {
		case err == nil || errors.Is(err, syscall.EEXIST):
		case !refused:
			return // the next connection tries all of them again
		default:
			// A watch that does not work must not stay unnoticed.
			c.log.Error("a xenstore watch was refused on the new connection", "path", w.path, "err", err)
			c.forget(w)
			w.end()
		}
		c.mu.Lock()
		gone := c.watches[w.token] == nil
		c.mu.Unlock()
		if gone && err == nil {
			_, _ = c.do(ctx, cn, OpUnwatch, 0, w.path, joined(w.path, w.token))
		}
	}
}
