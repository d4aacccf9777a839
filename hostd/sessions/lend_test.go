package sessions

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/member"
	"github.com/gpuctl/gpuctl/hostd/member/clusterapi"
	"github.com/gpuctl/gpuctl/hostd/sessions/ledger"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

var there = clusterapi.Self{Host: "there", ID: "h-there"}

// lender is a host with a claim of another host in its cluster's log.
type lender struct {
	*fixture

	t *testing.T
}

func newLender(t *testing.T, with ...func(*HostConfig)) *lender {
	f := newFixture(t, filepath.Join(t.TempDir(), "state.json"), with...)
	t.Cleanup(f.close)
	return &lender{f, t}
}

// assign makes a claim of the other host, and returns the fencing token of its assignment.
func (l *lender) assign(claim string, memory uint64, gpus ...string) uint64 {
	l.t.Helper()
	op := &clusterv1.PutClaim{Claim: &clusterv1.Claim{Id: claim, Count: uint32(len(gpus)), MinMemory: memory, Labels: map[string]string{"gpuctl.managed-by": there.ID}}}
	for _, g := range gpus {
		op.Choices = append(op.Choices, &clusterv1.Choice{Gpu: "here/" + g, Memory: memory})
	}
	l.host.Cluster.Known(l.t.Context(), gpus)
	res, err := l.node.Log().Apply(l.t.Context(), &clusterv1.Command{Op: &clusterv1.Command_PutClaim{PutClaim: op}})
	if err != nil || len(res.GetAssignments()) != len(gpus) {
		l.t.Fatal(res, err)
	}
	return res.GetAssignments()[0].GetToken()
}

func request(lease, claim string, token uint64, gpus ...string) *clusterv1.LendRequest {
	r := &clusterv1.LendRequest{Lease: lease, Claim: claim, Token: token, CertificateSha256: make([]byte, 32)}
	for _, g := range gpus {
		r.Gpus = append(r.Gpus, "here/"+g)
	}
	return r
}

func (l *lender) lend(r *clusterv1.LendRequest) *clusterv1.LendResponse {
	l.t.Helper()
	res, err := l.host.Lend(l.t.Context(), there, r)
	if err != nil {
		l.t.Fatal(err)
	}
	return res
}

func TestOnlyWhatTheLogHasAssignedIsLent(t *testing.T) {
	l := newLender(t)
	token := l.assign("c", 0, "big")
	for what, r := range map[string]*clusterv1.LendRequest{
		"another GPU":   request("l1", "c", token, "mid"),
		"an old token":  request("l1", "c", token-1, "big"),
		"another claim": request("l1", "d", token, "big"),
	} {
		if _, err := l.host.Lend(t.Context(), there, r); !errors.Is(err, member.ErrNotAssigned) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := l.host.Lend(t.Context(), clusterapi.Self{Host: "thief", ID: "h-thief"}, request("l1", "c", token, "big")); !errors.Is(err, member.ErrNotAssigned) {
		t.Errorf("another host's claim: %v", err)
	}
	if n := len(l.guest.Leases()); n != 0 {
		t.Fatalf("%d far executors were started", n)
	}
	first := l.lend(request("l1", "c", token, "big"))
	if again := l.lend(request("l1", "c", token, "big")); string(again.GetToken()) != string(first.GetToken()) {
		t.Error("the same request has another answer")
	}
	if !l.host.Expects(first.GetToken()) || l.host.Expects(make([]byte, 32)) {
		t.Error("the port does not know its leases")
	}
	if err := l.host.EndLease(t.Context(), clusterapi.Self{ID: "h-thief"}, "l1"); !errors.Is(err, errDenied) {
		t.Errorf("another host ends it: %v", err)
	}
	if own := l.owners()["big"]; len(own) != 1 || own[0].GetHost() != "there" {
		t.Errorf("%v", own)
	}
	if c := l.claim(&gpuctlv1.CreateClaimRequest{Expr: "id == 'big'"}); c != nil {
		t.Error("a lent GPU was given to a claim of this host")
	}
}

func TestHostileRequestsForLeases(t *testing.T) {
	l := newLender(t)
	token := l.assign("c", 0, "big")
	for what, change := range map[string]func(*clusterv1.LendRequest){
		"no name":       func(r *clusterv1.LendRequest) { r.Lease = "" },
		"a path":        func(r *clusterv1.LendRequest) { r.Lease = "../x" },
		"a long name":   func(r *clusterv1.LendRequest) { r.Lease = strings.Repeat("a", 33) },
		"no GPU":        func(r *clusterv1.LendRequest) { r.Gpus = nil },
		"many GPUs":     func(r *clusterv1.LendRequest) { r.Gpus = make([]string, 65) },
		"short hash":    func(r *clusterv1.LendRequest) { r.CertificateSha256 = r.CertificateSha256[1:] },
		"long outage":   func(r *clusterv1.LendRequest) { r.OutageMs = 1 << 40 },
		"a past outage": func(r *clusterv1.LendRequest) { r.OutageMs = -1 },
		"a NUL":         func(r *clusterv1.LendRequest) { r.Device = &gpuctlv1.VirtualDevice{Name: "a\x00"} },
		"a device type": func(r *clusterv1.LendRequest) { r.Device = &gpuctlv1.VirtualDevice{Type: "toaster"} },
	} {
		r := request("l1", "c", token, "big")
		change(r)
		if _, err := l.host.Lend(t.Context(), there, r); !errors.Is(err, errInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := l.host.Lend(t.Context(), there, request("l1", "c", token, "none/such")); !errors.Is(err, errNotFound) {
		t.Errorf("a GPU of another host: %v", err)
	}
	l.lend(request("l1", "c", token, "big"))
	other := request("l1", "c", token, "big")
	other.CertificateSha256 = []byte(strings.Repeat("x", 32))
	if _, err := l.host.Lend(t.Context(), there, other); err == nil {
		t.Error("a lease was taken over with another certificate")
	}
	if n := len(l.guest.Leases()); n != 1 {
		t.Errorf("%d far executors", n)
	}
}

// A lease holds as much of a GPU as the log has assigned: several fit, up to its memory.
func TestLeasesShareAGPUUpToItsMemory(t *testing.T) {
	l := newLender(t)
	a, b := l.assign("a", 3<<30, "big"), l.assign("b", 4<<30, "big")
	if res := l.lend(request("la", "a", a, "big")); res.GetMemory() != 3<<30 || res.GetLimits().GetGlobalMemory() != 3<<30 {
		t.Errorf("%v", res)
	}
	l.lend(request("lb", "b", b, "big"))
	if got := l.guest.Leases()["lb"].GetMemory(); got != 4<<30 {
		t.Errorf("gpuguest allows %d bytes", got)
	}
	if c := l.claim(&gpuctlv1.CreateClaimRequest{Expr: "id == 'big'", MinMemory: 2 << 30}); c != nil {
		t.Error("9 of 8 GiB were given away")
	}
	if c := l.claim(&gpuctlv1.CreateClaimRequest{Expr: "id == 'big'", MinMemory: 1 << 30}); c == nil {
		t.Error("the last GiB was not given away")
	}
}

func (l *lender) over(id string) {
	l.t.Helper()
	testkit.Until(l.t, "lease "+id+" is over", func() error {
		l.host.checkLent(l.t.Context())
		if l.guest.Leases()[id] != nil {
			return errors.New("its far executor runs")
		}
		if own := l.owners()["big"]; len(own) > 0 {
			return fmt.Errorf("%v", own)
		}
		return nil
	})
}

// The log decides when a lease is over, whatever the host that borrows says or does not
// say. The assignment is gone only after the far executor.
func TestAReleasedAssignmentEndsItsLease(t *testing.T) {
	l := newLender(t)
	l.lend(request("l1", "c", l.assign("c", 0, "big"), "big"))
	l.guest.Step = func(kind, step string) error {
		if kind == "lend" && step == "end" {
			return errors.New("it does not end")
		}
		return nil
	}
	if _, err := l.node.Log().Apply(t.Context(), &clusterv1.Command{Op: &clusterv1.Command_DeleteClaim{DeleteClaim: &clusterv1.DeleteClaim{Claim: "c"}}}); err != nil {
		t.Fatal(err)
	}
	l.host.checkLent(t.Context())
	l.host.Cluster.Kick()
	if c := l.claim(&gpuctlv1.CreateClaimRequest{Expr: "id == 'big'"}); c != nil {
		t.Fatal("the GPU has two owners: its far executor has not ended")
	}
	l.guest.Step = nil
	l.over("l1")
	testkit.Until(t, "the log knows", func() error {
		return testkit.Want(l.node.View().Claim("c") == nil)
	})
	if c := l.claim(&gpuctlv1.CreateClaimRequest{Expr: "id == 'big'"}); c == nil {
		t.Error("the GPU is not free")
	}
}

func TestAFarExecutorThatDiesEndsItsLease(t *testing.T) {
	l := newLender(t)
	token := l.assign("c", 0, "big")
	l.lend(request("l1", "c", token, "big"))
	l.guest.KillLease("l1")
	l.over("l1")
	l.lend(request("l2", "c", token, "big")) // the claim still has its assignment
}

// hostd may die after gpuguest has made a lease. The lease that is asked for again is the
// one that the journal has, and its carrier is expected.
func TestARepeatedLeaseIsTheSame(t *testing.T) {
	l := newLender(t)
	r := request("l1", "c", l.assign("c", 0, "big"), "big")
	first := l.lend(r)
	l.host.mu.Lock()
	l.host.lent["l1"].Secret = nil
	l.host.mu.Unlock()
	if again := l.lend(r); !bytes.Equal(again.GetToken(), first.GetToken()) || !l.host.Expects(again.GetToken()) {
		t.Error("its token is not expected")
	}
	l.guest.KillLease("l1")
	l.over("l1")
}

func TestAFarExecutorThatDoesNotStartLeavesNothing(t *testing.T) {
	l := newLender(t)
	token := l.assign("c", 0, "big")
	l.guest.Step = func(_, step string) error {
		if step == "start" {
			return errors.New("out of memory")
		}
		return nil
	}
	if _, err := l.host.Lend(t.Context(), there, request("l1", "c", token, "big")); err == nil || !strings.Contains(err.Error(), "out of memory") {
		t.Error(err)
	}
	l.over("l1")
}

// The next hostd takes its leases over; those that it does not know of end.
// TestALeaseThatEndsBeforeItsFarExecutorBeginsLeavesNone: the borrower gives it back, as it waits no
// longer, and that overtakes the call to gpuguest.
func TestALeaseThatEndsBeforeItsFarExecutorBeginsLeavesNone(t *testing.T) {
	l := newLender(t)
	token := l.assign("c", 0, "big")
	ends := []error{nil, errors.New("it does not die")}
	l.guest.Step = func(op, step string) error {
		switch {
		case op == "lend" && step == "start":
			return l.host.EndLease(context.Background(), there, "l1")
		case op == "lend" && step == "end" && len(ends) > 0:
			err := ends[0]
			ends = ends[1:]
			return err
		}
		return nil
	}
	if _, err := l.host.Lend(t.Context(), there, request("l1", "c", token, "big")); !errors.Is(err, errNotFound) {
		t.Errorf("a lease that has ended: %v", err)
	}
	if len(l.guest.Leases()) != 1 || len(l.owners()["big"]) != 1 {
		t.Errorf("a far executor that did not end: %v, owners of its GPU %v", l.guest.Leases(), l.owners()["big"])
	}
	l.over("l1")
	if n := len(l.guest.Leases()); n != 0 {
		t.Errorf("%d far executors", n)
	}
}

func TestLeasesSurviveARestartOfHostd(t *testing.T) {
	l := newLender(t)
	l.lend(request("l1", "c", l.assign("c", 0, "big"), "big"))
	secret := l.guest.Leases()["l1"]
	if secret == nil {
		t.Fatal("no far executor")
	}
	l.halt()
	l.start() // a cluster of one in memory: its log is empty, so the lease has no assignment any more
	if own := l.owners()["big"]; len(own) != 1 || own[0].GetHost() != "there" {
		t.Errorf("right after the start: %v", own)
	}
	l.over("l1")
}

func TestFarExecutorsThatNoLeaseKnowsEnd(t *testing.T) {
	l := newLender(t)
	if _, err := l.host.Guest.Lend(context.Background(), connect.NewRequest(&gpuctlv1.LendRequest{
		Lease: "stray", Runtime: &gpuctlv1.Runtime{Library: "/x"}, PeerCertSha256: make([]byte, 32),
	})); err != nil {
		t.Fatal(err)
	}
	l.host.mu.Lock()
	l.host.swept = false
	l.host.mu.Unlock()
	l.guest.Step = func(_, step string) error {
		if step == "end" {
			return errors.New("it does not end")
		}
		return nil
	}
	l.host.checkLent(t.Context())
	l.guest.Step = nil
	testkit.Until(t, "it has ended", func() error {
		l.host.checkLent(t.Context())
		return testkit.Want(len(l.guest.Leases()) == 0)
	})
}

// The far executor of a lease goes on over a restart of hostd that does not find all of its GPUs.
// Nobody else gets any of them.
func TestLentGPUsStayReservedWhenOneIsNotFound(t *testing.T) {
	h := &Host{ledger: ledger.New(), lent: map[string]*lent{}, HostConfig: HostConfig{Log: slog.New(slog.DiscardHandler)}}
	h.ledger.SetGPU("big", 1<<30)
	h.restoreLent([]*lent{{ID: "l-1", Claim: "other/c", GPUs: []string{"big", "gone"}}})
	if err := h.ledger.Reserve("c-1", []string{"big"}, ledger.Whole); !errors.Is(err, ledger.ErrBusy) {
		t.Errorf("another claim gets what is lent: %v", err)
	}
	for _, gpu := range []string{"big", "gone"} {
		if !h.Uses("other/c", gpu) {
			t.Errorf("the cluster is told that %s is free", gpu)
		}
	}
	if h.Uses("other/c", "mid") || h.Uses("c-1", "gone") {
		t.Error("it uses what it has not got")
	}
}
