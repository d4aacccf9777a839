package sessions

import (
	"errors"
	"net"
	"slices"
	"strings"
	"testing"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/hostd/member"
	"github.com/gpuctl/gpuctl/hostd/member/clusterapi"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

var thief = clusterapi.Self{Host: "thief", ID: "h-thief"}

func hash() []byte { return make([]byte, 32) }

func TestContentsAreFetchedByTheHostsOfALeaseOnly(t *testing.T) {
	l := newLender(t)
	ctx := testkit.Context(t)
	token := l.assign("c", 0, "big")
	first := l.lend(request("l1", "c", token, "big"))
	allow := &clusterv1.AllowFetchRequest{Lease: "l1", CertificateSha256: hash()}
	for what, x := range map[string]struct {
		who clusterapi.Self
		r   *clusterv1.AllowFetchRequest
		err error
	}{
		"another host":           {thief, allow, errDenied},
		"another host's look":    {thief, &clusterv1.AllowFetchRequest{Lease: "l1", Check: true}, errDenied},
		"no such lease":          {there, &clusterv1.AllowFetchRequest{Lease: "l2", CertificateSha256: hash()}, errNotFound},
		"nobody who is to fetch": {there, &clusterv1.AllowFetchRequest{Lease: "l1"}, errInvalid},
	} {
		if _, err := l.host.AllowFetch(ctx, x.who, x.r); !errors.Is(err, x.err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := l.host.AllowFetch(ctx, there, &clusterv1.AllowFetchRequest{Lease: "l1", Check: true}); err != nil || l.guest.Allowed("l1") != nil {
		t.Errorf("a look has changed something, or failed: %v", err)
	}
	allowed, err := l.host.AllowFetch(ctx, there, allow)
	if err != nil {
		t.Fatal(err)
	}
	if !l.host.Expects(allowed.GetToken()) || !l.host.Expects(first.GetToken()) {
		t.Error("the port does not know the fetch, or not the lease")
	}
	if err := l.host.EndFetch(ctx, thief, "l1"); !errors.Is(err, errDenied) || !l.host.Expects(allowed.GetToken()) {
		t.Errorf("another host ends it: %v", err)
	}
	if err := l.host.EndFetch(ctx, there, "l1"); err != nil || l.host.Expects(allowed.GetToken()) || l.guest.Allowed("l1") != nil {
		t.Errorf("it was taken back, and is expected: %v", err)
	}
	if err := l.host.EndFetch(ctx, there, "no-such"); err != nil {
		t.Errorf("a lease that is gone: %v", err)
	}
	if allowed, err = l.host.AllowFetch(ctx, there, allow); err != nil {
		t.Fatal(err)
	}
	l.host.mu.Lock()
	l.host.lent["l1"].fetchUntil = l.host.lent["l1"].fetchUntil.Add(-fetchFor)
	l.host.mu.Unlock()
	if l.host.Expects(allowed.GetToken()) {
		t.Error("a fetch that is too late is expected")
	}
}

// The log decides: without its assignment a lease gives nobody contents.
func TestContentsOfAReleasedAssignmentAreNotFetched(t *testing.T) {
	l := newLender(t)
	ctx := testkit.Context(t)
	token := l.assign("c", 0, "big")
	l.lend(request("l1", "c", token, "big"))
	if _, err := l.node.Log().Apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_DeleteClaim{DeleteClaim: &clusterv1.DeleteClaim{Claim: "c"}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := l.host.AllowFetch(ctx, there, &clusterv1.AllowFetchRequest{Lease: "l1", CertificateSha256: hash()}); !errors.Is(err, member.ErrNotAssigned) {
		t.Errorf("it may be fetched: %v", err)
	}
}

// A host that borrows names a host, and never an address.
func TestFarExecutorIsConnectedToHostsOfTheClusterOnly(t *testing.T) {
	l := newLender(t)
	ctx := testkit.Context(t)
	token := l.assign("c", 0, "big")
	l.lend(request("l1", "c", token, "big"))
	port, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer port.Close()
	at := port.Addr().String()
	fetch := func(host string) *clusterv1.FetchRequest {
		return &clusterv1.FetchRequest{Lease: "l1", Host: host, Token: hash(), CertificateSha256: hash()}
	}
	for _, host := range []string{"", "nowhere", at, "here"} { // this host lends at no port
		for _, check := range []bool{false, true} {
			r := fetch(host)
			r.Check = check
			if err := l.host.Fetch(ctx, there, r); err == nil {
				t.Errorf("host %q, check %v: it was reached", host, check)
			}
		}
	}
	l.lendsAt(at)
	if err := l.host.Fetch(ctx, there, &clusterv1.FetchRequest{Host: "here", Check: true}); err != nil {
		t.Errorf("a host that is there is not reached: %v", err)
	}
	if err := l.host.Fetch(ctx, thief, fetch("here")); !errors.Is(err, errDenied) {
		t.Errorf("another host's lease: %v", err)
	}
	if err := l.host.Fetch(ctx, there, fetch("here")); err != nil {
		t.Fatal(err)
	}
	if fs := l.guest.Fetches("l1"); len(fs) != 1 || strings.Join(fs[0].GetAddresses(), ",") != at {
		t.Errorf("%v", fs)
	}
	port.Close()
	if err := l.host.Fetch(ctx, there, &clusterv1.FetchRequest{Host: "here", Check: true}); err == nil {
		t.Error("a host that is not there is reached")
	}
}

// lendsAt makes the cluster know where this host lends.
func (l *lender) lendsAt(address string) {
	l.t.Helper()
	h := l.node.View().Host("here")
	if h == nil {
		l.t.Fatal("this host is not in its cluster")
	}
	h.LendAddress = address
	if _, err := l.node.Log().Apply(l.t.Context(), &clusterv1.Command{Op: &clusterv1.Command_ReportHost{ReportHost: &clusterv1.ReportHost{Host: h, Gpus: slices.Collect(l.node.View().GPUsOfHost("here"))}}}); err != nil {
		l.t.Fatal(err)
	}
}

func TestPathOfContents(t *testing.T) {
	l := newLender(t)
	for _, x := range []struct {
		from, to string
		straight bool
		want     string
	}{
		{"big", "mid", false, "here"},
		{"big", "b/one", false, "here b"},
		{"b/one", "big", false, "b here"},
		{"b/one", "c/one", false, "b here c"},
		{"b/one", "c/one", true, "b c"},
		{"b/one", "b/two", false, "b here b"},
		{"b/one", "b/two", true, "b"},
	} {
		if got := strings.Join(l.host.pathOf([]string{x.from}, []string{x.to}, x.straight), " "); got != x.want {
			t.Errorf("%s to %s, straight %v: %s, not %s", x.from, x.to, x.straight, got, x.want)
		}
	}
}
