package guesttest

import (
	"context"
	"errors"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// Folders returns the folders that have a session now.
func (g *Guest) Folders() (dirs []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for dir := range g.folders {
		dirs = append(dirs, dir)
	}
	return dirs
}

// planFolder plans a suspend to a folder, or a resume from one. g.mu is held.
func (g *Guest) planFolder(r *gpuctlv1.PlanRequest) (*connect.Response[gpuctlv1.PlanResponse], error) {
	there := g.folders[r.GetFolder()]
	if r.GetSession() == "" {
		if there == nil {
			return nil, precondition("%s: not a folder of a suspended session that can be used", r.GetFolder())
		}
		return connect.NewResponse(&gpuctlv1.PlanResponse{
			Session: there, Reasons: driverReasons(there, r.GetTarget()), Steps: steps("revive"), Bytes: there.GetUsage().GetMemory(), PredictedNs: 1e9, PredictedStopNs: 1e9,
		}), nil
	}
	s := g.sessions[r.GetSession()]
	if s == nil {
		return nil, connect.NewError(connect.CodeNotFound, errors.New("no such session"))
	}
	res := &gpuctlv1.PlanResponse{Steps: steps("store"), Bytes: s.GetUsage().GetMemory(), PredictedNs: 1e9, PredictedStopNs: 1e9}
	if there != nil {
		res.Reasons = []*gpuctlv1.Reason{{Code: "folder", Message: r.GetFolder() + " is there already"}}
	}
	return connect.NewResponse(res), nil
}

// store suspends a session to a folder: it ends.
func (g *Guest) store(ctx context.Context, r *gpuctlv1.SuspendRequest, stream *connect.ServerStream[gpuctlv1.Progress]) error {
	g.mu.Lock()
	before, there := g.sessions[r.GetSession()], g.folders[r.GetFile()]
	g.mu.Unlock()
	if there != nil {
		return stream.Send(&gpuctlv1.Progress{Result: &gpuctlv1.SwapResult{
			Session: before, Refused: true, Reasons: []*gpuctlv1.Reason{{Code: "folder", Message: r.GetFile() + " is there already"}},
		}})
	}
	return g.operate(ctx, stream, "store", r.GetSession(), r.GetFailAt(), nil, gpuctlv1.SessionState_SESSION_STATE_RUNNING, func(s *gpuctlv1.Session) {
		if g.folders == nil {
			g.folders = map[string]*gpuctlv1.Session{}
		}
		g.folders[r.GetFile()] = proto.CloneOf(before)
		s.State, s.SuspendedTo = gpuctlv1.SessionState_SESSION_STATE_ENDED, r.GetFile()
	})
}

// revive makes a session of a folder again, which is used up by that.
func (g *Guest) revive(ctx context.Context, r *gpuctlv1.ResumeRequest, stream *connect.ServerStream[gpuctlv1.Progress]) error {
	g.mu.Lock()
	there := g.folders[r.GetFolder()]
	if there == nil {
		g.mu.Unlock()
		return precondition("%s: not a folder of a suspended session that can be used", r.GetFolder())
	}
	s := proto.CloneOf(there)
	s.State, s.Claim = gpuctlv1.SessionState_SESSION_STATE_SUSPENDED, r.GetClaim()
	g.set(s)
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if s := g.sessions[there.GetId()]; s.GetState() == gpuctlv1.SessionState_SESSION_STATE_SUSPENDED { // it has failed
			s = proto.CloneOf(s)
			s.State = gpuctlv1.SessionState_SESSION_STATE_ENDED
			g.set(s)
		}
	}()
	return g.operate(ctx, stream, "revive", s.GetId(), r.GetFailAt(), r.GetTarget(), gpuctlv1.SessionState_SESSION_STATE_SUSPENDED, func(s *gpuctlv1.Session) {
		delete(g.folders, r.GetFolder())
		s.State = gpuctlv1.SessionState_SESSION_STATE_RUNNING
		moveTo(s, r.GetTarget())
	})
}
