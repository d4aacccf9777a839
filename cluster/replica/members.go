package replica

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"github.com/gpuctl/gpuctl/cluster/state"
)

// The rules for voters.
//
// Each host is a Raft server. Servers that are not voters get the log, but do not count
// for majorities. The number of voters follows the number of hosts, including hosts that
// are down, so that an outage never makes a majority smaller:
//
//	hosts    1  2  3  4  5  6  7 and more
//	voters   1  1  3  3  5  5  7 (or MaxVoters)
//
// It is odd, because an even number tolerates no more failures and needs one more answer.
// Two hosts have one voter: with two, the failure of either would stop both.
//
// A host becomes a voter when it has been healthy for Stabilize: it sends heartbeats, and
// is not far behind. Between two odd numbers there is an even one, so the change is begun
// only when enough hosts are ready. A voter that is down for longer than Lost is replaced
// if there is a healthy host: first that host is promoted, then the lost one is demoted.
// Nothing is done that the living voters could not commit. Hosts are chosen by failure
// domain, the one with the fewest voters first, then by name. A server is removed only
// after its host was removed, together with the host's identity. An identity without a
// host belongs to a host that is joining.

// member is a server, as the rules see it.
type member struct {
	ID, Name, Zone string
	Voter, Leader  bool
	Alive          bool // it sends heartbeats and is not far behind
	Stable         bool // it has been Alive for Stabilize
	Lost           bool // it has not been Alive for Lost
}

// move is one change of the voters.
type move struct {
	ID      string
	Promote bool // otherwise demote
	Why     string
}

func target(hosts, limit int) int {
	switch {
	case hosts < 3:
		return 1
	case hosts < 5:
		return 3
	case hosts < 7:
		return min(5, limit)
	default:
		return min(7, limit)
	}
}

// plan returns the next move; nil if the voters are as they should be, or nothing can be
// done now.
func plan(ms []member, limit int) *move {
	var voters, ready []member
	alive := 0
	zones := map[string]int{}
	for _, m := range ms {
		if m.Voter {
			voters = append(voters, m)
			if m.Alive || m.Leader {
				alive++
			}
			if !m.Lost {
				zones[m.Zone]++
			}
		} else if m.Stable {
			ready = append(ready, m)
		}
	}
	slices.SortFunc(ready, func(a, b member) int {
		return cmp.Or(cmp.Compare(zones[a.Zone], zones[b.Zone]), cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID))
	})
	// The first to be demoted: lost, not alive, in a zone with many voters, last by name.
	slices.SortFunc(voters, func(a, b member) int {
		return cmp.Or(
			less(a.Lost, b.Lost), less(!a.Alive, !b.Alive), -cmp.Compare(zones[a.Zone], zones[b.Zone]),
			-cmp.Compare(a.Name, b.Name), -cmp.Compare(a.ID, b.ID),
		)
	})
	n, want := len(voters), target(len(ms), limit)
	promote := func(m member, why string) *move {
		if alive+1 < (n+1)/2+1 {
			return nil
		}
		return &move{m.ID, true, why}
	}
	demote := func(m member, why string) *move {
		left := alive
		if m.Alive {
			left--
		}
		if m.Leader || left < (n-1)/2+1 {
			return nil
		}
		return &move{m.ID, false, why}
	}
	switch {
	case n == 0:
		return nil
	case n > want:
		for _, m := range voters {
			if mv := demote(m, fmt.Sprintf("%d voters are enough for %d hosts", want, len(ms))); mv != nil {
				return mv
			}
		}
		return nil
	case n < want:
		// Begin with an odd number only if the next odd number can be reached.
		if len(ready) > n%2 {
			return promote(ready[0], fmt.Sprintf("%d hosts need %d voters", len(ms), want))
		}
		if len(ready) > 0 && n%2 == 0 {
			return promote(ready[0], fmt.Sprintf("%d hosts need %d voters", len(ms), want))
		}
	}
	if len(ready) == 0 {
		return nil
	}
	if v := voters[0]; v.Lost && !v.Leader {
		return promote(ready[0], fmt.Sprintf("host %s is lost", v.Name))
	}
	if n < want {
		return nil
	}
	// A voter of another zone, if that makes the numbers in the zones more equal.
	for _, v := range voters {
		if !v.Leader && zones[v.Zone] >= zones[ready[0].Zone]+2 {
			return promote(ready[0], fmt.Sprintf("failure domain %q has %d voters, %q has %d", v.Zone, zones[v.Zone], ready[0].Zone, zones[ready[0].Zone]))
		}
	}
	return nil
}

// less sorts true before false.
func less(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	default:
		return 1
	}
}

// AddServer makes an admitted host a server without a vote. If this node is not the
// leader, it returns a *NotLeaderError.
func (s *Store) AddServer(ctx context.Context, id, address string) error {
	if id == "" || address == "" {
		return fmt.Errorf("add server %q: no id or no address", id)
	}
	if _, err := s.leading(ctx); err != nil {
		return fmt.Errorf("add server %s: %w", id, err)
	}
	for _, x := range s.servers() {
		if string(x.Address) == address && string(x.ID) != id {
			return fmt.Errorf("add server %s: its address %s belongs to server %s", id, address, x.ID)
		}
	}
	err := s.reconfigure(ctx, func(x map[string]raft.Server) bool { return string(x[id].Address) == address }, func() {
		s.raft.AddNonvoter(raft.ServerID(id), raft.ServerAddress(address), 0, s.cfg.Timing.RPC)
	})
	if err != nil {
		return fmt.Errorf("add server %s: %w", id, err)
	}
	return nil
}

// reconfigure asks Raft for a change of the servers, and waits until it is in force and
// committed. It does not wait for Raft's future, which Raft may forget when it shuts
// down.
func (s *Store) reconfigure(ctx context.Context, done func(map[string]raft.Server) bool, change func()) error {
	ctx, cancel := context.WithTimeout(ctx, 2*s.cfg.Timing.RPC)
	defer cancel()
	asked := false
	for wait := time.Millisecond; ; wait = min(2*wait, 20*time.Millisecond) {
		if !s.IsLeader() {
			return s.notLeader()
		}
		servers := map[string]raft.Server{}
		last := s.raft.LastIndex()
		for _, x := range s.servers() {
			servers[string(x.ID)] = x
		}
		if done(servers) {
			return s.committed(ctx, last)
		}
		if !asked {
			change()
			asked = true
		}
		select {
		case <-time.After(wait):
		case <-s.ctx.Done():
			return ErrClosed
		case <-ctx.Done():
			return fmt.Errorf("the voters did not agree in time: %w", ctx.Err())
		}
	}
}

// committed waits until an index is committed while this node leads.
func (s *Store) committed(ctx context.Context, index uint64) error {
	for wait := time.Millisecond; s.raft.CommitIndex() < index; wait = min(2*wait, 20*time.Millisecond) {
		if !s.IsLeader() {
			return s.notLeader()
		}
		select {
		case <-time.After(wait):
		case <-s.ctx.Done():
			return ErrClosed
		case <-ctx.Done():
			return fmt.Errorf("entry %d is not committed: %w", index, ctx.Err())
		}
	}
	return nil
}

// review makes the servers agree with the hosts, and the voters with the rules.
func (s *Store) review(ctx context.Context, l *Lead) error {
	gone := map[string]time.Duration{} // since when a server has had neither a host nor an identity
	tick := time.NewTicker(s.cfg.Timing.Review)
	defer tick.Stop()
	for {
		if err := s.alignServers(ctx, l, gone); err != nil {
			return err
		}
		if mv := plan(s.members(l), s.cfg.Members.MaxVoters); mv != nil {
			if err := s.do(ctx, mv); err != nil {
				return err
			}
		}
		v := l.View()
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-v.Changed(hostKind):
			// At most a few times in a tick, however often hosts change.
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(s.cfg.Timing.Review / 10):
			}
		}
	}
}

func (s *Store) do(ctx context.Context, mv *move) error {
	id := raft.ServerID(mv.ID)
	want, verb := raft.Nonvoter, "demote"
	if mv.Promote {
		want, verb = raft.Voter, "promote"
	}
	s.log.Info("voters change", "verb", verb, "server", mv.ID, "why", mv.Why)
	err := s.reconfigure(ctx, func(x map[string]raft.Server) bool {
		server, there := x[mv.ID]
		return !there || server.Suffrage == want
	}, func() {
		if !mv.Promote {
			s.raft.DemoteVoter(id, 0, s.cfg.Timing.RPC)
			return
		}
		for _, x := range s.servers() {
			if x.ID == id {
				s.raft.AddVoter(id, x.Address, 0, s.cfg.Timing.RPC)
			}
		}
	})
	if err != nil {
		return fmt.Errorf("%s server %s: %w", verb, mv.ID, err)
	}
	return nil
}

// members returns the servers as this leader sees them.
func (s *Store) members(l *Lead) []member {
	s.pulse.tick(s.cfg.Timing.Down / 2)
	view, commit := l.View(), s.raft.CommitIndex()
	servers := s.servers()
	out := make([]member, 0, len(servers))
	for _, x := range servers {
		id := string(x.ID)
		m := member{ID: id, Name: id, Voter: x.Suffrage == raft.Voter, Leader: id == s.cfg.ID}
		h := view.HostByID(id)
		if h != nil {
			m.Name, m.Zone = h.GetName(), h.GetLabels()[s.cfg.Members.Zone]
		}
		ok, since := s.pulse.judge(id, s.cfg.Timing.Down, commit, s.cfg.Members.Behind)
		m.Alive = ok || m.Leader
		// A host without a report may be about to be removed.
		m.Stable = ok && since >= s.cfg.Members.Stabilize && h != nil
		silent, _ := s.pulse.silent(id)
		m.Lost = !m.Leader && silent >= s.cfg.Members.Lost
		out = append(out, m)
	}
	return out
}

// alignServers adds servers for hosts that have none, updates their addresses, and
// removes those whose host was removed. A server with an identity but without a host is
// joining. A server that has had neither for some time was removed.
func (s *Store) alignServers(ctx context.Context, l *Lead, gone map[string]time.Duration) error {
	v := l.View()
	servers := map[string]raft.Server{}
	for _, x := range s.servers() {
		servers[string(x.ID)] = x
	}
	var errs []error
	for h := range v.Hosts() {
		if x, ok := servers[h.GetId()]; h.GetAddress() != "" && (!ok || string(x.Address) != h.GetAddress()) && h.GetId() != s.cfg.ID {
			errs = append(errs, s.AddServer(ctx, h.GetId(), h.GetAddress()))
		}
	}
	now := s.cfg.Clock.Monotonic()
	for id := range servers {
		if v.HostByID(id) != nil || v.Identity(id) != nil {
			delete(gone, id)
			continue
		}
		since, ok := gone[id]
		if !ok {
			gone[id], since = now, now
		}
		if now-since >= s.cfg.Members.Stabilize {
			errs = append(errs, s.removeServer(ctx, v, id))
		}
	}
	return errors.Join(errs...)
}

// removeServer removes a server. A leader that was removed itself transfers its
// leadership; its successor removes it.
func (s *Store) removeServer(ctx context.Context, v *state.View, id string) error {
	if id == s.cfg.ID {
		if others, _ := s.others(); len(others) > 0 {
			s.log.Info("this host was removed: leadership is handed over")
			s.raft.LeadershipTransfer()
		}
		return nil
	}
	s.log.Info("server is removed: its host was", "server", id, "index", v.Index())
	err := s.reconfigure(ctx, func(x map[string]raft.Server) bool {
		_, there := x[id]
		return !there
	}, func() { s.raft.RemoveServer(raft.ServerID(id), 0, s.cfg.Timing.RPC) })
	if err != nil {
		return fmt.Errorf("remove server %s: %w", id, err)
	}
	return nil
}
