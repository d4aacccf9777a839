package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net/url"
	"slices"
	"strings"
	"time"
)

const (
	// Lifetime is how long certificates of hosts and users are valid.
	Lifetime = 30 * 24 * time.Hour
	// BackDate is how long before its creation a certificate becomes valid.
	BackDate = time.Hour

	caLifetime = 10 * 365 * 24 * time.Hour
	caBackDate = 24 * time.Hour // so that certificates that a slower clock signs are not older than their authority
	maxCSR     = 16 << 10
	minRSA     = 2048
	maxRSA     = 8192
)

// CA signs the certificates of one cluster.
type CA struct {
	cert    *x509.Certificate
	key     crypto.Signer
	cluster string
}

// NewCA makes the authority of a new cluster.
func NewCA(clusterID string, now time.Time) (*CA, error) {
	if !ValidName(clusterID) || strings.Contains(clusterID, "@") {
		return nil, fmt.Errorf("%w: cluster id %q", ErrIdentity, clusterID)
	}
	key, err := NewKey()
	if err != nil {
		return nil, err
	}
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	// No common name: it is limited to 64 bytes, and a cluster's id may be longer.
	template := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{Organization: []string{"gpuctl cluster"}, OrganizationalUnit: []string{clusterID}},
		NotBefore:             now.Add(-caBackDate),
		NotAfter:              now.Add(caLifetime),
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("cluster authority: %w", err)
	}
	return newCA(der, key)
}

// ParseCA returns the authority with a certificate and a PKCS #8 key, both in DER.
func ParseCA(cert, key []byte) (*CA, error) {
	parsed, err := x509.ParsePKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("cluster authority's key: %w: %w", ErrDamaged, err)
	}
	signer, ok := parsed.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("cluster authority's key: %w: it cannot sign", ErrDamaged)
	}
	return newCA(cert, signer)
}

func newCA(der []byte, key crypto.Signer) (*CA, error) {
	cert, err := ParseCACertificate(der)
	if err != nil {
		return nil, err
	}
	if !samePublic(cert.PublicKey, key.Public()) {
		return nil, fmt.Errorf("cluster authority: %w: the key is another certificate's", ErrMismatch)
	}
	return &CA{cert, key, ClusterOf(cert)}, nil
}

// ParseCACertificate parses an authority's certificate in DER, and checks that it is one
// of a cluster.
func ParseCACertificate(der []byte) (*x509.Certificate, error) {
	cert, err := x509.ParseCertificate(der)
	switch {
	case err != nil:
		return nil, fmt.Errorf("cluster authority's certificate: %w: %w", ErrDamaged, err)
	case !cert.IsCA || !cert.BasicConstraintsValid || !cert.MaxPathLenZero || ClusterOf(cert) == "":
		return nil, fmt.Errorf("cluster authority's certificate: %w: it is not a cluster authority's", ErrMismatch)
	}
	if err := cert.CheckSignatureFrom(cert); err != nil {
		return nil, fmt.Errorf("cluster authority's certificate: %w: %w", ErrDamaged, err)
	}
	return cert, nil
}

// ClusterOf returns the id of the cluster in an authority's certificate; empty: none.
func ClusterOf(ca *x509.Certificate) string {
	if ou := ca.Subject.OrganizationalUnit; len(ou) == 1 && ValidName(ou[0]) {
		return ou[0]
	}
	return ""
}

// Certificate returns the authority's own certificate. It must not be changed.
func (ca *CA) Certificate() *x509.Certificate { return ca.cert }

// ClusterID returns the id of the cluster.
func (ca *CA) ClusterID() string { return ca.cluster }

// KeyDER returns the private key as PKCS #8.
func (ca *CA) KeyDER() ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(ca.key)
	if err != nil {
		return nil, fmt.Errorf("cluster authority's key: %w", err)
	}
	return der, nil
}

// Fingerprint returns the SHA-256 of an authority's certificate. A join token contains
// it.
func Fingerprint(ca *x509.Certificate) [sha256.Size]byte { return sha256.Sum256(ca.Raw) }

// Sign returns a certificate in DER for the key of a certificate request (PKCS #10). It
// uses nothing else of the request.
func (ca *CA) Sign(csr []byte, id Identity, now time.Time) ([]byte, error) {
	if err := id.validate(); err != nil {
		return nil, err
	}
	public, err := requestKey(csr)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", id.kind(), id.ID, err)
	}
	if now.After(ca.cert.NotAfter) || now.Before(ca.cert.NotBefore) {
		return nil, fmt.Errorf("%s %s: the cluster's authority is valid from %s to %s, and the clock here says %s: %w",
			id.kind(), id.ID, stamp(ca.cert.NotBefore), stamp(ca.cert.NotAfter), stamp(now), ErrExpired)
	}
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	lifetime := id.Lifetime
	if lifetime == 0 {
		lifetime = Lifetime
	}
	until := now.Add(lifetime)
	if until.After(ca.cert.NotAfter) {
		until = ca.cert.NotAfter
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		// A subject's serial number distinguishes subjects with the same name (RFC 4519).
		Subject:               pkix.Name{CommonName: id.ID, Organization: []string{roleName(id.Role)}, SerialNumber: id.Enrolment},
		NotBefore:             now.Add(-BackDate),
		NotAfter:              until,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
		URIs:                  []*url.URL{identityURI(ca.cluster, id.kind(), id.ID)},
	}
	if id.kind() == KindHost {
		template.ExtKeyUsage = append(template.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
		template.IPAddresses = id.IPs
		for _, name := range append([]string{id.ID}, id.Names...) {
			if !slices.Contains(template.DNSNames, name) {
				template.DNSNames = append(template.DNSNames, name)
			}
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, public, ca.key)
	if err != nil {
		return nil, fmt.Errorf("%s %s: certificate: %w", id.kind(), id.ID, err)
	}
	return der, nil
}

// requestKey returns the public key of a request, after it has checked that the requester
// has the private key.
func requestKey(der []byte) (crypto.PublicKey, error) {
	if len(der) > maxCSR {
		return nil, fmt.Errorf("%w: %d bytes, more than %d", ErrRequest, len(der), maxCSR)
	}
	csr, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	// Checked before the signature, because verifying with a huge key takes long.
	if err := checkKey(csr.PublicKey); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	if err := csr.CheckSignature(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	return csr.PublicKey, nil
}

func checkKey(key crypto.PublicKey) error {
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		if k.Curve == elliptic.P256() || k.Curve == elliptic.P384() {
			return nil
		}
		return fmt.Errorf("its key is on curve %s (want P-256 or P-384)", k.Curve.Params().Name)
	case ed25519.PublicKey:
		return nil
	case *rsa.PublicKey:
		if n := k.N.BitLen(); n < minRSA || n > maxRSA {
			return fmt.Errorf("its RSA key has %d bits (want %d to %d)", n, minRSA, maxRSA)
		}
		return nil
	}
	return fmt.Errorf("its key is a %T (want ECDSA, Ed25519 or RSA)", key)
}

// NewKey makes a private key of a type that every TLS library supports.
func NewKey() (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("key: %w", err)
	}
	return key, nil
}

// NewRequest returns a certificate request in DER for a key.
func NewRequest(key crypto.Signer) ([]byte, error) {
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return nil, fmt.Errorf("certificate request: %w", err)
	}
	return csr, nil
}

func newSerial() (*big.Int, error) {
	b := make([]byte, 16)
	if _, err := rand.Read(b); err != nil {
		return nil, fmt.Errorf("serial number: %w", err)
	}
	b[0] |= 1 // never 0
	return new(big.Int).SetBytes(b), nil
}

func samePublic(a, b crypto.PublicKey) bool {
	k, ok := a.(interface{ Equal(crypto.PublicKey) bool })
	return ok && k.Equal(b)
}
