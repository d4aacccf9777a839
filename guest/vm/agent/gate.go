package agent

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"
)

// Forever is the default for how long applications wait for a GPU.
const Forever time.Duration = -1

const (
	helloSize     = 64 // bytes of an application's hello, see guest/opencl/wire/PROTOCOL.md
	refuseTimeout = time.Second
	maxRefusals   = 32
	// notAvailable is CL_DEVICE_NOT_AVAILABLE (OpenCL specification).
	notAvailable = -2
)

// Gate accepts applications only while there is a GPU. Otherwise they wait to be
// accepted, or get an error. Only serve accepts applications, because it needs the
// credentials of the connecting process.
type Gate struct {
	listener *net.UnixListener
	serve    func(*net.UnixListener) error
	wait     time.Duration
	log      *slog.Logger

	mu    sync.Mutex
	ready bool
	since time.Time
	wake  chan struct{}
}

// NewGate returns a closed gate for a listener. serve accepts applications until its
// listener is closed. If there has been no GPU for the time wait, applications get an
// error. Forever: they wait without a limit. 0: they do not wait.
func NewGate(l *net.UnixListener, serve func(*net.UnixListener) error, wait time.Duration, log *slog.Logger) *Gate {
	return &Gate{listener: l, serve: serve, wait: wait, log: log, since: time.Now(), wake: make(chan struct{}, 1)}
}

// Set opens or closes the gate.
func (g *Gate) Set(ready bool) {
	g.mu.Lock()
	if g.ready != ready {
		g.ready, g.since = ready, time.Now()
	}
	g.mu.Unlock()
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// door is what happens to new applications.
type door int

const (
	shut door = iota // they wait
	open             // serve accepts them
	refusing
)

// now returns the present state, and for how long it lasts if Set is not called; 0:
// without a limit.
func (g *Gate) now() (door, time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.ready:
		return open, 0
	case g.wait < 0:
		return shut, 0
	}
	if left := g.wait - time.Since(g.since); left > 0 {
		return shut, left
	}
	return refusing, 0
}

// Run accepts and refuses applications until ctx ends.
func (g *Gate) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	is := shut
	var l *net.UnixListener
	stop := func() {
		if l != nil {
			l.Close() // this closes the copy only, so waiting applications stay connected
			wg.Wait()
			l = nil
		}
	}
	defer stop()
	for {
		want, left := g.now()
		if want != is {
			stop()
			is = want
			if is != shut {
				var err error
				if l, err = g.copy(); err != nil {
					return err
				}
				serve, mine := g.serve, l
				if is == refusing {
					serve = g.refuse
				}
				wg.Go(func() {
					if err := serve(mine); err != nil && !errors.Is(err, net.ErrClosed) {
						g.log.Error("applications", "err", err)
					}
				})
			}
		}
		var timer <-chan time.Time
		if left > 0 {
			timer = time.After(left)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-g.wake:
		case <-timer:
		}
	}
}

// copy duplicates the listener. Closing the copy leaves the socket listening.
func (g *Gate) copy() (*net.UnixListener, error) {
	f, err := g.listener.File()
	if err != nil {
		return nil, fmt.Errorf("socket of applications: %w", err)
	}
	defer f.Close()
	l, err := net.FileListener(f)
	if err != nil {
		return nil, fmt.Errorf("socket of applications: %w", err)
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		l.Close()
		return nil, fmt.Errorf("socket of applications: it is a %s", l.Addr().Network())
	}
	u.SetUnlinkOnClose(false)
	return u, nil
}

// refuse sends an error to applications: there is no GPU.
func (g *Gate) refuse(l *net.UnixListener) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, maxRefusals)
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			return err
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(refuseTimeout))
			if _, err := io.ReadFull(conn, make([]byte, helloSize)); err != nil {
				return
			}
			const text = "this VM has no GPU now"
			status := int32(notAvailable)
			b := binary.LittleEndian.AppendUint32(nil, uint32(status))
			b = binary.LittleEndian.AppendUint32(b, uint32(len(text)))
			_, _ = conn.Write(append(b, text...))
		})
	}
}
