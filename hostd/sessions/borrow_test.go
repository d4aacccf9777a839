package sessions

import (
	"context"
	"crypto/rand"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/guesttest"
	"github.com/gpuctl/gpuctl/hostd/member"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// farGPU is a GPU that another host lends.
const farGPU = "there/one"

func farLimits() *gpuctlv1.Limits {
	return &gpuctlv1.Limits{GlobalMemory: 8 << 30, MaxAlloc: 8 << 30}
}

func farTarget() *gpuctlv1.Target {
	return &gpuctlv1.Target{Gpu: farGPU, Limits: farLimits(), Runtime: &gpuctlv1.Runtime{Remote: &gpuctlv1.Remote{PeerCertSha256: make([]byte, 32)}}}
}

// otherHost is a host's cluster with another host in it, which lends a GPU.
type otherHost struct {
	*member.Node

	asked chan struct{} // gets something for each lease that is asked for
	ended chan struct{} // gets something for each lease that is to end

	lost atomic.Bool // the log has not assigned the GPU there

	mu    sync.Mutex
	lends chan struct{} // what is asked from now on is answered when it is closed
}

// hold keeps the other host from answering what it is asked from now on, until let is called.
func (o *otherHost) hold() (let func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	lends := make(chan struct{})
	o.lends = lends
	return func() { close(lends) }
}

func (*otherHost) GPU(id string) *clusterv1.GPU {
	return &clusterv1.GPU{Id: id, Host: "there", Name: "one", Limits: farLimits()}
}

func (*otherHost) Calibrate(context.Context, string, func(*clusterv1.Link, time.Duration, float64) *clusterv1.Link) error {
	return nil
}

func (o *otherHost) Borrow(ctx context.Context, _ string, _ *clusterv1.LendRequest) (*clusterv1.LendResponse, error) {
	if err := o.answer(ctx, o.asked); err != nil {
		return nil, err
	}
	if o.lost.Load() {
		return nil, fmt.Errorf("host there does not lend: %w", member.ErrNotAssigned)
	}
	peer := make([]byte, 32)
	_, _ = rand.Read(peer)
	return &clusterv1.LendResponse{Addresses: []string{"there:7651"}, Token: peer, CertificateSha256: peer, Limits: farLimits()}, nil
}

func (o *otherHost) Acquire(ctx context.Context, c *clusterv1.Claim, gpus []string, amount uint64) error {
	if slices.Contains(gpus, farGPU) {
		o.lost.Store(false)
		return nil
	}
	return o.Node.Acquire(ctx, c, gpus, amount)
}

func (o *otherHost) GiveBack(ctx context.Context, _, _ string) error { return o.answer(ctx, o.ended) }

// answer says that a call has come, and waits until the other host may answer it.
func (o *otherHost) answer(ctx context.Context, come chan<- struct{}) error {
	o.mu.Lock()
	lends := o.lends
	o.mu.Unlock()
	come <- struct{}{}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-lends:
		return nil
	}
}

// borrower is a host with a claim of its GPU big and a session there, and another host in its
// cluster.
type borrower struct {
	*fixture

	t       *testing.T
	token   string
	session string
	c       *claim
}

func newBorrower(t *testing.T) *borrower {
	t.Helper()
	f := &fixture{
		t: t, guest: guesttest.New(), state: filepath.Join(t.TempDir(), "state.json"),
		other: &otherHost{asked: make(chan struct{}, 8), ended: make(chan struct{}, 8)},
	}
	f.other.hold()()
	f.open()
	t.Cleanup(f.close)
	b := &borrower{fixture: f, t: t}
	b.token = b.fixture.claim(&gpuctlv1.CreateClaimRequest{Expr: "id == 'big'"}).GetToken()
	b.session = b.next()
	b.host.mu.Lock()
	b.c = b.host.claims[b.host.sessions[b.session].GetClaim()]
	b.host.mu.Unlock()
	return b
}

// next starts a session with the claim's token.
func (b *borrower) next() string {
	b.t.Helper()
	id, err := b.guest.Begin(b.token, 1, "x", 1<<20)
	if err != nil {
		b.t.Fatal(err)
	}
	b.resync()
	return id
}

func (b *borrower) resync() {
	b.t.Helper()
	if err := b.host.Resync(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
}

// away moves the session to the other host's GPU, as gpuguest does it, and returns the result.
func (b *borrower) away() *gpuctlv1.SwapResult {
	b.t.Helper()
	return b.result(b.host.Guest.Swap(b.t.Context(), connect.NewRequest(&gpuctlv1.SwapRequest{Session: b.session, Target: farTarget()})))
}

func (b *borrower) result(s *connect.ServerStreamForClient[gpuctlv1.Progress], err error) *gpuctlv1.SwapResult {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
	defer s.Close()
	var r *gpuctlv1.SwapResult
	for s.Receive() {
		r = s.Msg().GetResult()
	}
	if r.GetSession() == nil {
		b.t.Fatal(r, s.Err())
	}
	return r
}

// await waits until the other host was called.
func (b *borrower) await(call <-chan struct{}) {
	b.t.Helper()
	select {
	case <-call:
	case <-testkit.Context(b.t).Done():
		b.t.Fatal("the other host was not called")
	}
}

func (b *borrower) begin(kind string) *operation {
	b.t.Helper()
	op, _, _, err := b.host.begin(b.session, kind)
	if err != nil {
		b.t.Fatal(err)
	}
	return op
}

// has reports whether the claim has a GPU, after somebody has compared what it needs.
func (b *borrower) has(gpu string) bool {
	b.host.mu.Lock()
	defer b.host.mu.Unlock()
	b.host.settle(b.c)
	_, ok := b.host.ledger.Holds(b.c.ID, gpu)
	return ok
}

// As long as gpuguest has the old offer, a session may begin on the source. The offer of a
// remote GPU takes until that host has answered.
func TestSourceStaysReservedUntilItIsNotOfferedAnyMore(t *testing.T) {
	for what, leave := range map[string]func(*borrower, *sync.WaitGroup){
		"a swap": func(b *borrower, wg *sync.WaitGroup) {
			op := b.begin("migrate")
			s := b.away().GetSession()
			wg.Go(func() {
				b.host.commit(op, b.c, s)
				b.host.end(op, b.c)
			})
		},
		"a swap whose end a list tells": func(b *borrower, _ *sync.WaitGroup) {
			op := b.begin("migrate")
			b.away()
			b.resync() // no older list is accepted after that
			b.host.mu.Lock()
			op.doubt = true
			b.host.mu.Unlock()
			b.resync()
		},
		"a resume of a session that left its GPU to another": func(b *borrower, wg *sync.WaitGroup) {
			other := b.next()
			if _, err := last(b.Suspend(b.t.Context(), connect.NewRequest(&gpuctlv1.HostSuspendRequest{Session: b.session}))); err != nil {
				b.t.Fatal(err)
			}
			b.guest.End(other)
			b.resync()
			op := b.begin("resume")
			r := b.result(b.host.Guest.Resume(b.t.Context(), connect.NewRequest(&gpuctlv1.ResumeRequest{Session: b.session, Target: farTarget()})))
			wg.Go(func() {
				b.host.commit(op, b.c, r.GetSession())
				b.host.end(op, b.c)
			})
		},
	} {
		t.Run(what, func(t *testing.T) {
			b := newBorrower(t)
			let := b.other.hold()
			var wg sync.WaitGroup
			defer wg.Wait()
			leave(b, &wg)
			b.await(b.other.asked)
			if !b.has("big") {
				t.Error("the source is free, and gpuguest offers it")
			}
			if c := b.claim(&gpuctlv1.CreateClaimRequest{Expr: "id == 'big'"}); c != nil {
				t.Error("the source is another claim's, and gpuguest offers it")
			}
			let()
			testkit.Until(t, "the source is free", func() error { return testkit.Want(!b.has("big")) })
			b.session = b.next()
			if at := b.at(); at != farGPU {
				t.Errorf("the next session is on %s", at)
			}
		})
	}
}

// A session that has begun by the old offer, just before the new one, is not known here yet.
func TestASessionThatBeganByTheOldOfferKeepsItsGPU(t *testing.T) {
	b := newBorrower(t)
	op := b.begin("migrate")
	s := b.away().GetSession()
	var late string
	var err error
	b.guest.Offering = func() { late, err = b.guest.Begin(b.token, 1, "x", 1<<20) }
	b.host.commit(op, b.c, s)
	if err != nil {
		t.Fatal(err)
	}
	b.host.end(op, b.c)
	if !b.has("big") {
		t.Error("its GPU is free")
	}
	b.guest.End(late)
	b.resync()
	if b.has("big") {
		t.Error("nobody is there any more")
	}
}

// at returns where the session is.
func (b *borrower) at() string {
	b.host.mu.Lock()
	defer b.host.mu.Unlock()
	return b.host.sessions[b.session].GetTarget().GetGpu()
}

// abroad has the claim's next session begin on the other host's GPU.
func (b *borrower) abroad() {
	b.place(farGPU)
	b.host.repeatOffer(b.t.Context(), b.c)
	b.await(b.other.asked)
}

func (b *borrower) place(gpu string) {
	b.host.mu.Lock()
	defer b.host.mu.Unlock()
	b.c.place([]string{gpu})
	b.host.settle(b.c)
}

// renews starts to renew the lease that is offered. The other host answers when let is called.
func (b *borrower) renews(wg *sync.WaitGroup) (let func()) {
	b.t.Helper()
	let = b.other.hold()
	b.host.mu.Lock()
	old := b.host.borrowed[b.c.Lease]
	b.host.mu.Unlock()
	wg.Go(func() { b.host.renewOne(b.t.Context(), b.c, old) })
	b.await(b.other.asked)
	b.other.hold()()
	return let
}

// A lease takes a while. Meanwhile the claim may have come home, or left and come back: the lease
// is of an assignment that is over, then.
func TestALateLeaseIsNotOffered(t *testing.T) {
	for what, c := range map[string]struct {
		moves  []string
		want   string
		leases int // that are left: of the session, and for the next one
	}{
		"it came home":        {[]string{"big"}, "big", 0},
		"it was home between": {[]string{"big", farGPU}, farGPU, 2},
	} {
		t.Run(what, func(t *testing.T) {
			b := newBorrower(t)
			b.abroad()
			var wg sync.WaitGroup
			let := b.renews(&wg)
			for _, gpu := range c.moves {
				b.place(gpu)
				b.host.repeatOffer(t.Context(), b.c)
			}
			b.host.mu.Lock()
			lease := b.c.Lease
			b.host.mu.Unlock()
			let()
			wg.Wait()
			b.host.mu.Lock()
			if b.c.Lease != lease {
				t.Errorf("lease %q is offered, not %q", b.c.Lease, lease)
			}
			b.host.mu.Unlock()
			b.session = b.next()
			if at := b.at(); at != c.want {
				t.Errorf("the next session is on %s", at)
			}
			testkit.Until(t, "the other leases are given back", func() error {
				b.host.mu.Lock()
				defer b.host.mu.Unlock()
				return testkit.Want(len(b.host.borrowed) == c.leases)
			})
		})
	}
}

// Nothing is offered to a claim that is released: nobody would withdraw it.
func TestALateLeaseOfAReleasedClaimIsNotOffered(t *testing.T) {
	b := newBorrower(t)
	b.abroad()
	var wg sync.WaitGroup
	let := b.renews(&wg)
	if _, err := b.ReleaseClaim(t.Context(), connect.NewRequest(&gpuctlv1.ReleaseClaimRequest{Claim: b.c.ID})); err != nil {
		t.Fatal(err)
	}
	let()
	wg.Wait()
	if left := b.guest.Offered(); len(left) > 0 {
		t.Errorf("offered: %v", left)
	}
}

// A session was suspended, and is back before its claim's offer is withdrawn.
func TestALateWithdrawalTakesNoNewerOfferBack(t *testing.T) {
	b := newBorrower(t)
	b.host.withdrawAt(t.Context(), b.c, b.c.placed-1)
	if left := b.guest.Offered(); len(left) != 1 {
		t.Errorf("offered: %v", left)
	}
	b.host.withdrawAt(t.Context(), b.c, b.c.placed)
	if left := b.guest.Offered(); len(left) > 0 {
		t.Errorf("offered: %v", left)
	}
}

// What hostd was giving back when it stopped, the next one gives back.
func TestALeaseIsGivenBackByTheNextHostd(t *testing.T) {
	b := newBorrower(t)
	b.abroad()
	let := b.other.hold()
	b.place("big")
	b.host.repeatOffer(t.Context(), b.c)
	b.await(b.other.ended)
	b.halt()
	let()
	b.start()
	b.await(b.other.ended)
	testkit.Until(t, "the lease is over", func() error {
		b.host.mu.Lock()
		defer b.host.mu.Unlock()
		return testkit.Want(len(b.host.borrowed) == 0)
	})
}

// Until a host that was started knows who has what, it lends nothing and ends no lease. Another host that does not
// answer takes half a minute for each lease that is asked for.
func TestHostThatDoesNotAnswerKeepsNoOtherFromStarting(t *testing.T) {
	b := newBorrower(t)
	b.host.mu.Lock()
	b.c.place([]string{farGPU})
	b.host.save()
	b.host.mu.Unlock()
	b.halt()
	let := b.other.hold()
	started := make(chan struct{})
	go func() {
		defer close(started)
		b.start()
	}()
	<-b.other.asked
	select {
	case <-started:
	case <-time.After(20 * time.Second):
		t.Error("it waits for the other host")
	}
	let()
	<-started
	testkit.Until(t, "its GPU is offered all the same", func() error {
		b.host.mu.Lock()
		defer b.host.mu.Unlock()
		for _, c := range b.host.claims {
			if c.ID == b.c.ID {
				return testkit.Want(c.Lease != "", c.Offered)
			}
		}
		return testkit.Want(false)
	})
}

// A host was away for longer than its leases live. The hosts that lend have told the log that its claims have left
// their GPUs, and nobody binds such a claim again: the host that manages it has to.
func TestClaimGetsBackWhatItLostWhileItsHostWasTakenForDown(t *testing.T) {
	b := newBorrower(t)
	b.abroad()
	b.host.mu.Lock()
	old := b.host.borrowed[b.c.Lease]
	b.host.mu.Unlock()
	b.other.lost.Store(true)
	b.host.renewOne(t.Context(), b.c, old)
	b.host.mu.Lock()
	defer b.host.mu.Unlock()
	if b.c.Lease == old.ID {
		t.Error("its next session begins with a lease that is over")
	}
}
