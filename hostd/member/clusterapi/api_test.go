package clusterapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/cluster/clustertest"
	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/cluster/scheduler"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// member is a host of a cluster in this process.
type member struct {
	*clustertest.Node

	all       map[string]*member // by address
	ca        *pki.CA
	material  *pki.Material
	scheduler *scheduler.Scheduler
	api       *API
	joined    bool
	mute      bool // does not answer Facts
	lender    Lender
}

var _ Member = (*member)(nil)

func (m *member) Log() Log {
	if !m.joined || m.Store() == nil {
		return nil
	}
	return m.Store()
}
func (m *member) Scheduler() *scheduler.Scheduler { return m.scheduler }
func (m *member) Problem() error                  { return nil }
func (m *member) Lender() Lender                  { return m.lender }
func (m *member) Self() Self                      { return Self{Host: m.Name, ID: m.ID} }
func (m *member) Authority() (*pki.CA, error)     { return m.ca, nil }
func (m *member) Certificate() *pki.Material      { return m.material }

func (m *member) Init(context.Context, *clusterv1.InitRequest) error { return replica.ErrExists }
func (m *member) Join(context.Context, *clusterv1.JoinRequest) error { return pki.ErrTokenMalformed }

func (m *member) Facts(ctx context.Context) (*clusterv1.HostFacts, error) {
	if m.mute {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return &clusterv1.HostFacts{Host: m.Name, Load1: 1}, nil
}

// Peer calls the other host's handlers as this one.
func (m *member) Peer(address string) clusterv1connect.PeerServiceClient {
	return clusterv1connect.NewPeerServiceClient(&http.Client{Transport: wire{m, address}}, "http://"+address)
}

type wire struct {
	from *member
	to   string
}

func (w wire) RoundTrip(r *http.Request) (*http.Response, error) {
	to := w.from.all[w.to]
	if to == nil || to.Store() == nil {
		return nil, fmt.Errorf("%s: %w", w.to, clustertest.ErrUnreachable)
	}
	mux := http.NewServeMux()
	to.api.Handle(mux)
	ctx := access.WithCaller(r.Context(), access.Caller{Kind: access.Host, ID: w.from.ID, Host: w.from.Name})
	rec := httptest.NewRecorder()
	mux.ServeHTTP(rec, r.WithContext(ctx))
	return rec.Result(), nil
}

// rig is a cluster whose API can be called as anybody.
type rig struct {
	*clustertest.Cluster

	members []*member
}

func newRig(t *testing.T, nodes int) *rig {
	t.Helper()
	ctx := testkit.Context(t)
	ca, err := pki.NewCA("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{Cluster: clustertest.New(t, clustertest.Options{Nodes: nodes})}
	all := map[string]*member{}
	for _, n := range r.Nodes {
		key, err := pki.NewKey()
		if err != nil {
			t.Fatal(err)
		}
		csr, err := pki.NewRequest(key)
		if err != nil {
			t.Fatal(err)
		}
		cert, err := ca.Sign(csr, pki.HostIdentity(n.ID, n.Name, n.Address, ""), time.Now())
		if err != nil {
			t.Fatal(err)
		}
		m := &member{Node: n, all: all, ca: ca, joined: true, scheduler: scheduler.New(n.Store(), slog.New(slog.DiscardHandler))}
		if m.material, err = pki.NewMaterial(cert, ca.Certificate().Raw, key); err != nil {
			t.Fatal(err)
		}
		m.api = New(m, slog.New(slog.DiscardHandler))
		all[n.Address] = m
		r.members = append(r.members, m)
		rep := &clusterv1.ReportHost{Host: &clusterv1.Host{Name: n.Name, Id: n.ID, Address: n.Address, Protocol: state.Protocol}}
		for i := range 2 {
			rep.Gpus = append(rep.Gpus, &clusterv1.GPU{Name: fmt.Sprintf("g%d", i), Model: "m", Type: "gpu", Limits: &gpuctlv1.Limits{GlobalMemory: 8 << 30}})
		}
		r.Must(ctx, n, &clusterv1.Command{Op: &clusterv1.Command_ReportHost{ReportHost: rep}})
	}
	return r
}

func (r *rig) leader(ctx context.Context) (l *member, others []*member) {
	n := r.Leader(ctx)
	for _, m := range r.members {
		if m.Node == n {
			l = m
		} else {
			others = append(others, m)
		}
	}
	return l, others
}

// as serves a member's API through the table of rules, to a caller.
func (m *member) as(t *testing.T, c access.Caller) clusterv1connect.ClusterServiceClient {
	t.Helper()
	mux := http.NewServeMux()
	m.api.Handle(mux)
	rules := access.Table()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rule := rules[r.URL.Path]
		if rule.Kinds&c.Kind == 0 || c.Role < rule.Role {
			_ = connect.NewErrorWriter().Write(w, r, connect.NewError(connect.CodePermissionDenied, errors.New("role")))
			return
		}
		mux.ServeHTTP(w, r.WithContext(access.WithCaller(r.Context(), c)))
	}))
	client := &http.Client{Transport: &http.Transport{}}
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
		client.CloseIdleConnections()
	})
	return clusterv1connect.NewClusterServiceClient(client, s.URL)
}

func user(role clusterv1.Role) access.Caller {
	return access.Caller{Kind: access.User, ID: "ada", Role: role}
}

func local() access.Caller {
	return access.Caller{Kind: access.Local, Role: clusterv1.Role_ROLE_ADMIN}
}

// call is one request of any procedure.
func call[A, B any](f func(context.Context, *connect.Request[A]) (*connect.Response[B], error), m *A) func(context.Context) (*B, error) {
	return func(ctx context.Context) (*B, error) {
		res, err := f(ctx, connect.NewRequest(m))
		if err != nil {
			return nil, err
		}
		return res.Msg, nil
	}
}

func codeOf[B any](ctx context.Context, f func(context.Context) (*B, error)) (connect.Code, error) {
	_, err := f(ctx)
	if err == nil {
		return 0, nil
	}
	return connect.CodeOf(err), err
}

// TestCodes has every procedure refuse what is wrong with the right code, and
// words that name the object.
func TestCodes(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	r := newRig(t, 3)
	_, others := r.leader(ctx)
	c := others[0].as(t, local())
	const (
		invalid, notFound, exists = connect.CodeInvalidArgument, connect.CodeNotFound, connect.CodeAlreadyExists
		refused                   = connect.CodeFailedPrecondition
		host, gpu                 = clusterv1.Kind_KIND_HOST, clusterv1.Kind_KIND_GPU
	)
	if _, err := call(c.CreateClaim, &clusterv1.CreateClaimRequest{Claim: &clusterv1.Claim{Id: "there", Host: "n0"}})(ctx); err != nil {
		t.Fatal(err)
	}
	type result struct {
		code connect.Code
		err  error
	}
	got := func(code connect.Code, err error) result { return result{code, err} }
	for name, tt := range map[string]struct {
		result
		want  connect.Code
		words string
	}{
		"list of no kind":       {got(codeOf(ctx, call(c.List, &clusterv1.ListRequest{}))), invalid, "kind"},
		"list of what is none":  {got(codeOf(ctx, call(c.List, &clusterv1.ListRequest{Kind: 99}))), invalid, "kind"},
		"list where":            {got(codeOf(ctx, call(c.List, &clusterv1.ListRequest{Kind: gpu, Where: "modell == 'x'"}))), invalid, "model"},
		"list where not":        {got(codeOf(ctx, call(c.List, &clusterv1.ListRequest{Kind: host, Where: `labels["x"] == "y"`}))), invalid, "x"},
		"list one":              {got(codeOf(ctx, call(c.List, &clusterv1.ListRequest{Kind: host, Name: "x"}))), notFound, `"x"`},
		"describe":              {got(codeOf(ctx, call(c.Describe, &clusterv1.DescribeRequest{Kind: gpu, Name: "n0/g8"}))), notFound, "n0/g8"},
		"describe two":          {got(codeOf(ctx, call(c.Describe, &clusterv1.DescribeRequest{Kind: gpu, Name: "n0/g"}))), invalid, "n0/g1"},
		"describe nothing":      {got(codeOf(ctx, call(c.Describe, &clusterv1.DescribeRequest{Kind: gpu}))), notFound, "gpu"},
		"describe no kind":      {got(codeOf(ctx, call(c.Describe, &clusterv1.DescribeRequest{Name: "x"}))), invalid, "kind"},
		"place verb":            {got(codeOf(ctx, call(c.Place, &clusterv1.PlaceRequest{Verb: "push"}))), invalid, "push"},
		"place expression":      {got(codeOf(ctx, call(c.Place, &clusterv1.PlaceRequest{Claim: &clusterv1.Claim{Expr: "("}}))), invalid, ""},
		"claim nothing":         {got(codeOf(ctx, call(c.CreateClaim, &clusterv1.CreateClaimRequest{}))), invalid, "claim"},
		"claim a bad id":        {got(codeOf(ctx, call(c.CreateClaim, &clusterv1.CreateClaimRequest{Claim: &clusterv1.Claim{Id: "a b"}}))), invalid, "a b"},
		"claim an expression":   {got(codeOf(ctx, call(c.CreateClaim, &clusterv1.CreateClaimRequest{Claim: &clusterv1.Claim{Id: "e", Expr: "("}}))), invalid, ""},
		"claim other needs":     {got(codeOf(ctx, call(c.CreateClaim, &clusterv1.CreateClaimRequest{Claim: &clusterv1.Claim{Id: "there", Host: "n1"}}))), exists, "host"},
		"delete claim":          {got(codeOf(ctx, call(c.DeleteClaim, &clusterv1.DeleteClaimRequest{Claim: "x"}))), notFound, "x"},
		"drain":                 {got(codeOf(ctx, call(c.SetDrain, &clusterv1.SetDrainRequest{Host: "x", Draining: true}))), notFound, "x"},
		"cordon":                {got(codeOf(ctx, call(c.SetCordon, &clusterv1.SetCordonRequest{Gpu: "n0/x"}))), notFound, "n0/x"},
		"label":                 {got(codeOf(ctx, call(c.SetLabels, &clusterv1.SetLabelsRequest{Host: "x"}))), notFound, "x"},
		"label with a bad name": {got(codeOf(ctx, call(c.SetLabels, &clusterv1.SetLabelsRequest{Host: "n0", Set: map[string]string{"": "x"}}))), invalid, "label"},
		"rank":                  {got(codeOf(ctx, call(c.SetRank, &clusterv1.SetRankRequest{Model: "x"}))), notFound, "x"},
		"token for too long":    {got(codeOf(ctx, call(c.CreateToken, &clusterv1.CreateTokenRequest{TtlS: 1 << 31}))), invalid, "token"},
		"token for no role":     {got(codeOf(ctx, call(c.CreateToken, &clusterv1.CreateTokenRequest{Role: 77}))), invalid, ""},
		"token with a bad name": {got(codeOf(ctx, call(c.CreateToken, &clusterv1.CreateTokenRequest{Name: "a b/c"}))), invalid, "name"},
		"delete token":          {got(codeOf(ctx, call(c.DeleteToken, &clusterv1.DeleteTokenRequest{Id: "x"}))), notFound, "x"},
		"remove":                {got(codeOf(ctx, call(c.RemoveHost, &clusterv1.RemoveHostRequest{Host: "x"}))), notFound, "x"},
		"remove what is used":   {got(codeOf(ctx, call(c.RemoveHost, &clusterv1.RemoveHostRequest{Host: "n0"}))), refused, "force"},
		"revoke":                {got(codeOf(ctx, call(c.RevokeIdentity, &clusterv1.RevokeIdentityRequest{Id: "x"}))), notFound, "x"},
		"init":                  {got(codeOf(ctx, call(c.Init, &clusterv1.InitRequest{}))), refused, "already"},
		"join":                  {got(codeOf(ctx, call(c.Join, &clusterv1.JoinRequest{}))), invalid, "token"},
	} {
		if tt.code != tt.want || tt.err == nil || !strings.Contains(tt.err.Error(), tt.words) {
			t.Errorf("%s: %v, not %v with %q", name, tt.err, tt.want, tt.words)
		}
	}
}

// TestShapes asks every procedure, on a follower, for something that works.
func TestShapes(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	r := newRig(t, 3)
	_, others := r.leader(ctx)
	c, elsewhere := others[0].as(t, local()), others[1].as(t, local())
	res, err := call(c.CreateClaim, &clusterv1.CreateClaimRequest{Claim: &clusterv1.Claim{MinMemory: 1 << 30, Host: "n1"}})(ctx)
	if err != nil || !strings.HasPrefix(res.GetClaim().GetId(), "claim-") || len(res.GetAssignments()) != 1 || res.GetClaim().GetOwner() == "" {
		t.Fatalf("%v, %v", res, err)
	}
	id := res.GetClaim().GetId()
	full, err := call(c.CreateClaim, &clusterv1.CreateClaimRequest{Claim: &clusterv1.Claim{Id: "big", MinMemory: 1 << 40}})(ctx)
	if err != nil || full.GetClaim() != nil || len(full.GetRejected()) == 0 || len(full.GetRejected()[0].GetReasons()) == 0 {
		t.Errorf("%v, %v", full, err)
	}
	place, err := call(c.Place, &clusterv1.PlaceRequest{Claim: &clusterv1.Claim{}, Limit: 2})(ctx)
	if err != nil || len(place.GetCandidates()) != 2 || place.GetIndex() == 0 || len(place.GetRejected()) != 1 {
		t.Errorf("%v, %v", place, err)
	}
	d, err := call(elsewhere.Describe, &clusterv1.DescribeRequest{Kind: clusterv1.Kind_KIND_CLAIM, Name: id[:len(id)-3]})(ctx)
	if err != nil || d.GetObject().GetClaim().GetId() != id || len(d.GetRelated()) != 2 || len(d.GetEvents()) == 0 {
		t.Errorf("%v, %v", d, err)
	}
	if h, err := call(c.SetDrain, &clusterv1.SetDrainRequest{Host: "n2", Draining: true, Message: "why"})(ctx); err != nil || !h.GetHost().GetDraining() {
		t.Errorf("%v, %v", h, err)
	}
	if g, err := call(c.SetCordon, &clusterv1.SetCordonRequest{Gpu: "n0/g1", Cordoned: true})(ctx); err != nil || !g.GetGpu().GetCordoned() {
		t.Errorf("%v, %v", g, err)
	}
	if h, err := call(c.SetLabels, &clusterv1.SetLabelsRequest{Host: "n0", Set: map[string]string{"zone": "a"}})(ctx); err != nil || h.GetHost().GetLabels()["zone"] != "a" {
		t.Errorf("%v, %v", h, err)
	}
	if m, err := call(c.SetRank, &clusterv1.SetRankRequest{Model: "m", Rank: 5})(ctx); err != nil || m.GetModel().GetRank() != 5 {
		t.Errorf("%v, %v", m, err)
	}
	token, err := call(c.CreateToken, &clusterv1.CreateTokenRequest{Role: clusterv1.Role_ROLE_VIEWER, Name: "eve"})(ctx)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := pki.DecodeToken(token.GetToken())
	if err != nil || parsed.ID != token.GetId() || parsed.Fingerprint != pki.Fingerprint(r.members[0].ca.Certificate()) || len(parsed.Addresses) != 3 {
		t.Errorf("%v, %v", parsed, err)
	}
	tokens, err := call(elsewhere.ListTokens, &clusterv1.ListTokensRequest{})(ctx)
	if err != nil || len(tokens.GetTokens()) != 1 || len(tokens.GetTokens()[0].GetSecretHash()) != 0 {
		t.Errorf("%v, %v", tokens, err)
	}
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	csr, err := pki.NewRequest(key)
	if err != nil {
		t.Fatal(err)
	}
	peer := others[1].Peer(others[0].Address)
	in, err := call(peer.Enroll, &clusterv1.EnrollRequest{TokenId: parsed.ID, Secret: parsed.Secret[:], Csr: csr, Host: "eve"})(ctx)
	if err != nil || len(in.GetCaKey()) != 0 || in.GetClusterId() != "test" || len(in.GetAddresses()) != 3 {
		t.Errorf("%v, %v", in, err)
	}
	if _, err := pki.NewMaterial(in.GetCertificate(), in.GetCa(), key); err != nil {
		t.Error(err)
	}
	ids, err := call(c.ListIdentities, &clusterv1.ListIdentitiesRequest{})(ctx)
	if err != nil || !slices.ContainsFunc(ids.GetIdentities(), func(i *clusterv1.Identity) bool { return i.GetId() == "eve" }) {
		t.Errorf("%v, %v", ids, err)
	}
	if _, err := call(c.RevokeIdentity, &clusterv1.RevokeIdentityRequest{Id: "eve"})(ctx); err != nil {
		t.Error(err)
	}
	if del, err := call(elsewhere.DeleteClaim, &clusterv1.DeleteClaimRequest{Claim: id})(ctx); err != nil || del.GetClaim().GetState() != clusterv1.ClaimState_CLAIM_STATE_RELEASING {
		t.Errorf("%v, %v", del, err)
	}
	s, err := call(c.Status, &clusterv1.StatusRequest{})(ctx)
	if err != nil || !s.GetJoined() || len(s.GetMembers()) != 3 || s.GetCaFingerprint() == "" || s.GetCertificateExpiresUnixMs() == 0 {
		t.Errorf("%v, %v", s, err)
	}
	others[0].joined = false
	for name, err := range map[string]error{
		"list":  second(call(c.List, &clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_HOST})(ctx)),
		"claim": second(call(c.CreateClaim, &clusterv1.CreateClaimRequest{Claim: &clusterv1.Claim{}})(ctx)),
		"drain": second(call(c.SetDrain, &clusterv1.SetDrainRequest{})(ctx)),
	} {
		if connect.CodeOf(err) != connect.CodeFailedPrecondition || !strings.Contains(err.Error(), "cluster init") {
			t.Errorf("%s in no cluster: %v", name, err)
		}
	}
	if s, err := call(c.Status, &clusterv1.StatusRequest{})(ctx); err != nil || s.GetJoined() || !strings.Contains(s.GetMessage(), "join") {
		t.Errorf("%v, %v", s, err)
	}
}

func second[A any](_ A, err error) error { return err }

// TestSameUserElsewhere: a user may repeat a claim on another host.
func TestSameUserElsewhere(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	r := newRig(t, 3)
	for _, m := range r.members {
		c := m.as(t, user(clusterv1.Role_ROLE_OPERATOR))
		res, err := call(c.CreateClaim, &clusterv1.CreateClaimRequest{Claim: &clusterv1.Claim{Id: "mine", Owner: "root"}})(ctx)
		if err != nil || res.GetClaim().GetOwner() != "user:ada" || len(res.GetAssignments()) != 1 {
			t.Errorf("%v, %v", res, err)
		}
	}
}

// By these labels the cluster finds whose a claim is: the leader ends one of a host that is gone.
func TestOnlyHostsSetTheirLabelsOfClaims(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	r := newRig(t, 3)
	leader, others := r.leader(ctx)
	for _, m := range []*member{leader, others[0]} {
		for _, who := range []access.Caller{user(clusterv1.Role_ROLE_ADMIN), local()} {
			c := m.as(t, who)
			for _, key := range []string{placement.LabelManagedBy, placement.LabelVM, "gpuctl.new"} {
				claim := &clusterv1.Claim{Id: "forged", Labels: map[string]string{"team": "a", key: "gone"}}
				for what, err := range map[string]error{
					"claim": second(call(c.CreateClaim, &clusterv1.CreateClaimRequest{Claim: claim})(ctx)),
					"plan":  second(call(c.Place, &clusterv1.PlaceRequest{Claim: claim})(ctx)),
				} {
					if why := reason.Of(err); why.Code != reason.Denied || why.Object != key || !strings.Contains(err.Error(), "choose another name") {
						t.Errorf("%s with label %s: %v", what, key, err)
					}
				}
			}
			mine := &clusterv1.Claim{Unmet: clusterv1.Unmet_UNMET_WAIT, Labels: map[string]string{"team": "a", "gpuctl": "b"}}
			if _, err := call(c.CreateClaim, &clusterv1.CreateClaimRequest{Claim: mine})(ctx); err != nil {
				t.Errorf("a user's own labels: %v", err)
			}
		}
		// What hosts make of their own accord, here and by the leader.
		own := &clusterv1.Claim{Id: "of-" + m.Name, Owner: "host " + m.Name, Labels: map[string]string{placement.LabelManagedBy: m.ID}}
		if res, err := m.api.Bind(ctx, own); err != nil || res.GetClaim().GetLabels()[placement.LabelManagedBy] != m.ID {
			t.Errorf("host %s: %v, %v", m.Name, res, err)
		}
	}
}

// TestRoles: what the table says is what happens.
func TestRoles(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	r := newRig(t, 1)
	for _, role := range []clusterv1.Role{clusterv1.Role_ROLE_VIEWER, clusterv1.Role_ROLE_OPERATOR, clusterv1.Role_ROLE_ADMIN} {
		c := r.members[0].as(t, user(role))
		for least, f := range map[clusterv1.Role]func() error{
			clusterv1.Role_ROLE_VIEWER: func() error {
				return second(call(c.List, &clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_HOST})(ctx))
			},
			clusterv1.Role_ROLE_OPERATOR: func() error {
				return second(call(c.SetLabels, &clusterv1.SetLabelsRequest{Host: "n0"})(ctx))
			},
			clusterv1.Role_ROLE_ADMIN: func() error {
				return second(call(c.ListTokens, &clusterv1.ListTokensRequest{})(ctx))
			},
		} {
			err := f()
			if may := role >= least; may != (err == nil) || !may && connect.CodeOf(err) != connect.CodePermissionDenied {
				t.Errorf("%v asks for what needs %v: %v", role, least, err)
			}
		}
		if err := second(call(c.Init, &clusterv1.InitRequest{})(ctx)); connect.CodeOf(err) != connect.CodePermissionDenied {
			t.Errorf("init by a remote %v: %v", role, err)
		}
	}
}

// TestReadYourWrites lists on each follower what was just written elsewhere.
func TestReadYourWrites(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	r := newRig(t, 3)
	for i := range 60 {
		w, c := r.members[i%3].as(t, local()), r.members[(i+1)%3].as(t, local())
		value := fmt.Sprint(i)
		if _, err := call(w.SetLabels, &clusterv1.SetLabelsRequest{Host: "n0", Set: map[string]string{"x": value}})(ctx); err != nil {
			t.Fatal(err)
		}
		res, err := call(c.List, &clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_HOST, Where: `"x" in labels && labels["x"] == "` + value + `"`})(ctx)
		if err != nil || len(res.GetObjects()) != 1 {
			t.Fatalf("write %d: %v, %v", i, res, err)
		}
	}
}

// TestPages lists with a limit, from where the last page ended.
func TestPages(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	r := newRig(t, 3)
	c := r.members[1].as(t, user(clusterv1.Role_ROLE_VIEWER))
	var all []string
	for after := ""; ; {
		res, err := call(c.List, &clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_GPU, Limit: 4, After: after})(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range res.GetObjects() {
			all = append(all, state.Name(o))
		}
		if !res.GetMore() {
			break
		}
		after = all[len(all)-1]
	}
	if want := []string{"n0/g0", "n0/g1", "n1/g0", "n1/g1", "n2/g0", "n2/g1"}; !slices.Equal(all, want) {
		t.Errorf("%v", all)
	}
}

// TestNoQuorum: what is known here is said; the rest is refused soon, with
// words that help.
func TestNoQuorum(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	r := newRig(t, 3)
	l, others := r.leader(ctx)
	for _, m := range others {
		m.Kill()
	}
	c := l.as(t, local())
	res, err := call(c.List, &clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_GPU, Stale: true})(ctx)
	if err != nil || len(res.GetObjects()) != 6 {
		t.Errorf("%v, %v", res, err)
	}
	if s, err := call(c.Status, &clusterv1.StatusRequest{})(ctx); err != nil || s.GetQuorum() && time.Now().IsZero() {
		t.Errorf("%v, %v", s, err)
	}
	var wg sync.WaitGroup
	for name, f := range map[string]func() error{
		"list":   func() error { return second(call(c.List, &clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_GPU})(ctx)) },
		"labels": func() error { return second(call(c.SetLabels, &clusterv1.SetLabelsRequest{Host: "n0"})(ctx)) },
		"claim": func() error {
			return second(call(c.CreateClaim, &clusterv1.CreateClaimRequest{Claim: &clusterv1.Claim{Id: "c"}})(ctx))
		},
		"place": func() error { return second(call(c.Place, &clusterv1.PlaceRequest{})(ctx)) },
		"watch": func() error {
			s, err := c.Watch(ctx, connect.NewRequest(&clusterv1.WatchRequest{Kind: clusterv1.Kind_KIND_GPU}))
			if err != nil {
				return err
			}
			defer s.Close()
			s.Receive()
			return s.Err()
		},
	} {
		wg.Go(func() {
			began := time.Now()
			err := f()
			if connect.CodeOf(err) != connect.CodeUnavailable || !strings.Contains(err.Error(), "leader") {
				t.Errorf("%s: %v", name, err)
			}
			if d := time.Since(began); d > patience+2*time.Second {
				t.Errorf("%s: after %v", name, d)
			}
		})
	}
	wg.Wait()
}

func receive(t *testing.T, s *connect.ServerStreamForClient[clusterv1.WatchResponse]) *clusterv1.WatchResponse {
	t.Helper()
	if !s.Receive() {
		t.Fatal(s.Err())
	}
	return s.Msg()
}

// TestWatch sees what is there, then every end of a change, once.
func TestWatch(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	r := newRig(t, 3)
	_, others := r.leader(ctx)
	c, w := others[0].as(t, user(clusterv1.Role_ROLE_VIEWER)), others[1].as(t, local())
	s, err := c.Watch(ctx, connect.NewRequest(&clusterv1.WatchRequest{Kind: clusterv1.Kind_KIND_GPU, Where: "free && !cordoned"}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for range 6 {
		if m := receive(t, s); m.GetSynced() || m.GetDeleted() || m.GetObject() == nil {
			t.Fatalf("%v", m)
		}
	}
	if m := receive(t, s); !m.GetSynced() || m.GetObject() != nil {
		t.Fatalf("%v", m)
	}
	if _, err := call(w.CreateClaim, &clusterv1.CreateClaimRequest{Claim: &clusterv1.Claim{Id: "w", Host: "n1", Expr: `name == "g1"`}})(ctx); err != nil {
		t.Fatal(err)
	}
	if m := receive(t, s); !m.GetDeleted() || m.GetObject().GetGpu().GetId() != "n1/g1" {
		t.Errorf("no longer free: %v", m)
	}
	if _, err := call(w.SetCordon, &clusterv1.SetCordonRequest{Gpu: "n0/g0", Cordoned: true})(ctx); err != nil {
		t.Fatal(err)
	}
	if m := receive(t, s); !m.GetDeleted() || m.GetObject().GetGpu().GetId() != "n0/g0" {
		t.Errorf("cordoned: %v", m)
	}
	if _, err := call(w.SetCordon, &clusterv1.SetCordonRequest{Gpu: "n0/g0"})(ctx); err != nil {
		t.Fatal(err)
	}
	if m := receive(t, s); m.GetDeleted() || m.GetObject().GetGpu().GetId() != "n0/g0" {
		t.Errorf("back: %v", m)
	}
	// A model's counts are its own changes, too.
	models, err := c.Watch(ctx, connect.NewRequest(&clusterv1.WatchRequest{Kind: clusterv1.Kind_KIND_MODEL, Name: "m"}))
	if err != nil {
		t.Fatal(err)
	}
	defer models.Close()
	if m := receive(t, models); m.GetObject().GetModel().GetFree() != 5 {
		t.Errorf("%v", m)
	}
	receive(t, models)
	if _, err := call(w.CreateClaim, &clusterv1.CreateClaimRequest{Claim: &clusterv1.Claim{Id: "w2"}})(ctx); err != nil {
		t.Fatal(err)
	}
	if m := receive(t, models); m.GetObject().GetModel().GetFree() != 4 {
		t.Errorf("%v", m)
	}
	// One that is gone at once.
	claims, err := c.Watch(ctx, connect.NewRequest(&clusterv1.WatchRequest{Kind: clusterv1.Kind_KIND_CLAIM, Name: "brief"}))
	if err != nil {
		t.Fatal(err)
	}
	defer claims.Close()
	if m := receive(t, claims); !m.GetSynced() {
		t.Errorf("%v", m)
	}
	brief := &clusterv1.Claim{Id: "brief", MinMemory: 1 << 40, Unmet: clusterv1.Unmet_UNMET_WAIT}
	if _, err := call(w.CreateClaim, &clusterv1.CreateClaimRequest{Claim: brief})(ctx); err != nil {
		t.Fatal(err)
	}
	if m := receive(t, claims); m.GetObject().GetClaim().GetState() != clusterv1.ClaimState_CLAIM_STATE_PENDING {
		t.Errorf("%v", m)
	}
	if _, err := call(w.DeleteClaim, &clusterv1.DeleteClaimRequest{Claim: "brief"})(ctx); err != nil {
		t.Fatal(err)
	}
	if m := receive(t, claims); !m.GetDeleted() || m.GetObject().GetClaim().GetId() != "brief" {
		t.Errorf("%v", m)
	}
}

// TestEvents reads the past and what follows, in order and without gaps.
func TestEvents(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	r := newRig(t, 3)
	c, w := r.members[0].as(t, user(clusterv1.Role_ROLE_VIEWER)), r.members[1].as(t, local())
	for i := range 5 {
		if _, err := call(w.SetLabels, &clusterv1.SetLabelsRequest{Host: "n2", Set: map[string]string{"x": fmt.Sprint(i)}})(ctx); err != nil {
			t.Fatal(err)
		}
	}
	s, err := c.Events(ctx, connect.NewRequest(&clusterv1.EventsRequest{Kind: clusterv1.Kind_KIND_HOST, Object: "n2", Last: 2, Follow: true}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	go func() {
		for i := 5; i < 20; i++ {
			_, _ = call(w.SetLabels, &clusterv1.SetLabelsRequest{Host: "n2", Set: map[string]string{"x": fmt.Sprint(i)}})(ctx)
		}
	}()
	for i := 3; i < 20; i++ {
		if !s.Receive() {
			t.Fatal(s.Err())
		}
		if e := s.Msg(); e.GetMessage() != fmt.Sprintf("x=%d", i) || e.GetObject() != "n2" {
			t.Fatalf("event %d: %v", i, e)
		}
	}
	past, err := c.Events(ctx, connect.NewRequest(&clusterv1.EventsRequest{Last: 3}))
	if err != nil {
		t.Fatal(err)
	}
	defer past.Close()
	n := 0
	for past.Receive() {
		n++
	}
	if n != 3 || past.Err() != nil {
		t.Errorf("%d events, %v", n, past.Err())
	}
}

// TestTop leaves out who does not answer, and says so.
func TestTop(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	r := newRig(t, 3)
	r.members[2].mute = true
	c := r.members[0].as(t, user(clusterv1.Role_ROLE_VIEWER))
	s, err := c.Top(ctx, connect.NewRequest(&clusterv1.TopRequest{IntervalMs: 100}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for range 2 {
		if !s.Receive() {
			t.Fatal(s.Err())
		}
		m := s.Msg()
		if len(m.GetHosts()) != 2 || m.GetHosts()[0].GetHost() != "n0" || !slices.Equal(m.GetMissing(), []string{"n2"}) {
			t.Errorf("%v", m)
		}
	}
	none, err := c.Top(ctx, connect.NewRequest(&clusterv1.TopRequest{Host: "n7"}))
	if err != nil {
		t.Fatal(err)
	}
	defer none.Close()
	if none.Receive() || connect.CodeOf(none.Err()) != connect.CodeNotFound {
		t.Errorf("%v", none.Err())
	}
}

// TestPeers: hosts speak for themselves alone, and only so much at once.
func TestPeers(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	r := newRig(t, 3)
	for {
		l, others := r.leader(ctx)
		wrong := peersWrong(ctx, l, others[0])
		if now, _ := r.leader(ctx); now != l { // a busy machine: not what is asked about
			continue
		}
		for _, w := range wrong {
			t.Error(w)
		}
		return
	}
}

// peersWrong is what a leader and a follower answer each other that they should not.
func peersWrong(ctx context.Context, l, follower *member) (wrong []string) {
	p := follower.Peer(l.Address)
	for name, tt := range map[string]struct {
		err  error
		want connect.Code
	}{
		"heartbeat of another": {second(call(p.Heartbeat, &clusterv1.HeartbeatRequest{HostId: l.ID})(ctx)), connect.CodePermissionDenied},
		"nothing":              {second(call(p.Apply, &clusterv1.ApplyRequest{})(ctx)), connect.CodeInvalidArgument},
		"too much":             {second(call(p.Apply, &clusterv1.ApplyRequest{Commands: make([]*clusterv1.Command, maxForwarded+1)})(ctx)), connect.CodeInvalidArgument},
		"not the leader":       {second(call(l.Peer(follower.Address).ReadIndex, &clusterv1.ReadIndexRequest{})(ctx)), connect.CodeUnavailable},
		"no token":             {second(call(p.Enroll, &clusterv1.EnrollRequest{TokenId: "x", Secret: make([]byte, 32), Host: "h"})(ctx)), connect.CodePermissionDenied},
		"not a request":        {second(call(p.Renew, &clusterv1.RenewRequest{Csr: []byte("x")})(ctx)), connect.CodeInvalidArgument},
	} {
		if connect.CodeOf(tt.err) != tt.want {
			wrong = append(wrong, fmt.Sprintf("%s: %v, not %v", name, tt.err, tt.want))
		}
	}
	var elsewhere *replica.NotLeaderError
	err := Uncoded(second(call(l.Peer(follower.Address).ReadIndex, &clusterv1.ReadIndexRequest{})(ctx)))
	if !errors.As(err, &elsewhere) || elsewhere.Leader != l.Address {
		wrong = append(wrong, fmt.Sprintf("a follower's answer to a question for the leader: %v", err))
	}
	if f, err := call(p.Facts, &clusterv1.FactsRequest{})(ctx); err != nil || f.GetFacts().GetHost() != l.Name {
		wrong = append(wrong, fmt.Sprintf("facts: %v, %v", f, err))
	}
	return wrong
}

// TestErrorsTravel: what the store says is what another host hears.
func TestErrorsTravel(t *testing.T) {
	t.Parallel()
	for code, e := range logErrors() {
		wire := reason.Coded(fmt.Errorf("x: %w", e))
		if !reason.Is(wire, code) {
			t.Errorf("%s: %v", code, wire)
		}
		if back := Uncoded(wire); !errors.Is(back, e) {
			t.Errorf("%s: %v", code, back)
		}
	}
	if err := errors.New("x"); !errors.Is(Uncoded(err), err) || reason.Coded(nil) != nil || Uncoded(nil) != nil {
		t.Error("errors that are not the store's change")
	}
}
