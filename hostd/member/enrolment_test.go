package member

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/cluster/remote"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// holder is somebody with a certificate.
type holder struct {
	client *http.Client
	m      *pki.Material
	at     string
}

func (m *machine) holder(material *pki.Material) *holder {
	c := remote.Client(pki.Trust{Provider: material}.ClientConfig(""))
	m.t.Cleanup(c.CloseIdleConnections)
	return &holder{c, material, m.port}
}

// enrol lets a user in with a new token.
func (m *machine) enrol(ctx context.Context, name string, role clusterv1.Role) *holder {
	m.t.Helper()
	token := decode(m.t, m.token(ctx, &clusterv1.CreateTokenRequest{Name: name, Role: role}))
	key, csr, err := newRequest()
	if err != nil {
		m.t.Fatal(err)
	}
	res, err := remote.Enroll(ctx, token, &clusterv1.EnrollRequest{Csr: csr, Host: name})
	if err != nil {
		m.t.Fatal(err)
	}
	material, err := pki.NewMaterial(res.GetCertificate(), res.GetCa(), key)
	if err != nil {
		m.t.Fatal(err)
	}
	return m.holder(material)
}

func (m *machine) revoke(ctx context.Context, name string) {
	m.t.Helper()
	_, err := m.api.RevokeIdentity(admin(ctx), connect.NewRequest(&clusterv1.RevokeIdentityRequest{Id: name}))
	if err != nil {
		m.t.Fatal(err)
	}
}

// views is what a viewer may do, administers what an administrator may.
func (h *holder) views(ctx context.Context) error {
	_, err := clusterv1connect.NewClusterServiceClient(h.client, "https://"+h.at).Status(ctx, connect.NewRequest(&clusterv1.StatusRequest{}))
	return err
}

func (h *holder) administers(ctx context.Context) error {
	_, err := clusterv1connect.NewClusterServiceClient(h.client, "https://"+h.at).ListIdentities(ctx, connect.NewRequest(&clusterv1.ListIdentitiesRequest{}))
	return err
}

// renew returns the holder with its next certificate.
func (h *holder) renew(ctx context.Context, m *machine) (*holder, error) {
	key, csr, err := newRequest()
	if err != nil {
		return nil, err
	}
	res, err := remote.Peer(h.client, h.at).Renew(ctx, connect.NewRequest(&clusterv1.RenewRequest{Csr: csr}))
	if err != nil {
		return nil, err
	}
	material, err := pki.NewMaterial(res.Msg.GetCertificate(), res.Msg.GetCa(), key)
	if err != nil {
		return nil, err
	}
	return m.holder(material), nil
}

func dead(ctx context.Context, t *testing.T, what string, h *holder, m *machine) {
	t.Helper()
	// On the connection that there is, and on a new one.
	for range 2 {
		for _, err := range []error{h.views(ctx), h.administers(ctx)} {
			if connect.CodeOf(err) != connect.CodeUnauthenticated || !reason.Is(err, reason.Revoked) {
				t.Errorf("%s: %v, want that it is revoked", what, err)
			}
		}
		h.client.CloseIdleConnections()
	}
	if _, err := h.renew(ctx, m); connect.CodeOf(err) != connect.CodeUnauthenticated {
		t.Errorf("%s is renewed: %v", what, err)
	}
}

func alive(ctx context.Context, t *testing.T, what string, h *holder, admin bool) {
	t.Helper()
	if err := h.views(ctx); err != nil {
		t.Errorf("%s: %v", what, err)
	}
	if err := h.administers(ctx); (err == nil) != admin || err != nil && connect.CodeOf(err) != connect.CodePermissionDenied {
		t.Errorf("%s as an administrator: %v", what, err)
	}
}

func TestRevokedCertificateStaysDeadAfterNameIsEnrolledAgain(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	m := cluster(ctx, t, "a")[0]
	const viewer, administrator = clusterv1.Role_ROLE_VIEWER, clusterv1.Role_ROLE_ADMIN

	stolen := m.enrol(ctx, "alice", viewer)
	renewed, err := stolen.renew(ctx, m)
	if err != nil {
		t.Fatal(err)
	}
	alive(ctx, t, "the first certificate", stolen, false)
	alive(ctx, t, "the first, renewed", renewed, false)
	m.revoke(ctx, "alice")
	dead(ctx, t, "the first certificate", stolen, m)

	second := m.enrol(ctx, "alice", administrator)
	after := func() {
		t.Helper()
		dead(ctx, t, "the first certificate", stolen, m)
		dead(ctx, t, "the first, renewed", renewed, m)
	}
	after()
	alive(ctx, t, "the second certificate", second, true)
	next, err := second.renew(ctx, m)
	if err != nil {
		t.Fatal(err)
	}
	alive(ctx, t, "the second, renewed", next, true)

	// The state comes from what is on the disk.
	m.stop()
	m.start(ctx)
	testkit.Until(t, "caught up", func() error { return second.views(ctx) })
	after()
	alive(ctx, t, "the second certificate after a restart", second, true)
	alive(ctx, t, "the second, renewed, after a restart", next, true)

	// The reverse: an administrator's certificate has nothing of a later viewer.
	m.revoke(ctx, "alice")
	third := m.enrol(ctx, "alice", viewer)
	after()
	dead(ctx, t, "the second certificate", second, m)
	dead(ctx, t, "the second, renewed", next, m)
	alive(ctx, t, "the third certificate", third, false)
}

// An identity of before has no enrolment, nor have its certificates.
func TestCertificatesWithoutEnrolmentHoldUntilTheyAreRevoked(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	m := cluster(ctx, t, "a")[0]
	ca, err := m.Authority()
	if err != nil {
		t.Fatal(err)
	}
	issue := func(enrolment string) *holder {
		t.Helper()
		key, csr, err := newRequest()
		if err != nil {
			t.Fatal(err)
		}
		cert, err := ca.Sign(csr, pki.Identity{ID: "bob", Role: clusterv1.Role_ROLE_VIEWER, Enrolment: enrolment}, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		material, err := pki.NewMaterial(cert, ca.Certificate().Raw, key)
		if err != nil {
			t.Fatal(err)
		}
		return m.holder(material)
	}
	m.apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_PutIdentity{PutIdentity: &clusterv1.PutIdentity{
		Identity: &clusterv1.Identity{Id: "bob", Role: clusterv1.Role_ROLE_VIEWER},
	}}})
	old := issue("")
	alive(ctx, t, "a certificate of before", old, false)
	renewed, err := old.renew(ctx, m)
	if err != nil {
		t.Fatal(err)
	}
	alive(ctx, t, "the same, renewed", renewed, false)
	dead(ctx, t, "one of some enrolment", issue(pki.NewEnrolment()), m)
	m.revoke(ctx, "bob")
	now := m.enrol(ctx, "bob", clusterv1.Role_ROLE_ADMIN)
	dead(ctx, t, "a certificate of before", old, m)
	dead(ctx, t, "the same, renewed", renewed, m)
	alive(ctx, t, "that of the enrolment", now, true)
}

// A host that was removed and comes back under its own id has a certificate of
// another enrolment, and its former one is of no use, for Raft neither.
func TestRemovedHostsCertificateStaysDeadWhenItJoinsAgain(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	ms := cluster(ctx, t, "a", "b")
	a, b := ms[0], ms[1]
	former, id := b.Current(), b.Self().ID
	b.stop()
	testkit.Until(t, "removed", func() error {
		_, err := a.api.RemoveHost(admin(ctx), connect.NewRequest(&clusterv1.RemoveHostRequest{Host: "b", Force: true}))
		return err
	})
	remove(t, b.dir)
	token := decode(t, a.token(ctx, &clusterv1.CreateTokenRequest{}))
	_, csr, err := newRequest()
	if err != nil {
		t.Fatal(err)
	}
	_, err = remote.Enroll(ctx, token, &clusterv1.EnrollRequest{Csr: csr, Host: "b", HostId: id, Address: b.port, Protocol: state.Protocol})
	if err != nil {
		t.Fatal(err)
	}
	v := a.view(ctx)
	if v.Identity(id) == nil || v.Identity(id).GetEnrolment() == former.Peer.Enrolment || former.Peer.Enrolment == "" {
		t.Fatalf("identity %v, certificate of %q", v.Identity(id), former.Peer.Enrolment)
	}
	h := a.holder(former)
	_, err = remote.Peer(h.client, a.port).ReadIndex(ctx, connect.NewRequest(&clusterv1.ReadIndexRequest{}))
	if connect.CodeOf(err) != connect.CodeUnauthenticated || !reason.Is(err, reason.Revoked) {
		t.Errorf("the former certificate: %v", err)
	}
	trust := a.trust()
	if err := trust.Check(former.Peer); !errors.Is(err, pki.ErrRevoked) {
		t.Errorf("the former certificate for Raft: %v", err)
	}
}

// A leader that stood still after it had let somebody in has given no answer:
// the same request gets it, and no other does for a token that was used.
func TestEnrolmentWhoseAnswerWasLostIsAnsweredAgain(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	m := cluster(ctx, t, "a")[0]
	token := decode(t, m.token(ctx, &clusterv1.CreateTokenRequest{Name: "ann", Role: clusterv1.Role_ROLE_VIEWER}))
	key, csr, err := newRequest()
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		res, err := remote.Enroll(ctx, token, &clusterv1.EnrollRequest{Csr: csr, Host: "ann"})
		if err != nil {
			t.Fatal(err)
		}
		material, err := pki.NewMaterial(res.GetCertificate(), res.GetCa(), key)
		if err != nil {
			t.Fatal(err)
		}
		alive(ctx, t, "what it got", m.holder(material), false)
	}
	other := token
	other.Secret[0]++
	_, another, err := newRequest()
	if err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		token pki.Token
		csr   []byte
	}{"another key": {token, another}, "another secret": {other, csr}} {
		if _, err := remote.Enroll(ctx, c.token, &clusterv1.EnrollRequest{Csr: c.csr, Host: "ann"}); connect.CodeOf(err) != connect.CodePermissionDenied {
			t.Errorf("%s: %v", what, err)
		}
	}
	m.revoke(ctx, "ann")
	if _, err := remote.Enroll(ctx, token, &clusterv1.EnrollRequest{Csr: csr, Host: "ann"}); connect.CodeOf(err) != connect.CodePermissionDenied {
		t.Errorf("after it was revoked: %v", err)
	}
}

// A user's token lets its holder in by any name that is free. That of a host which has been let
// in and is no member yet is not: else it would be revoked, and a user in its place.
func TestAUsersTokenRevokesNoHostThatIsJoining(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	a := cluster(ctx, t, "a")[0]
	const joining = "h-joining"
	a.apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_PutIdentity{PutIdentity: &clusterv1.PutIdentity{
		Identity: &clusterv1.Identity{Id: joining, Host: "b", Role: clusterv1.Role_ROLE_HOST},
	}}})
	token := decode(t, a.token(ctx, &clusterv1.CreateTokenRequest{Role: clusterv1.Role_ROLE_VIEWER}))
	_, csr, err := newRequest()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := remote.Enroll(ctx, token, &clusterv1.EnrollRequest{Csr: csr, Host: joining}); err == nil {
		t.Error("a viewer has a host's name")
	}
	if i := a.view(ctx).Identity(joining); i.GetRole() != clusterv1.Role_ROLE_HOST {
		t.Errorf("the host that joins is %v", i)
	}
}
