package pki

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"testing"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// FuzzRequest reads certificate requests. One that is taken has a key that its
// sender holds, and the certificate for it says what the authority meant.
func FuzzRequest(f *testing.F) {
	now := time.Unix(1_800_000_000, 0)
	ca, err := NewCA("c1", now)
	if err != nil {
		f.Fatal(err)
	}
	ec, err := NewKey()
	if err != nil {
		f.Fatal(err)
	}
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		f.Fatal(err)
	}
	rs, err := rsa.GenerateKey(rand.Reader, minRSA)
	if err != nil {
		f.Fatal(err)
	}
	for _, make := range []func() ([]byte, error){
		func() ([]byte, error) { return NewRequest(ec) }, func() ([]byte, error) { return NewRequest(ed) }, func() ([]byte, error) { return NewRequest(rs) },
	} {
		der, err := make()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(der)
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		key, err := requestKey(in)
		if err != nil {
			return
		}
		if err := checkKey(key); err != nil || len(in) > maxCSR {
			t.Fatalf("a request of %d bytes with a %T: %v", len(in), key, err)
		}
		der, err := ca.Sign(in, Identity{ID: "u1", Role: clusterv1.Role_ROLE_VIEWER}, now)
		if err != nil {
			t.Fatal(err)
		}
		leaf, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		p, err := verifyLeaf(ca.Certificate(), leaf, now, x509.ExtKeyUsageClientAuth)
		if err != nil || p.ID != "u1" || p.Kind != KindUser || !samePublic(key, leaf.PublicKey) {
			t.Fatalf("%s: %v", p, err)
		}
	})
}

// FuzzLeaf reads certificates. One that is taken is signed by the authority,
// and what is read of one is a name that there may be.
func FuzzLeaf(f *testing.F) {
	now := time.Unix(1_800_000_000, 0)
	ca, err := NewCA("c1", now)
	if err != nil {
		f.Fatal(err)
	}
	other, err := NewCA("c1", now)
	if err != nil {
		f.Fatal(err)
	}
	key, err := NewKey()
	if err != nil {
		f.Fatal(err)
	}
	csr, err := NewRequest(key)
	if err != nil {
		f.Fatal(err)
	}
	issued := map[[sha256.Size]byte]bool{}
	for _, id := range []Identity{HostIdentity("h1", "node1", "192.0.2.1:7443", "e1"), {ID: "u@x", Role: clusterv1.Role_ROLE_ADMIN}} {
		for _, by := range []*CA{ca, other} {
			der, err := by.Sign(csr, id, now)
			if err != nil {
				f.Fatal(err)
			}
			leaf, err := x509.ParseCertificate(der)
			if err != nil {
				f.Fatal(err)
			}
			if by == ca {
				issued[sha256.Sum256(leaf.RawTBSCertificate)] = true
			}
			f.Add(der)
		}
	}
	f.Add(ca.Certificate().Raw)
	f.Fuzz(func(t *testing.T, in []byte) {
		leaf, err := x509.ParseCertificate(in)
		if err != nil {
			return
		}
		if p, err := PeerOf(leaf); err == nil && (!ValidName(p.ID) || !ValidName(p.Cluster) || p.Kind != KindHost && p.Kind != KindUser || p.ID != leaf.Subject.CommonName) {
			t.Fatalf("%+v", p)
		}
		for _, use := range []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth} {
			if p, err := verifyLeaf(ca.Certificate(), leaf, now, use); err == nil && !issued[sha256.Sum256(leaf.RawTBSCertificate)] {
				t.Fatalf("a certificate that nobody signed is %s's", p)
			}
		}
	})
}

// FuzzUnseal opens what only Seal can have made.
func FuzzUnseal(f *testing.F) {
	secret := bytes.Repeat([]byte{7}, secretSize)
	sealed, err := Seal(secret, []byte("a key"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(secret, sealed)
	f.Add(secret[1:], sealed)
	f.Add(secret, sealed[:16])
	f.Fuzz(func(t *testing.T, secret, sealed []byte) {
		key, err := Unseal(secret, sealed)
		if err != nil {
			return
		}
		if again, err := Seal(secret, key); err != nil || !bytes.Equal(again, sealed) {
			t.Fatalf("%x opens as %x: %v", sealed, key, err)
		}
	})
}
