package pki

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"fmt"
)

// Material is a certificate with its key, and the authority that verifies others.
type Material struct {
	CA          *x509.Certificate
	Certificate *tls.Certificate // the chain contains the authority, too, so that a client can check a token's fingerprint
	Peer        Peer             // owner of the certificate
}

// Provider returns the material in use, or nil if there is none yet.
type Provider interface {
	Current() *Material
}

// Current returns m, so that a Material is a Provider.
func (m *Material) Current() *Material { return m }

// NewMaterial checks that the authority has signed the certificate, and that the
// certificate belongs to the key. It does not check whether the certificate has expired,
// because an expired one can still be renewed by hand.
func NewMaterial(cert, ca []byte, key crypto.Signer) (*Material, error) {
	parsed, err := ParseCACertificate(ca)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(cert)
	if err != nil {
		return nil, fmt.Errorf("certificate: %w: %w", ErrDamaged, err)
	}
	if !samePublic(leaf.PublicKey, key.Public()) {
		return nil, fmt.Errorf("certificate of %q: %w: the key is another certificate's", leaf.Subject.CommonName, ErrMismatch)
	}
	peer, err := verifyLeaf(parsed, leaf, leaf.NotBefore, x509.ExtKeyUsageClientAuth)
	if err != nil {
		return nil, err
	}
	return &Material{parsed, &tls.Certificate{Certificate: [][]byte{leaf.Raw, parsed.Raw}, PrivateKey: key, Leaf: leaf}, peer}, nil
}
