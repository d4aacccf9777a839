package access

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// Kind is how a caller is authenticated.
type Kind uint8

// Kinds of callers. A Kind can be a set of them.
const (
	Anonymous Kind = 1 << iota // has no valid certificate
	Local                      // a process on this host, on its Unix socket
	Host                       // another host, by its certificate
	User                       // a user, by its certificate
)

func (k Kind) String() string {
	switch k {
	case Anonymous:
		return "anonymous"
	case Local:
		return "local"
	case Host:
		return "host"
	case User:
		return "user"
	}
	return "kind " + strconv.Itoa(int(k))
}

// Caller is who makes a call.
type Caller struct {
	Kind    Kind
	ID      string // id of the user or host; for a local process, its uid in words
	Role    clusterv1.Role
	UID     uint32 // of a Local caller, as is PID
	PID     int32
	Address string
	Host    string // name, of a Host

	// Enrolment is the enrolment of the certificate and its identity.
	Enrolment string

	// Problem is why a certificate that was presented is not valid.
	Problem error
}

func (c Caller) String() string {
	switch c.Kind {
	case Local:
		return fmt.Sprintf("uid %d (process %d)", c.UID, c.PID)
	case Host, User:
		return c.Kind.String() + " " + c.ID
	}
	return "somebody without a valid certificate"
}

// Actor returns the caller's name for commands and events.
func (c Caller) Actor() string {
	if c.Kind == Local {
		return fmt.Sprintf("uid:%d", c.UID)
	}
	return c.Kind.String() + ":" + c.ID
}

type callerKey struct{}

// WithCaller returns a context with a caller, for handlers that call other handlers, and
// for tests.
func WithCaller(ctx context.Context, c Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// From returns the caller of the request that a handler serves.
func From(ctx context.Context) (Caller, bool) {
	c, ok := ctx.Value(callerKey{}).(Caller)
	return c, ok
}

// LocalPolicy gives roles to processes of this host. Root and hostd's own user are always
// administrators, because they can replace hostd anyway.
type LocalPolicy struct {
	AdminUIDs    []uint32
	AdminGIDs    []uint32
	OperatorGIDs []uint32
	ViewerGIDs   []uint32
	Others       clusterv1.Role // role of all other users; ROLE_UNSPECIFIED: no access
}

// Peer is the process at the other end of a Unix socket.
type Peer struct {
	UID    uint32
	GID    uint32
	PID    int32
	Groups []uint32 // supplementary groups
}

// FromPeer returns the caller for a local process. self is the uid of hostd's user.
func FromPeer(p Peer, self uint32, policy LocalPolicy) Caller {
	c := Caller{Kind: Local, ID: "uid " + strconv.FormatUint(uint64(p.UID), 10), UID: p.UID, PID: p.PID, Role: policy.Others}
	in := func(gids []uint32) bool {
		return slices.Contains(gids, p.GID) || slices.ContainsFunc(p.Groups, func(g uint32) bool { return slices.Contains(gids, g) })
	}
	switch {
	case p.UID == 0, p.UID == self, slices.Contains(policy.AdminUIDs, p.UID), in(policy.AdminGIDs):
		c.Role = clusterv1.Role_ROLE_ADMIN
	case in(policy.OperatorGIDs):
		c.Role = max(c.Role, clusterv1.Role_ROLE_OPERATOR)
	case in(policy.ViewerGIDs):
		c.Role = max(c.Role, clusterv1.Role_ROLE_VIEWER)
	}
	if c.Role > clusterv1.Role_ROLE_ADMIN { // a policy must not give the role of a host
		c.Role = clusterv1.Role_ROLE_UNSPECIFIED
	}
	return c
}

// ErrNotReady means that this host does not know the cluster's state yet.
var ErrNotReady = reason.New(reason.NotReady, "this host has not caught up with the cluster yet")

// Lookup returns an identity from the cluster's state, or nil if there is none. The error
// wraps ErrNotReady if that is unknown yet.
type Lookup func(id string) (*clusterv1.Identity, error)

// FromTLS returns the caller for the owner of a verified certificate. Its role is the one
// that the cluster's state contains now.
func FromTLS(peer pki.Peer, lookup Lookup) (Caller, error) {
	identity, err := lookup(peer.ID)
	switch {
	case err != nil:
		return Caller{}, err
	case identity == nil:
		return Caller{}, fmt.Errorf("%s: %w; to come back it needs a new token from an administrator", peer, pki.ErrRevoked)
	case identity.GetEnrolment() != peer.Enrolment:
		return Caller{}, fmt.Errorf("%s: %w, and the name was enrolled again: this certificate is of another enrolment and stays revoked", peer, pki.ErrRevoked)
	}
	c := Caller{Kind: User, ID: peer.ID, Role: identity.GetRole(), Enrolment: peer.Enrolment}
	isHost := identity.GetRole() == clusterv1.Role_ROLE_HOST
	if isHost != (peer.Kind == pki.KindHost) {
		return Caller{}, fmt.Errorf("%s: %w: the cluster knows %s as %s; join again with a new token", peer, pki.ErrUntrusted, peer.ID, roleName(identity.GetRole()))
	}
	if isHost {
		c.Kind, c.Host = Host, identity.GetHost()
	}
	return c, nil
}

func roleName(r clusterv1.Role) string {
	if r == clusterv1.Role_ROLE_UNSPECIFIED {
		return "none"
	}
	return strings.ToLower(strings.TrimPrefix(r.String(), "ROLE_"))
}
