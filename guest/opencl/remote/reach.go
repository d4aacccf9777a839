package remote

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/gpuctl/gpuctl/internal/relay"
)

const (
	// stagger is how long an address is waited for alone before another one is tried beside it
	// (RFC 8305, section 5).
	stagger = 250 * time.Millisecond
	// relayAfter is how long ways without a VM's host are waited for before the one through it,
	// which is slower and is kept to once it has been taken: TCP sends its first packet again after 1 s.
	relayAfter = 2 * time.Second
	// rdmaFirst is how long RDMA is waited for before TCP: making a connection takes longer, and
	// who has set it up wants it.
	rdmaFirst = time.Second
)

// race is for the connection to one of several addresses. One that is silent does not keep the
// others waiting, also those that have failed: a network that was gone for a moment is back.
type race struct {
	d       *Dialer
	role    Role
	left    []int // indexes of the addresses, in the order in which they are tried
	next    int   // in left
	since   time.Time
	until   time.Time     // for so long, an address is waited for
	under   map[int]bool  // under way
	failed  map[int]error // how each failed last
	results chan attempt
}

type attempt struct {
	n    int
	conn net.Conn
	err  error
}

func (d *Dialer) newRace(role Role) *race {
	r := &race{d: d, role: role, since: time.Now(), under: map[int]bool{}, failed: map[int]error{}, results: make(chan attempt)}
	for i := range d.Addresses {
		r.left = append(r.left, (int(d.reached.Load())+i)%len(d.Addresses))
	}
	r.until = r.since.Add(d.timeout())
	return r
}

// reach connects to the first of the addresses that answers, and returns which that is. It gives
// up when each has failed and none is under way, or at its time limit. What is under way
// when it returns goes on until ctx ends.
func (r *race) reach(ctx context.Context) (attempt, error) {
	tick, limit := time.NewTicker(stagger), time.NewTimer(time.Until(r.until))
	defer tick.Stop()
	defer limit.Stop()
	r.begin(ctx, false)
	for len(r.failed) < len(r.left) || len(r.under) > 0 {
		select {
		case a := <-r.results:
			delete(r.under, a.n)
			if a.err == nil {
				return a, nil
			}
			r.failed[a.n] = a.err
			r.begin(ctx, false)
		case <-tick.C:
			r.begin(ctx, true)
		case <-limit.C:
			return attempt{}, r.err(context.DeadlineExceeded)
		case <-ctx.Done():
			return attempt{}, r.err(ctx.Err())
		}
	}
	return attempt{}, r.err(nil)
}

// drop tries an address no more, as who is there does not answer. The others have their time.
func (r *race) drop(n int) {
	r.left = slices.DeleteFunc(r.left, func(other int) bool { return other == n })
	delete(r.failed, n)
	r.until = time.Now().Add(r.d.timeout())
}

// begin tries the next address that may be tried now, if there is one; again says whether it may
// be one that has failed.
func (r *race) begin(ctx context.Context, again bool) {
	for range r.left {
		n := r.left[r.next%len(r.left)]
		r.next++
		if r.under[n] || !again && r.failed[n] != nil || !r.mayBegin(n) {
			continue
		}
		r.under[n] = true
		go func() {
			conn, err := r.d.connect(ctx, r.d.Addresses[n], r.role)
			select {
			case r.results <- attempt{n, conn, err}:
			case <-ctx.Done():
				if err == nil {
					conn.Close()
				}
			}
		}()
		return
	}
}

// mayBegin reports whether it is the time of an address.
func (r *race) mayBegin(n int) bool {
	passed := time.Since(r.since)
	switch {
	case n == r.left[0] || passed >= relayAfter || r.d.overRDMA(n):
		return true
	case !r.d.relayed(n):
		return passed >= rdmaFirst || !slices.ContainsFunc(r.left, func(other int) bool { return r.d.overRDMA(other) && r.failed[other] == nil })
	}
	return !slices.ContainsFunc(r.left, func(other int) bool { return !r.d.relayed(other) && r.failed[other] == nil })
}

// RDMAPrefix begins an address (HOST:PORT) that is reached over RDMA.
const RDMAPrefix = "rdma:"

// WithRDMA returns addresses with a way over RDMA before each to which there may be one.
func WithRDMA(addresses []string) (out []string) {
	for _, a := range addresses {
		if !strings.HasPrefix(a, relay.Prefix) && !strings.HasPrefix(a, RDMAPrefix) {
			out = append(out, RDMAPrefix+a)
		}
		out = append(out, a)
	}
	return out
}

func (d *Dialer) relayed(n int) bool { return strings.HasPrefix(d.Addresses[n], relay.Prefix) }

func (d *Dialer) overRDMA(n int) bool { return strings.HasPrefix(d.Addresses[n], RDMAPrefix) }

// err is why none was reached: how each has failed, or why it was given up.
func (r *race) err(why error) error {
	var errs []error
	for _, n := range r.left {
		if err := cmp.Or(r.failed[n], why); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", r.d.Addresses[n], err))
		}
	}
	return errors.Join(errs...)
}
