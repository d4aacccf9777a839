package scheduler

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// ErrContended means that other claims took the chosen GPUs in every attempt. A later
// attempt may succeed.
var ErrContended = reason.New(reason.Contended, "the GPUs were taken by others meanwhile")

const (
	tries      = 24
	candidates = 8 // concurrent claims are spread over that many candidates
	pace       = 50 * time.Millisecond
	perClaim   = 10 * time.Second // time limit for binding one waiting claim
)

// Log is the part of the replicated log that a scheduler needs.
type Log interface {
	Apply(ctx context.Context, c *clusterv1.Command) (*clusterv1.Result, error)
	Read(ctx context.Context, stale bool) (*state.View, error)
	State() *state.Store
}

type proposer interface {
	Apply(ctx context.Context, c *clusterv1.Command) (*clusterv1.Result, error)
}

// Lead is one term of leadership. Commands that are proposed after its end must be
// refused: the next leader may have bound the same claim already, and an assignment is
// added to those that a claim has.
type Lead interface {
	proposer
	View() *state.View
}

// Scheduler binds claims. It is safe for concurrent use.
type Scheduler struct {
	log   Log
	index *placement.Index
	out   *slog.Logger

	mu   sync.Mutex
	busy int // placements in progress; all of them would choose the same GPU
}

// New returns a scheduler for a log.
func New(log Log, out *slog.Logger) *Scheduler {
	return &Scheduler{log: log, index: placement.NewIndex(log.State().View()), out: out}
}

// Place answers a request from the state that is applied on this host.
func (s *Scheduler) Place(v *state.View, r placement.Request) placement.Decision {
	s.index.Update(v)
	return placement.Place(s.index, r)
}

// Outcome is the result of binding a claim.
type Outcome struct {
	Claim       *clusterv1.Claim // nil: refused
	Assignments []*clusterv1.Assignment
	Decision    placement.Decision // why the claim was refused or waits
}

// Create makes a claim and binds it. If it cannot be bound and may wait, it stays
// pending. If a claim with the same id and needs exists, it is returned. actor is the
// caller, and host the caller's host. Errors may wrap ErrContended.
func (s *Scheduler) Create(ctx context.Context, c *clusterv1.Claim, actor, host string) (Outcome, error) {
	if old := s.log.State().View().Claim(c.GetId()); old != nil {
		// The state machine decides whether the needs are the same.
		return s.put(ctx, c, nil, actor)
	}
	o, err := s.bindFirst(ctx, placement.Request{Claim: c, Host: host}, c.GetUnmet() == clusterv1.Unmet_UNMET_WAIT, func(choices []*clusterv1.Choice) (Outcome, error) {
		return s.put(ctx, c, choices, actor)
	})
	if err == nil && o.Claim == nil && s.log.State().View().Claim(c.GetId()) != nil {
		// Another call has made the same claim meanwhile. The GPUs that were missing
		// are its own.
		return s.put(ctx, c, nil, actor)
	}
	return o, err
}

// Assign adds to a claim the GPUs that a request finds. Errors may wrap ErrContended.
func (s *Scheduler) Assign(ctx context.Context, r placement.Request, actor string) (Outcome, error) {
	return s.bind(ctx, r, false, func(choices []*clusterv1.Choice) (Outcome, error) {
		return s.assign(ctx, s.log, r.Claim.GetId(), choices, actor)
	})
}

func (s *Scheduler) assign(ctx context.Context, to proposer, claim string, choices []*clusterv1.Choice, actor string) (Outcome, error) {
	return s.propose(ctx, to, &clusterv1.Command{Actor: actor, Op: &clusterv1.Command_Assign{
		Assign: &clusterv1.Assign{Claim: claim, Choices: choices},
	}})
}

// takenError is the state machine's message that a choice does not fit any more.
type takenError string

func (e takenError) Error() string { return string(e) }

// bind finds choices and commits them. If they have been taken meanwhile, it tries again.
func (s *Scheduler) bind(ctx context.Context, r placement.Request, waits bool, commit func([]*clusterv1.Choice) (Outcome, error)) (Outcome, error) {
	turn := s.enter()
	defer s.leave()
	view := s.log.State().View()
	fresh := false
	var last string
	r.Context = ctx
	for try := range tries {
		r.Limit = candidates
		d := s.Place(view, r)
		if d.Err != nil {
			return Outcome{}, d.Err
		}
		if !d.OK() {
			if !fresh {
				// This host's state may be behind, so read again before the claim is
				// refused.
				var err error
				if view, err = s.log.Read(ctx, false); err != nil {
					return Outcome{}, err
				}
				fresh = true
				continue
			}
			if waits {
				o, err := commit(nil)
				o.Decision = d
				return o, err
			}
			return Outcome{Decision: d}, nil
		}
		n := min(len(d.Candidates), 1+turn+try)
		pick := d.Candidates[(turn+try)%n]
		o, err := commit(pick.New())
		var taken takenError
		if err == nil || !errors.As(err, &taken) {
			o.Decision = d
			return o, err
		}
		last = string(taken)
		if view, err = s.log.Read(ctx, false); err != nil {
			return Outcome{}, err
		}
		fresh = true
	}
	return Outcome{}, fmt.Errorf("claim %s: %w (%s)", r.Claim.GetId(), ErrContended, last)
}

// bindFirst binds a claim where it can first be placed: see placement.Tries. The decision
// of a refusal is about all of the hosts that were tried.
func (s *Scheduler) bindFirst(ctx context.Context, r placement.Request, waits bool, commit func([]*clusterv1.Choice) (Outcome, error)) (Outcome, error) {
	tries := placement.Tries(r.Claim, s.log.State().View().Queue())
	for i, where := range tries {
		last := i == len(tries)-1
		r.Where = where
		o, err := s.bind(ctx, r, waits && last, commit)
		if err != nil || o.Claim != nil {
			return o, err
		}
		if last {
			if len(tries) > 1 {
				r.Where, r.Context = placement.Anywhere, ctx
				o.Decision = s.Place(s.log.State().View(), r)
			}
			return o, nil
		}
	}
	return Outcome{}, nil
}

func (s *Scheduler) enter() (turn int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy++
	return s.busy - 1
}

func (s *Scheduler) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy--
}

func (s *Scheduler) put(ctx context.Context, c *clusterv1.Claim, choices []*clusterv1.Choice, actor string) (Outcome, error) {
	return s.propose(ctx, s.log, &clusterv1.Command{Actor: actor, Op: &clusterv1.Command_PutClaim{
		PutClaim: &clusterv1.PutClaim{Claim: c, Choices: choices},
	}})
}

func (s *Scheduler) propose(ctx context.Context, to proposer, c *clusterv1.Command) (Outcome, error) {
	res, err := to.Apply(ctx, c)
	if err != nil {
		return Outcome{}, err
	}
	switch res.GetOutcome() {
	case clusterv1.Outcome_OUTCOME_OK:
		return Outcome{Claim: res.GetClaim(), Assignments: res.GetAssignments()}, nil
	case clusterv1.Outcome_OUTCOME_NO_CAPACITY:
		return Outcome{}, takenError(res.GetMessage())
	}
	return Outcome{}, &Error{res}
}

// Error is a result of the state machine that is not OK.
type Error struct{ Result *clusterv1.Result }

func (e *Error) Error() string { return e.Result.GetMessage() }

// Reason returns why the state machine refused the command.
func (e *Error) Reason() reason.Reason {
	code := reason.Refused
	switch e.Result.GetOutcome() {
	case clusterv1.Outcome_OUTCOME_INVALID:
		code = reason.Invalid
	case clusterv1.Outcome_OUTCOME_NOT_FOUND:
		code = reason.NotFound
	case clusterv1.Outcome_OUTCOME_ALREADY_EXISTS:
		code = reason.Exists
	case clusterv1.Outcome_OUTCOME_NO_CAPACITY:
		code = reason.NoCapacity
	case clusterv1.Outcome_OUTCOME_STALE:
		code = reason.Stale
	case clusterv1.Outcome_OUTCOME_REFUSED, clusterv1.Outcome_OUTCOME_OK, clusterv1.Outcome_OUTCOME_UNSPECIFIED:
	}
	return reason.Reason{Code: code}
}

// Check returns an *Error for a result that is not OK.
func Check(res *clusterv1.Result, err error) (*clusterv1.Result, error) {
	if err == nil && res.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
		err = &Error{res}
	}
	return res, err
}

// Run binds pending claims until ctx ends. Only the leader runs it.
func (s *Scheduler) Run(ctx context.Context, l Lead) {
	for ctx.Err() == nil {
		v := l.View()
		changed := v.Changed(clusterv1.Kind_KIND_CLAIM, clusterv1.Kind_KIND_GPU, clusterv1.Kind_KIND_HOST, clusterv1.Kind_KIND_ASSIGNMENT)
		for _, c := range pending(v) {
			if ctx.Err() != nil {
				return
			}
			s.retry(ctx, l, v, c)
		}
		select {
		case <-ctx.Done():
		case <-changed:
			// Several changes in a short time cause only one pass.
			select {
			case <-ctx.Done():
			case <-time.After(pace):
			}
		}
	}
}

// Waits reports whether a pending claim waits for the leader to bind it. If a host manages it
// and it was bound before, that host has given the GPU back, as for a session that is
// suspended. It asks for one when it needs one again, and would at once give back what the
// leader binds meanwhile.
func Waits(c *clusterv1.Claim) bool {
	managed := c.GetLabels()[placement.LabelManagedBy] != ""
	return c.GetUnmet() == clusterv1.Unmet_UNMET_WAIT && (!managed || !state.WasBound(c))
}

// pending returns the claims that wait, the oldest first, by the time at which their
// hosts' clocks say they were made. That time decides only about the order.
func pending(v *state.View) []*clusterv1.Claim {
	var out []*clusterv1.Claim
	for c := range v.PendingClaims() {
		if Waits(c) {
			out = append(out, c)
		}
	}
	slices.SortStableFunc(out, func(a, b *clusterv1.Claim) int {
		return int(min(max(a.GetCreatedUnixMs()-b.GetCreatedUnixMs(), -1), 1))
	})
	return out
}

func (s *Scheduler) retry(ctx context.Context, l Lead, v *state.View, c *clusterv1.Claim) {
	// One claim must not delay all others.
	ctx, cancel := context.WithTimeout(ctx, perClaim)
	defer cancel()
	r := placement.Request{Claim: c, Limit: 1, Context: ctx, Host: c.GetHome()}
	if !slices.ContainsFunc(placement.Tries(c, v.Queue()), func(w placement.Where) bool {
		r.Where = w
		return s.Place(v, r).OK()
	}) {
		return
	}
	o, err := s.bind(ctx, r, false, func(choices []*clusterv1.Choice) (Outcome, error) {
		if now := l.View().Claim(c.GetId()); now.GetState() != clusterv1.ClaimState_CLAIM_STATE_PENDING {
			return Outcome{}, nil
		}
		return s.assign(ctx, l, c.GetId(), choices, "scheduler")
	})
	switch {
	case err != nil && ctx.Err() == nil:
		s.out.Debug("pending claim not bound", "claim", c.GetId(), "err", err)
	case o.Claim != nil:
		s.out.Info("pending claim bound", "claim", c.GetId())
	}
}
