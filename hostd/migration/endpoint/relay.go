package endpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/vm/channel"
	"github.com/gpuctl/gpuctl/internal/relay"
	"github.com/gpuctl/gpuctl/internal/throttle"
	"github.com/gpuctl/gpuctl/internal/vm"
)

// RelayProtocol is the lowest version of gpuguest whose carriers can connect through the host.
const RelayProtocol = 6

const (
	reachFor = 2 * time.Second
	// wayFor is how long a way to a VM is kept that no connection uses.
	wayFor = time.Minute
)

// errNotLent is returned for addresses that a VM has no GPU at.
var errNotLent = errors.New("no GPU that is lent to the VM is there")

// reachFromHere tries an address that a VM does not reach over its network. How long its
// channel takes is part of the time.
func (l *Local) reachFromHere(ctx context.Context, uuid, address string, one *gpuctlv1.Reached) {
	began := time.Now()
	conn, err := (&net.Dialer{Timeout: reachFor}).DialContext(ctx, "tcp", address)
	if err != nil {
		one.Error += "; nor does its host: " + err.Error()
		return
	}
	conn.Close()
	one.Error, one.ThroughHost = "", true
	one.RttNs = (time.Since(began) + l.Guests.roundTrip(uuid)).Nanoseconds()
}

// ways returns the addresses at which carriers in a VM reach a far executor: over the VM's
// network and through its host, the one that works first.
func (l *Local) ways(ctx context.Context, uuid string, addresses []string) []string {
	protocol, err := l.AgentProtocol(ctx, uuid)
	if err != nil || protocol < RelayProtocol {
		return addresses
	}
	through := make([]string, len(addresses))
	for i, a := range addresses {
		through[i] = relay.Prefix + a
	}
	reached, err := l.reach(ctx, uuid, addresses)
	if err == nil && !slices.ContainsFunc(reached, func(r *gpuctlv1.Reached) bool { return r.GetError() == "" }) {
		return append(through, addresses...)
	}
	return append(slices.Clone(addresses), through...)
}

// Relay makes connections of carriers in a VM to the ports for which may returns true, until
// ctx ends or gpuguest does not answer. The connections end with ctx, too.
func (l *Local) Relay(ctx context.Context, m vm.VM, may func(address string) bool) error {
	o, err := l.Guests.get(ctx, m.UUID)
	if err != nil {
		return err
	}
	stream, err := o.agent.Relay(ctx, connect.NewRequest(&gpuctlv1.RelayRequest{Instance: l.Guests.instance}))
	if err != nil {
		return fmt.Errorf("%w: %w", errNoAgent, err)
	}
	defer func() { _ = stream.Close() }()
	ways := &ways{guests: l.Guests, uuid: m.UUID, open: map[bool]*way{}}
	log := throttle.Logger(l.Log.With("machine", m.Name), wishesLogged, wishesEvery)
	ctx, cancel := context.WithCancel(ctx)
	host := &relay.Host{
		Open: ways.use, URL: channel.BaseURL, Log: log,
		May: func(address string, first []byte) error {
			if _, err := remote.ParsePreamble(first); err != nil {
				return err
			}
			if !may(address) {
				return fmt.Errorf("%.80q: %w", address, errNotLent)
			}
			return nil
		},
	}
	defer ways.close()
	defer host.Wait()
	defer cancel()
	defer l.Guests.relays(m.UUID, host)()
	return takeWishes(ctx, host, stream)
}

// takeWishes has the host make the connections that a VM says are waiting.
func takeWishes(ctx context.Context, host *relay.Host, stream *connect.ServerStreamForClient[gpuctlv1.RelayResponse]) error {
	news := make(chan []relay.Wish)
	go func() {
		defer close(news)
		for stream.Receive() {
			all := stream.Msg().GetWishes()
			var now []relay.Wish
			for _, w := range all[:min(len(all), mostWishes)] {
				now = append(now, relay.Wish{ID: w.GetId(), Address: w.GetAddress(), Bulk: w.GetBulk(), First: w.GetFirst()})
			}
			news <- now
		}
	}()
	var all []relay.Wish
	var again <-chan time.Time
	for {
		select {
		case now, ok := <-news:
			if !ok {
				return fmt.Errorf("gpuguest makes no connections through its host any more: %w", cmp.Or(stream.Err(), io.EOF))
			}
			all = now
		case <-again:
		}
		again = nil
		if !host.Take(ctx, all) {
			again = time.After(refusedFor / 4)
		}
	}
}

// ways are what streams to a VM go over: a vchan for bulk transfers and one for the rest, or
// the VM's channel for both. They are opened when they are needed.
type ways struct {
	guests *Guests
	uuid   string

	mu   sync.Mutex
	open map[bool]*way // by whether they are for bulk transfers
}

// way is one of them.
type way struct {
	client *http.Client
	end    func()
	used   int
	idle   *time.Timer
	ready  chan struct{} // closed when client or err is set
	err    error
}

// use returns a client over a way that is open until done is called, with an error if the way
// seems to be broken.
func (w *ways) use(ctx context.Context, bulk bool) (c *http.Client, done func(error), err error) {
	w.mu.Lock()
	one := w.open[bulk]
	if one == nil {
		one = &way{ready: make(chan struct{})}
		w.open[bulk] = one
		go func() {
			one.client, one.end, one.err = w.guests.Bulk(context.WithoutCancel(ctx), w.uuid)
			close(one.ready)
		}()
	}
	one.used++
	if one.idle != nil {
		one.idle.Stop()
	}
	w.mu.Unlock()
	done = func(err error) {
		if err != nil {
			w.forget(bulk, one)
		}
		w.release(bulk, one)
	}
	select {
	case <-one.ready:
	case <-ctx.Done():
		done(nil)
		return nil, nil, ctx.Err()
	}
	if one.err != nil {
		done(one.err)
		return nil, nil, one.err
	}
	return one.client, done, nil
}

// forget has the next connection open a way anew.
func (w *ways) forget(bulk bool, one *way) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.open[bulk] == one {
		delete(w.open, bulk)
	}
}

// release ends a way that nothing uses any more, after a while.
func (w *ways) release(bulk bool, one *way) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if one.used--; one.used > 0 {
		return
	}
	if w.open[bulk] != one {
		go one.close()
		return
	}
	one.idle = time.AfterFunc(wayFor, func() {
		w.mu.Lock()
		unused := one.used == 0 && w.open[bulk] == one
		if unused {
			delete(w.open, bulk)
		}
		w.mu.Unlock()
		if unused {
			one.close()
		}
	})
}

func (o *way) close() {
	<-o.ready
	if o.end != nil {
		o.end()
	}
}

// close ends all ways. Nothing may use them any more.
func (w *ways) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for bulk, one := range w.open {
		delete(w.open, bulk)
		if one.idle != nil {
			one.idle.Stop()
		}
		one.close()
	}
}
