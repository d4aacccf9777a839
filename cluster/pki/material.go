package pki

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"fmt"
)

// Material is what its owner shows to others and knows them by.
type Material struct {
	CA          *x509.Certificate
	Certificate *tls.Certificate // its chain is the leaf and the authority, so that a token's fingerprint can be met
	Peer        Peer             // whom the certificate is of
}

// Provider knows the material in force. It may be nil: there is none yet.
type Provider interface {
	Current() *Material
}

// Current makes a Material a Provider of itself.
func (m *Material) Current() *Material { return m }

// NewMaterial puts together what belongs together: the authority has signed
// the certificate, which is that of the key. Whether it is valid now is not
// checked: a certificate that has expired can still be renewed by hand.
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
