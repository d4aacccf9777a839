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
)

// race is for the connection to one of several addresses. One that is silent does not keep the
// others waiting, also those that have failed: a network that was gone for a moment is back.
type race struct {
	d       *Dialer
	left    []int // indexes of the addresses, in the order in which they are tried
	next    int   // in left
	since   time.Time
	under   map[int]bool  // under way
	failed  map[int]error // how each failed last
	results chan attempt
}

type attempt struct {
	n    int
	conn net.Conn
	err  error
}

// reach connects to the first of the addresses that answers, and returns which that is. It gives
// up when each has failed and none is under way, or at its time limit.
func (d *Dialer) reach(ctx context.Context, left []int, role Role) (attempt, error) {
	ctx, cancel := context.WithTimeout(ctx, d.timeout())
	defer cancel()
	r := &race{d: d, left: left, since: time.Now(), under: map[int]bool{}, failed: map[int]error{}, results: make(chan attempt)}
	r.begin(ctx, role)
	t := time.NewTicker(stagger)
	defer t.Stop()
	for {
		select {
		case a := <-r.results:
			if a.err == nil {
				return a, nil
			}
			delete(r.under, a.n)
			r.failed[a.n] = a.err
			switch {
			case len(r.failed) < len(left):
				r.begin(ctx, role)
			case len(r.under) == 0:
				return attempt{}, r.err(nil)
			}
		case <-t.C:
			r.begin(ctx, role)
		case <-ctx.Done():
			return attempt{}, r.err(ctx.Err())
		}
	}
}

// begin tries the next address that may be tried now, if there is one.
func (r *race) begin(ctx context.Context, role Role) {
	for range r.left {
		n := r.left[r.next%len(r.left)]
		r.next++
		if r.under[n] || !r.mayBegin(n) {
			continue
		}
		r.under[n] = true
		go func() {
			conn, err := r.d.connect(ctx, r.d.Addresses[n], role)
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
	if n == r.left[0] || !r.d.relayed(n) || time.Since(r.since) >= relayAfter {
		return true
	}
	return !slices.ContainsFunc(r.left, func(other int) bool { return !r.d.relayed(other) && r.failed[other] == nil })
}

func (d *Dialer) relayed(n int) bool { return strings.HasPrefix(d.Addresses[n], relay.Prefix) }

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
