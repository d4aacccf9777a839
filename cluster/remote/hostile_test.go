package remote

import (
	"bytes"
	"compress/gzip"
	"crypto/tls"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	"github.com/gpuctl/gpuctl/cluster/pki"
)

// authority makes the certificates of a cluster.
type authority struct {
	*testing.T
	ca *pki.CA
}

func newAuthority(t *testing.T) authority {
	t.Helper()
	ca, err := pki.NewCA("c", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return authority{t, ca}
}

func (a authority) material(of pki.Identity) *pki.Material {
	a.Helper()
	key, err := pki.NewKey()
	if err != nil {
		a.Fatal(err)
	}
	csr, err := pki.NewRequest(key)
	if err != nil {
		a.Fatal(err)
	}
	cert, err := a.ca.Sign(csr, of, time.Now())
	if err != nil {
		a.Fatal(err)
	}
	m, err := pki.NewMaterial(cert, a.ca.Certificate().Raw, key)
	if err != nil {
		a.Fatal(err)
	}
	return m
}

// host serves as a host of the cluster, and returns its address. It speaks HTTP/1, whose
// connections end with a request if the handler wants that.
func (a authority) host(h http.Handler) string {
	a.Helper()
	m := a.material(pki.HostIdentity("h-1", "n1", "127.0.0.1:1", ""))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		a.Fatal(err)
	}
	server := &http.Server{
		Handler: h, ReadHeaderTimeout: time.Minute,
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{*m.Certificate}, ClientAuth: tls.RequestClientCert, NextProtos: []string{pki.ProtoHTTP1}},
	}
	over := make(chan error)
	go func() { over <- server.ServeTLS(l, "", "") }()
	a.Cleanup(func() { server.Close(); <-over })
	return l.Addr().String()
}

// clients returns the client of a user of the cluster, as gpuctl makes it, and that of a
// host, as hostd makes it.
func (a authority) clients(addresses ...string) map[string]*http.Client {
	a.Helper()
	config := a.TempDir()
	u, err := NewUser(func(name string) string {
		if name == "XDG_CONFIG_HOME" {
			return filepath.Join(config, "config")
		}
		return ""
	})
	if err != nil {
		a.Fatal(err)
	}
	user := a.material(pki.Identity{ID: "u-1", Role: clusterv1.Role_ROLE_ADMIN})
	if err := u.clusters.Save(&pki.Credentials{Name: "c", Addresses: addresses, Material: user}); err != nil {
		a.Fatal(err)
	}
	ofUser, _, err := u.Client("c")
	if err != nil {
		a.Fatal(err)
	}
	host := a.material(pki.HostIdentity("h-2", "n2", "127.0.0.1:2", ""))
	return map[string]*http.Client{
		"user": ofUser,
		"host": Client(pki.Trust{Provider: host, Now: time.Now}.ClientConfig("")),
	}
}

// Two messages may have the same bytes. A host could redirect an administrator's harmless
// call to another host, as one that does harm.
func TestHostDoesNotRedirectCallsToAnotherHost(t *testing.T) {
	a := newAuthority(t)
	var harm atomic.Int32
	other := a.host(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		harm.Add(1)
		w.WriteHeader(http.StatusInternalServerError)
	}))
	var asked atomic.Int32
	first := a.host(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if asked.Add(1) > 1 {
			harm.Add(1) // it came back by the redirection
		}
		w.Header().Set("Location", "https://"+other+clusterv1connect.ClusterServiceRemoveHostProcedure)
		w.WriteHeader(http.StatusTemporaryRedirect)
	}))
	for of, c := range a.clients(first, other) {
		asked.Store(0)
		_, err := clusterv1connect.NewClusterServiceClient(c, "https://"+first).
			Describe(t.Context(), connect.NewRequest(&clusterv1.DescribeRequest{Kind: clusterv1.Kind_KIND_HOST}))
		if err == nil || asked.Load() == 0 || harm.Load() > 0 {
			t.Errorf("%s: %v, asked %d times, redirected %d times", of, err, asked.Load(), harm.Load())
		}
		c.CloseIdleConnections()
	}
}

// What a host answers to another host is bounded, also what is packed in it.
func TestAnswersOfAHostAreBounded(t *testing.T) {
	a := newAuthority(t)
	var bomb bytes.Buffer
	z := gzip.NewWriter(&bomb)
	zeros := make([]byte, 1<<20)
	for range 4 * maxAnswer / len(zeros) {
		_, _ = z.Write(zeros)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	for name, answer := range map[string]func(w http.ResponseWriter){
		"without end": func(w http.ResponseWriter) {
			for {
				if _, err := w.Write(zeros); err != nil {
					return
				}
			}
		},
		"packed": func(w http.ResponseWriter) {
			w.Header().Set("Content-Encoding", "gzip")
			_, _ = w.Write(bomb.Bytes())
		},
		"a header": func(w http.ResponseWriter) {
			w.Header().Set("X", strings.Repeat("x", 2*maxAnswerHeader))
		},
	} {
		var sent atomic.Int64
		address := a.host(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/proto")
			answer(counted{w, &sent})
		}))
		c := a.clients(address)["host"]
		_, err := Peer(c, address).Facts(t.Context(), connect.NewRequest(&clusterv1.FactsRequest{}))
		if err == nil || sent.Load() > 2*maxAnswer {
			t.Errorf("%s: %v, after %d bytes", name, err, sent.Load())
		}
		if name == "without end" && connect.CodeOf(err) != connect.CodeResourceExhausted {
			t.Errorf("%s: %v", name, err)
		}
		c.CloseIdleConnections()
	}
}

// counted counts the bytes of an answer.
type counted struct {
	http.ResponseWriter
	sent *atomic.Int64
}

func (c counted) Write(b []byte) (int, error) {
	n, err := c.ResponseWriter.Write(b)
	c.sent.Add(int64(n))
	return n, err
}
