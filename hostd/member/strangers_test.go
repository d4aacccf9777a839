package member

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"runtime"
	"sync"
	"testing"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/cluster/remote"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// flood sends zeros until nobody takes them any more, and says how many were
// taken.
type flood struct {
	ctx  context.Context
	mu   *sync.Mutex
	sent *int64
	left int64
}

func (f *flood) Read(p []byte) (int, error) {
	if f.ctx.Err() != nil || f.left <= 0 {
		return 0, io.EOF
	}
	n := int(min(int64(len(p)), f.left))
	clear(p[:n])
	f.left -= int64(n)
	f.mu.Lock()
	*f.sent += int64(n)
	f.mu.Unlock()
	return n, nil
}

// Two connections without a certificate, each with a hundred requests of
// eight megabytes, cost some kilobytes, and a host joins meanwhile.
func TestStrangersCannotFillTheMemoryOrKeepAHostFromJoining(t *testing.T) {
	ctx := testkit.Context(t)
	a := cluster(ctx, t, "a")[0]
	b := newMachine(t, "b")
	token := a.token(ctx, &clusterv1.CreateTokenRequest{})
	fingerprint := decode(t, token).Fingerprint

	var before, now runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	peak := int64(0)
	sample := func() {
		runtime.ReadMemStats(&now)
		peak = max(peak, int64(now.HeapInuse)-int64(before.HeapInuse))
	}
	attack, stop := context.WithCancel(ctx)
	var mu sync.Mutex
	var sent int64
	var wg sync.WaitGroup
	refused := make(chan error, 100)
	defer func() { stop(); wg.Wait() }()
	for range 2 {
		c := remote.Client(pki.PinnedClientConfig(fingerprint, nil))
		defer c.CloseIdleConnections()
		for i := range 50 {
			wg.Go(func() {
				for first := true; attack.Err() == nil; first = false {
					// A message that is announced, and half of them in a form that
					// says nothing of its size.
					body := &flood{ctx: attack, mu: &mu, sent: &sent, left: 8 << 20}
					req, err := http.NewRequestWithContext(attack, http.MethodPost, "https://"+a.port+clusterv1connect.PeerServiceEnrollProcedure, body)
					if err != nil {
						t.Error(err)
						return
					}
					req.Header.Set("Content-Type", "application/proto")
					if i%2 == 0 {
						req.ContentLength = body.left
					}
					res, err := c.Do(req)
					if err == nil {
						_, _ = io.Copy(io.Discard, res.Body)
						res.Body.Close()
						if res.StatusCode == http.StatusOK {
							t.Error("let in")
						}
					}
					if first {
						refused <- err
					}
				}
			})
		}
	}
	for range 20 { // it is going on
		select {
		case <-refused:
			sample()
		case <-ctx.Done():
			t.Fatal("nothing is answered")
		}
	}
	if err := b.Join(ctx, &clusterv1.JoinRequest{Token: token}); err != nil {
		t.Errorf("an honest host: %v", err)
	}
	for range 50 {
		select {
		case <-refused:
			sample()
		case <-ctx.Done():
			t.Fatal("they are not answered")
		}
	}
	stop()
	wg.Wait()
	mu.Lock()
	defer mu.Unlock()
	// Both sides of it are in this process, and so are two hosts.
	if peak > 96<<20 {
		t.Errorf("the heap grew by %d MiB", peak>>20)
	}
	t.Logf("heap %d MiB more, %d MiB sent", peak>>20, sent>>20)
}

// What one request may have is bounded whatever it says.
func TestEnrollTakesSmallRequestsOnly(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	a := cluster(ctx, t, "a")[0]
	token := decode(t, a.token(ctx, &clusterv1.CreateTokenRequest{}))
	c := remote.Client(pki.PinnedClientConfig(token.Fingerprint, nil))
	defer c.CloseIdleConnections()
	for what, by := range map[string]struct {
		options []connect.ClientOption
		want    connect.Code
	}{
		"plain": {nil, connect.CodeResourceExhausted}, "gRPC": {[]connect.ClientOption{connect.WithGRPC()}, connect.CodeResourceExhausted},
		"compressed": {[]connect.ClientOption{connect.WithSendGzip()}, connect.CodeInvalidArgument},
	} {
		peer := clusterv1connect.NewPeerServiceClient(c, "https://"+a.port, by.options...)
		_, err := peer.Enroll(ctx, connect.NewRequest(&clusterv1.EnrollRequest{TokenId: token.ID, Secret: token.Secret[:], Host: "x", Csr: bytes.Repeat([]byte{1}, 40<<10)}))
		if connect.CodeOf(err) != by.want {
			t.Errorf("%s: %v", what, err)
		}
	}
	// The token is still good.
	if err := newMachine(t, "b").Join(ctx, &clusterv1.JoinRequest{Token: a.token(ctx, &clusterv1.CreateTokenRequest{})}); err != nil {
		t.Error(err)
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		t.Error("it took too long")
	}
}
