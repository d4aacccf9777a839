package remote

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// dying is a leader that lets somebody in, dies before its answer is out and is
// then a host that knows of no leader.
type dying struct {
	clusterv1connect.UnimplementedPeerServiceHandler
	asked atomic.Int32
}

func (d *dying) Enroll(context.Context, *connect.Request[clusterv1.EnrollRequest]) (*connect.Response[clusterv1.EnrollResponse], error) {
	if d.asked.Add(1) == 1 {
		panic(http.ErrAbortHandler)
	}
	return nil, reason.Coded(reason.Errorf(reason.NoLeader, "the cluster has no leader"))
}

// Who hears that nobody leads joins again, with another request; the token of the
// first one may be used up.
func TestLostEnrolmentIsNotSaidToBeWithoutALeader(t *testing.T) {
	ca, err := pki.NewCA("c", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	csr, err := pki.NewRequest(key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := ca.Sign(csr, pki.HostIdentity("h-1", "n1", "127.0.0.1:1", ""), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	m, err := pki.NewMaterial(cert, ca.Certificate().Raw, key)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	host := &dying{}
	mux := http.NewServeMux()
	mux.Handle(clusterv1connect.NewPeerServiceHandler(host))
	server := &http.Server{Handler: mux, TLSConfig: &tls.Config{Certificates: []tls.Certificate{*m.Certificate}, NextProtos: []string{"http/1.1"}}, ReadHeaderTimeout: time.Minute}
	over := make(chan error)
	go func() { over <- server.ServeTLS(l, "", "") }()
	defer func() { server.Close(); <-over }()

	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	_, err = Enroll(ctx, pki.Token{Addresses: []string{l.Addr().String()}, Fingerprint: pki.Fingerprint(ca.Certificate())}, &clusterv1.EnrollRequest{})
	if connect.CodeOf(err) != connect.CodeUnavailable || reason.Retry(err) {
		t.Errorf("%v, leaderless: %v", err, reason.Retry(err))
	}
	if host.asked.Load() == 0 {
		t.Error("it was not asked")
	}
}
