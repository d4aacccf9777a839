package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
)

// GuestSessions implements Sessions with a GuestService.
type GuestSessions struct {
	Client gpuctlv1connect.GuestServiceClient
	// RunDir is the run folder of guest/session. A session that is being started is not
	// listed yet, but has a folder there.
	RunDir string
}

var _ Sessions = (*GuestSessions)(nil)

// List returns all sessions. A session that is being started has no target.
func (g *GuestSessions) List(ctx context.Context) ([]*gpuctlv1.Session, error) {
	// Read the folders first: a session that is listed afterwards is not being started
	// any more.
	entries, err := os.ReadDir(filepath.Join(g.RunDir, "sessions"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("sessions' folder: %w", err)
	}
	resp, err := g.Client.ListSessions(ctx, connect.NewRequest(&gpuctlv1.ListSessionsRequest{}))
	if err != nil {
		return nil, err
	}
	all := resp.Msg.Sessions
	listed := map[string]bool{}
	for _, s := range all {
		listed[s.Id] = true
	}
	for _, e := range entries {
		if !listed[e.Name()] {
			all = append(all, &gpuctlv1.Session{Id: e.Name(), State: gpuctlv1.SessionState_SESSION_STATE_RUNNING})
		}
	}
	return all, nil
}

// Offer implements Sessions.
func (g *GuestSessions) Offer(ctx context.Context, o *gpuctlv1.OfferRequest) error {
	_, err := g.Client.Offer(ctx, connect.NewRequest(o))
	return err
}

// Withdraw implements Sessions.
func (g *GuestSessions) Withdraw(ctx context.Context, token string) error {
	_, err := g.Client.Withdraw(ctx, connect.NewRequest(&gpuctlv1.WithdrawRequest{Token: token}))
	return err
}

// Warm implements Sessions.
func (g *GuestSessions) Warm(ctx context.Context, rt *gpuctlv1.Runtime) error {
	_, err := g.Client.Warm(ctx, connect.NewRequest(&gpuctlv1.WarmRequest{Runtime: rt}))
	return err
}
