package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

const (
	maxWishes = 64              // sessions that wait for a lease at the same time
	leaseWait = 2 * time.Minute // how long one of them waits
	wishAgain = 5 * time.Second // after this time the host is told again
	maxGPUID  = 600             // bytes of a GPU's id, and of a claim's
)

// wish is a session that waits for a lease.
type wish struct {
	claim  string
	device *gpuctlv1.VirtualDevice
	answer chan *gpuctlv1.GrantRequest // has room for one
}

// remoteTarget returns what applications are offered of a GPU that a host lends to the VM.
// Each session needs a lease of its own: see Lease.
func remoteTarget(lent *gpuctlv1.BorrowRequest) *gpuctlv1.Target {
	return &gpuctlv1.Target{
		Gpu: lent.GetGpu(), Model: lent.GetModel(), Limits: proto.CloneOf(lent.GetLimits()), Runtime: &gpuctlv1.Runtime{Remote: &gpuctlv1.Remote{}},
	}
}

// lent returns the GPU that a host lends to the VM now, or nil.
func (a *Agent) lent() *gpuctlv1.BorrowRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.remote
}

// borrow sets the GPU that a host lends to the VM. giveBack is its undo.
func (a *Agent) borrow(lent *gpuctlv1.BorrowRequest) (giveBack func()) {
	set := func(to *gpuctlv1.BorrowRequest) {
		a.mu.Lock()
		defer a.mu.Unlock()
		if to == nil && a.remote != lent {
			return // another call has taken its place
		}
		a.remote = to
		a.news()
	}
	set(lent)
	return func() {
		set(nil)
		a.poke() // offers what is left
	}
}

// waiting returns the sessions that wait for a lease, and whether the GPU is still the one
// that is lent to the VM.
func (a *Agent) waiting(lent *gpuctlv1.BorrowRequest) (out []*gpuctlv1.LeaseWish, current bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for session, w := range a.wishes {
		if len(w.answer) == 0 {
			out = append(out, &gpuctlv1.LeaseWish{Session: session, Claim: w.claim, Device: w.device})
		}
	}
	slices.SortFunc(out, func(x, y *gpuctlv1.LeaseWish) int { return strings.Compare(x.GetSession(), y.GetSession()) })
	return out, a.remote == lent
}

// Lease asks the host for a lease for a session that begins on a GPU which is lent to the
// VM. It waits until a host answers, for leaseWait at most.
func (a *Agent) Lease(ctx context.Context, session string, offer *gpuctlv1.OfferRequest) (*gpuctlv1.Target, error) {
	ctx, cancel := context.WithTimeout(ctx, leaseWait)
	defer cancel()
	w := &wish{claim: offer.GetClaim(), device: offer.GetDevice(), answer: make(chan *gpuctlv1.GrantRequest, 1)}
	a.mu.Lock()
	if len(a.wishes) >= maxWishes {
		a.mu.Unlock()
		return nil, fmt.Errorf("%d sessions wait for a lease of a remote GPU: try again", maxWishes)
	}
	a.wishes[session] = w
	a.news()
	a.mu.Unlock()
	defer func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.wishes, session)
		a.news()
	}()
	select {
	case g := <-w.answer:
		if g.GetError() != "" {
			return nil, fmt.Errorf("the host lends no GPU: %s", g.GetError())
		}
		return g.GetTarget(), nil
	case <-ctx.Done():
		return nil, fmt.Errorf("no host has answered within %v that it lends a GPU: %w", leaseWait, ctx.Err())
	}
}

// Borrow takes a GPU that a host lends to the VM, for as long as the host holds the call.
func (v service) Borrow(ctx context.Context, req *connect.Request[gpuctlv1.BorrowRequest], st *connect.ServerStream[gpuctlv1.BorrowResponse]) error {
	lent := proto.CloneOf(req.Msg)
	if lent.GetGpu() == "" || lent.GetClaim() == "" || len(lent.GetGpu()) > maxGPUID || len(lent.GetClaim()) > maxGPUID || strings.HasPrefix(lent.GetGpu(), gpuPrefix) {
		return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("a remote GPU has an id of the inventory and a claim, of %d bytes at most", maxGPUID))
	}
	v.a.log.Info("a host lends a GPU", "gpu", lent.GetGpu(), "claim", lent.GetClaim(), "memory", lent.GetMemory())
	defer v.a.borrow(lent)()
	v.a.offer(ctx)
	for {
		changed := v.a.next()
		wishes, current := v.a.waiting(lent)
		if !current {
			return connect.NewError(connect.CodeAborted, errors.New("another call has taken this one's place"))
		}
		if err := st.Send(&gpuctlv1.BorrowResponse{Wishes: wishes}); err != nil {
			return err
		}
		var again <-chan time.Time
		if len(wishes) > 0 { // a host that is asked for many at once leaves some out
			again = time.After(wishAgain)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case <-again:
		}
	}
}

// Grant answers a session that waits for a lease. One that does not wait any more is no
// error: its lease ends without a carrier.
func (v service) Grant(_ context.Context, req *connect.Request[gpuctlv1.GrantRequest]) (*connect.Response[gpuctlv1.GrantResponse], error) {
	m := req.Msg
	if m.GetError() == "" && len(m.GetTarget().GetRuntime().GetRemote().GetToken()) == 0 {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("neither a lease nor why there is none"))
	}
	v.a.mu.Lock()
	defer v.a.mu.Unlock()
	if w := v.a.wishes[m.GetSession()]; w != nil && len(w.answer) == 0 {
		w.answer <- proto.CloneOf(m)
	}
	return connect.NewResponse(&gpuctlv1.GrantResponse{}), nil
}
