package cuda

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/cuda/ask"
	"github.com/gpuctl/gpuctl/guest/engine"
	"github.com/gpuctl/gpuctl/guest/service"
	"github.com/gpuctl/gpuctl/internal/wait"
)

var _ service.Folders = (*Manager)(nil)

const (
	mostOffers = 1 << 20        // bytes of offers.json
	tokenName  = "GPUCTL_TOKEN" //nolint:gosec // a name in the environment of processes that gpuctl run starts
	// lookEvery is how often offered processes are looked for, and usage is read at most.
	lookEvery = time.Second
	// lookRest is how many times as long as a look at all processes the pause after it is at least:
	// with thousands of processes, or on a slow machine, it must not take a processor.
	lookRest = 10
)

// Has reports whether the session is this engine's.
func (m *Manager) Has(session string) bool { return strings.HasPrefix(session, idPrefix) }

// List returns the sessions, oldest first.
func (m *Manager) List(ctx context.Context) []*gpuctlv1.Session {
	m.usage(ctx)
	var out []*gpuctlv1.Session
	for _, s := range m.list() {
		out = append(out, s.snapshot())
	}
	return out
}

// answerTime is how long a list of sessions waits for the driver to say what they have.
const answerTime = 500 * time.Millisecond

// usage brings up to date what running sessions have, at most once a second. The driver may take
// long, as for a GPU that hangs under somebody's program. Whoever wants to know of sessions must not
// wait for that: what is known is good enough. A look that is late serves later lists.
func (m *Manager) usage(ctx context.Context) {
	looked, late := m.beginLook()
	if looked == nil || late {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	select {
	case <-looked:
	case <-ctx.Done():
	}
}

// beginLook has the driver asked what sessions have, if it is not being asked. looked is closed when
// it has answered; nil: it is not asked. late is whether it took long the last time.
func (m *Manager) beginLook() (looked <-chan struct{}, late bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.looking != nil:
		return m.looking, m.late
	case len(m.sessions) == 0 || time.Since(m.seenAt) < lookEvery || m.ctx.Err() != nil:
		return nil, false
	}
	still := map[*session]int{}
	for _, s := range m.sessions {
		if n, ok := s.stays(); ok {
			still[s] = n
		}
	}
	began, done := time.Now(), make(chan struct{})
	m.looking = done
	go func() { // Close does not wait for a driver that hangs
		defer close(done)
		a, err := m.devices()
		if err != nil {
			m.log.Debug("read usage", "err", err)
		} else {
			for s, n := range still {
				s.used(&machine{Answer: a}, n)
			}
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		m.looking, m.late = nil, time.Since(began) >= answerTime
		m.seenAt = time.Now()
	}()
	return done, m.late
}

// devices asks what is on the GPUs, until the manager is closed.
func (m *Manager) devices() (*ask.Answer, error) {
	w, err := m.ask.Start(ask.Devices, 0)
	if err != nil {
		return nil, err
	}
	defer context.AfterFunc(m.ctx, w.End)() // it changes nothing
	return w.Ask(ask.Request{}, m.cfg.Deadlines.Look)
}

// stays reports whether a session runs and no operation changes where it is, and how many have begun.
func (s *session) stays() (begun int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.begun, s.op == nil && s.state == gpuctlv1.SessionState_SESSION_STATE_RUNNING
}

// used brings up to date what a running session has, unless an operation has begun since the driver
// was asked: it is elsewhere now. Its members are replaced, since a plan may be looking at them.
func (s *session) used(c *machine, begun int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.op != nil || s.begun != begun || s.state != gpuctlv1.SessionState_SESSION_STATE_RUNNING {
		return
	}
	members := make([]*member, len(s.rec.Members))
	for i, mb := range s.rec.Members {
		next := *mb
		if us, used := c.uses(mb.PID); len(us) > 0 {
			next.Uses, next.Used = us, used
		}
		members[i] = &next
	}
	s.rec.Members, s.rec.GPUs = members, gpusOf(c, members, s.rec.GPUs)
}

// Watch implements service.Engine.
func (m *Manager) Watch(ctx context.Context, send func(*gpuctlv1.Session) error) error {
	list := func(context.Context) []*session { return m.list() }
	return engine.Watched[*session]{Changes: &m.changes, List: list, Snapshot: (*session).snapshot, Ended: m.ctx.Done()}.Watch(ctx, send)
}

// Lost returns the sessions that were lost, also those whose processes have ended since.
func (m *Manager) Lost() []*gpuctlv1.LostSession { return m.losses.All() }

// Serves reports whether a target has GPUs of NVIDIA's driver.
func (m *Manager) Serves(target *gpuctlv1.Target) bool {
	if len(target.GetDriver()) == 0 || len(target.GetDriver()) > ask.MostGPUs {
		return false
	}
	for _, g := range target.GetDriver() {
		if _, err := ask.UUID(g.GetUuid()).Bytes(); err != nil {
			return false
		}
	}
	return true
}

// GPUs returns the GPUs that the driver shows and the engine can use, and their memory in
// bytes. Without a driver there are none.
func (m *Manager) GPUs(ctx context.Context) (gpus []*gpuctlv1.DriverGPU, memory []uint64, err error) {
	a, err := m.ask.Call(ctx, ask.Request{Op: ask.Devices}, m.cfg.Deadlines.Look)
	if errors.Is(err, ask.ErrNoDriver) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	for _, g := range a.GPUs {
		if g.MIG || g.Lost || g.Slice {
			continue
		}
		gpus = append(gpus, &gpuctlv1.DriverGPU{Uuid: string(g.UUID), PciAddress: g.Address, PciDevice: g.Chip, Model: g.Name})
		memory = append(memory, g.Total)
	}
	return gpus, memory, nil
}

// Offer has processes with the token in their environment become sessions of the offer's
// claim when they begin to use CUDA.
func (m *Manager) Offer(_ context.Context, o *gpuctlv1.OfferRequest) error {
	return m.changeOffers(func(all engine.Offers) { all[o.GetToken()] = o })
}

// Withdraw removes an offer. Sessions stay.
func (m *Manager) Withdraw(_ context.Context, token string) error {
	m.mu.Lock()
	_, has := m.offers[token]
	m.mu.Unlock()
	if !has {
		return nil
	}
	return m.changeOffers(func(all engine.Offers) { delete(all, token) })
}

func (m *Manager) changeOffers(change func(engine.Offers)) (err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.offers, err = m.offers.Change(m.cfg.Dir, change)
	return err
}

func (m *Manager) loadOffers() (err error) {
	m.offers, err = engine.ReadOffers(m.cfg.Dir, mostOffers)
	return err
}

// adoptOffered looks for processes with an offer's token, and for those that have joined the job of
// a session, as long as there are offers or sessions.
func (m *Manager) adoptOffered() {
	for pause := lookEvery; wait.For(m.ctx, pause) == nil; {
		m.mu.Lock()
		n := len(m.offers) + len(m.sessions)
		m.mu.Unlock()
		if n == 0 {
			pause = lookEvery
			continue
		}
		began := time.Now()
		found, err := m.findOffered()
		pause = max(lookEvery, lookRest*time.Since(began))
		if err != nil {
			m.log.Debug("look for offered processes", "err", err)
		}
		for _, o := range found {
			m.adoptAside(o)
		}
	}
}

// offered is a process with an offer's token, or what belongs to a session.
type offered struct {
	pid int
	uid uint32
	by  *gpuctlv1.OfferRequest
	to  *joining
}

// turn is what a job is adopted by. An offer may be for all users, as that of a VM is.
type turn struct {
	token string // or a session
	uid   uint32
}

// findOffered returns a process of each job of which one has an offer's token, and what belongs to
// sessions. The environment that a process was started with does not change.
func (m *Manager) findOffered() (found []offered, err error) {
	l, err := m.cfg.Roots.Take(false)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	m.strangers.forget(now)
	for _, j := range l.Jobs() {
		s, others := m.parts(j)
		if s != nil {
			others = m.strangers.due(others, now)
		}
		to := &joining{s: s, root: j.Root}
		for _, h := range others {
			token := m.cfg.Roots.Variable(h.PID, tokenName) // without the lock, as it may take long
			m.mu.Lock()
			o := m.offers[token]
			m.mu.Unlock()
			switch {
			case s != nil && m.joins(s, o):
				to.new = append(to.new, h)
			case o != nil:
				found = append(found, offered{pid: h.PID, uid: h.UID, by: o})
			}
			if o != nil && s == nil {
				break // it stands for its job
			}
		}
		if len(to.new) > 0 {
			found = append(found, offered{to: to})
		}
	}
	return found, nil
}

// adoptAside adopts an offered process while others are looked for. Its user can end or stop the
// helpers that ask for it, and nobody else may wait for that. Of one offer and user, one job at a time.
func (m *Manager) adoptAside(o offered) {
	m.mu.Lock()
	defer m.mu.Unlock()
	key := turn{o.by.GetToken(), o.uid}
	if o.to != nil {
		key.token = o.to.s.id // no token is one
	}
	if m.aside[key] {
		return
	}
	m.aside[key] = true
	m.wg.Go(func() {
		if err := m.adoptOffer(m.ctx, o); err != nil {
			m.log.Debug("adopt an offered process", "pid", o.pid, "err", err)
		}
		m.mu.Lock()
		delete(m.aside, key)
		m.mu.Unlock()
	})
}

func (m *Manager) adoptOffer(ctx context.Context, o offered) error {
	if o.to != nil {
		return m.grow(ctx, o.to)
	}
	resp, err := m.adopt(ctx, &gpuctlv1.AdoptRequest{Pid: uint32(o.pid)}, o.by)
	for _, r := range resp.GetRefused() {
		m.log.Debug("an offered process is no session yet", "pid", r.GetPid(), "reasons", r.GetReasons())
	}
	return err
}

// Folders implements service.Folders.
func (m *Manager) Folders() {}

// Plan checks, and touches nothing.
func (m *Manager) Plan(ctx context.Context, req *gpuctlv1.PlanRequest) (*gpuctlv1.PlanResponse, error) {
	if req.GetFolder() != "" {
		return m.planFolder(ctx, req)
	}
	s, err := m.lookup(req.GetSession())
	if err != nil {
		return nil, err
	}
	kind := kindSwap
	s.mu.Lock()
	switch {
	case s.rec.SuspendedTo != "":
		kind = kindResume
	case req.GetRehearse():
		kind = kindRehearse
	case len(req.GetTarget().GetDriver()) == 0:
		kind = kindSuspend
	}
	s.mu.Unlock()
	c, err := m.look(ctx)
	if err != nil {
		return nil, noDriver(err)
	}
	_, rs := s.assess(c, kind, req.GetTarget())
	if kind != kindResume {
		more, err := m.planMembers(ctx, c, s)
		if err != nil {
			return nil, err
		}
		rs = append(rs, more...)
	}
	return s.planned(kind, rs), nil
}

// planMembers asks the driver for the state of each process of the session's job.
func (m *Manager) planMembers(ctx context.Context, c *machine, s *session) (rs reasons, err error) {
	job := s.job(c.look)
	if job == nil {
		rs.add(ReasonGone, "the session's processes use no GPU any more")
		return rs, nil
	}
	_, rs, err = m.members(ctx, c, job)
	return rs, err
}

// planned is the answer to a plan.
func (s *session) planned(kind string, rs reasons) *gpuctlv1.PlanResponse {
	resp := &gpuctlv1.PlanResponse{}
	resp.Reasons = rs
	for _, st := range (&operation{s: s}).stepsOf(kind) {
		resp.Steps = append(resp.Steps, st.Name)
	}
	for _, mb := range s.members() {
		resp.Bytes += mb.bytes()
	}
	resp.Stop = predict(kind, resp.GetBytes())
	resp.PredictedStopNs = (resp.Stop.LowNs + resp.Stop.HighNs) / 2
	resp.Total = &gpuctlv1.Prediction{LowNs: resp.Stop.LowNs + time.Second.Nanoseconds(), HighNs: resp.Stop.HighNs + 4*time.Second.Nanoseconds()}
	resp.PredictedNs = (resp.Total.LowNs + resp.Total.HighNs) / 2
	return resp
}

// predict estimates how long the processes stop, from what was measured on H100 and H200
// cards: 0.3 s, and 1.5 to 2.5 GB/s out, 5 to 8 GB/s in.
func predict(kind string, bytes uint64) *gpuctlv1.Prediction {
	p := &gpuctlv1.Prediction{}
	add := func(low, high float64) {
		p.LowNs += int64(0.1e9 + float64(bytes)/high)
		p.HighNs += int64(0.5e9 + float64(bytes)/low)
	}
	if kind != kindResume && kind != kindRevive {
		add(1.5, 2.5)
	}
	if kind != kindSuspend && kind != kindStore {
		add(5, 8)
	}
	return p
}

// Swap moves a session to other GPUs, or rehearses that.
func (m *Manager) Swap(ctx context.Context, req *gpuctlv1.SwapRequest, sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
	kind, target := kindSwap, req.GetTarget()
	if req.GetRehearse() {
		kind, target = kindRehearse, nil
	}
	return m.operate(ctx, req.GetSession(), kind, target, req.GetFreezeTimeoutMs(), req.GetFailAt(), sink)
}

// Suspend takes a session's state off its GPUs. It stays in the memory of its processes.
func (m *Manager) Suspend(ctx context.Context, req *gpuctlv1.SuspendRequest, sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
	switch {
	case req.GetWithProcess() && req.GetFile() != "" && req.GetAway() == "":
		return m.Store(ctx, req.GetSession(), req.GetFile(), req.GetFreezeTimeoutMs(), req.GetFailAt(), sink)
	case req.GetAway() != "":
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("session %s: the driver keeps states in the memory of the processes; they can't be kept on the host", req.GetSession()))
	case req.GetFile() != "":
		return nil, connect.NewError(connect.CodeUnimplemented, fmt.Errorf("session %s: the driver keeps states in the memory of the processes; a file needs the processes, too", req.GetSession()))
	}
	return m.operate(ctx, req.GetSession(), kindSuspend, nil, req.GetFreezeTimeoutMs(), req.GetFailAt(), sink)
}

// Resume gives a session GPUs again: the target's, or those that it had.
func (m *Manager) Resume(ctx context.Context, req *gpuctlv1.ResumeRequest, sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
	if req.GetFolder() != "" {
		return m.revive(ctx, req.GetFolder(), req.GetClaim(), req.GetTarget(), req.GetFailAt(), sink)
	}
	return m.operate(ctx, req.GetSession(), kindResume, req.GetTarget(), 0, req.GetFailAt(), sink)
}

func (m *Manager) operate(ctx context.Context, id, kind string, target *gpuctlv1.Target, lockMS int64, failAt string, sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
	s, err := m.lookup(id)
	if err != nil {
		return nil, err
	}
	if sink == nil {
		sink = func(*gpuctlv1.Progress) {}
	}
	op, err := s.begin(ctx, kind, target, lockMS, failAt, sink)
	if err != nil {
		return nil, err
	}
	return op.run(), nil
}
