package sessions

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/sessions/ledger"
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/size"
)

// newRequest makes a request of gpuguest's API.
func newRequest[T any](m *T) *connect.Request[T] { return connect.NewRequest(m) }

// adoptProcesses makes sessions of running processes that use CUDA. Each session gets a
// claim that has the GPUs which its processes use, before gpuguest makes the session: what
// uses a GPU has it in the ledger. caller is the user who asks; nil: an operator elsewhere.
func (h *Host) adoptProcesses(ctx context.Context, req *gpuctlv1.HostAdoptRequest, caller *gpuctlv1.FileOwner) (*gpuctlv1.HostAdoptResponse, error) {
	if (req.GetPid() == 0) != req.GetAll() {
		return nil, fmt.Errorf("%w: name a process, or all", errInvalid)
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	seen, err := h.Guest.Adopt(ctx, newRequest(&gpuctlv1.AdoptRequest{Pid: req.GetPid(), All: req.GetAll(), Look: true}))
	if err != nil {
		return nil, fmt.Errorf("look at what runs: %w", err)
	}
	res := &gpuctlv1.HostAdoptResponse{Refused: seen.Msg.GetRefused()}
	for _, s := range seen.Msg.GetSessions() {
		s, reasons, err := h.adoptOne(ctx, s, req.GetPlan(), caller)
		if err != nil {
			return nil, err
		}
		if len(reasons) > 0 {
			res.Refused = append(res.Refused, &gpuctlv1.AdoptRefusal{Pid: s.GetPid(), Command: s.GetCommand(), Reasons: reasons})
			continue
		}
		res.Sessions = append(res.Sessions, s)
	}
	return res, nil
}

// adoptOne adopts the processes that gpuguest has described, unless plan is set. It returns
// the session, or the reasons against it.
func (h *Host) adoptOne(ctx context.Context, s *gpuctlv1.Session, plan bool, caller *gpuctlv1.FileOwner) (*gpuctlv1.Session, []*gpuctlv1.Reason, error) {
	h.mu.Lock()
	s = h.withNames(s)
	h.mu.Unlock()
	if s.GetId() != "" {
		return s, nil, nil // it is one already
	}
	if reasons := h.foreign(s, caller); len(reasons) > 0 {
		return s, reasons, nil
	}
	held, err := newHolder(h.proc, int(s.GetPid()))
	if err != nil {
		return s, []*gpuctlv1.Reason{because("ended", "it has ended")}, nil
	}
	c, p, reasons := h.claimFor(s, held, plan)
	if plan || len(reasons) > 0 {
		return s, reasons, nil
	}
	if err := h.Cluster.Acquire(ctx, c.forCluster(nil), p.ids(), ledger.Whole); err != nil {
		h.release(h.ctx, c)
		return s, []*gpuctlv1.Reason{because("busy", "%v", err)}, nil
	}
	res, err := h.Guest.Adopt(ctx, newRequest(&gpuctlv1.AdoptRequest{
		Pid: s.GetPid(), Claims: map[uint32]*gpuctlv1.AdoptClaim{s.GetPid(): {Claim: c.ID, Target: p.target(ledger.Whole), Only: startsOf(s, held)}},
	}))
	switch {
	case err != nil && refusedCall(err):
		h.release(h.ctx, c)
		return s, []*gpuctlv1.Reason{because("adopt", "%v", plain(err))}, nil
	case err != nil:
		// The session may exist. The claim stays as long as the process runs, and the next
		// adoption of it uses it.
		return nil, nil, fmt.Errorf("adopt process %d: %w", s.GetPid(), err)
	}
	for _, r := range res.Msg.GetRefused() {
		reasons = append(reasons, r.GetReasons()...)
	}
	i := slices.IndexFunc(res.Msg.GetSessions(), func(made *gpuctlv1.Session) bool { return made.GetClaim() == c.ID })
	if i < 0 {
		h.release(h.ctx, c)
		if len(reasons) == 0 {
			reasons = []*gpuctlv1.Reason{because("ended", "it has changed meanwhile; try again")}
		}
		return s, reasons, nil
	}
	if err := h.Resync(ctx); err != nil {
		h.Log.Warn("sessions are as last seen", "err", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	made := h.withNames(res.Msg.GetSessions()[i])
	h.Log.Info("process adopted", "session", made.GetId(), "claim", c.ID, "pid", made.GetPid(), "gpu", made.GetTarget().GetGpu())
	return proto.CloneOf(made), nil, nil
}

// startsOf returns which processes the session may have: those that were looked at, whose
// users are known. Their pids may be others' soon.
func startsOf(s *gpuctlv1.Session, held holder) map[uint32]uint64 {
	only := map[uint32]uint64{uint32(held.PID): held.Start}
	for _, p := range s.GetDriver().GetProcesses() {
		only[p.GetPid()] = p.GetStart()
	}
	return only
}

// refusedCall reports whether gpuguest has answered that it does nothing.
func refusedCall(err error) bool {
	switch connect.CodeOf(err) {
	case connect.CodeNotFound, connect.CodeInvalidArgument, connect.CodeFailedPrecondition, connect.CodeUnimplemented:
		return true
	default:
		return false
	}
}

// claimFor reserves the GPUs that a session's processes use for a claim of its own, which
// lasts as long as the first of them. With plan, or if there are reasons against it, nothing
// is changed.
func (h *Host) claimFor(s *gpuctlv1.Session, held holder, plan bool) (*claim, placement, []*gpuctlv1.Reason) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p, unknown := h.byUUID(s.GetDriver().GetGpus())
	var reasons []*gpuctlv1.Reason
	for _, g := range unknown {
		reasons = append(reasons, because("gpu", "it uses GPU %s, which gpuctl can't give to anybody: it is unknown or partitioned", g.GetUuid()))
	}
	if len(p)+len(unknown) == 0 {
		reasons = append(reasons, because("gpu", "it uses no GPU"))
	}
	ids := p.ids()
	// An adoption whose end is not known has left its claim.
	for _, c := range h.claims {
		if c.Holder == held && c.Token == "" && !c.Released && slices.Equal(c.GPUs, ids) {
			return c, p, reasons
		}
	}
	for _, g := range p {
		if _, free := h.ledger.Room("", g.GetId()); !free {
			reasons = append(reasons, because("busy", "its GPU %s is held by claim %s", g.GetId(), strings.Join(ownerNames(h.ledger, g.GetId(), ""), ", ")))
		}
	}
	if len(h.claims) >= maxClaims {
		reasons = append(reasons, because("busy", "%d claims exist already", maxClaims))
	}
	if len(reasons) > 0 || plan {
		return nil, p, reasons
	}
	c := &claim{ID: "c-" + random.Hex(4), Count: len(p), GPUs: ids, Engine: driverEngine, Holder: held, Created: time.Now().UnixMilli()}
	if err := h.ledger.Reserve(c.ID, ids, ledger.Whole); err != nil {
		return nil, p, []*gpuctlv1.Reason{because("busy", "%v", err)}
	}
	h.claims[c.ID] = c
	h.save()
	return c, p, nil
}

// foreign returns why the caller may not adopt the processes: they are another user's.
func (h *Host) foreign(s *gpuctlv1.Session, caller *gpuctlv1.FileOwner) []*gpuctlv1.Reason {
	if caller == nil || caller.GetUid() == 0 {
		return nil
	}
	var reasons []*gpuctlv1.Reason
	for _, p := range s.GetDriver().GetProcesses() {
		uid, err := userOf(h.proc, int(p.GetPid()))
		// After the user: then both are of the same process.
		now := holder{int(p.GetPid()), p.GetStart()}
		switch {
		case err != nil || !now.alive(h.proc):
			reasons = append(reasons, because("ended", "process %d has ended", p.GetPid()))
		case uid != caller.GetUid():
			reasons = append(reasons, because("user", "process %d is of user %d; ask as that user, or as root", p.GetPid(), uid))
		}
	}
	return reasons
}

// userOf returns the real user of a process (proc_pid_status(5)).
func userOf(proc fs.FS, pid int) (uint32, error) {
	data, err := fs.ReadFile(proc, strconv.Itoa(pid)+"/status")
	if err != nil {
		return 0, fmt.Errorf("process %d: %w", pid, err)
	}
	for line := range strings.Lines(string(data[:min(len(data), 64*size.KiB)])) {
		rest, ok := strings.CutPrefix(line, "Uid:")
		if fields := strings.Fields(rest); ok && len(fields) > 0 {
			uid, err := strconv.ParseUint(fields[0], 10, 32)
			if err != nil {
				return 0, fmt.Errorf("process %d: user: %w", pid, err)
			}
			return uint32(uid), nil
		}
	}
	return 0, fmt.Errorf("process %d: %w", pid, errors.New("its status names no user"))
}
