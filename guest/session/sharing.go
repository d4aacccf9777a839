package session

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/turn"
)

const (
	joinTimeout = 2 * time.Second
	joinEvery   = time.Second // how often it is tried to give an executor its seats
)

// sharing gives the executors that serve sessions their seats at the arbiters of their GPUs. It
// compares what is with what should be whenever a session changes. So it needs to know
// nothing of operations, and a gpuguest that takes sessions over begins with empty books.
type sharing struct {
	m    *Manager
	cfg  turn.Config
	bell chan struct{}

	mu      sync.Mutex // taken after a session's lock
	gpus    map[string]*turn.Arbiter
	places  map[*executor]*place
	reports []turn.Report        // to be dealt with
	lent    map[string]*executor // of other hosts' sessions, by id; run's alone
}

// place is an executor's seats, one for each of its GPUs.
type place struct {
	seats []*turn.Seat
	tried time.Time
	said  string // why it has none, as it was logged
}

func newSharing(m *Manager, c turn.Config) *sharing {
	s := &sharing{m: m, cfg: c, bell: make(chan struct{}, 1), gpus: map[string]*turn.Arbiter{}, places: map[*executor]*place{}}
	s.cfg.Log = m.log
	s.cfg.Report = func(r turn.Report) {
		s.mu.Lock()
		s.reports = append(s.reports, r)
		s.mu.Unlock()
		s.ring()
	}
	return s
}

// ring makes run look again.
func (h *sharing) ring() {
	select {
	case h.bell <- struct{}{}:
	default:
	}
}

// run keeps the seats as they should be, until ctx ends. Then everybody is free.
func (h *sharing) run(ctx context.Context) {
	t := time.NewTicker(joinEvery)
	defer t.Stop()
	for ctx.Err() == nil {
		h.match(ctx)
		h.judge()
		select {
		case <-ctx.Done():
		case <-h.bell:
		case <-t.C:
		}
	}
	h.mu.Lock()
	gpus := slices.Collect(maps.Values(h.gpus))
	h.mu.Unlock()
	for _, a := range gpus {
		a.Close()
	}
}

// Sharer is an executor that is no session's here, and has the same GPUs: it serves a session
// of another host.
type Sharer struct {
	ID      string // of its lease: the other host has chosen it
	Owner   string // whose share it uses
	GPUs    []string
	Process Process
	Socket  string // control socket of its first generation; that for turns is beside it
	Log     *slog.Logger
}

// lentPrefix begins the name of a sharer at an arbiter, so that it is no session's.
const lentPrefix = "lease "

// sitter is who is to have seats.
type sitter struct {
	turn.Member
	gpus []string
	log  *slog.Logger
}

// sitters returns who is to have seats: executors that serve sessions, and those of other
// hosts' sessions.
func (h *sharing) sitters() map[*executor]sitter {
	want := map[*executor]sitter{}
	for _, s := range h.m.list() {
		s.mu.Lock()
		if e := s.current; e != nil && !s.ending && !e.dead() {
			x := sitter{turn.Member{Session: s.id, Owner: s.rec.Owner, Weight: int(s.rec.Weight)}, strings.Split(e.target.GetGpu(), ","), s.log}
			if x.Owner == "" {
				x.Owner = "claim:" + s.rec.Claim // of an older gpuguest
			}
			want[e] = x
		}
		s.mu.Unlock()
	}
	if h.m.cfg.Lender == nil {
		return want
	}
	lent := map[string]*executor{}
	for _, o := range h.m.cfg.Lender.Sharers() {
		e := h.lent[o.ID]
		if e == nil || e.proc != o.Process {
			e = newExecutor(1, nil, o.Process, o.Socket, "")
		}
		lent[o.ID] = e
		if !e.dead() && len(o.GPUs) > 0 {
			want[e] = sitter{turn.Member{Session: lentPrefix + o.ID, Owner: o.Owner}, o.GPUs, o.Log}
		}
	}
	h.lent = lent
	return want
}

// match gives seats to executors that serve sessions, and takes them from others.
func (h *sharing) match(ctx context.Context) {
	want := h.sitters()
	var leave []*turn.Seat
	join := map[*executor]*place{}
	h.mu.Lock()
	for e, p := range h.places {
		_, wanted := want[e]
		if !wanted || slices.ContainsFunc(p.seats, (*turn.Seat).Gone) {
			leave = append(leave, p.seats...)
			p.seats = nil
		}
		if !wanted {
			delete(h.places, e)
		}
	}
	for e := range want {
		p := h.places[e]
		if p == nil {
			p = &place{}
			h.places[e] = p
		}
		if p.seats == nil && time.Since(p.tried) >= joinEvery {
			p.tried = time.Now()
			join[e] = p
		}
	}
	h.mu.Unlock()
	for _, s := range leave {
		s.Leave() // not under the lock: it may report something
	}
	var wg sync.WaitGroup
	for e, p := range join {
		wg.Go(func() { h.join(ctx, want[e], e, p) })
	}
	wg.Wait()
}

// join gives an executor its seats. Without them it launches as it likes.
func (h *sharing) join(ctx context.Context, x sitter, e *executor, p *place) {
	ctx, cancel := e.bound(ctx, joinTimeout)
	defer cancel()
	m := x.Member
	if m.Weight == 0 {
		m.Weight = turn.DefaultWeight
	}
	var seats []*turn.Seat
	var failed error
	for i, gpu := range x.gpus {
		conn, err := e.dial(ctx, e.turnSocket)
		if err == nil {
			var a *turn.Arbiter
			if a, err = h.arbiter(gpu); err != nil {
				conn.Close()
			} else {
				var seat *turn.Seat
				if seat, err = a.Join(m, i, conn); err == nil {
					seats = append(seats, seat)
				}
			}
		}
		if err != nil {
			failed = err
			break
		}
	}
	if failed != nil {
		for _, seat := range seats {
			seat.Leave()
		}
		if text := failed.Error(); text != p.said && !e.dead() {
			p.said = text
			x.log.Info("the session's executor takes no turns on its GPU", "err", failed)
		}
		return
	}
	h.mu.Lock()
	p.seats, p.said = seats, ""
	h.mu.Unlock()
}

func (h *sharing) arbiter(gpu string) (*turn.Arbiter, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if a := h.gpus[gpu]; a != nil {
		return a, nil
	}
	a, err := turn.New(gpu, h.cfg)
	if err == nil {
		h.gpus[gpu] = a
	}
	return a, err
}

// judge deals with what arbiters have reported.
func (h *sharing) judge() {
	h.mu.Lock()
	todo := h.reports
	h.reports = nil
	h.mu.Unlock()
	for _, r := range todo {
		if lease, ok := strings.CutPrefix(r.Session, lentPrefix); ok {
			h.judgeLent(lease, r)
			continue
		}
		s, err := h.m.lookup(r.Session)
		if err != nil {
			continue // it has ended
		}
		switch r.Event {
		case turn.Overdue:
			text := fmt.Sprintf("%s has had GPU %s for %v while %d wait: they go on beside it", command(r.Name), r.GPU, r.For.Round(time.Millisecond), r.Waiting)
			s.log.Warn("a command keeps the GPU", "gpu", r.GPU, "owner", r.Owner, "kernel", r.Name, "for", r.For, "waiting", r.Waiting)
			s.remark(text)
		case turn.Ended:
			s.remark("")
		case turn.Endless:
			s.expel(fmt.Sprintf("%s has had GPU %s for %v while others wait", command(r.Name), r.GPU, r.For.Round(time.Second)))
		case turn.Breach:
			s.expel(fmt.Sprintf("its executor's requests for GPU %s make no sense: %v", r.GPU, r.Err))
		case turn.Gone: // its executor ends, or a new connection is made
		}
	}
}

// judgeLent deals with what an arbiter has reported of an executor of another host's session.
// It is ended where a session would be; its lease ends with it.
func (h *sharing) judgeLent(lease string, r turn.Report) {
	e := h.lent[lease]
	if e == nil {
		return // it has ended
	}
	log := h.m.log.With("lease", lease, "gpu", r.GPU, "owner", r.Owner)
	switch r.Event {
	case turn.Overdue:
		log.Warn("a command of another host's session keeps the GPU", "kernel", r.Name, "for", r.For, "waiting", r.Waiting)
	case turn.Endless:
		log.Error("a lease is ended for the sake of others", "kernel", r.Name, "for", r.For)
		e.proc.Kill()
	case turn.Breach:
		log.Error("a lease is ended: its executor's requests make no sense", "err", r.Err)
		e.proc.Kill()
	case turn.Ended, turn.Gone:
	}
}

func command(name string) string {
	if name == "" {
		return "a command"
	}
	return "command " + name
}

// remark tells of something in the state of a session that runs.
func (s *session) remark(text string) {
	s.mu.Lock()
	runs := s.state == gpuctlv1.SessionState_SESSION_STATE_RUNNING
	if runs {
		s.message = text
	}
	s.mu.Unlock()
	if runs {
		s.m.changed(s)
	}
}

// expel ends a session that keeps its GPU from others. During an operation only the executor
// is killed: the operation decides what that means.
func (s *session) expel(why string) {
	s.mu.Lock()
	e, op := s.current, s.op
	if op == nil {
		s.message = why
	}
	s.mu.Unlock()
	s.log.Error("session is ended for the sake of others", "why", why)
	switch {
	case op == nil:
		go s.lose(why) // a driver may delay the end of its process
	case e != nil:
		e.proc.Kill() // without waiting for its end, for the same reason: others are to get their turns
	}
}

// shareOf returns what an executor's session has had of its GPUs; nil: it has no seats.
func (h *sharing) shareOf(e *executor) *gpuctlv1.Share {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.places[e]
	if p == nil || len(p.seats) == 0 {
		return nil
	}
	sum := &gpuctlv1.Share{}
	for _, seat := range p.seats {
		u := seat.Use()
		sum.Shared = sum.Shared || u.Shared
		sum.Waiting = sum.Waiting || u.Waiting
		sum.Turns += u.Turns
		sum.Lapses += u.Lapses
		sum.BusyNs += u.Busy.Nanoseconds()
		sum.WaitedNs += u.Waited.Nanoseconds()
		sum.OverrunNs += u.Overrun.Nanoseconds()
		if u.Keeps > 0 {
			sum.Keeps, sum.KeepsNs = u.Name, u.Keeps.Nanoseconds()
		}
	}
	return sum
}

// turnSocket returns the socket for turns, in the folder of the socket of the same
// generation.
func turnSocket(socket string, gen uint32) string {
	return filepath.Join(filepath.Dir(socket), fmt.Sprintf("t%d", gen))
}
