package replica

import (
	"context"
	"fmt"
	"sync"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
)

// pulse has the heartbeats that the leader has received. They are never in the log.
type pulse struct {
	clock Clock
	mu    sync.Mutex
	from  time.Duration   // beginning of this term
	ticks time.Duration   // last tick
	hosts map[string]beat // by host id
}

type beat struct {
	at      time.Duration
	healthy time.Duration // when it became healthy; not healthy if 0 and !ok
	ok      bool
	applied uint64
	version string
}

func newPulse(clock Clock) *pulse {
	return &pulse{clock: clock, hosts: map[string]beat{}}
}

func (p *pulse) reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.begin()
}

func (p *pulse) begin() {
	now := p.clock.Monotonic()
	p.from, p.ticks, p.hosts = now, now, map[string]beat{}
}

// tick must be called before hosts are judged. If this process itself was paused for
// longer than pause, missing heartbeats prove nothing, so all measurements start again.
func (p *pulse) tick(pause time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if now := p.clock.Monotonic(); now-p.ticks < pause {
		p.ticks = now
		return
	}
	p.begin()
}

func (p *pulse) hear(r *clusterv1.HeartbeatRequest) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := p.hosts[r.GetHostId()]
	b.at, b.applied, b.version = p.clock.Monotonic(), r.GetAppliedIndex(), r.GetVersion()
	p.hosts[r.GetHostId()] = b
}

// silent returns the time since a host's last heartbeat, but at most the time since this
// node leads.
func (p *pulse) silent(id string) (d time.Duration, heard bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b, heard := p.hosts[id]
	if !heard {
		return p.clock.Monotonic() - p.from, false
	}
	return p.clock.Monotonic() - b.at, true
}

// judge reports whether a host is healthy, and since when.
func (p *pulse) judge(id string, down time.Duration, commit, behind uint64) (ok bool, since time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b, heard := p.hosts[id]
	now := p.clock.Monotonic()
	ok = heard && now-b.at < down && b.applied+behind >= commit
	if ok && !b.ok {
		b.healthy = now
	}
	b.ok = ok
	if heard {
		p.hosts[id] = b
	}
	if !ok {
		return false, 0
	}
	return true, now - b.healthy
}

func (p *pulse) last(id string) (b beat, heard bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b, heard = p.hosts[id]
	return b, heard
}

// HandleHeartbeat records a host's heartbeat. If this node is not the leader, it returns
// a *NotLeaderError.
func (s *Store) HandleHeartbeat(r *clusterv1.HeartbeatRequest) (*clusterv1.HeartbeatResponse, error) {
	if !s.IsLeader() {
		return nil, s.notLeader()
	}
	s.pulse.hear(r)
	h := s.fsm.state.View().HostByID(r.GetHostId())
	known := h != nil && h.GetName() == r.GetHost() && h.GetAddress() == r.GetAddress() &&
		(r.GetBootId() == "" || h.GetBootId() == r.GetBootId()) &&
		(r.GetVersion() == "" || h.GetVersion() == r.GetVersion())
	return &clusterv1.HeartbeatResponse{Leader: s.cfg.Name, Term: s.raft.CurrentTerm(), Known: known}, nil
}

// beat sends this host's heartbeats to the leader.
func (s *Store) beat() {
	tick := time.NewTicker(s.cfg.Timing.Pulse)
	defer tick.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-tick.C:
			s.beatOnce()
		}
	}
}

func (s *Store) beatOnce() {
	r := s.sign()
	var resp *clusterv1.HeartbeatResponse
	if s.IsLeader() {
		resp, _ = s.HandleHeartbeat(r)
	} else if address, _ := s.raft.LeaderWithID(); address != "" && s.cfg.Peers != nil && s.fsm.err() == nil {
		ctx, cancel := context.WithTimeout(s.ctx, s.cfg.Timing.RPC)
		defer cancel()
		var err error
		if resp, err = s.cfg.Peers.Heartbeat(ctx, string(address), r); err != nil {
			s.log.Debug("heartbeat", "leader", string(address), "err", err)
		}
	}
	if resp != nil && !resp.GetKnown() && s.cfg.Unknown != nil {
		s.cfg.Unknown()
	}
}

// sign returns this host's heartbeat.
func (s *Store) sign() *clusterv1.HeartbeatRequest {
	return &clusterv1.HeartbeatRequest{
		Host: s.cfg.Name, HostId: s.cfg.ID, BootId: s.cfg.BootID, Protocol: state.Protocol,
		Version: s.cfg.Version, AppliedIndex: s.reached(), Address: s.cfg.Address,
	}
}

// reached returns the index up to which this node has applied the log.
func (s *Store) reached() uint64 {
	if s.fsm.err() != nil {
		return s.fsm.index()
	}
	return s.raft.AppliedIndex()
}

// watchHosts proposes that a host is down, or is up again. Only these transitions are in
// the log.
func (s *Store) watchHosts(ctx context.Context, l *Lead) error {
	tick := time.NewTicker(max(s.cfg.Timing.Down/10, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		s.pulse.tick(s.cfg.Timing.Down / 2)
		s.pulse.hear(s.sign())
		for h := range l.View().Hosts() {
			d, heard := s.pulse.silent(h.GetId())
			down := d >= s.cfg.Timing.Down
			if down == h.GetDown() || !down && !heard {
				continue
			}
			cmd := &clusterv1.SetHostDown{Host: h.GetName(), Down: down}
			if down {
				cmd.Message = fmt.Sprintf("not heard of for %v", s.cfg.Timing.Down)
			}
			if _, err := l.Apply(ctx, &clusterv1.Command{
				Actor: s.cfg.Name, Op: &clusterv1.Command_SetHostDown{SetHostDown: cmd},
			}); err != nil {
				return fmt.Errorf("host %s: %w", h.GetName(), err)
			}
		}
	}
}

// expire deletes reservations that were not changed for the time that they have, as
// measured by this leader.
func (s *Store) expire(ctx context.Context, l *Lead) error {
	type seen struct {
		revision uint64
		at       time.Duration
	}
	known := map[string]seen{}
	tick := time.NewTicker(s.cfg.Timing.Expiry)
	defer tick.Stop()
	for {
		v, now := l.View(), s.cfg.Clock.Monotonic()
		there := map[string]seen{}
		for r := range v.Reservations() {
			k, ok := known[r.GetId()]
			if !ok || k.revision != r.GetRevision() {
				k = seen{r.GetRevision(), now}
			}
			there[r.GetId()] = k
			if now-k.at < time.Duration(r.GetTtlMs())*time.Millisecond {
				continue
			}
			if _, err := l.Apply(ctx, &clusterv1.Command{
				Actor: s.cfg.Name, Op: &clusterv1.Command_DeleteReservation{DeleteReservation: &clusterv1.DeleteReservation{
					Id: r.GetId(), Token: r.GetToken(), Expired: true,
				}},
			}); err != nil {
				return fmt.Errorf("reservation %s: %w", r.GetId(), err)
			}
		}
		known = there
		if len(there) == 0 {
			select {
			case <-ctx.Done():
				return nil
			case <-v.Changed(clusterv1.Kind_KIND_RESERVATION):
			}
			continue
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// quorum reports whether this leader has recently received answers of a majority.
func (s *Store) quorum() bool {
	others, need := s.others()
	n, _ := s.acks.since(others, s.raft.CurrentTerm(), time.Now().Add(-2*s.cfg.Timing.Heartbeat))
	return s.IsLeader() && n >= need
}
