package replica

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"strings"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// The state keeps the results of the last 4096 commands. A command whose outcome is
// unknown is not sent again after this many entries of the leader's log.
const horizon = 3000

// Apply proposes a command and returns the state machine's result. If the leader changes,
// it tries again until ctx ends. A result that is not OK is not an error. The result is
// shared and must not be changed. Errors wrap those of this package.
func (s *Store) Apply(ctx context.Context, cmd *clusterv1.Command) (*clusterv1.Result, error) {
	c := s.stamp(cmd)
	rs, err := s.submit(ctx, []*clusterv1.Command{c})
	if err != nil {
		return nil, fmt.Errorf("command %s: %w", c.GetId(), err)
	}
	return rs[0], nil
}

// stamp sets the fields that each command must have. All attempts use the same.
func (s *Store) stamp(cmd *clusterv1.Command) *clusterv1.Command {
	c := proto.CloneOf(cmd)
	c.Id = or(c.GetId(), rand.Text())
	c.Version = or(c.GetVersion(), state.VersionOf(c))
	c.UnixMs = or(c.GetUnixMs(), s.cfg.Clock.Wall().UnixMilli())
	return c
}

// attempt is the outcome of one attempt.
type attempt struct {
	results []*clusterv1.Result
	err     error
	maybe   bool // the command may have been proposed
	final   bool // another attempt would fail in the same way
}

func (s *Store) submit(ctx context.Context, cmds []*clusterv1.Command) ([]*clusterv1.Result, error) {
	began, maybe, hint := s.fsm.index(), false, ""
	for wait := 2 * time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		if err := s.alive(); err != nil {
			return nil, fate(err, maybe)
		}
		a := s.tryAgain(ctx, cmds, s.leaderOr(hint), maybe, began)
		if a.err == nil {
			return a.results, nil
		}
		maybe, hint = maybe || a.maybe, ""
		var other *NotLeaderError
		if errors.As(a.err, &other) {
			hint = other.Leader
		}
		if a.final {
			return nil, fate(a.err, maybe)
		}
		select {
		case <-ctx.Done():
			if !maybe {
				return nil, fmt.Errorf("%w: %w (%w)", ErrNoLeader, a.err, ctx.Err())
			}
			return nil, fmt.Errorf("%w (%w)", fate(a.err, maybe), ctx.Err())
		case <-time.After(wait):
		}
	}
}

// errForgotten means that the state may not know any more that it has applied a command.
var errForgotten = errors.New("too much was applied since it was sent first")

// tryAgain makes one attempt. maybe is whether an earlier one may have proposed the commands, at
// the entry began or later. This host may be far behind then, so the leader is asked how far the
// log has come since.
func (s *Store) tryAgain(ctx context.Context, cmds []*clusterv1.Command, address string, maybe bool, began uint64) attempt {
	if maybe {
		index, err := s.come(ctx, address)
		if err != nil {
			return attempt{err: err}
		}
		if index > began+horizon {
			return attempt{err: errForgotten, final: true}
		}
	}
	return s.try(ctx, cmds, address)
}

// come returns how far the log has come, as the leader at an address says.
func (s *Store) come(ctx context.Context, address string) (uint64, error) {
	if s.IsLeader() {
		return s.ReadIndex(ctx)
	}
	if address == "" || address == s.cfg.Address || s.cfg.Peers == nil {
		return 0, ErrNoLeader
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timing.RPC)
	defer cancel()
	return s.cfg.Peers.ReadIndex(ctx, address)
}

// fate returns the error of a command that fails. If the command may have been proposed
// in any attempt, the error must not be ErrNoLeader, even if the last attempt found no
// leader: that error means that nothing was done.
func fate(err error, maybe bool) error {
	switch {
	case !maybe:
		return err
	case errors.Is(err, ErrNoLeader), errors.Is(err, ErrNotLeader):
		return fmt.Errorf("%w: %s", ErrTimeout, err.Error())
	case errors.Is(err, ErrTimeout):
		return err
	}
	return fmt.Errorf("%w: %w", ErrTimeout, err)
}

// alive returns why this node does nothing any more, or nil.
func (s *Store) alive() error {
	if err := s.fsm.err(); err != nil {
		return err
	}
	if s.ctx.Err() != nil {
		return ErrClosed
	}
	return nil
}

// leaderOr returns the address of the leader. If none is known, it returns hint, which
// another host has reported. If this node's disk has failed, the node follows nobody, so
// it asks any member.
func (s *Store) leaderOr(hint string) string {
	a, _ := s.raft.LeaderWithID()
	if string(a) == s.cfg.Address {
		a = ""
	}
	if a != "" || hint != "" || s.guard.health() == nil && !s.stalled() {
		return or(string(a), hint)
	}
	var all []string
	for _, x := range s.servers() {
		if x.ID != raft.ServerID(s.cfg.ID) {
			all = append(all, string(x.Address))
		}
	}
	if len(all) == 0 {
		return ""
	}
	return all[mathrand.IntN(len(all))] //nolint:gosec // any will do
}

func (s *Store) try(ctx context.Context, cmds []*clusterv1.Command, address string) attempt {
	if s.IsLeader() {
		return s.propose(ctx, cmds)
	}
	if address == "" {
		if err := s.member(); err != nil {
			return attempt{err: err, final: true}
		}
		return attempt{err: ErrNoLeader}
	}
	if address == s.cfg.Address || s.cfg.Peers == nil {
		return attempt{err: ErrNoLeader} // this node has just lost or gained the leadership
	}
	return s.forward(ctx, cmds, address, func() string {
		a, _ := s.raft.LeaderWithID()
		return string(a)
	})
}

// forward makes one attempt through the leader at an address. The leader has a time limit
// for proposing, and this host has one for the answer.
func (s *Store) forward(ctx context.Context, cmds []*clusterv1.Command, address string, leader func() string) attempt {
	ctx, cancel := WhileLeading(ctx, leader, address, 2*s.cfg.Timing.RPC)
	defer cancel()
	rs, err := s.cfg.Peers.Apply(ctx, address, cmds)
	switch {
	case err == nil && len(rs) == len(cmds):
		return attempt{results: rs}
	case err == nil:
		return attempt{err: fmt.Errorf("leader %s: %d results for %d commands", address, len(rs), len(cmds)), maybe: true}
	}
	return attempt{
		err:   fmt.Errorf("leader %s: %w", address, err),
		maybe: !errors.Is(err, ErrNotLeader) && !errors.Is(err, ErrNoLeader) && !errors.Is(err, ErrProtocol) && !reason.Unsent(err),
		final: errors.Is(err, ErrProtocol),
	}
}

// ApplyLocal proposes commands that another host has forwarded. If this node is not the
// leader, it returns a *NotLeaderError. Each command must have an id.
func (s *Store) ApplyLocal(ctx context.Context, cmds []*clusterv1.Command) ([]*clusterv1.Result, error) {
	for i, c := range cmds {
		if c.GetId() == "" || c.GetVersion() == 0 || c.GetOp() == nil {
			return nil, fmt.Errorf("command %d of %d: without id, version or operation", i+1, len(cmds))
		}
	}
	if err := s.alive(); err != nil {
		return nil, err
	}
	a := s.propose(ctx, cmds)
	if a.err != nil {
		return nil, fate(a.err, a.maybe)
	}
	return a.results, nil
}

func (s *Store) notLeader() error {
	address, _ := s.raft.LeaderWithID()
	if string(address) == s.cfg.Address {
		address = ""
	}
	return &NotLeaderError{Leader: string(address)}
}

func (s *Store) propose(ctx context.Context, cmds []*clusterv1.Command) attempt {
	// The leader knows the protocol and the tokens only after it has applied everything
	// that was committed before.
	term, err := s.leading(ctx)
	if err != nil {
		return attempt{err: err}
	}
	results := make([]*clusterv1.Result, len(cmds))
	answers := make([]<-chan *clusterv1.Result, len(cmds))
	proposed := false
	for i, c := range cmds {
		refused, err := s.check(c)
		if err != nil {
			return attempt{err: err, final: true, maybe: proposed}
		}
		if refused != nil {
			results[i] = refused
			continue
		}
		data, err := state.Encode(c)
		if err != nil {
			return attempt{err: err, final: true, maybe: proposed}
		}
		var forget func()
		answers[i], forget = s.fsm.expect(c.GetId())
		defer forget()
		s.raft.Apply(data, s.cfg.Timing.RPC)
		proposed = true
	}
	for i, answer := range answers {
		if answer == nil {
			continue
		}
		r, err := s.await(ctx, term, answer)
		if err != nil {
			return attempt{err: err, maybe: true}
		}
		results[i] = r
	}
	return attempt{results: results}
}

// await waits for an answer while this node leads. The answer comes when the command is
// committed and applied on this host.
func (s *Store) await(ctx context.Context, term uint64, answer <-chan *clusterv1.Result) (*clusterv1.Result, error) {
	look := time.NewTicker(10 * time.Millisecond)
	defer look.Stop()
	limit := time.After(s.cfg.Timing.RPC)
	for {
		select {
		case r := <-answer:
			return r, nil
		case <-s.fsm.stopped:
			return nil, s.fsm.err()
		case <-s.ctx.Done():
			return nil, ErrClosed
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-limit:
			return nil, errors.New("the leader's log did not take it in time")
		case <-look.C:
			if !s.IsLeader() || s.raft.CurrentTerm() != term {
				return nil, errors.New("leadership was lost")
			}
		}
	}
}

// check checks a command before the leader proposes it. It returns an error for a command
// that not all hosts know, and a result for one that is refused.
func (s *Store) check(c *clusterv1.Command) (*clusterv1.Result, error) {
	v := s.fsm.state.View()
	if c.GetVersion() > v.Protocol() {
		var old []string
		for h := range v.Hosts() {
			if h.GetProtocol() < c.GetVersion() {
				old = append(old, fmt.Sprintf("%s (protocol %d)", h.GetName(), h.GetProtocol()))
			}
		}
		if len(old) == 0 {
			old = []string{fmt.Sprintf("%s (protocol %d)", s.cfg.Name, v.Protocol())}
		}
		if len(old) > 10 {
			old = append(old[:10], fmt.Sprintf("and %d more", len(old)-10))
		}
		return nil, fmt.Errorf("%w, which needs protocol %d: upgrade %s", ErrProtocol, c.GetVersion(), strings.Join(old, ", "))
	}
	if use := c.GetUseJoinToken(); use != nil {
		if t := v.JoinToken(use.GetId()); t != nil && t.GetExpiresUnixMs() > 0 && s.cfg.Clock.Wall().UnixMilli() >= t.GetExpiresUnixMs() {
			at := time.UnixMilli(t.GetExpiresUnixMs()).UTC().Format(time.RFC3339)
			return &clusterv1.Result{
				Outcome: clusterv1.Outcome_OUTCOME_REFUSED, Index: v.Index(),
				Message: fmt.Sprintf("join token %s: expired at %s", use.GetId(), at),
			}, nil
		}
	}
	return nil, nil
}
