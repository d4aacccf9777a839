package sessions

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/hostd/inventory"
	"github.com/gpuctl/gpuctl/internal/news"
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/suggest"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
)

// Server offers a Host as HostService.
type Server struct {
	host *Host
}

var _ gpuctlv1connect.HostServiceHandler = (*Server)(nil)

// Handle adds the host's API to a mux.
func (h *Host) Handle(mux *http.ServeMux, options ...connect.HandlerOption) {
	options = append(options, connect.WithReadMaxBytes(1<<20), connect.WithCompressMinBytes(64<<10))
	mux.Handle(gpuctlv1connect.NewHostServiceHandler(&Server{h}, options...))
}

// wait returns when the GPUs of this host are known.
func (s *Server) wait(ctx context.Context) error {
	select {
	case <-s.host.ready:
		return nil
	case <-ctx.Done():
		return reason.Coded(ctx.Err())
	}
}

// GetInventory lists the GPUs and the claims that have them.
func (s *Server) GetInventory(ctx context.Context, _ *connect.Request[gpuctlv1.GetInventoryRequest]) (*connect.Response[gpuctlv1.GetInventoryResponse], error) {
	if err := s.wait(ctx); err != nil {
		return nil, err
	}
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	return connect.NewResponse(&gpuctlv1.GetInventoryResponse{Gpus: slices.Concat(s.host.view(), s.host.servedView()), Warnings: s.host.warnings}), nil
}

// CreateClaim chooses GPUs and reserves them.
func (s *Server) CreateClaim(ctx context.Context, req *connect.Request[gpuctlv1.CreateClaimRequest]) (*connect.Response[gpuctlv1.CreateClaimResponse], error) {
	if err := s.wait(ctx); err != nil {
		return nil, err
	}
	m, defaults := req.Msg, s.host.Config.VirtualDevice
	c := &claim{
		ID: "c-" + random.Hex(4), Token: random.Hex(20), Expr: m.GetExpr(), Min: m.GetMinMemory(), Prefer: m.GetPreferMemory(),
		Count: max(1, int(m.GetCount())), Name: m.GetDevice().GetName(), Type: m.GetDevice().GetType(), Created: time.Now().UnixMilli(),
		Engine: m.GetEngine(),
		Remote: m.GetRemote(), Wait: m.GetWait(),
	}
	if c.Name == "" {
		c.Name = defaults.Name
	}
	if c.Type == "" {
		c.Type = defaults.Type
	}
	switch {
	case !slices.Contains([]string{"", remoteNever, remoteAllowed, remoteOnly}, c.Remote):
		return nil, reason.Coded(fmt.Errorf("%w: remote is %q, not never, allowed or only", errInvalid, c.Remote))
	case c.Count > maxClaimGPUs:
		return nil, reason.Coded(fmt.Errorf("%w: count %d is more than %d", errInvalid, c.Count, maxClaimGPUs))
	case !slices.Contains([]string{"", "gpu", "cpu", "accelerator"}, c.Type):
		return nil, reason.Coded(fmt.Errorf("%w: device type %q is not gpu, cpu or accelerator", errInvalid, c.Type))
	case len(c.Name) > maxNameLength || strings.ContainsRune(c.Name, 0):
		return nil, reason.Coded(fmt.Errorf("%w: the device's name is longer than %d bytes, or has a NUL", errInvalid, maxNameLength))
	case !slices.Contains([]string{"", portableEngine, driverEngine}, c.Engine):
		return nil, reason.Coded(fmt.Errorf("%w: engine %q is not %s or %s", errInvalid, c.Engine, portableEngine, driverEngine))
	case c.Engine == driverEngine && c.Min > 0:
		return nil, reason.Coded(fmt.Errorf("%w: a CUDA program has its GPUs alone; leave the memory out", errInvalid))
	case c.Prefer > 0 && c.Prefer < c.Min:
		return nil, reason.Coded(fmt.Errorf("%w: the preferred memory is less than the least", errInvalid))
	}
	if m.GetWhileCallerLives() {
		peer, ok := unixrpc.PeerFrom(ctx)
		if !ok {
			return nil, reason.Coded(fmt.Errorf("%w: while_caller_lives needs a unix socket", errInvalid))
		}
		var err error
		if c.Holder, err = newHolder(s.host.proc, int(peer.PID)); err != nil {
			return nil, reason.Coded(fmt.Errorf("%w: %w", errInvalid, err))
		}
	}
	if err := s.host.setOwner(ctx, c, m); err != nil {
		return nil, reason.Coded(err)
	}
	p, out, err := s.host.createClaim(ctx, c)
	if err != nil {
		return nil, reason.Coded(err)
	}
	res := &gpuctlv1.CreateClaimResponse{Rejected: out}
	if p != nil {
		s.host.mu.Lock()
		res.Claim, res.Token, res.AppSocket, res.Gpus = c.proto(), c.Token, s.host.AppSocket, p
		s.host.mu.Unlock()
	}
	return connect.NewResponse(res), nil
}

// ReleaseClaim releases a claim. Sessions that still use it keep their GPUs.
func (s *Server) ReleaseClaim(ctx context.Context, req *connect.Request[gpuctlv1.ReleaseClaimRequest]) (*connect.Response[gpuctlv1.ReleaseClaimResponse], error) {
	if err := s.wait(ctx); err != nil {
		return nil, err
	}
	s.host.mu.Lock()
	c := s.host.claims[req.Msg.GetClaim()]
	var ids []string
	for id := range s.host.claims {
		ids = append(ids, id)
	}
	s.host.mu.Unlock()
	if c == nil {
		return nil, reason.Coded(fmt.Errorf("%w: no claim %q%s", errNotFound, req.Msg.GetClaim(), suggest.Hint(req.Msg.GetClaim(), ids)))
	}
	if c.VM != nil && c.VM.Migration == "" {
		return nil, reason.Coded(reason.Errorf(reason.Refused, "claim %s is one of VM %s, which has the GPU until it is detached", c.ID, c.VM.Name).On("claim", c.ID).Do("gpuctl detach %s --remote ends it", c.VM.Name))
	}
	if c.VM != nil {
		return nil, reason.Coded(reason.Errorf(reason.Refused, "claim %s is one of VM %s, whose applications compute by it while migration %s runs", c.ID, c.VM.Name, c.VM.Migration).On("claim", c.ID).Do("gpuctl migrations abort %s has that undone", c.VM.Migration))
	}
	s.host.release(ctx, c)
	if c.Holder.PID != 0 {
		// Usually the application has just ended. Wait for its sessions, so that the next
		// caller finds the GPU free.
		s.host.awaitEnd(ctx, c)
	}
	return connect.NewResponse(&gpuctlv1.ReleaseClaimResponse{Lost: s.host.lostOf(ctx, c.ID)}), nil
}

// lostOf returns the sessions of a claim that were lost. They end with their applications, so
// lists of sessions may not have them any more.
func (h *Host) lostOf(ctx context.Context, claim string) []*gpuctlv1.LostSession {
	res, err := h.list(ctx)
	if err != nil {
		h.Log.Debug("lost sessions not listed", "claim", claim, "err", err)
	}
	var out []*gpuctlv1.LostSession
	for _, l := range res.GetLost() { // the list is others', too
		if l.GetClaim() == claim {
			out = append(out, l)
		}
	}
	return out
}

// ListClaims lists the claims, including released ones whose last session has not ended.
func (s *Server) ListClaims(ctx context.Context, _ *connect.Request[gpuctlv1.ListClaimsRequest]) (*connect.Response[gpuctlv1.ListClaimsResponse], error) {
	if err := s.wait(ctx); err != nil {
		return nil, err
	}
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	res := &gpuctlv1.ListClaimsResponse{}
	for _, c := range s.host.claims {
		res.Claims = append(res.Claims, c.proto())
	}
	slices.SortFunc(res.Claims, func(a, b *gpuctlv1.Claim) int { return strings.Compare(a.GetId(), b.GetId()) })
	return connect.NewResponse(res), nil
}

// ListSessions asks gpuguest for its sessions, so that their usage is up to date.
func (s *Server) ListSessions(ctx context.Context, _ *connect.Request[gpuctlv1.HostListSessionsRequest]) (*connect.Response[gpuctlv1.HostListSessionsResponse], error) {
	if err := s.wait(ctx); err != nil {
		return nil, err
	}
	if err := s.host.Resync(ctx); err != nil {
		s.host.Log.Warn("sessions are as last seen", "err", err)
	}
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	res := &gpuctlv1.HostListSessionsResponse{}
	for _, known := range s.host.sessions {
		res.Sessions = append(res.Sessions, known.Session)
	}
	slices.SortFunc(res.Sessions, func(a, b *gpuctlv1.Session) int { return strings.Compare(a.GetId(), b.GetId()) })
	return connect.NewResponse(res), nil
}

// WatchSessions streams changes until the client leaves.
func (s *Server) WatchSessions(ctx context.Context, _ *connect.Request[gpuctlv1.HostWatchSessionsRequest], stream *connect.ServerStream[gpuctlv1.Session]) error {
	if err := s.wait(ctx); err != nil {
		return err
	}
	w := s.host.watch()
	defer w.Close()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.host.ctx.Done():
			return reason.Coded(reason.Errorf(reason.Stopping, "hostd is stopping"))
		case <-w.Bell():
		}
		for _, session := range w.Take() {
			if err := stream.Send(session); err != nil {
				return fmt.Errorf("watch: %w", err)
			}
		}
	}
}

// watch returns a reader of changes. It begins with the present sessions.
func (h *Host) watch() *news.Reader[string, *gpuctlv1.Session] {
	h.mu.Lock() // under the lock, so that no change is missed between the list and the reader
	defer h.mu.Unlock()
	w := h.changes.Read()
	for id, s := range h.sessions {
		w.Put(id, s.Session)
	}
	return w
}

// DescribeSession returns everything that is known about a session.
func (s *Server) DescribeSession(ctx context.Context, req *connect.Request[gpuctlv1.DescribeSessionRequest]) (*connect.Response[gpuctlv1.DescribeSessionResponse], error) {
	if err := s.wait(ctx); err != nil {
		return nil, err
	}
	if err := s.host.Resync(ctx); err != nil {
		s.host.Log.Warn("sessions are as last seen", "err", err)
	}
	h := s.host
	h.mu.Lock()
	defer h.mu.Unlock()
	found, err := h.find(req.Msg.GetSession())
	if err != nil {
		return nil, reason.Coded(err)
	}
	res := &gpuctlv1.DescribeSessionResponse{Session: found, Last: h.last[found.GetId()]}
	if c := h.claims[found.GetClaim()]; c != nil {
		res.Claim = c.proto()
	}
	if op := h.ops[found.GetId()]; op != nil {
		res.Operation = op.Kind
	}
	at := splitIDs(found.GetTarget().GetGpu())
	for _, id := range at {
		if far(id) {
			if g := inventory.OfCluster(h.Cluster.GPU(id)); g != nil {
				res.Gpus = append(res.Gpus, g)
			}
		}
	}
	for _, g := range h.view() {
		if slices.Contains(at, g.GetId()) {
			res.Gpus = append(res.Gpus, g)
		}
	}
	return connect.NewResponse(res), nil
}

// Plan returns what Swap would do.
func (s *Server) Plan(ctx context.Context, req *connect.Request[gpuctlv1.HostPlanRequest]) (*connect.Response[gpuctlv1.HostPlanResponse], error) {
	if err := s.wait(ctx); err != nil {
		return nil, err
	}
	res, err := s.host.planSwap(ctx, req.Msg, caller(ctx))
	if err != nil {
		return nil, reason.Coded(err)
	}
	return connect.NewResponse(res), nil
}

// Swap moves a session to another GPU.
func (s *Server) Swap(ctx context.Context, req *connect.Request[gpuctlv1.HostSwapRequest], stream *connect.ServerStream[gpuctlv1.OperationUpdate]) error {
	return s.operate(ctx, stream, func(send emit) error { return s.host.swap(req.Msg, send) })
}

// Suspend saves a session's state and frees its GPU.
func (s *Server) Suspend(ctx context.Context, req *connect.Request[gpuctlv1.HostSuspendRequest], stream *connect.ServerStream[gpuctlv1.OperationUpdate]) error {
	return s.operate(ctx, stream, func(send emit) error { return s.host.suspend(req.Msg, caller(ctx), send) })
}

// caller returns the user who calls over this host's socket, or nil for a call from
// another host: its user is unknown here.
func caller(ctx context.Context) *gpuctlv1.FileOwner {
	p, ok := unixrpc.PeerFrom(ctx)
	if !ok {
		return nil
	}
	return &gpuctlv1.FileOwner{Uid: p.UID, Gid: p.GID}
}

// Resume continues a suspended session, or one of a folder.
func (s *Server) Resume(ctx context.Context, req *connect.Request[gpuctlv1.HostResumeRequest], stream *connect.ServerStream[gpuctlv1.OperationUpdate]) error {
	return s.operate(ctx, stream, func(send emit) error { return s.host.resume(req.Msg, caller(ctx), send) })
}

// Adopt makes sessions of processes that use CUDA.
func (s *Server) Adopt(ctx context.Context, req *connect.Request[gpuctlv1.HostAdoptRequest]) (*connect.Response[gpuctlv1.HostAdoptResponse], error) {
	if err := s.wait(ctx); err != nil {
		return nil, err
	}
	res, err := s.host.adoptProcesses(ctx, req.Msg, caller(ctx))
	if err != nil {
		return nil, reason.Coded(err)
	}
	return connect.NewResponse(res), nil
}

// operate starts an operation and sends its updates until it ends or the client leaves. A
// slow client misses some updates, but not the last one.
func (s *Server) operate(ctx context.Context, stream *connect.ServerStream[gpuctlv1.OperationUpdate], start func(emit) error) error {
	if err := s.wait(ctx); err != nil {
		return err
	}
	relay := news.NewRelay[*gpuctlv1.OperationUpdate]()
	send := func(u *gpuctlv1.OperationUpdate) {
		if u.GetProgress().GetResult() != nil {
			relay.End(u)
			return
		}
		relay.Tell(u)
	}
	// A session may have begun since the last list.
	if err := s.host.Resync(ctx); err != nil {
		s.host.Log.Warn("sessions are as last seen", "err", err)
	}
	if err := start(send); err != nil {
		return reason.Coded(err)
	}
	return relay.Send(ctx, stream.Send)
}
