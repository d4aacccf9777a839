package sessions

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	place "github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/hostd/telemetry/metrics"
	"github.com/gpuctl/gpuctl/hostd/telemetry/trace"
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// emit receives the updates of an operation. It must not block.
type emit func(*gpuctlv1.OperationUpdate)

// progressStream is a stream of Progress from gpuguest.
type progressStream interface {
	Receive() bool
	Msg() *gpuctlv1.Progress
	Err() error
	Close() error
}

// begin registers an operation on a session. A session has one operation at a time.
func (h *Host) begin(ref, kind string) (*operation, *gpuctlv1.Session, *claim, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s, err := h.find(ref)
	if err != nil {
		return nil, nil, nil, err
	}
	if op := h.ops[s.GetId()]; op != nil {
		return nil, nil, nil, fmt.Errorf("session %s: %w: a %s is in progress", s.GetId(), errBusy, op.Kind)
	}
	suspended := s.GetState() == gpuctlv1.SessionState_SESSION_STATE_SUSPENDED
	switch {
	case s.GetState() == gpuctlv1.SessionState_SESSION_STATE_LOST:
		return nil, nil, nil, fmt.Errorf("session %s: %w: it is lost (%s)", s.GetId(), errBusy, s.GetMessage())
	case kind == "resume" && !suspended:
		return nil, nil, nil, fmt.Errorf("session %s: %w: it is not suspended", s.GetId(), errBusy)
	case kind != "resume" && suspended:
		return nil, nil, nil, reason.Detail(fmt.Errorf("session %s: %w: it is suspended", s.GetId(), errBusy)).On("session", s.GetId()).Do("gpuctl resume %s --to GPU continues it elsewhere", s.GetId())
	}
	c := h.claims[s.GetClaim()]
	if c == nil {
		return nil, nil, nil, fmt.Errorf("session %s: %w: its claim %s is not known", s.GetId(), errNotFound, s.GetClaim())
	}
	op := &operation{Session: s.GetId(), Claim: c.ID, Kind: kind}
	if h.onGPU(s) {
		op.From = splitIDs(s.GetTarget().GetGpu())
	}
	h.register(op, s)
	return op, s, c, nil
}

// register journals an operation that begins, and reports it. The caller holds h.mu.
func (h *Host) register(op *operation, s *gpuctlv1.Session) {
	op.Record.Migration = &clusterv1.Migration{
		Id: "m-" + random.Hex(6), Verb: op.Kind, Object: op.Session, Claim: op.Claim, From: s.GetTarget().GetGpu(),
		State: clusterv1.MigrationState_MIGRATION_STATE_RUNNING, StartedUnixMs: time.Now().UnixMilli(),
	}
	h.ops[op.Session] = op
	h.save()
	h.Log.Info("operation began", "session", op.Session, "claim", op.Claim, "step", op.Kind, "gpu", s.GetTarget().GetGpu())
	h.Cluster.Record(proto.CloneOf(op.Record.Migration))
	op.began = time.Now()
	op.trace = h.Tracer.Begin(h.ctx, trace.Op{
		ID: op.Record.GetId(), Verb: op.Kind, Object: op.Session, Claim: op.Claim, From: op.Record.GetFrom(), At: time.UnixMilli(op.Record.GetStartedUnixMs()),
	})
}

// end removes the operation, and gives back the GPUs that the claim no longer needs.
func (h *Host) end(op *operation, c *claim) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ops[op.Session] == op && !op.doubt {
		delete(h.ops, op.Session)
		op.unmade(c)
	}
	h.settle(c)
	select {
	case h.unnamed <- struct{}{}:
	default:
	}
}

// reserve reserves a target for the operation: first in the cluster, then in the ledger.
// It returns how much of each GPU the claim gets, or the reason why it gets none.
func (h *Host) reserve(ctx context.Context, op *operation, c *claim, p placement) (uint64, *gpuctlv1.Candidate) {
	h.mu.Lock()
	amount, busy := h.room(c, p)
	if busy == nil {
		op.GPUs = p.ids()
		h.save()
	}
	h.mu.Unlock()
	if busy != nil {
		return 0, busy
	}
	err := h.Cluster.Acquire(ctx, c.forCluster(nil), p.ids(), amount)
	h.mu.Lock()
	defer h.mu.Unlock()
	if err == nil {
		err = h.ledger.Reserve(c.ID, p.ids(), amount)
	}
	if err != nil {
		op.GPUs = nil
		h.settle(c)
		return 0, rejected(p[0], because("busy", "%v", err))
	}
	return amount, nil
}

// room returns how much of each GPU the claim would get (bytes, or ledger.Whole). The
// caller holds h.mu.
func (h *Host) room(c *claim, p placement) (amount uint64, busy *gpuctlv1.Candidate) {
	for i, g := range p {
		room, free := h.ledger.Room(c.ID, g.GetId())
		if far(g.GetId()) {
			h.count(g.GetId())
			room, free = h.Cluster.Room(c.ID, g.GetId())
		}
		if r := judgeRoom(g, c, h.ledger, room, free); r != nil {
			return 0, rejected(g, r)
		}
		if n := c.amount(room); i == 0 || n < amount {
			amount = n
		}
	}
	return amount, nil
}

// drop gives back the operation's target.
func (h *Host) drop(op *operation, c *claim) {
	h.mu.Lock()
	defer h.mu.Unlock()
	op.GPUs, op.Lease = nil, ""
	h.settle(c)
}

// lease describes the operation's target to gpuguest. If the target is on another host,
// its lease belongs to the operation from now on.
func (h *Host) lease(ctx context.Context, op *operation, c *claim, p placement, amount uint64) (*gpuctlv1.Target, error) {
	target, lease, err := h.target(ctx, c, p, amount)
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	op.Lease = lease
	h.save()
	h.mu.Unlock()
	h.named(lease)
	return target, nil
}

// move swaps or resumes a session: it tries the placements in order, until one is not
// refused.
func (h *Host) move(ctx context.Context, op *operation, s *gpuctlv1.Session, c *claim, to []placement, out []*gpuctlv1.Candidate,
	start starter, send emit,
) {
	final := &gpuctlv1.OperationUpdate{Session: s.GetId()}
	finish := func(r *gpuctlv1.SwapResult) {
		final.Rejected = out
		final.Progress = &gpuctlv1.Progress{Result: r}
		h.note(op, r)
		h.end(op, c) // before send: the receiver may start the next operation at once
		send(final)
	}
	for _, p := range to {
		amount, busy := h.reserve(ctx, op, c, p)
		if busy != nil {
			out = append(out, busy)
			continue
		}
		plan, err := h.plan(ctx, planRequest(s, op.Folder, p.example(amount)))
		switch {
		case err == nil && len(plan.GetReasons()) > 0:
			out = append(out, rejected(p[0], plan.GetReasons()...))
			h.drop(op, c)
			continue
		case connect.CodeOf(err) == connect.CodeUnavailable || ctx.Err() != nil:
			h.drop(op, c)
			finish(&gpuctlv1.SwapResult{Error: fmt.Sprintf("the guest helper does not answer: %v; nothing was changed", plain(err)), RolledBack: true})
			return
		case err != nil && op.Kind != "resume": // the plan of a suspended session is made during its resume
			out = append(out, rejected(p[0], because("plan", "%v", plain(err))))
			h.drop(op, c)
			continue
		}
		final.Gpus, final.Model = p.ids(), p[0].GetModel()
		op.here = here(plan)
		target, err := h.lease(ctx, op, c, p, amount)
		if err != nil {
			out = append(out, rejected(p[0], because("lend", "%v", plain(err))))
			final.Gpus, final.Model = nil, ""
			h.drop(op, c)
			continue
		}
		detour := h.straight(ctx, op, s, target)
		stream, err := start(ctx, target)
		var result *gpuctlv1.SwapResult
		if err == nil {
			result, err = h.relay(op, stream, final, send)
		}
		if err == nil {
			result.Detour = cmp.Or(result.GetDetour(), detour)
		}
		switch {
		case err != nil:
			finish(h.doubtful(op, err))
			return
		case result.GetHeld():
			h.doubt(op) // its target may still have the GPU
		case result.GetRefused():
			out = append(out, rejected(p[0], result.GetReasons()...))
			final.Gpus, final.Model = nil, ""
			h.drop(op, c)
			continue
		case result.GetError() == "" && !result.GetRolledBack():
			h.commit(op, c, result.GetSession())
			h.learn(op, s, p, result)
		default:
			h.heard(result.GetSession()) // before: if it is lost, its target may have something of it
			h.drop(op, c)
		}
		finish(result)
		return
	}
	finish(&gpuctlv1.SwapResult{Session: s, Refused: true, Error: "no GPU can serve the session"})
}

// relay passes the progress on, and returns the result at the end of the stream.
func (h *Host) relay(op *operation, stream progressStream, about *gpuctlv1.OperationUpdate, send emit) (*gpuctlv1.SwapResult, error) {
	defer func() { _ = stream.Close() }()
	step := ""
	var result *gpuctlv1.SwapResult
	for stream.Receive() {
		p := proto.CloneOf(stream.Msg())
		if p.GetStep() != step && p.GetStep() != "" {
			step = p.GetStep()
			h.Log.Info("step", "session", about.GetSession(), "step", step, "gpu", strings.Join(about.GetGpus(), separator))
			op.trace.Step(step, time.Now())
			h.record(op, func(m *clusterv1.Migration) {
				if m.GetStep() != "" {
					m.Done = append(m.Done, m.Step)
				}
				m.Step, m.To = step, strings.Join(about.GetGpus(), separator)
			})
		}
		if p.GetResult() != nil {
			result = p.GetResult()
			continue
		}
		send(&gpuctlv1.OperationUpdate{Session: about.GetSession(), Gpus: about.GetGpus(), Model: about.GetModel(), Progress: p})
	}
	if result != nil {
		return result, nil
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	return nil, errors.New("the guest helper ended the operation without a result")
}

// doubtful makes a result of an error that ended the stream. If gpuguest refused the
// call, nothing has changed. Otherwise the outcome is unknown, and the target stays
// reserved.
func (h *Host) doubtful(op *operation, err error) *gpuctlv1.SwapResult {
	switch connect.CodeOf(err) {
	case connect.CodeNotFound, connect.CodeInvalidArgument, connect.CodeFailedPrecondition, connect.CodeUnimplemented, connect.CodeAlreadyExists:
		return &gpuctlv1.SwapResult{Error: plain(err).Error(), RolledBack: true}
	}
	h.doubt(op)
	return &gpuctlv1.SwapResult{Error: fmt.Sprintf("lost track of it (%v); the session either goes on where it was or is at its target: gpuctl sessions says which", plain(err))}
}

// doubt keeps the operation and its target until gpuguest reports on which GPU the
// session is.
func (h *Host) doubt(op *operation) {
	h.mu.Lock()
	op.doubt, op.since = true, time.Now()
	h.save()
	h.mu.Unlock()
	h.work.Go(func() {
		// Do not wait for the next periodic list.
		if err := h.Resync(h.ctx); err != nil && h.ctx.Err() == nil {
			h.Log.Warn("outcome of an operation is not known yet", "session", op.Session, "err", err)
		}
	})
}

// commit changes the claim's placement to the session's new GPUs. The source is given
// back when no session can start there any more.
func (h *Host) commit(op *operation, c *claim, s *gpuctlv1.Session) {
	h.mu.Lock()
	moved := false
	if s != nil {
		s = hide(s)
		if op.Kind == "home" || op.Kind != "resume" && far(s.GetTarget().GetGpu()) {
			c.Stays = true // it has come home, or an operator wants it elsewhere
		}
		if op.Folder != "" {
			h.revived(op, c, s)
		}
		h.enter(s)
		if known := h.sessions[s.GetId()]; known != nil {
			moved = h.moved(c, known.Session)
		} else if s.GetState() == gpuctlv1.SessionState_SESSION_STATE_ENDED { // it is in a folder
			moved = h.moved(c, s)
		}
	}
	op.GPUs, op.From, op.Lease = nil, nil, ""
	h.mu.Unlock()
	if moved {
		h.repeatOffer(h.ctx, c)
	}
}

// heard enters what an operation's result says of its session; nil: nothing.
func (h *Host) heard(s *gpuctlv1.Session) {
	if s == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.enter(hide(s))
}

// enter replaces what is known of a session, unless it is newer. The caller holds h.mu.
func (h *Host) enter(s *gpuctlv1.Session) {
	if known := h.sessions[s.GetId()]; known != nil && s.GetGeneration() >= known.GetGeneration() {
		known.Session = h.withNames(s)
		h.changes.Put(s.GetId(), known.Session)
	}
}

// note stores the result in the metrics, the trace and the cluster, and logs it.
func (h *Host) note(op *operation, r *gpuctlv1.SwapResult) {
	now := time.Now()
	h.Metrics.Operation(op.Kind, now.Sub(op.began), r)
	op.trace.End(metrics.Outcome(r), r.GetSession().GetTarget().GetGpu(), r, now)
	h.record(op, func(m *clusterv1.Migration) {
		m.Done, m.Step = append(m.Done, m.Step), ""
		m.EndedUnixMs, m.StoppedNs, m.Message = time.Now().UnixMilli(), r.GetStoppedNs(), r.GetError()
		m.Bytes = r.GetBytesPrecopied() + r.GetBytesFrozen()
		switch {
		case r.GetError() == "" && !r.GetRolledBack():
			m.State = clusterv1.MigrationState_MIGRATION_STATE_DONE
		case r.GetRolledBack() || r.GetRefused():
			m.State = clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK
		default:
			m.State = clusterv1.MigrationState_MIGRATION_STATE_FAILED
		}
	})
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.sessions[op.Session] != nil {
		h.last[op.Session] = r
	}
	level := h.Log.Info
	if r.GetError() != "" && !r.GetRefused() {
		level = h.Log.Warn
	}
	level("operation ended", "session", op.Session, "claim", op.Claim, "step", op.Kind, "gpu", r.GetSession().GetTarget().GetGpu(),
		"stopped", time.Duration(r.GetStoppedNs()), "refused", r.GetRefused(), "rolled_back", r.GetRolledBack(), "held", r.GetHeld(), "err", r.GetError())
}

// plan asks gpuguest what an operation would do.
func (h *Host) plan(ctx context.Context, req *gpuctlv1.PlanRequest) (*gpuctlv1.PlanResponse, error) {
	timeout := callTimeout
	if req.GetBuild() {
		timeout = buildTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	res, err := h.Guest.Plan(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}

// destinations returns the placements that a session may move to, best first, and the
// reasons against the other GPUs.
func (h *Host) destinations(ctx context.Context, s *gpuctlv1.Session, c *claim, verb place.Verb, to string) ([]placement, []*gpuctlv1.Candidate, error) {
	const most = 64
	to = h.inHere(to)
	from := splitIDs(s.GetTarget().GetGpu())
	claim := c.forCluster(nil) // the claim's expression holds for its first GPU only
	if len(from) > 0 {
		claim.Count = uint32(len(from))
	}
	h.mu.Lock()
	all := make([]string, len(h.gpus))
	for i, g := range h.gpus {
		all[i] = g.GetId()
	}
	h.mu.Unlock()
	h.Cluster.Known(ctx, all)
	h.Cluster.Settle(ctx)
	var fit []placement
	var out []*gpuctlv1.Candidate
	tries := h.tries(c, verb, from, to)
	for _, where := range tries {
		d, err := h.Cluster.Place(ctx, place.Request{Claim: claim, Verb: verb, From: slices.Clone(from), To: to, Limit: most, Where: where})
		switch {
		case err == nil:
			err = d.Err
		case errors.Is(err, replica.ErrNoLeader):
			err = fmt.Errorf("%w; where the session could go is decided by the cluster", err)
		}
		if err != nil {
			return nil, nil, err
		}
		h.mu.Lock()
		for _, candidate := range d.Candidates {
			var ids []string
			for _, id := range candidate.GPUs() {
				ids = append(ids, h.nameOf(id))
			}
			p := h.placement(ids)
			if p == nil {
				continue
			}
			if why := misfit(s, p); why != nil {
				out = append(out, rejected(p[0], why))
				continue
			}
			fit = append(fit, p)
		}
		rejections := slices.Collect(d.Rejected())
		switch {
		case where != place.Elsewhere && (len(rejections) > 0 || len(fit) == 0):
			out = append(out, h.candidates(rejections, all)...)
		case where == place.Elsewhere && len(fit) == 0:
			out = append(out, h.farCandidates(rejections, []string{to})...)
		}
		h.mu.Unlock()
	}
	return fit, out, nil
}

// tries returns where a session may go. A GPU of another host is considered if the caller
// names one, or the host, and if the claim allows it; a session that is there already
// may also resume there.
func (h *Host) tries(c *claim, verb place.Verb, from []string, to string) []place.Where {
	if c.remote() == clusterv1.Remote_REMOTE_NEVER {
		return []place.Where{place.Anywhere}
	}
	switch local := slices.ContainsFunc(h.gpus, func(g *gpuctlv1.GPU) bool { return strings.HasPrefix(to+separator, g.GetId()+separator) }); {
	case c.remote() == clusterv1.Remote_REMOTE_ONLY, far(to), slices.Contains(h.Cluster.OtherHosts(), to):
		return []place.Where{place.Elsewhere}
	case local, verb == place.Upgrade, verb == place.Downgrade:
		return []place.Where{place.AtHome}
	case to != "", verb == place.Resume && slices.ContainsFunc(from, far):
		return []place.Where{place.AtHome, place.Elsewhere}
	}
	return []place.Where{place.AtHome}
}

// verbs maps the API's verbs to those of the placement.
func verbs() map[gpuctlv1.Verb]place.Verb {
	return map[gpuctlv1.Verb]place.Verb{
		gpuctlv1.Verb_VERB_UPGRADE: place.Upgrade, gpuctlv1.Verb_VERB_DOWNGRADE: place.Downgrade, gpuctlv1.Verb_VERB_MIGRATE: place.Migrate,
		gpuctlv1.Verb_VERB_UNSPECIFIED: place.Resume,
	}
}

// swap starts a swap. If it returns nil, the swap goes on in the background.
func (h *Host) swap(req *gpuctlv1.HostSwapRequest, send emit) error {
	if req.GetRehearse() {
		return h.rehearse(req, send)
	}
	verb := req.GetVerb()
	kind := strings.ToLower(strings.TrimPrefix(verb.String(), "VERB_"))
	if verb == gpuctlv1.Verb_VERB_UNSPECIFIED || gpuctlv1.Verb_name[int32(verb)] == "" {
		return fmt.Errorf("%w: a swap is an upgrade, a downgrade or a migrate", errInvalid)
	}
	if verb == gpuctlv1.Verb_VERB_MIGRATE && req.GetTo() == "" {
		return fmt.Errorf("%w: migrate needs a GPU or model to go to", errInvalid)
	}
	return h.swapAs(kind, req, send)
}

// swapAs starts a swap under a name.
func (h *Host) swapAs(kind string, req *gpuctlv1.HostSwapRequest, send emit) error {
	op, s, c, err := h.begin(req.GetSession(), kind)
	if err != nil {
		return err
	}
	start := func(ctx context.Context, t *gpuctlv1.Target) (progressStream, error) {
		return h.Guest.Swap(ctx, connect.NewRequest(&gpuctlv1.SwapRequest{
			Session: s.GetId(), Target: t, FreezeTimeoutMs: req.GetFreezeTimeoutMs(), TimeoutMs: req.GetTimeoutMs(), FailAt: req.GetFailAt(),
		}))
	}
	return h.proceed(op, s, c, verbs()[req.GetVerb()], req.GetTo(), start, send)
}

// starter starts an operation of gpuguest's that brings a session to a target.
type starter func(context.Context, *gpuctlv1.Target) (progressStream, error)

// proceed goes on with an operation that has begun: it finds where the session can go, and moves
// it there. The operation ends by itself.
func (h *Host) proceed(op *operation, s *gpuctlv1.Session, c *claim, verb place.Verb, where string, start starter, send emit) error {
	to, out, err := h.destinations(h.ctx, s, c, verb, where)
	if err != nil {
		h.note(op, &gpuctlv1.SwapResult{Session: s, Refused: true, Error: err.Error()})
		h.end(op, c)
		return err
	}
	h.work.Go(func() { h.move(h.ctx, op, s, c, to, out, start, send) })
	return nil
}

// resume starts a resume, as swap does.
func (h *Host) resume(req *gpuctlv1.HostResumeRequest, caller *gpuctlv1.FileOwner, send emit) error {
	if req.GetFolder() != "" {
		return h.resumeFrom(req, caller, send)
	}
	op, s, c, err := h.begin(req.GetSession(), "resume")
	if err != nil {
		return err
	}
	start := func(ctx context.Context, t *gpuctlv1.Target) (progressStream, error) {
		return h.Guest.Resume(ctx, connect.NewRequest(&gpuctlv1.ResumeRequest{Session: s.GetId(), Target: t, TimeoutMs: req.GetTimeoutMs(), FailAt: req.GetFailAt()}))
	}
	return h.proceed(op, s, c, place.Resume, req.GetTo(), start, send)
}

// suspend starts a suspend, as swap does; it needs no target. If the state is written to
// a file, it is written with the owner's rights.
func (h *Host) suspend(req *gpuctlv1.HostSuspendRequest, owner *gpuctlv1.FileOwner, send emit) error {
	if f := req.GetFile(); f != "" && !strings.HasPrefix(f, "/") {
		return fmt.Errorf("%w: file %q: the path must be absolute", errInvalid, f)
	}
	file, dir := req.GetFile(), req.GetFolder()
	if dir != "" {
		if err := checkFolder(dir, owner); err != nil {
			return err
		}
		if file != "" {
			return fmt.Errorf("%w: name a file or a folder, not both", errInvalid)
		}
		file = dir
	}
	op, s, c, err := h.begin(req.GetSession(), "suspend")
	if err != nil {
		return err
	}
	if dir != "" && s.GetEngine() != driverEngine {
		err := notWithProcess(s)
		h.note(op, &gpuctlv1.SwapResult{Session: s, Refused: true, Error: err.Error()})
		h.end(op, c)
		return err
	}
	h.mu.Lock()
	op.Into = dir
	h.save()
	h.mu.Unlock()
	start := func(ctx context.Context) (progressStream, error) {
		return h.Guest.Suspend(ctx, connect.NewRequest(&gpuctlv1.SuspendRequest{
			Session: s.GetId(), File: file, WithProcess: dir != "", FreezeTimeoutMs: req.GetFreezeTimeoutMs(), TimeoutMs: req.GetTimeoutMs(), FailAt: req.GetFailAt(), Owner: owner,
		}))
	}
	h.work.Go(func() { h.stay(op, s, c, start, send) })
	return nil
}

// stay runs an operation that needs no target.
func (h *Host) stay(op *operation, s *gpuctlv1.Session, c *claim, start func(context.Context) (progressStream, error), send emit) {
	about := &gpuctlv1.OperationUpdate{Session: s.GetId()}
	stream, err := start(h.ctx)
	var result *gpuctlv1.SwapResult
	if err == nil {
		result, err = h.relay(op, stream, about, send)
	}
	switch {
	case err != nil:
		result = h.doubtful(op, err)
	case result.GetHeld():
		h.doubt(op)
	case result.GetRefused():
		about.Rejected = []*gpuctlv1.Candidate{{Gpu: s.GetTarget().GetGpu(), Model: s.GetTarget().GetModel(), Reasons: result.GetReasons()}}
	case result.GetError() == "" && !result.GetRolledBack():
		h.commit(op, c, result.GetSession())
	}
	about.Progress = &gpuctlv1.Progress{Result: result}
	h.note(op, result)
	h.end(op, c)
	send(about)
}

// planSwap returns what swap would do. It reserves nothing.
func (h *Host) planSwap(ctx context.Context, req *gpuctlv1.HostPlanRequest, caller *gpuctlv1.FileOwner) (*gpuctlv1.HostPlanResponse, error) {
	if dir := cmp.Or(req.GetFrom(), req.GetFolder()); dir != "" {
		if err := checkFolder(dir, caller); err != nil {
			return nil, err
		}
	}
	if req.GetFrom() != "" {
		return h.planResumeFrom(ctx, req)
	}
	h.mu.Lock()
	s, err := h.find(req.GetSession())
	var c *claim
	if err == nil {
		c = h.claims[s.GetClaim()]
	}
	h.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if c == nil {
		return nil, fmt.Errorf("session %s: %w: its claim is not known", s.GetId(), errNotFound)
	}
	switch {
	case req.GetFolder() != "":
		return h.planStore(ctx, s, req.GetFolder())
	case req.GetRehearse():
		return h.planRehearsal(ctx, s)
	}
	to, out, err := h.destinations(ctx, s, c, verbs()[req.GetVerb()], req.GetTo())
	if err != nil {
		return nil, err
	}
	res := &gpuctlv1.HostPlanResponse{Session: s.GetId(), From: splitIDs(s.GetTarget().GetGpu()), Rejected: out}
	for _, p := range to {
		h.mu.Lock()
		amount, busy := h.room(c, p)
		h.mu.Unlock()
		plan, err := h.plan(ctx, &gpuctlv1.PlanRequest{Session: s.GetId(), Target: p.example(amount), Build: req.GetBuild() && busy == nil && !p.far()})
		if err != nil {
			if connect.CodeOf(err) == connect.CodeUnavailable {
				return nil, err
			}
			plan = &gpuctlv1.PlanResponse{Reasons: []*gpuctlv1.Reason{because("plan", "%v", plain(err))}}
		}
		reasons := plan.GetReasons()
		if busy != nil { // gpuguest's reasons are added to this one
			reasons = slices.Concat(busy.GetReasons(), reasons)
		}
		if len(reasons) > 0 {
			res.Rejected = append(res.Rejected, rejected(p[0], reasons...))
			continue
		}
		if res.Gpus == nil {
			res.Gpus, res.Model = p.ids(), p[0].GetModel()
			res.Steps, res.Bytes = plan.GetSteps(), plan.GetBytes()
			res.PredictedNs, res.PredictedStopNs = plan.GetPredictedNs(), plan.GetPredictedStopNs()
			res.Total, res.Stop = plan.GetTotal(), plan.GetStop()
			h.price(ctx, s, p, plan, res)
			break
		}
	}
	return res, nil
}
