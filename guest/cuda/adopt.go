package cuda

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/cuda/ask"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
	"github.com/gpuctl/gpuctl/guest/service"
)

var _ service.Adopter = (*Manager)(nil)

// Adopt makes sessions of jobs that run. Nothing of them is touched.
func (m *Manager) Adopt(ctx context.Context, req *gpuctlv1.AdoptRequest) (*gpuctlv1.AdoptResponse, error) {
	return m.adopt(ctx, req, nil)
}

// adopt does the same by an offer, if that is not nil.
func (m *Manager) adopt(ctx context.Context, req *gpuctlv1.AdoptRequest, by *gpuctlv1.OfferRequest) (*gpuctlv1.AdoptResponse, error) {
	resp := &gpuctlv1.AdoptResponse{}
	pid := int(req.GetPid())
	refuse := func(pid int, command string, rs reasons) {
		resp.Refused = append(resp.Refused, &gpuctlv1.AdoptRefusal{Pid: uint32(pid), Command: command, Reasons: rs})
	}
	if !req.GetAll() {
		if rs := m.checkProcess(pid); len(rs) > 0 {
			refuse(pid, "", rs)
			return resp, nil
		}
		p, err := holders.Pin(pid, 0)
		switch {
		case errors.Is(err, holders.ErrGone):
			var rs reasons
			rs.add(ReasonGone, "there is no process %d", pid)
			refuse(pid, "", rs)
			return resp, nil
		case err != nil:
			return nil, err
		}
		p.Close()
		if s := m.sessionOf(pid, p.Start); s != nil { // one that is suspended has no GPU open
			resp.Sessions = append(resp.Sessions, s.snapshot())
			return resp, nil
		}
	}
	c, err := m.look(ctx)
	if errors.Is(err, ask.ErrNoDriver) && req.GetAll() {
		return resp, nil // nothing here uses CUDA
	}
	if errors.Is(err, ask.ErrNoDriver) {
		var rs reasons
		rs.add(ReasonDriver, "%v", err)
		refuse(pid, "", rs)
		return resp, nil
	}
	if err != nil {
		return nil, noDriver(err)
	}
	var jobs []*holders.Job
	if req.GetAll() {
		jobs = c.look.Jobs()
	} else if j := c.look.JobOf(pid); j != nil {
		jobs = append(jobs, j)
	}
	found := false
	for i, a := range m.adoptJobs(ctx, c, jobs, req, by) {
		j, rs := jobs[i], a.rs
		switch {
		case a.err != nil && req.GetAll() && ctx.Err() == nil:
			// Its user can end its helpers, and must not keep others' jobs from being adopted.
			rs.add(ReasonState, "%v", a.err)
			refuse(j.Root.PID, j.Holders[0].Command, rs)
		case a.err != nil:
			return nil, a.err
		case a.s != nil:
			resp.Sessions = append(resp.Sessions, a.s)
		case slices.ContainsFunc(rs, func(r *gpuctlv1.Reason) bool { return r.Code == ReasonNoCUDA }) && req.GetAll():
			continue // a service that looks after GPUs
		default:
			refuse(j.Root.PID, j.Holders[0].Command, rs)
		}
		found = true
	}
	if !found && !req.GetAll() {
		var rs reasons
		rs.add(ReasonNoCUDA, "pid %d and its children have no GPU of NVIDIA's driver open", pid)
		if p := c.look.Processes[pid]; p == nil {
			rs = nil
			rs.add(ReasonGone, "pid %d has ended", pid)
		}
		refuse(pid, "", rs)
	}
	return resp, nil
}

// adopted is what has become of a job.
type adopted struct {
	s   *gpuctlv1.Session
	rs  reasons
	err error
}

// atOnce is how many jobs of a user are adopted at a time.
const atOnce = 4

// adoptJobs makes sessions of jobs. If they are all that there are, some users may stop the helpers that ask for
// their processes: others' do not wait for these, and the caller gets an answer in time.
func (m *Manager) adoptJobs(ctx context.Context, c *machine, jobs []*holders.Job, req *gpuctlv1.AdoptRequest, by *gpuctlv1.OfferRequest) []adopted {
	if end, ok := ctx.Deadline(); ok && req.GetAll() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, end.Add(-time.Until(end)/4))
		defer cancel()
	}
	turns := map[uint32]chan struct{}{}
	answers := make([]chan adopted, len(jobs))
	for i, j := range jobs {
		turn := turns[j.Holders[0].UID]
		if turn == nil {
			turn = make(chan struct{}, atOnce)
			turns[j.Holders[0].UID] = turn
		}
		answer := make(chan adopted, 1)
		answers[i] = answer
		go func() { // a helper that is stopped is waited for for longer than the caller waits
			select {
			case turn <- struct{}{}:
				defer func() { <-turn }()
			case <-ctx.Done():
				return
			}
			var a adopted
			a.s, a.rs, a.err = m.adoptJob(ctx, c, j, req, by)
			answer <- a
		}()
	}
	out := make([]adopted, len(jobs))
	for i, answer := range answers {
		select {
		case out[i] = <-answer:
		case <-ctx.Done():
			select {
			case out[i] = <-answer:
			default:
				out[i].err = fmt.Errorf("the driver has not said its state yet: %w", ctx.Err())
			}
		}
	}
	return out
}

// checkProcess checks the pid that was named.
func (m *Manager) checkProcess(pid int) reasons {
	var rs reasons
	st, err := m.cfg.Roots.Status(pid)
	switch {
	case pid <= 1 || errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH):
		rs.add(ReasonGone, "there is no process %d", pid)
		return rs
	case err != nil:
		rs.add(ReasonGone, "pid %d: %v", pid, err)
		return rs
	case st.Leader != pid:
		rs.add(ReasonThread, "%d is a thread of process %d; name the process", pid, st.Leader)
		return rs
	}
	return rs
}

// checkOwner checks that gpuguest may move a process, and that the driver can be asked.
func (m *Manager) checkOwner(rs *reasons, pid int) {
	if st, err := m.cfg.Roots.Status(pid); err == nil && m.cfg.UID != 0 {
		for _, uid := range st.UIDs {
			if uid != m.cfg.UID {
				rs.add(ReasonForeign, "pid %d is user %d's, and gpuguest runs as user %d: it can move its own user's processes only", pid, uid, m.cfg.UID)
				break
			}
		}
	}
	if same, err := m.cfg.Roots.SameNamespace(pid); err == nil && !same {
		rs.add(ReasonNamespace, "pid %d has pids of another namespace, as in a container; the driver takes pids of its own namespace only: run gpuguest in there", pid)
	}
}

// adoptJob makes a session of a job, or returns the one that it is.
func (m *Manager) adoptJob(ctx context.Context, c *machine, j *holders.Job, req *gpuctlv1.AdoptRequest, by *gpuctlv1.OfferRequest) (*gpuctlv1.Session, reasons, error) {
	for _, h := range j.Holders {
		if s := m.sessionOf(h.PID, h.Start); s != nil {
			return s.snapshot(), nil, nil
		}
	}
	var rs reasons
	for _, h := range j.Holders {
		m.checkOwner(&rs, h.PID)
	}
	if len(rs) > 0 {
		return nil, rs, nil
	}
	members, rs, err := m.members(ctx, c, j)
	if err != nil || len(rs) > 0 {
		return nil, rs, err
	}
	if c.CUDA < 12080 {
		rs.add(ReasonDriver, "the driver %s is of CUDA %d.%d; suspending processes needs 12.8, which is driver 570", c.Driver, c.CUDA/1000, c.CUDA%1000/10)
		return nil, rs, nil
	}
	s := &session{m: m, log: m.log, state: gpuctlv1.SessionState_SESSION_STATE_RUNNING}
	s.rec = record{
		Version: recordVersion, PID: j.Root.PID, Start: j.Root.Start, Command: m.cfg.Roots.Command(j.Root.PID), StartedMS: time.Now().UnixMilli(),
		Driver: c.Driver, Members: members, GPUs: gpusOf(c, members, nil), Generation: 1,
	}
	claim := claimOf(req, append([]int{j.Root.PID}, pids(members)...))
	if by != nil { // who has the token may not use CUDA itself
		claim = &gpuctlv1.AdoptClaim{Claim: by.GetClaim(), Target: by.GetTarget()}
	}
	checkOnly(&rs, claim.GetOnly(), j.Root, members)
	if len(rs) > 0 {
		return nil, rs, nil
	}
	s.rec.Claim = claim.GetClaim()
	if t := claim.GetTarget(); t != nil {
		s.rec.Target = marshal(t)
	}
	if req.GetLook() {
		return s.snapshot(), nil, nil
	}
	m.adopting.Lock() // two calls must not make two sessions of one process
	defer m.adopting.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, nil, err // who asked for it has an answer
	}
	for _, h := range j.Holders { // another call may have been faster
		if s := m.sessionOf(h.PID, h.Start); s != nil {
			return s.snapshot(), nil, nil
		}
	}
	if err := m.add(s, by); err != nil {
		return nil, nil, err
	}
	return s.snapshot(), nil, nil
}

// claimOf returns the claim of the first of these processes that has one, or nil.
func claimOf(req *gpuctlv1.AdoptRequest, pids []int) *gpuctlv1.AdoptClaim {
	for _, pid := range pids {
		if claim := req.GetClaims()[uint32(pid)]; claim != nil {
			return claim
		}
	}
	return nil
}

// checkOnly checks that a job has no process that its claim was not made for: somebody else's
// may have got the pid of one that has ended.
func checkOnly(rs *reasons, only map[uint32]uint64, root *holders.Process, members []*member) {
	if len(only) == 0 {
		return
	}
	if only[uint32(root.PID)] != root.Start {
		rs.add(ReasonGone, "pid %d is another process than that which was to be adopted; try again", root.PID)
	}
	for _, mb := range members {
		if mb.PID != root.PID && only[uint32(mb.PID)] != mb.Start {
			rs.add(ReasonGone, "pid %d has begun to use CUDA since the job was looked at; try again", mb.PID)
		}
	}
}

func pids(members []*member) []int {
	var ps []int
	for _, mb := range members {
		ps = append(ps, mb.PID)
	}
	return ps
}

// members asks the driver which holders of a job use CUDA. All that do must run.
func (m *Manager) members(ctx context.Context, c *machine, j *holders.Job) ([]*member, reasons, error) {
	type answer struct {
		a   *ask.Answer
		err error
	}
	answers := make([]answer, len(j.Holders))
	turn := make(chan struct{}, mostReady)
	var wg sync.WaitGroup
	for i, h := range j.Holders {
		wg.Go(func() {
			turn <- struct{}{}
			defer func() { <-turn }()
			a, err := m.ask.Call(ctx, ask.Request{Op: ask.GetState, PID: h.PID, Start: h.Start}, m.cfg.Deadlines.State)
			answers[i] = answer{a, err}
		})
	}
	wg.Wait()
	var members []*member
	var rs reasons
	var said []string
	for i, h := range j.Holders {
		a, err := answers[i].a, answers[i].err
		var refused *ask.DriverError
		switch {
		case errors.As(err, &refused) && refused.NoCUDA():
			said = append(said, fmt.Sprintf("pid %d: %s", h.PID, refused.Name))
			continue // a child that was forked, or one that only asks for temperatures
		case errors.Is(err, ask.ErrGone):
			continue
		case errors.Is(err, ask.ErrNoDriver):
			rs.add(ReasonDriver, "%v", err)
			return nil, rs, nil
		case errors.Is(err, ask.ErrDeadline):
			rs.add(ReasonState, "pid %d: %v; another process of its job may be locked", h.PID, err)
			continue
		case err != nil:
			return nil, nil, fmt.Errorf("ask for the state of pid %d: %w", h.PID, err)
		case a.State != ask.Running:
			rs.add(ReasonState, "pid %d (%s) is %s for the driver, and must be running: something else suspends it", h.PID, h.Command, a.State)
		}
		uses, used := c.uses(h.PID)
		members = append(members, &member{
			PID: h.PID, Parent: h.Parent, Start: h.Start, Command: h.Command, Uses: uses, Used: used, state: a.State,
		})
	}
	for _, h := range j.Holders {
		if len(members) == 0 && len(rs) == 0 && m.cfg.Roots.Loads(h.PID, "libnvidia-opencl.so") {
			rs.add(ReasonNoCUDA, "pid %d (%s) uses OpenCL on NVIDIA's own platform, which the driver does not suspend: start it with gpuctl run, so that the engine portable serves it", h.PID, h.Command)
		}
	}
	if len(members) == 0 && len(rs) == 0 {
		rs.add(ReasonNoCUDA, "pid %d and its children do not use CUDA: the driver knows none of them (%s)", j.Root.PID, strings.Join(said, ", "))
	}
	if len(members) > mostMembers {
		rs.add(ReasonState, "the job has %d processes that use CUDA; at most %d", len(members), mostMembers)
	}
	return members, rs, nil
}

// noDriver makes an error of a look one of the API.
func noDriver(err error) error {
	if errors.Is(err, ask.ErrNoDriver) {
		return connect.NewError(connect.CodeFailedPrecondition, err)
	}
	return err
}
