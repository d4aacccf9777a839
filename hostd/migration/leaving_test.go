package migration

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/cluster/state"
)

// planned has something happen when it was said what a plan needs to know.
type planned struct {
	sending
	said func()
}

func (p planned) Site(string) (gpuctlv1connect.SiteServiceClient, error) { return p, nil }

func (p planned) MachineFacts(ctx context.Context, req *connect.Request[gpuctlv1.SiteMachine]) (*connect.Response[gpuctlv1.SiteMachineFacts], error) {
	res, err := p.sending.MachineFacts(ctx, req)
	p.said()
	return res, err
}

// A VM that is declared a service VM after a plan was made that did not see that, and before the migration is
// recorded, or before this host has applied the record, would be moved away from those that it serves.
func TestVMWhoseMigrationIsBeingBegunIsLeaving(t *testing.T) {
	empty := state.New()
	var m *Manager
	asked := 0
	m = New(Config{
		Node: planned{sending{records: records{host: "h1", store: empty, now: empty}}, func() {
			asked++
			if _, err := m.Leaving(t.Context(), "u1"); err == nil {
				t.Error("it was planned: it is not said to leave")
			}
			if id, err := m.Leaving(t.Context(), "u2"); id != "" || err != nil {
				t.Errorf("another one: %q, %v", id, err)
			}
		}},
		VMs: func(context.Context) ([]*gpuctlv1.Machine, []string) {
			return []*gpuctlv1.Machine{{Uuid: "u1", Name: "web", Host: "h1"}}, nil
		},
	})
	mux := http.NewServeMux()
	m.Handle(mux)
	server := httptest.NewServer(mux)
	defer server.Close()
	stream, err := gpuctlv1connect.NewMigrationServiceClient(server.Client(), server.URL).Start(t.Context(), connect.NewRequest(&gpuctlv1.MachineStartRequest{
		Plan: &gpuctlv1.MachinePlanRequest{Machine: "web", Verb: "migrate"}, NoWait: true,
	}))
	if err != nil {
		t.Fatal(err)
	}
	for stream.Receive() { // until the call has ended
	}
	if stream.Err() != nil || asked == 0 {
		t.Errorf("asked %d times, %v", asked, stream.Err())
	}
	if err := stream.Close(); err != nil {
		t.Error(err)
	}
	if id, err := m.Leaving(t.Context(), "u1"); id != "" || err != nil {
		t.Errorf("it was refused: %q, %v", id, err)
	}
	now := state.New()
	putter(t, now)(&clusterv1.Migration{Id: "m-1", Verb: "migrate", Object: "web", Driver: "h1", Machine: &clusterv1.MachineMove{Uuid: "u1", Name: "web", FromHost: "h1", ToHost: "h2"}})
	for name, c := range map[string]struct {
		node records
		want string
	}{
		"not applied here yet": {records{host: "h1", store: empty, now: now}, "m-1"},
		"nobody answers":       {records{host: "h1", store: now}, "m-1"},
		"no cluster":           {records{host: "h1"}, ""},
	} {
		if id, err := New(Config{Node: c.node}).Leaving(t.Context(), "u1"); id != c.want || err != nil {
			t.Errorf("%s: %q, %v", name, id, err)
		}
	}
}
