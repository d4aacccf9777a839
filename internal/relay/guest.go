package relay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
)

// Guest is the VM's end. It is safe for concurrent use.
type Guest struct {
	// May reports whether a user of the VM may connect through the host.
	May func(uid uint32) bool
	Log *slog.Logger

	mu      sync.Mutex
	waiting map[string]*waiting
	news    chan struct{} // closed at each change of waiting
	host    string        // the instance of the host that was told last
	calls   uint64        // of Watch
	joined  map[net.Conn]string
}

// waiting is a program's connection that the host has not made yet.
type waiting struct {
	Wish
	conn   net.Conn
	answer chan error // has room for one; nil: the host takes the connection
}

// NewGuest returns a Guest. It accepts nothing yet.
func NewGuest(may func(uid uint32) bool, log *slog.Logger) *Guest {
	return &Guest{May: may, Log: log, waiting: map[string]*waiting{}, news: make(chan struct{}), joined: map[net.Conn]string{}}
}

// Serve accepts programs' connections until ctx ends, and returns when all of them have ended.
func (g *Guest) Serve(ctx context.Context, l *net.UnixListener) error {
	return serve(ctx, l, g.Log, g.program, func() { g.drop(func(string) bool { return true }) })
}

// program waits until the host has made a program's connection. An error is for the program,
// whose connection is still the caller's then.
func (g *Guest) program(conn *net.UnixConn) error {
	peer, err := unixrpc.Credentials(conn)
	if err != nil {
		return err
	}
	if !g.May(peer.UID) {
		return fmt.Errorf("user %d may not connect through the host", peer.UID)
	}
	_ = conn.SetDeadline(time.Now().Add(headFor))
	w := &waiting{conn: conn, answer: make(chan error, 1)}
	if w.Wish, err = readHead(conn); err != nil {
		return err
	}
	_ = conn.SetDeadline(time.Time{})
	w.ID = random.Hex(8)
	if err := g.add(w); err != nil {
		return err
	}
	patience := time.NewTimer(waitFor)
	defer patience.Stop()
	select {
	case err := <-w.answer:
		return err
	case <-patience.C:
	}
	if !g.remove(w) { // it is being answered
		return <-w.answer
	}
	return fmt.Errorf("the host has not connected to %s within %v", w.Address, waitFor)
}

func (g *Guest) changed() {
	close(g.news)
	g.news = make(chan struct{})
}

func (g *Guest) add(w *waiting) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case len(g.waiting) >= mostWaiting:
		return fmt.Errorf("%d connections wait for the host already", mostWaiting)
	case len(g.joined) >= mostJoined:
		return errFull
	}
	g.waiting[w.ID] = w
	g.changed()
	return nil
}

// remove reports whether w was still waiting.
func (g *Guest) remove(w *waiting) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.waiting[w.ID] != w {
		return false
	}
	delete(g.waiting, w.ID)
	g.changed()
	return true
}

// take removes the connection with an id, or returns nil.
func (g *Guest) take(id string) *waiting {
	g.mu.Lock()
	w := g.waiting[id]
	g.mu.Unlock()
	if w == nil || !g.remove(w) {
		return nil
	}
	return w
}

// Watch tells a host of the connections that wait, first of those that do so now, then at
// each change, until ctx ends or tell fails. A call ends the one before it. instance names
// the host's process: connections that another one has made end, as the VM has left it.
func (g *Guest) Watch(ctx context.Context, instance string, tell func([]Wish) error) error {
	g.mu.Lock()
	g.calls++
	call := g.calls
	g.host = instance
	g.changed()
	g.mu.Unlock()
	g.drop(func(other string) bool { return other != instance })
	for {
		g.mu.Lock()
		news, current := g.news, g.calls == call
		all := make([]Wish, 0, len(g.waiting))
		for _, w := range g.waiting {
			all = append(all, w.Wish)
		}
		g.mu.Unlock()
		if !current {
			return errors.New("another call has taken this one's place")
		}
		slices.SortFunc(all, func(a, b Wish) int { return strings.Compare(a.ID, b.ID) })
		if err := tell(all); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-news:
		}
	}
}

// drop ends the connections that instances of the host have made.
func (g *Guest) drop(of func(instance string) bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for conn, instance := range g.joined {
		if of(instance) {
			_ = conn.Close()
		}
	}
}

// ServeHTTP answers the host for one connection: it refuses it, or takes it over.
func (g *Guest) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	id := strings.TrimPrefix(r.URL.Path, Path)
	reason := r.Header.Get(refusal)
	h, ok := rw.(http.Hijacker)
	if r.Method != http.MethodPost || reason == "" && (!ok || r.Header.Get("Upgrade") != protocol) {
		http.Error(rw, "a connection is refused, or upgraded to "+protocol, http.StatusBadRequest)
		return
	}
	w := g.take(id)
	if w == nil {
		http.Error(rw, "no such connection waits", http.StatusGone)
		return
	}
	if reason != "" {
		w.answer <- errors.New(reason)
		rw.WriteHeader(http.StatusNoContent)
		return
	}
	stream, buf, err := h.Hijack()
	if err != nil {
		w.answer <- fmt.Errorf("connection of the host: %w", err)
		return
	}
	w.answer <- nil
	early, _ := buf.Reader.Peek(buf.Reader.Buffered())
	g.hold(w, leading{stream, bytes.NewReader(slices.Clone(early))})
}

// hold passes what comes until the end of either connection.
func (g *Guest) hold(w *waiting, stream net.Conn) {
	g.mu.Lock()
	instance := g.host
	g.joined[w.conn] = instance
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		delete(g.joined, w.conn)
	}()
	_ = stream.SetDeadline(time.Time{})
	_, err := io.WriteString(stream, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+protocol+"\r\n\r\n")
	if err == nil {
		_, err = io.WriteString(w.conn, "ok\n")
	}
	if err != nil {
		_ = stream.Close()
		_ = w.conn.Close()
		return
	}
	join(w.conn, stream)
}
