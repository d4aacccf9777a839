package access

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	"github.com/gpuctl/gpuctl/cluster/pki"
)

func TestBodiesAreBoundedInBytesAndInTime(t *testing.T) {
	got := make(chan error, 1)
	var limits Limits
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		restrict(w, r, limits)
		_, err := io.Copy(io.Discard, r.Body)
		got <- err
		if err == nil {
			// Its deadline is over with the body: the caller is still heard.
			select {
			case <-r.Context().Done():
			case <-time.After(3 * limits.Time):
			}
			got <- r.Context().Err()
		}
	}))
	defer server.Close()
	send := func(body io.Reader) {
		go func() {
			if res, err := server.Client().Post(server.URL, "application/proto", body); err == nil {
				res.Body.Close()
			}
		}()
	}
	limits = Limits{Body: 10}
	send(strings.NewReader("12345678901"))
	var large *http.MaxBytesError
	if err := <-got; !errors.As(err, &large) {
		t.Errorf("too large: %v", err)
	}
	limits = Limits{Time: 20 * time.Millisecond}
	r, w := io.Pipe()
	defer w.Close()
	send(r)
	if err := <-got; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("too slow: %v", err)
	}
	send(strings.NewReader("123"))
	for range 2 {
		if err := <-got; err != nil {
			t.Errorf("in time: %v", err)
		}
	}
}

func TestOneUserCannotHoldAllStreams(t *testing.T) {
	s := open(t, true)
	s.put("ann", viewer)
	s.put("vic", viewer)
	ann := s.cluster(s.as(t, issue(s.ca, pki.Identity{ID: "ann", Role: viewer}, time.Now())))
	vic := s.cluster(s.as(t, issue(s.ca, pki.Identity{ID: "vic", Role: viewer}, time.Now())))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	most := LimitsOf(Caller{Kind: User, Role: viewer}).Streams
	watch := func(c clusterv1connect.ClusterServiceClient) (*connect.ServerStreamForClient[clusterv1.WatchResponse], error) {
		w, err := c.Watch(ctx, connect.NewRequest(&clusterv1.WatchRequest{}))
		if err == nil && !w.Receive() {
			err = w.Err()
		}
		return w, err
	}
	var first *connect.ServerStreamForClient[clusterv1.WatchResponse]
	for i := range most {
		w, err := watch(ann)
		if err != nil {
			t.Fatalf("stream %d: %v", i, err)
		}
		defer w.Close()
		if first == nil {
			first = w
		}
	}
	if _, err := watch(ann); connect.CodeOf(err) != connect.CodeResourceExhausted || !strings.Contains(err.Error(), "streams under way") {
		t.Errorf("one more: %v", err)
	}
	if err := status(ann); err != nil {
		t.Errorf("a call beside them: %v", err)
	}
	w, err := watch(vic)
	if err != nil {
		t.Errorf("another user: %v", err)
	}
	w.Close()
	first.Close()
	for { // the server hears of it a moment later
		w, err := watch(ann)
		if err == nil {
			w.Close()
			break
		}
		if connect.CodeOf(err) != connect.CodeResourceExhausted {
			t.Fatal(err)
		}
	}
}

func TestAddressesOfOneNetworkCountTogether(t *testing.T) {
	for address, want := range map[string]string{
		"192.0.2.7:1": "192.0.2.7", "[2001:db8::1]:1": "2001:db8::/64", "[2001:db8::ffff]:2": "2001:db8::/64", "[::ffff:192.0.2.7]:3": "::ffff:192.0.2.7", "local": "local",
	} {
		if got := (Caller{Kind: Anonymous, Address: address}).key(); got != want {
			t.Errorf("%s: %s", address, got)
		}
	}
}

func TestStrangersDoNotFillTheTrail(t *testing.T) {
	var w window
	now := time.Unix(1e9, 0)
	let := 0
	for range 10 * failuresEach {
		if w.allow(now) {
			let++
		}
	}
	if let != failuresEach || !w.allow(now.Add(time.Minute)) {
		t.Errorf("%d", let)
	}
}

// Enrolments fail for whoever has no token: a stranger's on the leader, too, to
// which another host passes them on, and a viewer's.
func TestTrailIsNotFilledByCallsThatAnybodyMayMake(t *testing.T) {
	lines := func(c Caller, procedure string, err error) uint64 {
		audit := openAudit(t, AuditConfig{})
		g := NewGate(Config{Audit: audit, Log: slog.New(slog.DiscardHandler), Now: func() time.Time { return time.Unix(1e9, 0) }})
		for range 10 * failuresEach {
			g.audited(c, procedure, g.Now())(&clusterv1.EnrollRequest{}, err, true)
		}
		audit.Close()
		return audit.Counts().Lines
	}
	no := connect.NewError(connect.CodePermissionDenied, errors.New("no such token"))
	for _, c := range []Caller{{Kind: Anonymous, Address: "192.0.2.7:1"}, {Kind: Host, ID: "h-1", Host: "n1"}, {Kind: User, ID: "vic", Role: viewer}} {
		if n := lines(c, clusterv1connect.PeerServiceEnrollProcedure, no); n != failuresEach {
			t.Errorf("%s: %d lines of enrolments that failed", c, n)
		}
		if n := lines(c, clusterv1connect.PeerServiceEnrollProcedure, nil); n != 10*failuresEach {
			t.Errorf("%s: %d lines of enrolments", c, n)
		}
	}
	if n := lines(Caller{Kind: User, ID: "vic", Role: viewer}, clusterv1connect.PeerServiceRenewProcedure, nil); n != 1 {
		t.Errorf("%d lines of a viewer's renewals", n)
	}
	if n := lines(Caller{Kind: User, ID: "otto", Role: operator}, clusterv1connect.ClusterServiceSetDrainProcedure, no); n != 10*failuresEach {
		t.Errorf("%d lines of what an operator does", n)
	}
}

// A request that is compressed could unpack to a thousand times its size, and keep a
// processor busy for seconds.
func TestCompressedRequestsAreNotUnpacked(t *testing.T) {
	s := open(t, true)
	clients := map[string]clusterv1connect.ClusterServiceClient{}
	for name, options := range map[string][]connect.ClientOption{"connect": nil, "gRPC": {connect.WithGRPC()}, "gRPC-Web": {connect.WithGRPCWeb()}} {
		clients[name] = s.cluster(s.as(t, nil), append(options, connect.WithSendGzip())...)
		clients[name+", local"] = clusterv1connect.NewClusterServiceClient(unixClient(t, s.socket), "http://host", connect.WithSendGzip())
	}
	s.put("ann", admin)
	clients["connect, admin"] = s.cluster(s.as(t, issue(s.ca, pki.Identity{ID: "ann", Role: admin}, time.Now())), connect.WithSendGzip())
	for name, c := range clients {
		_, err := c.Join(t.Context(), connect.NewRequest(&clusterv1.JoinRequest{Token: strings.Repeat("x", 1<<10)}))
		if code := connect.CodeOf(err); err == nil || code != connect.CodeInvalidArgument && code != connect.CodeUnauthenticated && code != connect.CodePermissionDenied {
			t.Errorf("%s: %v", name, err)
		}
		// A stream's messages say for themselves whether they are compressed.
		st, err := c.Watch(t.Context(), connect.NewRequest(&clusterv1.WatchRequest{}))
		if err == nil {
			st.Receive()
			err = st.Err()
			st.Close()
		}
		if code := connect.CodeOf(err); code != connect.CodeInvalidArgument && code != connect.CodeUnauthenticated {
			t.Errorf("%s, stream: %v", name, err)
		}
		if n := s.backend.reached.Swap(0); n != 0 {
			t.Errorf("%s: %d calls reached the handler", name, n)
		}
	}
}
