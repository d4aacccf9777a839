package access

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/reflect/protoreflect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const asHost = clusterv1.Role_ROLE_HOST

func services() []protoreflect.ServiceDescriptor {
	var out []protoreflect.ServiceDescriptor
	for _, c := range []struct {
		file protoreflect.FileDescriptor
		name protoreflect.Name
	}{
		{clusterv1.File_gpuctl_cluster_v1_service_proto, "ClusterService"},
		{clusterv1.File_gpuctl_cluster_v1_service_proto, "PeerService"},
		{gpuctlv1.File_gpuctl_v1_host_proto, "HostService"},
		{gpuctlv1.File_gpuctl_v1_device_proto, "DeviceService"},
		{gpuctlv1.File_gpuctl_v1_migrate_proto, "MigrationService"},
		{gpuctlv1.File_gpuctl_v1_migrate_proto, "SiteService"},
	} {
		out = append(out, c.file.Services().ByName(c.name))
	}
	return out
}

func procedures() (out []string) {
	for _, s := range services() {
		for i := range s.Methods().Len() {
			out = append(out, fmt.Sprintf("/%s/%s", s.FullName(), s.Methods().Get(i).Name()))
		}
	}
	return out
}

func TestEveryProcedureHasARule(t *testing.T) {
	table := Table()
	all := procedures()
	for _, p := range all {
		r, ok := table[p]
		if !ok || r.Kinds == 0 {
			t.Errorf("%s: nothing in the table", p)
		}
		if ok && r.Role == clusterv1.Role_ROLE_UNSPECIFIED && r.Kinds&(Local|User) != 0 && !strings.HasSuffix(p, "/Enroll") {
			t.Errorf("%s: for users of no role", p)
		}
	}
	if len(table) != len(all) {
		t.Errorf("%d rules for %d procedures", len(table), len(all))
	}
	// Both files' services are all here: one that is added must be, too.
	if n := clusterv1.File_gpuctl_cluster_v1_service_proto.Services().Len() + gpuctlv1.File_gpuctl_v1_host_proto.Services().Len() + gpuctlv1.File_gpuctl_v1_device_proto.Services().Len() +
		gpuctlv1.File_gpuctl_v1_migrate_proto.Services().Len(); n != len(services()) {
		t.Errorf("%d services, %d of them looked at", n, len(services()))
	}
}

// The whole table, kind by kind and role by role, against the rules in words.
func TestWhoMayDoWhat(t *testing.T) {
	reads := map[string]bool{}
	for _, n := range strings.Fields("List Watch Describe Events Top Status Place ListCards ListMachines ListNICs Isolation GetInventory ListClaims ListSessions WatchSessions DescribeSession") {
		reads[n] = true
	}
	admins := map[string]bool{}
	for _, n := range strings.Fields("CreateToken ListTokens DeleteToken RemoveHost RevokeIdentity ListIdentities SetQueue Init Join") {
		admins[n] = true
	}
	may := func(service, name string, c Caller) bool {
		switch {
		case service == "PeerService" && name == "Enroll":
			return c.Kind != Local
		case name == "Renew" && c.Kind == User:
			return c.Role >= viewer
		case service == "PeerService", service == "SiteService":
			return c.Kind == Host
		case c.Kind == Anonymous:
			return false
		case reads[name] || service == "MigrationService" && name == "Plan":
			return c.Kind == Host || c.Role >= viewer
		case c.Kind == Host:
			return service == "DeviceService" || service == "MigrationService"
		case service == "HostService" || name == "Init" || name == "Join":
			if c.Kind != Local {
				return false
			}
		}
		if admins[name] {
			return c.Role >= admin
		}
		return c.Role >= operator
	}
	callers := []Caller{{Kind: Anonymous}, {Kind: Anonymous, Problem: pki.ErrExpired}, {Kind: Host, Role: asHost, ID: "h"}}
	for _, kind := range []Kind{Local, User} {
		for _, role := range []clusterv1.Role{0, viewer, operator, admin} {
			callers = append(callers, Caller{Kind: kind, Role: role, ID: "x"})
		}
	}
	table := Table()
	for _, s := range services() {
		for i := range s.Methods().Len() {
			name := string(s.Methods().Get(i).Name())
			for _, c := range callers {
				err := decide(table, c, fmt.Sprintf("/%s/%s", s.FullName(), name))
				if want := may(string(s.Name()), name, c); (err == nil) != want {
					t.Errorf("%s %s by %s %s: %v", s.Name(), name, c.Kind, c.Role, err)
				}
				if err != nil && !strings.Contains(err.Message(), name) {
					t.Errorf("%q does not name %s", err.Message(), name)
				}
			}
		}
	}
	for _, p := range []string{"", "/", "/gpuctl.v1.GuestService/Swap", "/gpuctl.cluster.v1.ClusterService/list", "/gpuctl.cluster.v1.ClusterService/List/"} {
		if decide(table, Caller{Kind: Local, Role: admin}, p) == nil {
			t.Errorf("%q is let through", p)
		}
	}
}

func TestLocalRoles(t *testing.T) {
	policy := LocalPolicy{AdminUIDs: []uint32{7}, AdminGIDs: []uint32{50}, OperatorGIDs: []uint32{60}, ViewerGIDs: []uint32{70}}
	for name, c := range map[string]struct {
		peer   Peer
		others clusterv1.Role
		want   clusterv1.Role
	}{
		"root":             {Peer{UID: 0, GID: 99}, 0, admin},
		"hostd's user":     {Peer{UID: 5, GID: 99}, 0, admin},
		"listed":           {Peer{UID: 7, GID: 99}, 0, admin},
		"operator":         {Peer{UID: 9, GID: 60}, 0, operator},
		"supplementary":    {Peer{UID: 9, GID: 99, Groups: []uint32{1, 60}}, 0, operator},
		"admin group":      {Peer{UID: 9, GID: 70, Groups: []uint32{60, 50}}, 0, admin},
		"viewer":           {Peer{UID: 9, GID: 70}, 0, viewer},
		"others":           {Peer{UID: 9, GID: 99}, 0, 0},
		"others view":      {Peer{UID: 9, GID: 99}, viewer, viewer},
		"others operate":   {Peer{UID: 9, GID: 70}, operator, operator},
		"others are hosts": {Peer{UID: 9, GID: 99}, asHost, 0},
	} {
		policy.Others = c.others
		if got := FromPeer(c.peer, 5, policy).Role; got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// backend counts what reaches it, and takes tokens once, as the log does.
type backend struct {
	clusterv1connect.UnimplementedClusterServiceHandler
	clusterv1connect.UnimplementedPeerServiceHandler

	reached atomic.Int32
	last    atomic.Pointer[Caller]
	ca      *pki.CA

	mu     sync.Mutex
	tokens map[string]*clusterv1.JoinToken
}

func (b *backend) hit(ctx context.Context) {
	b.reached.Add(1)
	c, _ := From(ctx)
	b.last.Store(&c)
}

func (b *backend) Status(ctx context.Context, _ *connect.Request[clusterv1.StatusRequest]) (*connect.Response[clusterv1.StatusResponse], error) {
	b.hit(ctx)
	return connect.NewResponse(&clusterv1.StatusResponse{Joined: true}), nil
}

func (b *backend) SetDrain(ctx context.Context, req *connect.Request[clusterv1.SetDrainRequest]) (*connect.Response[clusterv1.SetDrainResponse], error) {
	b.hit(ctx)
	if req.Msg.GetHost() == "nowhere" {
		return nil, connect.NewError(connect.CodeNotFound, errors.New("no host nowhere"))
	}
	if req.Msg.GetHost() == "panic" {
		panic(http.ErrAbortHandler)
	}
	return connect.NewResponse(&clusterv1.SetDrainResponse{}), nil
}

// CreateClaim is in both services.
func (b *backend) CreateClaim(ctx context.Context, _ *connect.Request[clusterv1.CreateClaimRequest]) (*connect.Response[clusterv1.CreateClaimResponse], error) {
	b.hit(ctx)
	return connect.NewResponse(&clusterv1.CreateClaimResponse{}), nil
}

func (b *backend) Join(ctx context.Context, _ *connect.Request[clusterv1.JoinRequest]) (*connect.Response[clusterv1.JoinResponse], error) {
	b.hit(ctx)
	return connect.NewResponse(&clusterv1.JoinResponse{}), nil
}

func (b *backend) Watch(ctx context.Context, _ *connect.Request[clusterv1.WatchRequest], s *connect.ServerStream[clusterv1.WatchResponse]) error {
	b.hit(ctx)
	if err := s.Send(&clusterv1.WatchResponse{Index: 1}); err != nil {
		return err
	}
	<-ctx.Done() // nothing to tell: only the gate can end it
	return nil
}

func (b *backend) Top(ctx context.Context, _ *connect.Request[clusterv1.TopRequest], s *connect.ServerStream[clusterv1.TopResponse]) error {
	b.hit(ctx)
	for { // a handler that does not look at its context
		if err := s.Send(&clusterv1.TopResponse{}); err != nil {
			return err
		}
		time.Sleep(time.Millisecond) // what there is to tell takes time
	}
}

func (b *backend) Heartbeat(ctx context.Context, _ *connect.Request[clusterv1.HeartbeatRequest]) (*connect.Response[clusterv1.HeartbeatResponse], error) {
	b.hit(ctx)
	return connect.NewResponse(&clusterv1.HeartbeatResponse{}), nil
}

func (b *backend) Enroll(ctx context.Context, req *connect.Request[clusterv1.EnrollRequest]) (*connect.Response[clusterv1.EnrollResponse], error) {
	b.hit(ctx)
	m := req.Msg
	b.mu.Lock()
	defer b.mu.Unlock()
	stored := b.tokens[m.GetTokenId()]
	if err := pki.VerifyToken(m.GetSecret(), stored, m.GetHost(), time.Now()); err != nil {
		return nil, connect.NewError(connect.CodeUnauthenticated, err)
	}
	delete(b.tokens, m.GetTokenId())
	cert, err := b.ca.Sign(m.GetCsr(), pki.Identity{ID: m.GetHost(), Role: stored.GetRole()}, time.Now())
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	return connect.NewResponse(&clusterv1.EnrollResponse{Certificate: cert, Ca: b.ca.Certificate().Raw}), nil
}

type site struct {
	ca         *pki.CA
	backend    *backend
	address    string
	socket     string
	log        *testkit.Log
	audit      *AuditLog
	mu         sync.Mutex
	identities map[string]*clusterv1.Identity
	notReady   atomic.Bool
	others     atomic.Int32
	ahead      atomic.Int64 // of the server's clock
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func (s *site) lookup(id string) (*clusterv1.Identity, error) {
	if s.notReady.Load() {
		return nil, ErrNotReady
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.identities[id], nil
}

func (s *site) put(id string, role clusterv1.Role) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.identities[id] = &clusterv1.Identity{Id: id, Role: role}
	if role == 0 {
		delete(s.identities, id)
	}
}

func (s *site) now() time.Time { return time.Now().Add(time.Duration(s.ahead.Load())) }

func issue(ca *pki.CA, id pki.Identity, at time.Time) *pki.Material {
	key := must(pki.NewKey())
	return must(pki.NewMaterial(must(ca.Sign(must(pki.NewRequest(key)), id, at)), ca.Certificate().Raw, key))
}

func open(t *testing.T, middleware bool) *site {
	t.Helper()
	dir := t.TempDir()
	s := &site{ca: must(pki.NewCA("c1", time.Now())), log: &testkit.Log{}, identities: map[string]*clusterv1.Identity{}}
	s.backend = &backend{ca: s.ca, tokens: map[string]*clusterv1.JoinToken{}}
	log := slog.New(slog.NewTextHandler(s.log, nil))
	s.audit = must(OpenAudit(AuditConfig{Path: filepath.Join(dir, "audit.log"), Log: log, Sync: 10 * time.Millisecond}))
	trust := pki.Trust{Provider: issue(s.ca, pki.HostIdentity("h-1", "n1", "", ""), time.Now()), Now: s.now}
	gate := NewGate(Config{
		Trust: trust, Lookup: s.lookup, Audit: s.audit, Log: log, Now: s.now, Recheck: 20 * time.Millisecond,
		Local: func() LocalPolicy { return LocalPolicy{Others: clusterv1.Role(s.others.Load())} },
	})
	web := http.NewServeMux()
	web.Handle(clusterv1connect.NewClusterServiceHandler(s.backend, connect.WithInterceptors(gate)))
	web.Handle(clusterv1connect.NewPeerServiceHandler(s.backend, connect.WithInterceptors(gate)))
	var handler http.Handler = web
	if middleware {
		handler = gate.Middleware(web)
	}
	server := &http.Server{Handler: handler, ConnContext: gate.ConnContext, ReadHeaderTimeout: time.Second, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
	mux := pki.NewMux(pki.MuxConfig{Listener: must(net.Listen("tcp", "127.0.0.1:0")), Trust: trust, Log: log})
	s.address, s.socket = mux.HTTP().Addr().String(), filepath.Join(dir, "s")
	local := must(net.Listen("unix", s.socket))
	var wait sync.WaitGroup
	wait.Go(func() { server.Serve(mux.HTTP()) })
	wait.Go(func() { server.Serve(local) })
	t.Cleanup(func() { server.Close(); mux.Close(); wait.Wait(); s.audit.Close() })
	return s
}

func (s *site) client(t *testing.T, config *tls.Config) *http.Client {
	config.NextProtos = []string{"h2"}
	tr := &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// as is a client with a certificate, nil for none.
func (s *site) as(t *testing.T, m *pki.Material) *http.Client {
	config := pki.PinnedClientConfig(pki.Fingerprint(s.ca.Certificate()), nil)
	if m != nil {
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return m.Certificate, nil }
	}
	return s.client(t, config)
}

func (s *site) cluster(c *http.Client, o ...connect.ClientOption) clusterv1connect.ClusterServiceClient {
	return clusterv1connect.NewClusterServiceClient(c, "https://"+s.address, o...)
}

func (s *site) peers(c *http.Client) clusterv1connect.PeerServiceClient {
	return clusterv1connect.NewPeerServiceClient(c, "https://"+s.address)
}

func status(c clusterv1connect.ClusterServiceClient) error {
	_, err := c.Status(context.Background(), connect.NewRequest(&clusterv1.StatusRequest{}))
	return err
}

func drain(c clusterv1connect.ClusterServiceClient, host string) error {
	_, err := c.SetDrain(context.Background(), connect.NewRequest(&clusterv1.SetDrainRequest{Host: host, Draining: true, Message: "disk"}))
	return err
}

// refusedWith wants a code and words, and that no handler was reached.
func (s *site) refusedWith(t *testing.T, what string, err error, code connect.Code, words string) {
	t.Helper()
	if connect.CodeOf(err) != code || err == nil || !strings.Contains(err.Error(), words) {
		t.Errorf("%s: %v, want %s with %q", what, err, code, words)
	}
	if n := s.backend.reached.Swap(0); n != 0 {
		t.Errorf("%s: it reached the handler", what)
	}
}

func TestRefusals(t *testing.T) {
	for _, middleware := range []bool{false, true} {
		t.Run(fmt.Sprintf("middleware %t", middleware), func(t *testing.T) {
			s := open(t, middleware)
			for id, role := range map[string]clusterv1.Role{"ann": admin, "vic": viewer, "old": admin, "h-2": asHost, "mix": admin, "was-host": viewer} {
				s.put(id, role)
			}
			now := time.Now()
			user := func(id string) pki.Identity { return pki.Identity{ID: id, Role: admin} }
			old := user("old")
			old.Lifetime = time.Minute
			another, twin := must(pki.NewCA("c2", now)), must(pki.NewCA("c1", now))
			for _, c := range []struct {
				what  string
				m     *pki.Material
				code  connect.Code
				words string
			}{
				{"anonymous", nil, connect.CodeUnauthenticated, "ask an administrator for a token"},
				{"expired", issue(s.ca, old, now.Add(-time.Hour)), connect.CodeUnauthenticated, "has expired"},
				{"not yet valid", issue(s.ca, user("ann"), now.Add(3*time.Hour)), connect.CodeUnauthenticated, "set the clocks"},
				{"wrong CA", issue(twin, user("ann"), now), connect.CodeUnauthenticated, "not from this cluster's authority"},
				{"another cluster's user", issue(another, user("ann"), now), connect.CodeUnauthenticated, "choose the right cluster"},
				{"another cluster's host", issue(another, pki.HostIdentity("h-2", "", "", ""), now), connect.CodeUnauthenticated, "another cluster"},
				{"never known or removed", issue(s.ca, user("eve"), now), connect.CodeUnauthenticated, "removed from the cluster"},
				{"a user that the cluster knows as host", issue(s.ca, user("h-2"), now), connect.CodeUnauthenticated, "join again"},
				{"a host that the cluster knows as user", issue(s.ca, pki.HostIdentity("was-host", "", "", ""), now), connect.CodeUnauthenticated, "join again"},
				// What the certificate says of its role does not matter.
				{"wrong role", issue(s.ca, user("vic"), now), connect.CodePermissionDenied, "has role viewer and it needs operator"},
				{"host", issue(s.ca, pki.HostIdentity("h-2", "", "", ""), now), connect.CodePermissionDenied, "not for hosts"},
			} {
				s.refusedWith(t, c.what, drain(s.cluster(s.as(t, c.m)), "n1"), c.code, c.words)
				s.refusedWith(t, c.what+" with gRPC", drain(s.cluster(s.as(t, c.m), connect.WithGRPC()), "n1"), c.code, c.words)
			}
			ann := s.as(t, issue(s.ca, user("ann"), now))
			_, err := s.cluster(ann).Join(t.Context(), connect.NewRequest(&clusterv1.JoinRequest{Token: "x"}))
			s.refusedWith(t, "Join from afar", err, connect.CodePermissionDenied, "run it there")
			_, err = s.peers(ann).Heartbeat(t.Context(), connect.NewRequest(&clusterv1.HeartbeatRequest{}))
			s.refusedWith(t, "a user as host", err, connect.CodePermissionDenied, "for hosts alone")
			s.notReady.Store(true)
			s.refusedWith(t, "not caught up", drain(s.cluster(ann), "n1"), connect.CodeUnavailable, "ask another host")
			s.notReady.Store(false)
			// On the very same connection.
			if err := drain(s.cluster(ann), "n1"); err != nil || s.backend.reached.Swap(0) != 1 {
				t.Errorf("an administrator: %v", err)
			}
			if c := s.backend.last.Load(); c.ID != "ann" || c.Role != admin || c.Kind != User || c.Actor() != "user:ann" {
				t.Errorf("the handler was told %+v", c)
			}
			if err := s.peersBeat(t); err != nil || s.backend.reached.Swap(0) != 1 {
				t.Errorf("a host: %v", err)
			}
			for _, want := range []string{"caller=\"user vic\"", "from=127.0.0.1:", "procedure=/gpuctl.cluster.v1.ClusterService/SetDrain", "code=permission_denied", "needs operator"} {
				if !strings.Contains(s.log.String(), want) {
					t.Errorf("the log has no %s:\n%s", want, s.log)
				}
			}
		})
	}
}

func (s *site) peersBeat(t *testing.T) error {
	m := issue(s.ca, pki.HostIdentity("h-2", "", "", ""), time.Now())
	_, err := s.peers(s.as(t, m)).Heartbeat(t.Context(), connect.NewRequest(&clusterv1.HeartbeatRequest{}))
	return err
}

// Whoever may connect can make up as many procedures as he likes, and long ones.
func TestRefusalsOfMadeUpProceduresAreLoggedOnce(t *testing.T) {
	s := open(t, true)
	local := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", s.socket)
	}}}
	defer local.CloseIdleConnections()
	for url, c := range map[string]*http.Client{"http://local": local, "https://" + s.address: s.as(t, nil)} {
		for i := range 20 {
			res, err := c.Post(fmt.Sprintf("%s/made.up/%d%s", url, i, strings.Repeat("x", 4096)), "application/json", strings.NewReader("{}"))
			if err != nil {
				t.Fatal(err)
			}
			res.Body.Close()
			if res.StatusCode != http.StatusForbidden {
				t.Errorf("%s: %s", url, res.Status)
			}
		}
	}
	if n := strings.Count(s.log.String(), "call refused"); n != 2 || len(s.log.String()) > 4096 {
		t.Errorf("%d lines of two callers, %d bytes", n, len(s.log.String()))
	}
}

func TestRemovalActsOnOpenConnections(t *testing.T) {
	s := open(t, false)
	s.put("ann", viewer)
	c := s.cluster(s.as(t, issue(s.ca, pki.Identity{ID: "ann", Role: viewer}, time.Now())))
	if err := status(c); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	watch := must(c.Watch(ctx, connect.NewRequest(&clusterv1.WatchRequest{})))
	defer watch.Close()
	top := must(c.Top(ctx, connect.NewRequest(&clusterv1.TopRequest{})))
	defer top.Close()
	if !watch.Receive() || !top.Receive() {
		t.Fatal(watch.Err(), top.Err())
	}
	s.backend.reached.Store(0)
	s.put("ann", 0)
	s.refusedWith(t, "next request", status(c), connect.CodeUnauthenticated, "removed from the cluster")
	for watch.Receive() {
	}
	s.refusedWith(t, "silent stream", watch.Err(), connect.CodeUnauthenticated, "removed from the cluster")
	for top.Receive() {
	}
	s.refusedWith(t, "busy stream", top.Err(), connect.CodeUnauthenticated, "removed from the cluster")
}

func TestExpiryAndDemotionActOnOpenConnections(t *testing.T) {
	s := open(t, false)
	s.put("ann", admin)
	c := s.cluster(s.as(t, issue(s.ca, pki.Identity{ID: "ann", Role: admin}, time.Now())))
	if err := drain(c, "n1"); err != nil {
		t.Fatal(err)
	}
	s.backend.reached.Store(0)
	s.put("ann", viewer)
	s.refusedWith(t, "demoted", drain(c, "n1"), connect.CodePermissionDenied, "has role viewer")
	s.ahead.Store(int64(pki.Lifetime + time.Minute))
	s.refusedWith(t, "expired meanwhile", status(c), connect.CodeUnauthenticated, "has expired")
	// The clock was wrong, and is set right: the connection serves again.
	s.ahead.Store(0)
	if err := status(c); err != nil {
		t.Error(err)
	}
}

func TestATokenWorksOnce(t *testing.T) {
	s := open(t, true)
	token, stored, err := pki.NewToken(pki.Token{
		Addresses: []string{s.address}, Fingerprint: pki.Fingerprint(s.ca.Certificate()), Role: viewer, Name: "vic", Expires: time.Now().Add(time.Minute),
	}, "uid:0")
	if err != nil {
		t.Fatal(err)
	}
	s.backend.tokens[token.ID] = stored
	text := must(token.Encode())
	got := must(pki.DecodeToken(text))
	key := must(pki.NewKey())
	enroll := func(id string, secret []byte, name string) (*connect.Response[clusterv1.EnrollResponse], error) {
		config := pki.PinnedClientConfig(got.Fingerprint, nil)
		return s.peers(s.client(t, config)).Enroll(t.Context(), connect.NewRequest(&clusterv1.EnrollRequest{
			TokenId: id, Secret: secret, Host: name, Csr: must(pki.NewRequest(key)),
		}))
	}
	for what, call := range map[string]func() (*connect.Response[clusterv1.EnrollResponse], error){
		"wrong secret": func() (*connect.Response[clusterv1.EnrollResponse], error) {
			return enroll(got.ID, make([]byte, 32), "vic")
		},
		"wrong name": func() (*connect.Response[clusterv1.EnrollResponse], error) {
			return enroll(got.ID, got.Secret[:], "eve")
		},
		"unknown token": func() (*connect.Response[clusterv1.EnrollResponse], error) {
			return enroll("t-0", got.Secret[:], "vic")
		},
	} {
		if _, err := call(); connect.CodeOf(err) != connect.CodeUnauthenticated {
			t.Errorf("%s: %v", what, err)
		}
	}
	res, err := enroll(got.ID, got.Secret[:], "vic")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := enroll(got.ID, got.Secret[:], "vic"); connect.CodeOf(err) != connect.CodeUnauthenticated || !strings.Contains(err.Error(), "it was used") {
		t.Errorf("again: %v", err)
	}
	s.put("vic", viewer)
	m := must(pki.NewMaterial(res.Msg.GetCertificate(), res.Msg.GetCa(), key))
	if err := status(s.cluster(s.as(t, m))); err != nil {
		t.Error(err)
	}
	if err := s.audit.Flush(); err != nil {
		t.Fatal(err)
	}
	data := must(os.ReadFile(s.audit.Path))
	if bytes.Count(data, []byte("PeerService/Enroll")) != 5 {
		t.Errorf("the trail:\n%s", data)
	}
	if !bytes.Contains(data, []byte(`"kind":"anonymous"`)) || bytes.Contains(data, got.Secret[:]) {
		t.Errorf("the trail:\n%s", data)
	}
}

func TestTheUnixSocketKnowsItsCaller(t *testing.T) {
	s := open(t, true)
	c := clusterv1connect.NewClusterServiceClient(unixClient(t, s.socket), "http://host")
	if _, err := c.Join(t.Context(), connect.NewRequest(&clusterv1.JoinRequest{Token: "gpuctl-join-v1.secret", Host: "n2"})); err != nil {
		t.Fatal(err)
	}
	got := s.backend.last.Load()
	if got.Kind != Local || int(got.UID) != os.Getuid() || int(got.PID) != os.Getpid() || got.Role != admin {
		t.Errorf("got %+v", got)
	}
	s.backend.reached.Store(0)
	peer := clusterv1connect.NewPeerServiceClient(unixClient(t, s.socket), "http://host")
	_, err := peer.Heartbeat(t.Context(), connect.NewRequest(&clusterv1.HeartbeatRequest{}))
	s.refusedWith(t, "a process as host", err, connect.CodePermissionDenied, "not on this socket")
	if err := s.audit.Flush(); err != nil {
		t.Fatal(err)
	}
	data := must(os.ReadFile(s.audit.Path))
	if bytes.Contains(data, []byte("secret")) || !bytes.Contains(data, []byte(`"object":"n2"`)) || !bytes.Contains(data, []byte(hidden)) {
		t.Errorf("the trail:\n%s", data)
	}
}

func unixClient(t *testing.T, socket string) *http.Client {
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

func TestPeerGroups(t *testing.T) {
	l := must(net.Listen("unix", filepath.Join(t.TempDir(), "s")))
	defer l.Close()
	c := must(net.Dial("unix", l.Addr().String()))
	defer c.Close()
	in := must(l.Accept())
	defer in.Close()
	got := must(PeerOf(in.(*net.UnixConn)))
	want := must(os.Getgroups())
	if len(got.Groups) != len(want) || int(got.GID) != os.Getgid() {
		t.Fatalf("got %+v, want %v", got, want)
	}
	for i, g := range want {
		if int(got.Groups[i]) != g {
			t.Errorf("got %v, want %v", got.Groups, want)
		}
	}
}

func TestTheTrailSaysWhoDidWhat(t *testing.T) {
	s := open(t, false)
	s.put("ann", admin)
	s.put("vic", viewer)
	ann := s.cluster(s.as(t, issue(s.ca, pki.Identity{ID: "ann", Role: admin}, time.Now())))
	vic := s.cluster(s.as(t, issue(s.ca, pki.Identity{ID: "vic", Role: viewer}, time.Now())))
	drain(ann, "n1")
	drain(ann, "nowhere")
	drain(ann, "panic")
	status(ann) // changes nothing
	for range 50 {
		drain(vic, "n1")
	}
	if err := s.audit.Flush(); err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range bytes.Lines(must(os.ReadFile(s.audit.Path))) {
		var e Entry
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		if e.From == "" || e.Time.IsZero() {
			t.Errorf("%s", line)
		}
		got = append(got, fmt.Sprintf("%s %s %s %s %v", e.Kind, e.Caller, e.Object, e.Outcome, e.Args["message"]))
	}
	want := []string{"user ann n1 ok disk", "user ann nowhere not_found disk", "user ann panic internal disk", "user vic  permission_denied <nil>"}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s", strings.Join(got, "\n"))
	}
	if n := strings.Count(s.log.String(), "call refused"); n != 1 {
		t.Errorf("%d refusals in the log", n)
	}
	if info := must(os.Stat(s.audit.Path)); info.Mode().Perm() != 0o600 {
		t.Errorf("mode %o", info.Mode().Perm())
	}
}

func TestRefusedBodiesAreNotRead(t *testing.T) {
	s := open(t, true)
	r, w := io.Pipe() // a body that never ends
	defer w.Close()
	req := must(http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+s.address+clusterv1connect.ClusterServiceSetDrainProcedure, r))
	req.Header.Set("Content-Type", "application/proto")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	res, err := s.as(t, nil).Do(req.WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusUnauthorized {
		t.Errorf("status %s", res.Status)
	}
	get := must(s.as(t, nil).Get("https://" + s.address + "/debug"))
	get.Body.Close()
	if get.StatusCode != http.StatusForbidden {
		t.Errorf("a path that is no procedure: %s", get.Status)
	}
}
