package pki

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/random"
)

const (
	scheme        = "gpuctl"
	maxNameLength = 64 // longest common name (X.520, ub-common-name)
	maxNames      = 16
)

// Kind is the kind of a certificate's owner.
type Kind uint8

// Kinds of owners.
const (
	KindUser Kind = iota + 1
	KindHost
)

func (k Kind) String() string {
	switch k {
	case KindHost:
		return "host"
	case KindUser:
		return "user"
	}
	return "nobody"
}

// Peer is the owner of a certificate.
type Peer struct {
	Cluster   string
	Kind      Kind
	ID        string
	Names     []string // names of a host, including its id
	NotBefore time.Time
	NotAfter  time.Time
	Serial    string
	Enrolment string // enrolment from which the certificate comes; empty: made by a version without enrolments
}

func (p Peer) String() string { return p.Kind.String() + " " + p.ID }

// Is reports whether the peer is the host with that id or name.
func (p Peer) Is(host string) bool {
	return p.Kind == KindHost && (p.ID == host || slices.ContainsFunc(p.Names, func(n string) bool { return strings.EqualFold(n, host) }))
}

// Valid returns an error if the certificate is not valid at that time.
func (p Peer) Valid(now time.Time) error {
	switch {
	case now.Before(p.NotBefore):
		return fmt.Errorf("%s: %w: it begins at %s and the clock here says %s; set the clocks of both machines",
			p, ErrNotYetValid, stamp(p.NotBefore), stamp(now))
	case now.After(p.NotAfter):
		return fmt.Errorf("%s: %w on %s (the clock here says %s); join again with a new token, or set the clock if it is wrong",
			p, ErrExpired, stamp(p.NotAfter), stamp(now))
	}
	return nil
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// Identity is the content of a certificate to be signed.
type Identity struct {
	ID       string
	Role     clusterv1.Role // ROLE_HOST makes it a host's; any other role is only for people to read
	Names    []string       // more DNS names of a host
	IPs      []net.IP       // addresses of a host
	Lifetime time.Duration  // 0: Lifetime
	// Enrolment is the identity's enrolment (see NewEnrolment). All certificates of the
	// identity contain it. Empty: it has none.
	Enrolment string
}

// NewEnrolment returns an id for an enrolment. It is unique, so that a new enrolment with
// the same name is different.
func NewEnrolment() string { return "e-" + random.Hex(16) }

// EnrolmentOf returns the enrolment that results from a token's secret and a certificate
// request. Repeating the same request, because the answer was lost, results in the same
// enrolment. Nobody else can make that request.
func EnrolmentOf(secret, csr []byte) string {
	h := sha256.New()
	_ = binary.Write(h, binary.BigEndian, uint64(len(secret)))
	h.Write(secret)
	h.Write(csr)
	return "e-" + hex.EncodeToString(h.Sum(nil)[:16])
}

// HostIdentity returns the identity of a host. address is the host:port at which it is
// reached.
func HostIdentity(id, name, address, enrolment string) Identity {
	out := Identity{ID: id, Role: clusterv1.Role_ROLE_HOST, Enrolment: enrolment}
	if name != "" {
		out.Names = append(out.Names, name)
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = address
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		if !ip.IsUnspecified() {
			out.IPs = append(out.IPs, net.IP(ip.Unmap().AsSlice()))
		}
	} else if ValidName(host) {
		out.Names = append(out.Names, host)
	}
	return out
}

func (id Identity) kind() Kind {
	if id.Role == clusterv1.Role_ROLE_HOST {
		return KindHost
	}
	return KindUser
}

func (id Identity) validate() error {
	if !ValidName(id.ID) {
		return fmt.Errorf("%w: id %q (want letters, digits, '.', '_', '@' and '-', at most %d)", ErrIdentity, id.ID, maxNameLength)
	}
	switch id.Role {
	case clusterv1.Role_ROLE_HOST:
		if strings.Contains(id.ID, "@") {
			return fmt.Errorf("%w: host id %q has an '@'", ErrIdentity, id.ID)
		}
	case clusterv1.Role_ROLE_VIEWER, clusterv1.Role_ROLE_OPERATOR, clusterv1.Role_ROLE_ADMIN:
		if len(id.Names)+len(id.IPs) != 0 {
			return fmt.Errorf("%w: user %s: users have no host names and addresses", ErrIdentity, id.ID)
		}
	default:
		return fmt.Errorf("%w: %s has role %s", ErrIdentity, id.ID, id.Role)
	}
	if len(id.Names) > maxNames || len(id.IPs) > maxNames {
		return fmt.Errorf("%w: host %s: more than %d names or addresses", ErrIdentity, id.ID, maxNames)
	}
	for _, name := range id.Names {
		if !ValidName(name) || strings.Contains(name, "@") {
			return fmt.Errorf("%w: host %s: name %q", ErrIdentity, id.ID, name)
		}
	}
	for _, ip := range id.IPs {
		if ip.To16() == nil {
			return fmt.Errorf("%w: host %s: an address of %d bytes", ErrIdentity, id.ID, len(ip))
		}
	}
	if id.Enrolment != "" && !ValidName(id.Enrolment) {
		return fmt.Errorf("%w: %s: enrolment %.100q", ErrIdentity, id.ID, id.Enrolment)
	}
	if id.Lifetime < 0 {
		return fmt.Errorf("%w: %s: lifetime %s", ErrIdentity, id.ID, id.Lifetime)
	}
	return nil
}

// ValidName reports whether a host, user, cluster or token may have this name.
func ValidName(name string) bool {
	if name == "" || len(name) > maxNameLength {
		return false
	}
	for i := range len(name) {
		c := name[i]
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !letter && (i == 0 || !strings.ContainsRune("._@-", rune(c))) {
			return false
		}
	}
	return true
}

// roleName returns the name of a role in a certificate, for people to read.
func roleName(r clusterv1.Role) string {
	return strings.ToLower(strings.TrimPrefix(r.String(), "ROLE_"))
}

func identityURI(cluster string, kind Kind, id string) *url.URL {
	return &url.URL{Scheme: scheme, Host: cluster, Path: "/" + kind.String() + "/" + id}
}

// PeerOf returns the owner of a certificate. It verifies nothing.
func PeerOf(cert *x509.Certificate) (Peer, error) {
	bad := func(why string) (Peer, error) {
		return Peer{}, fmt.Errorf("%w: %s", ErrMalformed, why)
	}
	if len(cert.URIs) != 1 {
		return bad(fmt.Sprintf("%d URIs", len(cert.URIs)))
	}
	u := cert.URIs[0]
	parts := strings.Split(u.Path, "/")
	if u.Scheme != scheme || u.User != nil || u.RawQuery != "" || u.Fragment != "" || u.Opaque != "" || len(parts) != 3 || parts[0] != "" {
		return bad(fmt.Sprintf("%.200q is not gpuctl://CLUSTER/host|user/ID", u.String()))
	}
	p := Peer{
		Cluster: u.Host, ID: parts[2], Names: cert.DNSNames,
		NotBefore: cert.NotBefore, NotAfter: cert.NotAfter, Serial: cert.SerialNumber.Text(16),
		Enrolment: cert.Subject.SerialNumber,
	}
	switch parts[1] {
	case "host":
		p.Kind = KindHost
	case "user":
		p.Kind = KindUser
	default:
		return bad(fmt.Sprintf("%.100q is neither host nor user", parts[1]))
	}
	if !ValidName(p.Cluster) || !ValidName(p.ID) {
		return bad("a name with other characters")
	}
	if p.Enrolment != "" && !ValidName(p.Enrolment) {
		return bad("an enrolment with other characters")
	}
	if cert.Subject.CommonName != p.ID {
		return bad("the common name is not the identity's")
	}
	return p, nil
}
