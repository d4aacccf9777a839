package member

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"testing"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/hostd/member/clusterapi"
)

// The parts of a host are made with a node that has not started. They may call
// it: it answers like a host that has not joined. The services that it serves
// are given to Start, when all of them have been made.
func TestNodeThatHasNotStartedAnswersLikeAHostThatHasNotJoined(t *testing.T) {
	ctx := context.Background()
	n := New(ctx, Config{Name: "solo", Logger: slog.New(slog.DiscardHandler)})
	defer n.Close()
	n.Kick()
	n.Settle(ctx)
	n.Note(&clusterv1.Event{Kind: clusterv1.Kind_KIND_HOST, Object: "solo", Type: "Made"})
	if n.HostName() != "solo" || n.View() != nil || len(n.OtherHosts()) > 0 || n.Health() != nil {
		t.Fatalf("host %q, view %v, others %v, health %v", n.HostName(), n.View(), n.OtherHosts(), n.Health())
	}
	if _, err := n.Claim(ctx, &clusterv1.Claim{Id: "c"}); !errors.Is(err, clusterapi.ErrNotJoined) {
		t.Errorf("claim: %v", err)
	}
	if _, err := n.Read(ctx); !errors.Is(err, clusterapi.ErrNotJoined) {
		t.Errorf("read: %v", err)
	}
	if _, err := n.Site("other"); err == nil {
		t.Error("another host is reached")
	}
	n.Known(ctx, []string{"gpu"})
	if err := n.Announce(ctx); err != nil {
		t.Errorf("announce: %v", err)
	}
	served := false
	err := n.Start(ctx, Served{Host: &fake{}, Services: func(*http.ServeMux, ...connect.HandlerOption) { served = true }})
	if err != nil {
		t.Fatal(err)
	}
	if n.View() == nil || !served {
		t.Errorf("view %v, services asked for: %v", n.View(), served)
	}
}
