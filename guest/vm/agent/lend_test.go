package agent_test

import (
	"errors"
	"slices"
	"sync"
	"testing"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/vm/agent"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// fakeLender has the leases that the test sets.
type fakeLender struct {
	mu     sync.Mutex
	leases []*gpuctlv1.Lease
}

func (l *fakeLender) Addresses() []string { return []string{"192.0.2.7:7651"} }

func (l *fakeLender) Leases() []*gpuctlv1.Lease {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.leases)
}

func (l *fakeLender) set(leases ...*gpuctlv1.Lease) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.leases = leases
}

// lendingRig is a VM that lends, with both of its cards ready.
func lendingRig(t *testing.T) (*rig, *fakeLender, *gpuctlv1.GuestDevice) {
	t.Helper()
	r, l := newRig(t), &fakeLender{}
	r.lender = l
	r.restart()
	r.until(secondAt, "ready", ready)
	return r, l, r.until(firstAt, "ready", ready)
}

func (r *rig) hello() *gpuctlv1.HelloResponse {
	r.t.Helper()
	res, err := r.client.Hello(r.t.Context(), connect.NewRequest(&gpuctlv1.HelloRequest{}))
	if err != nil {
		r.t.Fatal(err)
	}
	return res.Msg
}

func used(rt *gpuctlv1.Runtime) *gpuctlv1.Lease {
	return &gpuctlv1.Lease{Id: "l-1", Runtime: rt, State: gpuctlv1.LeaseState_LEASE_STATE_USED}
}

// The cards of a VM that lends are for others: its own applications are not offered them. One
// that a session of the VM's own still uses is not lent.
func TestCardsOfAVMThatLendsAreForOthers(t *testing.T) {
	r, _, d := lendingRig(t)
	h := r.hello()
	if h.GetProtocol() < 5 || !slices.Equal(h.GetLendAddresses(), []string{"192.0.2.7:7651"}) || !h.GetDevices()[0].GetLends() || !h.GetDevices()[1].GetLends() {
		t.Errorf("%v", h)
	}
	r.offers("")
	said, end := r.lend("hostb/far") // it may borrow
	<-said
	r.offers("hostb/far")
	_ = end()

	own := &gpuctlv1.Session{Id: "s-own", State: gpuctlv1.SessionState_SESSION_STATE_RUNNING, Target: &gpuctlv1.Target{Gpu: "vm/" + firstAt}}
	r.sessions.set(own)
	if h := r.hello(); h.GetDevices()[0].GetLends() || h.GetDevices()[0].GetMessage() == "" || !h.GetDevices()[1].GetLends() {
		t.Errorf("with a session of its own: %v", h.GetDevices())
	}
	if _, err := r.made.BeginLend(t.Context(), d.GetTarget().GetRuntime()); !errors.Is(err, agent.ErrInUse) {
		t.Errorf("with a session of its own: %v", err)
	}
	r.sessions.set()
	if _, err := r.made.BeginLend(t.Context(), &gpuctlv1.Runtime{Library: "other.so"}); !errors.Is(err, agent.ErrNoDevice) {
		t.Errorf("a runtime of no card: %v", err)
	}
	plain := newRig(t)
	plain.until(firstAt, "ready", ready)
	if h := plain.hello(); len(h.GetLendAddresses()) > 0 || h.GetDevices()[0].GetLends() {
		t.Errorf("a VM that lends nothing: %v", h)
	}
}

// A card is not released while a lease runs on it, nor lent while it is released.
func TestACardWithALeaseIsNotReleased(t *testing.T) {
	r, l, d := lendingRig(t)
	other := r.until(secondAt, "ready", ready)
	l.set(used(d.GetTarget().GetRuntime()))
	refused(t, r.release(firstAt), connect.CodeFailedPrecondition, "lease l-1", firstAt)
	r.untouched()
	l.set(used(&gpuctlv1.Runtime{Library: "of-no-card.so"})) // nobody knows where it is
	refused(t, r.release(firstAt), connect.CodeFailedPrecondition, "lease l-1")
	r.untouched()

	over := used(d.GetTarget().GetRuntime())
	over.State = gpuctlv1.LeaseState_LEASE_STATE_ENDED
	l.set(over, used(other.GetTarget().GetRuntime()))
	if err := r.release(firstAt); err != nil {
		t.Error(err)
	}
	if _, err := r.made.BeginLend(t.Context(), d.GetTarget().GetRuntime()); !errors.Is(err, agent.ErrNoDevice) {
		t.Errorf("it is released: %v", err)
	}
	if _, err := r.takeUp(firstAt); err != nil {
		t.Error(err)
	}
}

// A release waits for a lease that is being made, and is refused when that is there.
func TestAReleaseWaitsForALeaseThatIsBeingMade(t *testing.T) {
	r, l, d := lendingRig(t)
	end, err := r.made.BeginLend(t.Context(), d.GetTarget().GetRuntime())
	if err != nil {
		t.Fatal(err)
	}
	released := make(chan error, 1)
	go func() { released <- r.release(firstAt) }()
	r.until(firstAt, "held", func(d *gpuctlv1.GuestDevice) bool { return !d.GetReady() })
	select {
	case err := <-released:
		t.Errorf("it has not waited: %v", err)
	default:
	}
	l.set(used(d.GetTarget().GetRuntime()))
	end()
	refused(t, <-released, connect.CodeFailedPrecondition, "lease l-1")
	testkit.Until(t, "it may be lent again", func() error {
		end, err := r.made.BeginLend(t.Context(), d.GetTarget().GetRuntime())
		if err == nil {
			end()
		}
		return err
	})
}
