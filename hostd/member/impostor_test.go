package member

import (
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// A host of the cluster answers at the address of another one that is down, as after a
// mistake with addresses. It must not be asked where a VM is, as if it were that host, nor
// for its vote.
func TestHostAtTheAddressOfAnotherIsNotBelieved(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	ms := cluster(ctx, t, "a", "b", "c")
	a, b, c := ms[0], ms[1], ms[2]
	where := func() error {
		site, err := a.Site("b")
		if err != nil {
			t.Fatal(err)
		}
		_, err = site.Where(ctx, connect.NewRequest(&gpuctlv1.SiteMachine{Uuid: "x"}))
		return err
	}
	if err := where(); errors.Is(err, pki.ErrWrongHost) {
		t.Fatal("the right host is not believed:", err)
	}
	b.crash()
	l, err := net.Listen("tcp", b.port)
	if err != nil {
		t.Fatal(err)
	}
	var asked atomic.Int32
	impostor := &http.Server{
		Handler:           http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }),
		ReadHeaderTimeout: time.Minute,
		TLSConfig: &tls.Config{
			Certificates: []tls.Certificate{*c.Current().Certificate}, ClientAuth: tls.RequestClientCert, NextProtos: []string{pki.ProtoHTTP2, pki.ProtoHTTP1, pki.ProtoRaft},
		},
	}
	over := make(chan error)
	go func() { over <- impostor.ServeTLS(l, "", "") }()
	defer func() { impostor.Close(); <-over }()

	testkit.Until(t, "a notices who answers", func() error {
		if err := where(); !errors.Is(err, pki.ErrWrongHost) {
			return testkit.Want(false, err) // connections of before may just have broken
		}
		return nil
	})
	if conn, err := a.member().port.Raft().Dial(b.port, time.Minute); !errors.Is(err, pki.ErrWrongHost) {
		t.Errorf("raft: %v", err)
		if err == nil {
			conn.Close()
		}
	}
	if n := asked.Load(); n > 0 {
		t.Errorf("it was asked %d times", n)
	}
}
