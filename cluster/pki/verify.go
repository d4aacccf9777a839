package pki

import (
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"time"
)

// Protocols that are negotiated on the port (ALPN).
const (
	ProtoHTTP2 = "h2"
	ProtoHTTP1 = "http/1.1"
	ProtoRaft  = "gpuctl-raft/1"
)

// Trust decides which certificates are valid.
type Trust struct {
	Provider Provider
	// Revoked reports whether a peer's identity was removed, or has another enrolment
	// than the certificate. While the cluster's state is unknown on this host, it must
	// return false: a host that has just joined learns the state from hosts that it could
	// not accept otherwise. Nil: no identity is revoked.
	Revoked func(p Peer) bool
	Now     func() time.Time // nil: time.Now
}

func (t Trust) now() time.Time {
	if t.Now != nil {
		return t.Now()
	}
	return time.Now()
}

// Check returns an error if a peer that was verified before is not valid any more: its
// certificate has expired since, or its identity was removed.
func (t Trust) Check(p Peer) error {
	if err := p.Valid(t.now()); err != nil {
		return err
	}
	if t.Revoked != nil && t.Revoked(p) {
		return fmt.Errorf("%s: %w; to come back it needs a new token from an administrator", p, ErrRevoked)
	}
	return nil
}

// Verify returns the owner of a client's certificate chain.
func (t Trust) Verify(chain []*x509.Certificate) (Peer, error) {
	return t.verify(chain, x509.ExtKeyUsageClientAuth)
}

// VerifyServer returns the host of a server's certificate chain. If host is not empty,
// the server must have that id or name.
func (t Trust) VerifyServer(chain []*x509.Certificate, host string) (Peer, error) {
	p, err := t.verify(chain, x509.ExtKeyUsageServerAuth)
	switch {
	case err != nil:
		return Peer{}, err
	case p.Kind != KindHost:
		return Peer{}, fmt.Errorf("%s: %w", p, ErrNotHost)
	case host != "" && !p.Is(host):
		return Peer{}, fmt.Errorf("%w: %s (%v), not %s; check the address", ErrWrongHost, p, p.Names, host)
	}
	return p, nil
}

func (t Trust) verify(chain []*x509.Certificate, use x509.ExtKeyUsage) (Peer, error) {
	if len(chain) == 0 {
		return Peer{}, ErrNoCertificate
	}
	m := t.Provider.Current()
	if m == nil {
		return Peer{}, fmt.Errorf("%w: this host belongs to no cluster yet", ErrUntrusted)
	}
	p, err := verifyLeaf(m.CA, chain[0], t.now(), use)
	if err != nil {
		return Peer{}, err
	}
	return p, t.Check(p)
}

// verifyLeaf checks everything except revocation.
func verifyLeaf(ca, leaf *x509.Certificate, now time.Time, use x509.ExtKeyUsage) (Peer, error) {
	roots := x509.NewCertPool()
	roots.AddCert(ca)
	// The time is checked separately, to distinguish an expired certificate of the right
	// authority from one of another authority.
	at := now
	if at.Before(leaf.NotBefore) || at.After(leaf.NotAfter) {
		at = leaf.NotAfter
	}
	if at.Before(ca.NotBefore) && leaf.NotAfter.After(ca.NotBefore) {
		at = ca.NotBefore
	}
	_, err := leaf.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: at, KeyUsages: []x509.ExtKeyUsage{use}})
	p, malformed := PeerOf(leaf)
	if err != nil {
		var invalid x509.CertificateInvalidError
		switch {
		case errors.As(err, &invalid) && invalid.Reason == x509.IncompatibleUsage:
			return Peer{}, fmt.Errorf("%s: %w: it is not for this use", p, ErrNotHost)
		case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
			return Peer{}, fmt.Errorf("%w: that of the cluster's authority, on %s", ErrExpired, stamp(ca.NotAfter))
		case malformed == nil && p.Cluster != ClusterOf(ca):
			return Peer{}, wrongCluster(p, ca)
		}
		return Peer{}, fmt.Errorf("%w (%s): %w; join this cluster with a token of its own", ErrUntrusted, ClusterOf(ca), err)
	}
	switch {
	case malformed != nil:
		return Peer{}, malformed
	case leaf.IsCA:
		return Peer{}, fmt.Errorf("%w: it is an authority's", ErrMalformed)
	case p.Cluster != ClusterOf(ca):
		return Peer{}, wrongCluster(p, ca)
	}
	return p, p.Valid(now)
}

func wrongCluster(p Peer, ca *x509.Certificate) error {
	return fmt.Errorf("%s: %w: %s, while this is %s; choose the right cluster, or join this one with a token", p, ErrWrongCluster, p.Cluster, ClusterOf(ca))
}

// ServerConfig returns the TLS configuration of the port. HTTP connections without a
// certificate, or with one that is not valid, are accepted: Verify returns who the client
// is. Raft connections need a host's certificate.
func (t Trust) ServerConfig() *tls.Config {
	config := &tls.Config{
		MinVersion:             tls.VersionTLS13,
		NextProtos:             []string{ProtoHTTP2, ProtoHTTP1, ProtoRaft},
		ClientAuth:             tls.RequestClientCert,
		SessionTicketsDisabled: true, // each connection is verified again
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			m := t.Provider.Current()
			if m == nil {
				return nil, errors.New("this host belongs to no cluster yet")
			}
			return m.Certificate, nil
		},
		VerifyConnection: func(cs tls.ConnectionState) error {
			if cs.NegotiatedProtocol != ProtoRaft {
				return nil
			}
			_, err := t.raftPeer(cs)
			return err
		},
	}
	// Browsers would ask their user for certificates of the authorities named here.
	config.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		m := t.Provider.Current()
		if m == nil {
			return nil, nil
		}
		c := config.Clone()
		c.GetConfigForClient = nil
		c.ClientCAs = x509.NewCertPool()
		c.ClientCAs.AddCert(m.CA)
		return c, nil
	}
	return config
}

func (t Trust) raftPeer(cs tls.ConnectionState) (Peer, error) {
	p, err := t.Verify(cs.PeerCertificates)
	if err == nil && p.Kind != KindHost {
		err = fmt.Errorf("%s: %w: raft is between hosts", p, ErrNotHost)
	}
	return p, err
}

// ClientConfig returns the TLS configuration for connections to hosts of this cluster: to
// the one with that id or name, or to any if host is empty. The caller adds the
// protocols.
func (t Trust) ClientConfig(host string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ServerName: serverName(host),
		// The standard check does not know identities, and compares names with the
		// address. VerifyConnection replaces it.
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection verifies
		VerifyConnection: func(cs tls.ConnectionState) error {
			_, err := t.VerifyServer(cs.PeerCertificates, host)
			return err
		},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			if m := t.Provider.Current(); m != nil {
				return m.Certificate, nil
			}
			return &tls.Certificate{}, nil
		},
	}
}

// PinnedClientConfig returns the TLS configuration for a client that has only a token:
// the server must be a host whose authority has this fingerprint.
func PinnedClientConfig(fingerprint [sha256.Size]byte, now func() time.Time) *tls.Config {
	if now == nil {
		now = time.Now
	}
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection verifies
		VerifyConnection: func(cs tls.ConnectionState) error {
			_, err := VerifyPinned(cs.PeerCertificates, fingerprint, now())
			return err
		},
	}
}

// VerifyPinned returns the host of a server's certificate chain, whose authority must
// have this fingerprint.
func VerifyPinned(chain []*x509.Certificate, fingerprint [sha256.Size]byte, now time.Time) (Peer, error) {
	if len(chain) == 0 {
		return Peer{}, ErrNoCertificate
	}
	for _, cert := range chain[1:] {
		if sum := Fingerprint(cert); subtle.ConstantTimeCompare(sum[:], fingerprint[:]) != 1 {
			continue
		}
		ca, err := ParseCACertificate(cert.Raw)
		if err != nil {
			return Peer{}, err
		}
		p, err := verifyLeaf(ca, chain[0], now, x509.ExtKeyUsageServerAuth)
		if err == nil && p.Kind != KindHost {
			err = fmt.Errorf("%s: %w", p, ErrNotHost)
		}
		return p, err
	}
	return Peer{}, fmt.Errorf("%w: the server's authority is not the one in the token; somebody else answers at this address, or the token is of another cluster", ErrUntrusted)
}

func serverName(host string) string {
	if net.ParseIP(host) != nil {
		return "" // clients do not send it for addresses
	}
	return host
}
