package sessions

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	place "github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/hostd/sessions/ledger"
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// checkFolder checks who names a folder for a session with its processes, and how. gpuguest
// reads and writes it as root, so nobody else may name one.
func checkFolder(dir string, caller *gpuctlv1.FileOwner) error {
	switch {
	case caller == nil || caller.GetUid() != 0:
		return reason.Detail(reason.Errorf(reason.Denied, "folder %q: only root of this host may have processes written to a folder, or made again from one", dir)).On("folder", dir).Do("ask as root, on the host itself")
	case !filepath.IsAbs(dir) || filepath.Clean(dir) != dir:
		return fmt.Errorf("%w: folder %q: the path must be absolute, without .. and doubled slashes", errInvalid, dir)
	}
	return nil
}

// planRequest is a plan of gpuguest's: of a session, or of the one in a folder.
func planRequest(s *gpuctlv1.Session, folder string, target *gpuctlv1.Target) *gpuctlv1.PlanRequest {
	if folder != "" {
		return &gpuctlv1.PlanRequest{Folder: folder, Target: target}
	}
	return &gpuctlv1.PlanRequest{Session: s.GetId(), Target: target}
}

// inFolder asks gpuguest which session is in a folder. The folder is not changed.
func (h *Host) inFolder(ctx context.Context, dir string) (*gpuctlv1.Session, error) {
	plan, err := h.plan(ctx, &gpuctlv1.PlanRequest{Folder: dir})
	if err != nil {
		return nil, fmt.Errorf("folder %s: %w", dir, err)
	}
	s := plan.GetSession()
	if s.GetId() == "" || len(s.GetDriver().GetGpus()) == 0 || len(s.GetDriver().GetGpus()) > maxClaimGPUs {
		return nil, fmt.Errorf("folder %s: %w: its session has %d GPUs", dir, errInvalid, len(s.GetDriver().GetGpus()))
	}
	s = proto.CloneOf(s)
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, unknown := h.byUUID(s.GetDriver().GetGpus()); len(unknown) > 0 { // it was on another host
		s.Target.Gpu = ""
		return s, nil
	}
	return h.withNames(s), nil
}

// folderClaim makes the claim that a session of a folder gets. It is not the host's yet.
func folderClaim(s *gpuctlv1.Session) *claim {
	return &claim{ID: "c-" + random.Hex(4), Count: len(s.GetDriver().GetGpus()), Engine: driverEngine, Created: time.Now().UnixMilli()}
}

// resumeFrom makes the processes of a folder again, with a claim of their own: it has GPUs
// before anything is made, and lasts as long as the first of the processes.
func (h *Host) resumeFrom(req *gpuctlv1.HostResumeRequest, caller *gpuctlv1.FileOwner, send emit) error {
	dir := req.GetFolder()
	if err := checkFolder(dir, caller); err != nil {
		return err
	}
	if req.GetSession() != "" {
		return fmt.Errorf("%w: name a session or a folder, not both", errInvalid)
	}
	s, err := h.inFolder(h.ctx, dir)
	if err != nil {
		return err
	}
	c := folderClaim(s)
	op := &operation{Session: s.GetId(), Claim: c.ID, Kind: "resume", Folder: dir}
	h.mu.Lock()
	switch {
	case h.sessions[s.GetId()] != nil:
		err = fmt.Errorf("session %s: %w: it is here, and in %s", s.GetId(), errBusy, dir)
	case h.ops[s.GetId()] != nil:
		err = fmt.Errorf("session %s: %w: a %s is in progress", s.GetId(), errBusy, h.ops[s.GetId()].Kind)
	case len(h.claims) >= maxClaims:
		err = fmt.Errorf("%w: %d claims exist already", errBusy, maxClaims)
	default:
		h.claims[c.ID] = c
		h.register(op, s)
	}
	h.mu.Unlock()
	if err != nil {
		return err
	}
	start := func(ctx context.Context, t *gpuctlv1.Target) (progressStream, error) {
		return h.Guest.Resume(ctx, connect.NewRequest(&gpuctlv1.ResumeRequest{Folder: dir, Claim: c.ID, Target: t, TimeoutMs: req.GetTimeoutMs(), FailAt: req.GetFailAt()}))
	}
	return h.proceed(op, s, c, place.Resume, req.GetTo(), start, send)
}

// revived enters the session that was made from a folder, and gives its claim the process
// with which it ends. The caller holds h.mu.
func (h *Host) revived(op *operation, c *claim, s *gpuctlv1.Session) {
	op.made = true
	if h.sessions[s.GetId()] == nil {
		h.sessions[s.GetId()] = &session{h.withNames(s), time.Now()}
		h.changes.Put(s.GetId(), h.sessions[s.GetId()].Session)
	}
	var err error
	if c.Holder, err = newHolder(h.proc, int(s.GetPid())); err != nil {
		c.Released = true // it has ended already
	}
}

// unmade ends the claim of a session that was not made from its folder, and of which
// gpuguest knows nothing. The caller holds h.mu.
func (op *operation) unmade(c *claim) {
	if op.Folder != "" && !op.made {
		c.Released = true
	}
}

// forget ends operations in doubt of sessions that gpuguest does not have, as a list says
// that was asked for then. The caller holds h.mu.
func (h *Host) forget(listed map[string]bool, asked time.Time) {
	for id, op := range h.ops {
		if !op.doubt || listed[id] || h.sessions[id] != nil || !op.since.Before(asked) {
			continue
		}
		delete(h.ops, id)
		h.conclude(op, nil)
		if c := h.claims[op.Claim]; c != nil {
			op.unmade(c)
			h.settle(c)
		}
	}
}

// planStore returns what a suspend of a session to a folder would do, and what is against it.
func (h *Host) planStore(ctx context.Context, s *gpuctlv1.Session, dir string) (*gpuctlv1.HostPlanResponse, error) {
	if s.GetEngine() != driverEngine {
		return nil, notWithProcess(s)
	}
	return h.planStay(ctx, s, &gpuctlv1.PlanRequest{Session: s.GetId(), Folder: dir})
}

func notWithProcess(s *gpuctlv1.Session) error {
	return reason.Detail(fmt.Errorf("session %s: %w: only processes that use CUDA are written to a folder", s.GetId(), errInvalid)).On("session", s.GetId()).Do("gpuctl suspend %s --file FILE keeps its state, and the program waits", s.GetId())
}

// planResumeFrom returns what a resume from a folder would do. It reserves nothing.
func (h *Host) planResumeFrom(ctx context.Context, req *gpuctlv1.HostPlanRequest) (*gpuctlv1.HostPlanResponse, error) {
	s, err := h.inFolder(ctx, req.GetFrom())
	if err != nil {
		return nil, err
	}
	c := folderClaim(s)
	to, out, err := h.destinations(ctx, s, c, place.Resume, req.GetTo())
	if err != nil {
		return nil, err
	}
	var from []string
	for _, g := range s.GetDriver().GetGpus() {
		from = append(from, g.GetUuid())
	}
	if s.GetTarget().GetGpu() != "" {
		from = splitIDs(s.GetTarget().GetGpu())
	}
	res := &gpuctlv1.HostPlanResponse{Session: s.GetId(), From: from, Rejected: out}
	for _, p := range to {
		h.mu.Lock()
		_, busy := h.room(c, p)
		h.mu.Unlock()
		plan, err := h.plan(ctx, planRequest(s, req.GetFrom(), p.example(ledger.Whole)))
		if err != nil {
			return nil, fmt.Errorf("folder %s: %w", req.GetFrom(), err)
		}
		if reasons := append(busy.GetReasons(), plan.GetReasons()...); len(reasons) > 0 {
			res.Rejected = append(res.Rejected, rejected(p[0], reasons...))
			continue
		}
		res.Gpus, res.Model, res.Steps, res.Bytes = p.ids(), p[0].GetModel(), plan.GetSteps(), plan.GetBytes()
		res.PredictedNs, res.PredictedStopNs, res.Total, res.Stop = plan.GetPredictedNs(), plan.GetPredictedStopNs(), plan.GetTotal(), plan.GetStop()
		break
	}
	return res, nil
}

// planStay returns what an operation would do that needs no target.
func (h *Host) planStay(ctx context.Context, s *gpuctlv1.Session, req *gpuctlv1.PlanRequest) (*gpuctlv1.HostPlanResponse, error) {
	plan, err := h.plan(ctx, req)
	if err != nil {
		return nil, fmt.Errorf("session %s: %w", s.GetId(), err)
	}
	res := &gpuctlv1.HostPlanResponse{
		Session: s.GetId(), From: splitIDs(s.GetTarget().GetGpu()), Model: s.GetTarget().GetModel(), Steps: plan.GetSteps(), Bytes: plan.GetBytes(),
		PredictedNs: plan.GetPredictedNs(), PredictedStopNs: plan.GetPredictedStopNs(), Total: plan.GetTotal(), Stop: plan.GetStop(),
	}
	if len(plan.GetReasons()) > 0 {
		res.Rejected = []*gpuctlv1.Candidate{{Gpu: s.GetTarget().GetGpu(), Model: s.GetTarget().GetModel(), Reasons: plan.GetReasons()}}
		return res, nil
	}
	res.Gpus = res.From
	return res, nil
}
