package agent_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/vm/agent"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// lend holds a call by which a host lends a GPU. It returns what the VM says, first and at
// each change.
func (r *rig) lend(gpu string) (said chan []*gpuctlv1.LeaseWish, end func() error) {
	r.t.Helper()
	ctx, cancel := context.WithCancel(r.t.Context())
	st, err := r.client.Borrow(ctx, connect.NewRequest(&gpuctlv1.BorrowRequest{Gpu: gpu, Claim: "c", Model: "Far", Memory: 1 << 30, Limits: &gpuctlv1.Limits{GlobalMemory: 1 << 30}}))
	if err != nil {
		r.t.Fatal(err)
	}
	said = make(chan []*gpuctlv1.LeaseWish, 1000)
	over := make(chan error, 1)
	go func() {
		defer close(said)
		for st.Receive() {
			said <- st.Msg().GetWishes()
		}
		over <- st.Err()
		_ = st.Close()
	}()
	return said, func() error {
		cancel()
		return <-over
	}
}

func (r *rig) offers(want string) {
	r.t.Helper()
	testkit.Until(r.t, "applications are offered "+want, func() error {
		return testkit.Want(r.sessions.offered() == want && r.open.Load() == (want != ""), r.sessions.offered())
	})
}

// without has the VM release its cards.
func (r *rig) without() {
	r.t.Helper()
	for _, address := range []string{firstAt, secondAt} {
		r.until(address, "ready", ready)
		if err := r.release(address); err != nil {
			r.t.Fatal(err)
		}
	}
}

// A VM without cards offers the GPU that a host lends to it, for as long as the host holds
// its call. A card of its own comes first.
func TestAGPUIsOfferedAsLongAsAHostLendsIt(t *testing.T) {
	r := newRig(t)
	r.until(firstAt, "ready", ready)
	said, end := r.lend("h2/far")
	if w := <-said; len(w) != 0 {
		t.Errorf("%v wait", w)
	}
	hello, err := r.client.Hello(t.Context(), connect.NewRequest(&gpuctlv1.HelloRequest{}))
	if err != nil || hello.Msg.GetRemote().GetGpu() != "h2/far" || hello.Msg.GetProtocol() != agent.Protocol {
		t.Errorf("%v %v", hello.Msg.GetRemote(), err)
	}
	r.offers("vm/" + firstAt)
	r.without()
	r.offers("h2/far")
	// Another host's call takes its place: the VM has moved.
	next, end2 := r.lend("h3/far")
	<-next
	for range said { // it ends by itself
	}
	if err := end(); connect.CodeOf(err) != connect.CodeAborted {
		t.Errorf("the former call ends with %v", err)
	}
	r.offers("h3/far")
	if err := end2(); connect.CodeOf(err) != connect.CodeCanceled {
		t.Error(err)
	}
	r.offers("")
	for what, m := range map[string]*gpuctlv1.BorrowRequest{
		"no GPU": {Claim: "c"}, "no claim": {Gpu: "h/g"}, "a card of the VM": {Gpu: "vm/0000:00:05.0", Claim: "c"}, "a long id": {Gpu: strings.Repeat("x", 700), Claim: "c"},
	} {
		st, err := r.client.Borrow(t.Context(), connect.NewRequest(m))
		if err == nil {
			for st.Receive() {
				t.Errorf("%s: it is borrowed", what)
			}
			err = st.Err()
			_ = st.Close()
		}
		refused(t, err, connect.CodeInvalidArgument)
	}
	r.offers("")
}

// Each session waits for a lease of its own, over a change of the host that lends.
func TestSessionsWaitForTheirLeases(t *testing.T) {
	r := newRig(t)
	r.without()
	type answer struct {
		target *gpuctlv1.Target
		err    error
	}
	ask := func(ctx context.Context, session string) chan answer {
		out := make(chan answer, 1)
		go func() {
			target, err := r.made.Lease(ctx, session, &gpuctlv1.OfferRequest{Claim: "c", Device: &gpuctlv1.VirtualDevice{Name: "d"}})
			out <- answer{target, err}
		}()
		return out
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	one := ask(ctx, "s-1")
	said, end := r.lend("h2/far")
	awaits := func(said chan []*gpuctlv1.LeaseWish, ids ...string) {
		t.Helper()
		for wishes := range said {
			var got []string
			for _, w := range wishes {
				if w.GetClaim() != "c" || w.GetDevice().GetName() != "d" {
					t.Errorf("%v", w)
				}
				got = append(got, w.GetSession())
			}
			if strings.Join(got, " ") == strings.Join(ids, " ") {
				return
			}
		}
		t.Fatalf("%v never wait", ids)
	}
	awaits(said, "s-1")
	two := ask(ctx, "s-2")
	awaits(said, "s-1", "s-2")
	_ = end() // hostd dies
	said, end = r.lend("h2/far")
	awaits(said, "s-1", "s-2")
	grant := func(m *gpuctlv1.GrantRequest) error {
		_, err := r.client.Grant(t.Context(), connect.NewRequest(m))
		return err
	}
	target := &gpuctlv1.Target{Gpu: "h2/far", Runtime: &gpuctlv1.Runtime{Remote: &gpuctlv1.Remote{Token: []byte("t")}}}
	refused(t, grant(&gpuctlv1.GrantRequest{Session: "s-1", Target: &gpuctlv1.Target{Gpu: "h2/far"}}), connect.CodeInvalidArgument)
	for range 2 { // the answer may have been lost
		if err := grant(&gpuctlv1.GrantRequest{Session: "s-1", Target: target}); err != nil {
			t.Fatal(err)
		}
	}
	if a := <-one; a.err != nil || a.target.GetGpu() != "h2/far" {
		t.Errorf("%v", a)
	}
	if err := grant(&gpuctlv1.GrantRequest{Session: "s-2", Error: "no room"}); err != nil {
		t.Fatal(err)
	}
	if a := <-two; a.err == nil || !strings.Contains(a.err.Error(), "no room") {
		t.Errorf("%v", a)
	}
	awaits(said)
	if err := grant(&gpuctlv1.GrantRequest{Session: "s-9", Target: target}); err != nil {
		t.Errorf("one that waits no more: %v", err)
	}
	// There is a limit to how many wait, and those that give up make room.
	few, stop := context.WithCancel(ctx)
	var all []chan answer
	for i := range 64 {
		all = append(all, ask(few, fmt.Sprint("w-", i)))
	}
	testkit.Until(t, "all wait", func() error {
		wishes := <-said
		return testkit.Want(len(wishes) == 64, len(wishes))
	})
	if a := <-ask(ctx, "s-3"); a.err == nil {
		t.Error("a 65th session waits")
	}
	stop()
	for _, a := range all {
		if got := <-a; !errors.Is(got.err, context.Canceled) {
			t.Errorf("%v", got.err)
		}
	}
	_ = end()
}
