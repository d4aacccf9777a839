package access

import (
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"testing"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	"github.com/gpuctl/gpuctl/cluster/pki"
)

// BenchmarkAuthorize is what a request costs on a connection that is open.
func BenchmarkAuthorize(b *testing.B) {
	ca := must(pki.NewCA("c1", time.Now()))
	server := pki.Trust{Provider: issue(ca, pki.HostIdentity("h-1", "", "", ""), time.Now()), Revoked: func(pki.Peer) bool { return false }}
	client := pki.Trust{Provider: issue(ca, pki.Identity{ID: "ann", Role: admin}, time.Now())}
	identity := &clusterv1.Identity{Id: "ann", Role: admin}
	gate := NewGate(Config{Trust: server, Lookup: func(string) (*clusterv1.Identity, error) { return identity, nil }, Log: slog.New(slog.DiscardHandler)})
	near, far := net.Pipe()
	in, out := tls.Server(near, server.ServerConfig()), tls.Client(far, client.ClientConfig(""))
	done := make(chan struct{})
	go func() { defer close(done); io.Copy(io.Discard, out) }()
	if err := in.HandshakeContext(b.Context()); err != nil {
		b.Fatal(err)
	}
	ctx := gate.ConnContext(context.Background(), in)
	for b.Loop() {
		if _, err := gate.authorize(ctx, clusterv1connect.ClusterServiceSetDrainProcedure); err != nil {
			b.Fatal(err)
		}
	}
	near.Close()
	<-done
}

// BenchmarkAppend is what an entry costs the call that it is about.
func BenchmarkAppend(b *testing.B) {
	a := must(OpenAudit(AuditConfig{Path: filepath.Join(b.TempDir(), "audit.log"), Log: slog.New(slog.DiscardHandler)}))
	defer a.Close()
	gate := NewGate(Config{Log: slog.New(slog.DiscardHandler), Audit: a})
	m := &clusterv1.CreateClaimRequest{Claim: &clusterv1.Claim{Id: "c-1", MinMemory: 1 << 30, Holder: "vm one", Labels: map[string]string{"team": "x"}}}
	for b.Loop() {
		a.Append(gate.entry(Caller{Kind: User, ID: "ann", Role: admin}, clusterv1connect.ClusterServiceCreateClaimProcedure, m, time.Now(), nil))
	}
}
