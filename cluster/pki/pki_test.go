package pki

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	admin = clusterv1.Role_ROLE_ADMIN
	host  = clusterv1.Role_ROLE_HOST
)

func quietLog() *slog.Logger { return slog.New(slog.DiscardHandler) }

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func newCAFor(cluster string) *CA { return must(NewCA(cluster, time.Now())) }

func issue(ca *CA, id Identity) *Material { return issueAt(ca, id, time.Now()) }

func issueAt(ca *CA, id Identity, at time.Time) *Material {
	key := must(NewKey())
	cert := must(ca.Sign(must(NewRequest(key)), id, at))
	return must(NewMaterial(cert, ca.Certificate().Raw, key))
}

func TestCertificateSaysWhatTheIdentityIs(t *testing.T) {
	ca := newCAFor("c1")
	m := issue(ca, HostIdentity("h-1", "node1", "192.0.2.7:7443", ""))
	leaf := m.Certificate.Leaf
	if leaf.Subject.CommonName != "h-1" || !slices.Equal(leaf.DNSNames, []string{"h-1", "node1"}) || leaf.URIs[0].String() != "gpuctl://c1/host/h-1" {
		t.Errorf("got %v %v %v", leaf.Subject, leaf.DNSNames, leaf.URIs)
	}
	if len(leaf.IPAddresses) != 1 || !leaf.IPAddresses[0].Equal(net.IPv4(192, 0, 2, 7)) {
		t.Errorf("addresses %v", leaf.IPAddresses)
	}
	if d := time.Until(leaf.NotAfter); d > Lifetime || d < Lifetime-time.Minute {
		t.Errorf("valid for %s", d)
	}
	if d := time.Since(leaf.NotBefore); d < BackDate || d > BackDate+time.Minute {
		t.Errorf("valid since %s", d)
	}
	if n := leaf.SerialNumber.BitLen(); n < 100 || n > 128 {
		t.Errorf("serial number of %d bits", n)
	}
	u := issue(ca, Identity{ID: "ann@example.org", Role: admin})
	if u.Peer.Kind != KindUser || u.Peer.ID != "ann@example.org" || len(u.Certificate.Leaf.DNSNames) != 0 || slices.Contains(u.Certificate.Leaf.ExtKeyUsage, x509.ExtKeyUsageServerAuth) {
		t.Errorf("user: %+v %v", u.Peer, u.Certificate.Leaf.ExtKeyUsage)
	}
}

// The standard library's own verification, which knows nothing of gpuctl,
// accepts a host under its names.
func TestOthersAcceptHosts(t *testing.T) {
	ca := newCAFor("c1")
	m := issue(ca, HostIdentity("h-1", "node1.example.org", "[2001:db8::1]:7443", ""))
	roots := x509.NewCertPool()
	roots.AddCert(ca.Certificate())
	for _, name := range []string{"h-1", "node1.example.org", "2001:db8::1"} {
		if _, err := m.Certificate.Leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: roots}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := m.Certificate.Leaf.Verify(x509.VerifyOptions{DNSName: "example.org", Roots: roots}); err == nil {
		t.Error("accepted under another name")
	}
}

func TestOpenSSLAcceptsHosts(t *testing.T) {
	openssl, err := exec.LookPath("openssl")
	if err != nil {
		t.Fatal("no openssl: make setup")
	}
	dir := NewDir(t.TempDir())
	ca := newCAFor("c1")
	if err := errors.Join(dir.SaveCA(ca), dir.Save(issue(ca, HostIdentity("h-1", "node1", "192.0.2.7:1", "")))); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(openssl, "verify", "-x509_strict", "-purpose", "sslserver", "-verify_hostname", "node1", "-CAfile", dir.file("ca.crt"), dir.file("node.crt")).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

func TestRequestsThatAreRefused(t *testing.T) {
	ca := newCAFor("c1")
	csr := func(key crypto.Signer) []byte { return must(NewRequest(key)) }
	good := csr(must(NewKey()))
	forged := bytes.Clone(good)
	forged[len(forged)-1] ^= 1
	user := Identity{ID: "ann", Role: admin}
	_, ed, _ := ed25519.GenerateKey(rand.Reader)
	for name, c := range map[string]struct {
		csr  []byte
		id   Identity
		want error
	}{
		"good":            {good, user, nil},
		"ed25519":         {csr(ed), user, nil},
		"p384":            {csr(must(ecdsa.GenerateKey(elliptic.P384(), rand.Reader))), user, nil},
		"rsa":             {csr(must(rsa.GenerateKey(rand.Reader, 2048))), user, nil},
		"p224":            {csr(must(ecdsa.GenerateKey(elliptic.P224(), rand.Reader))), user, ErrRequest},
		"p521":            {csr(must(ecdsa.GenerateKey(elliptic.P521(), rand.Reader))), user, ErrRequest},
		"small rsa":       {csr(must(rsa.GenerateKey(rand.Reader, 1024))), user, ErrRequest},
		"signature":       {forged, user, ErrRequest},
		"cut":             {good[:len(good)-3], user, ErrRequest},
		"empty":           {nil, user, ErrRequest},
		"too long":        {make([]byte, maxCSR+1), user, ErrRequest},
		"no id":           {good, Identity{Role: admin}, ErrIdentity},
		"slash":           {good, Identity{ID: "a/b", Role: admin}, ErrIdentity},
		"dots":            {good, Identity{ID: "..", Role: admin}, ErrIdentity},
		"long":            {good, Identity{ID: strings.Repeat("a", 65), Role: admin}, ErrIdentity},
		"no role":         {good, Identity{ID: "ann"}, ErrIdentity},
		"user with names": {good, Identity{ID: "ann", Role: admin, Names: []string{"example.org"}}, ErrIdentity},
		"wildcard":        {good, Identity{ID: "h", Role: host, Names: []string{"*.example.org"}}, ErrIdentity},
		"bad address":     {good, Identity{ID: "h", Role: host, IPs: []net.IP{{1, 2}}}, ErrIdentity},
	} {
		if _, err := ca.Sign(c.csr, c.id, time.Now()); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

func TestTheSubjectOfARequestIsIgnored(t *testing.T) {
	ca := newCAFor("c1")
	key := must(NewKey())
	csr := must(x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: "root", Organization: []string{"admin"}}, DNSNames: []string{"bank.example"},
	}, key))
	leaf := must(x509.ParseCertificate(must(ca.Sign(csr, Identity{ID: "ann", Role: clusterv1.Role_ROLE_VIEWER}, time.Now()))))
	if leaf.Subject.CommonName != "ann" || leaf.Subject.Organization[0] != "viewer" || len(leaf.DNSNames) != 0 {
		t.Errorf("got %v %v", leaf.Subject, leaf.DNSNames)
	}
}

func TestVerifyTellsWhy(t *testing.T) {
	ca, other, twin := newCAFor("c1"), newCAFor("c2"), newCAFor("c1")
	now := time.Now()
	trust := Trust{Provider: issue(ca, HostIdentity("h-1", "n1", "", "")), Revoked: func(p Peer) bool { return p.ID == "gone" }, Now: func() time.Time { return now }}
	user := Identity{ID: "ann", Role: admin}
	short := user
	short.Lifetime = time.Minute
	plain := must(x509.ParseCertificate(must(x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: must(newSerial()), NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour),
		Subject: pkix.Name{CommonName: "ann"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, ca.cert, must(NewKey()).Public(), ca.key))))
	for name, c := range map[string]struct {
		leaf *x509.Certificate
		want error
	}{
		"good":                           {issue(ca, user).Certificate.Leaf, nil},
		"clock an hour behind the maker": {issueAt(ca, user, now.Add(59*time.Minute)).Certificate.Leaf, nil},
		"too new":                        {issueAt(ca, user, now.Add(2*time.Hour)).Certificate.Leaf, ErrNotYetValid},
		"expired":                        {issueAt(ca, short, now.Add(-2*time.Minute)).Certificate.Leaf, ErrExpired},
		"other cluster":                  {issue(other, user).Certificate.Leaf, ErrWrongCluster},
		"same name, other authority":     {issue(twin, user).Certificate.Leaf, ErrUntrusted},
		"removed":                        {issue(ca, Identity{ID: "gone", Role: admin}).Certificate.Leaf, ErrRevoked},
		"no identity":                    {plain, ErrMalformed},
		"the authority itself":           {ca.cert, ErrMalformed},
	} {
		if _, err := trust.Verify([]*x509.Certificate{c.leaf}); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	if _, err := trust.Verify(nil); !errors.Is(err, ErrNoCertificate) {
		t.Error(err)
	}
	if _, err := trust.VerifyServer([]*x509.Certificate{issue(ca, user).Certificate.Leaf}, ""); !errors.Is(err, ErrNotHost) {
		t.Errorf("a user as server: %v", err)
	}
	h2 := issue(ca, HostIdentity("h-2", "n2", "", "")).Certificate.Leaf
	for name, want := range map[string]error{"": nil, "h-2": nil, "N2": nil, "h-1": ErrWrongHost} {
		if _, err := trust.VerifyServer([]*x509.Certificate{h2}, name); !errors.Is(err, want) {
			t.Errorf("expecting %q: %v, want %v", name, err, want)
		}
	}
}

func TestFilesComeBack(t *testing.T) {
	dir := NewDir(filepath.Join(t.TempDir(), "pki"))
	if _, err := dir.Load(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("nothing there: %v", err)
	}
	ca := newCAFor("c1")
	m := issue(ca, HostIdentity("h-1", "n1", "", ""))
	if err := errors.Join(dir.SaveCA(ca), dir.Save(m)); err != nil {
		t.Fatal(err)
	}
	got, err := dir.Load()
	if err != nil || got.Peer.String() != m.Peer.String() || !samePublic(got.Certificate.Leaf.PublicKey, m.Certificate.Leaf.PublicKey) {
		t.Fatalf("%v %v", got, err)
	}
	again, err := dir.LoadCA()
	if err != nil || again.ClusterID() != "c1" {
		t.Fatal(err)
	}
	for _, name := range []string{"ca.key", "node.key"} {
		if info, _ := os.Stat(dir.file(name)); info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %o", name, info.Mode().Perm())
		}
	}
	left, _ := filepath.Glob(filepath.Join(dir.path, "*"))
	if len(left) != 4 {
		t.Errorf("files %v", left)
	}
}

// Every step of Save is a moment where the machine may stop.
func TestSaveSurvivesACrashAtEveryStep(t *testing.T) {
	ca := newCAFor("c1")
	old, renewed := issue(ca, HostIdentity("h-1", "n1", "", "")), issue(ca, HostIdentity("h-1", "n1", "", ""))
	from, to := NewDir(t.TempDir()), NewDir(t.TempDir())
	if err := errors.Join(from.Save(old), to.Save(renewed)); err != nil {
		t.Fatal(err)
	}
	step := func(n int) *Material {
		d := NewDir(t.TempDir())
		if err := d.Save(old); err != nil {
			t.Fatal(err)
		}
		if n >= 1 {
			copyFile(t, to.file("node.key"), d.file("node.key.next"))
		}
		if n >= 2 {
			copyFile(t, to.file("node.crt"), d.file("node.crt"))
		}
		m, err := d.Load()
		if err != nil {
			t.Fatalf("after step %d: %v", n, err)
		}
		if again, err := d.Load(); err != nil || again.Peer.Serial != m.Peer.Serial {
			t.Fatalf("after step %d, again: %v", n, err)
		}
		if _, err := os.Stat(d.file("node.key.next")); n == 2 && !errors.Is(err, os.ErrNotExist) {
			t.Errorf("what was begun is not finished: %v", err)
		}
		return m
	}
	for n, want := range []*Material{old, old, renewed} {
		if got := step(n); got.Peer.Serial != want.Peer.Serial {
			t.Errorf("after step %d: certificate %s, want %s", n, got.Peer.Serial, want.Peer.Serial)
		}
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	if err := os.WriteFile(to, must(os.ReadFile(from)), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestFilesThatAreRefused(t *testing.T) {
	ca, other := newCAFor("c1"), newCAFor("c2")
	stranger := NewDir(t.TempDir())
	if err := errors.Join(stranger.SaveCA(other), stranger.Save(issue(other, HostIdentity("h-9", "n9", "", "")))); err != nil {
		t.Fatal(err)
	}
	cut := func(name string) func(Dir) {
		return func(d Dir) {
			data := must(os.ReadFile(d.file(name)))
			os.WriteFile(d.file(name), data[:len(data)/2], 0o600)
		}
	}
	take := func(name string) func(Dir) { return func(d Dir) { copyFile(t, stranger.file(name), d.file(name)) } }
	for name, c := range map[string]struct {
		change func(Dir)
		want   error
		ca     bool
	}{
		"world-readable key":     {func(d Dir) { os.Chmod(d.file("node.key"), 0o644) }, ErrPermissions, false},
		"group-readable key":     {func(d Dir) { os.Chmod(d.file("node.key"), 0o640) }, ErrPermissions, false},
		"readable authority key": {func(d Dir) { os.Chmod(d.file("ca.key"), 0o604) }, ErrPermissions, true},
		"cut certificate":        {cut("node.crt"), ErrDamaged, false},
		"cut key":                {cut("node.key"), ErrDamaged, false},
		"cut authority":          {cut("ca.crt"), ErrDamaged, false},
		"cut authority key":      {cut("ca.key"), ErrDamaged, true},
		"empty":                  {func(d Dir) { os.Truncate(d.file("node.crt"), 0) }, ErrDamaged, false},
		"huge":                   {func(d Dir) { os.Truncate(d.file("node.crt"), 1<<30) }, ErrDamaged, false},
		"a folder":               {func(d Dir) { os.Remove(d.file("node.crt")); os.Mkdir(d.file("node.crt"), 0o700) }, ErrDamaged, false},
		"another's key":          {take("node.key"), ErrMismatch, false},
		"another's certificate":  {take("node.crt"), ErrMismatch, false},
		"another's authority":    {take("ca.crt"), ErrWrongCluster, false},
		"another's ca key":       {take("ca.key"), ErrMismatch, true},
		"no key":                 {func(d Dir) { os.Remove(d.file("node.key")) }, os.ErrNotExist, false},
		"a key as certificate":   {func(d Dir) { copyFile(t, d.file("node.key"), d.file("node.crt")) }, ErrDamaged, false},
	} {
		t.Run(name, func(t *testing.T) {
			d := NewDir(t.TempDir())
			if err := errors.Join(d.SaveCA(ca), d.Save(issue(ca, HostIdentity("h-1", "n1", "", "")))); err != nil {
				t.Fatal(err)
			}
			c.change(d)
			_, err := d.Load()
			if c.ca {
				_, err = d.LoadCA()
			}
			if !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
			if err != nil && !strings.Contains(err.Error(), d.path) {
				t.Errorf("%v does not say where", err)
			}
		})
	}
}

func TestCredentials(t *testing.T) {
	home := t.TempDir()
	clusters, err := NewClusters(func(k string) string { return map[string]string{"HOME": home}[k] })
	if err != nil || clusters.Path() != filepath.Join(home, ".config/gpuctl/clusters") {
		t.Fatal(clusters, err)
	}
	if names, err := clusters.List(); err != nil || len(names) != 0 {
		t.Fatal(names, err)
	}
	m := issue(newCAFor("c1"), Identity{ID: "ann", Role: admin})
	want := []string{"192.0.2.1:7443", "[2001:db8::1]:7443", "node3:7443"}
	for _, name := range []string{"prod", "lab"} {
		if err := clusters.Save(&Credentials{name, want, m}); err != nil {
			t.Fatal(err)
		}
	}
	if names, err := clusters.List(); err != nil || !slices.Equal(names, []string{"lab", "prod"}) {
		t.Errorf("%v %v", names, err)
	}
	got, err := clusters.Load("prod")
	if err != nil || !slices.Equal(got.Addresses, want) || got.Material.Peer.ID != "ann" {
		t.Errorf("%+v %v", got, err)
	}
	if err := clusters.Remove("prod"); err != nil {
		t.Error(err)
	}
	if _, err := clusters.Load("prod"); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	for _, name := range []string{"", "..", "../x", "a/b"} {
		if err := clusters.Save(&Credentials{name, want, m}); !errors.Is(err, ErrIdentity) {
			t.Errorf("name %q: %v", name, err)
		}
		if err := clusters.Remove(name); !errors.Is(err, ErrIdentity) {
			t.Errorf("name %q: %v", name, err)
		}
	}
	for _, a := range []string{"", "node", "node:", ":1", "node:0", "node:70000", "a b:1", "a\n:1"} {
		if clusters.Save(&Credentials{"x", []string{a}, m}) == nil {
			t.Errorf("address %q is stored", a)
		}
	}
}

func FuzzLoad(f *testing.F) {
	d := NewDir(f.TempDir())
	ca := newCAFor("c1")
	if err := errors.Join(d.SaveCA(ca), d.Save(issue(ca, HostIdentity("h-1", "n1", "", "")))); err != nil {
		f.Fatal(err)
	}
	read := func(name string) []byte { return must(os.ReadFile(d.file(name))) }
	f.Add(read("ca.crt"), read("node.crt"), read("node.key"), []byte{})
	f.Add(read("ca.crt"), read("node.crt"), read("ca.key"), read("node.key"))
	f.Fuzz(func(t *testing.T, ca, cert, key, next []byte) {
		var der [4][]byte
		for i, data := range [][]byte{ca, cert, key, next} {
			kind := typeCert
			if i >= 2 {
				kind = typeKey
			}
			var err error
			if der[i], err = parsePEM(data, kind); err != nil && !errors.Is(err, ErrDamaged) {
				t.Fatal(err)
			}
		}
		m, _, err := assemble(der[0], der[1], der[2], der[3])
		if (m == nil) == (err == nil) {
			t.Fatal(m, err)
		}
		if m != nil && (m.Peer.ID == "" || ClusterOf(m.CA) != m.Peer.Cluster) {
			t.Fatalf("took %+v", m.Peer)
		}
	})
}
