package sessions

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// list is a list of gpuguest's sessions. It serves all who have asked for it before it began.
type list struct {
	done chan struct{}                  // closed at its end
	res  *gpuctlv1.ListSessionsResponse // nil: it has failed
}

// Resync requests gpuguest's list of sessions and makes the host's state agree with it.
func (h *Host) Resync(ctx context.Context) error {
	_, err := h.list(ctx)
	return err
}

// list is Resync, and returns the list. Lists are made one after the other, so no older one
// follows a newer one.
func (h *Host) list(ctx context.Context) (*gpuctlv1.ListSessionsResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	for {
		h.mu.Lock()
		l := h.wanted
		if l == nil {
			l = &list{done: make(chan struct{})}
			h.wanted = l
			h.mu.Unlock()
			return h.ask(ctx, l)
		}
		h.mu.Unlock()
		select {
		case <-l.done:
			if l.res != nil {
				return l.res, nil
			}
			// Who has made it may only have left.
		case <-ctx.Done():
			return nil, fmt.Errorf("list the guest's sessions: %w", ctx.Err())
		}
	}
}

// ask makes the list that is wanted.
func (h *Host) ask(ctx context.Context, l *list) (*gpuctlv1.ListSessionsResponse, error) {
	defer close(l.done)
	var err error
	select {
	case h.listing <- struct{}{}:
		defer func() { <-h.listing }()
	case <-ctx.Done():
		err = ctx.Err()
	}
	h.mu.Lock()
	h.wanted = nil // it does not serve who asks from now on
	h.mu.Unlock()
	asked := time.Now()
	var res *connect.Response[gpuctlv1.ListSessionsResponse]
	if err == nil {
		res, err = h.Guest.ListSessions(ctx, connect.NewRequest(&gpuctlv1.ListSessionsRequest{}))
	}
	if err != nil {
		return nil, fmt.Errorf("list the guest's sessions: %w", err)
	}
	h.agree(res.Msg, asked)
	l.res = res.Msg
	return l.res, nil
}

// agree makes the host's state agree with a list that was requested then.
func (h *Host) agree(res *gpuctlv1.ListSessionsResponse, asked time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, at := range h.over {
		if at.Before(asked) { // no later list contains it
			delete(h.over, id)
		}
	}
	listed := map[string]bool{}
	for _, s := range res.GetSessions() {
		listed[s.GetId()] = true
		if _, over := h.over[s.GetId()]; over {
			continue // it ended after the list was made
		}
		h.update(s, asked)
	}
	for id, s := range h.sessions {
		// A session that was first seen after the request may be missing from the answer.
		if !listed[id] && s.seen.Before(asked) {
			gone := proto.CloneOf(s.Session)
			gone.State = gpuctlv1.SessionState_SESSION_STATE_ENDED
			h.update(gone, asked)
		}
	}
	h.forget(listed, asked)
	for _, c := range h.claims {
		if !c.since.IsZero() && c.since.Before(asked) {
			h.replaced(c)
		}
	}
}
