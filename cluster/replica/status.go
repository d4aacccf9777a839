package replica

import (
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

const hostKind = clusterv1.Kind_KIND_HOST

// Health returns why this node does not work, or nil if it does.
func (s *Store) Health() error {
	var errs []error
	if err := s.alive(); err != nil {
		errs = append(errs, err)
	}
	if err := s.guard.health(); err != nil {
		errs = append(errs, fmt.Errorf("disk: %w", err))
	} else if s.stalled() {
		errs = append(errs, errors.New("disk: a write takes long"))
	}
	return errors.Join(errs...)
}

// Skipped returns how many unknown entries this node has skipped.
func (s *Store) Skipped() uint64 { return s.fsm.skipped.Load() }

// Status returns what this node knows about the cluster. Only the leader knows the health
// of the members; other nodes return what is replicated. It does not contain
// certificates.
func (s *Store) Status() *clusterv1.StatusResponse {
	v := s.fsm.state.View()
	leader, address := s.Leader()
	r := &clusterv1.StatusResponse{
		Joined: s.member() == nil, ClusterId: v.ClusterID(), Host: s.cfg.Name, HostId: s.cfg.ID,
		Leader: leader, Term: s.raft.CurrentTerm(), LastIndex: s.raft.LastIndex(),
		AppliedIndex: s.reached(), CommitIndex: s.raft.CommitIndex(), Protocol: v.Protocol(),
		Standalone: s.cfg.Dir == "" && s.cfg.Peers == nil,
	}
	leads := s.IsLeader()
	r.Quorum = leads && s.quorum() || !leads && address != "" && time.Since(s.raft.LastContact()) < 2*s.cfg.Timing.Heartbeat
	for _, x := range s.servers() {
		r.Members = append(r.Members, s.memberStatus(x, leads, address, r.GetCommitIndex()))
	}
	switch err := s.Health(); {
	case err != nil:
		r.Message = err.Error()
	case !r.GetJoined():
		r.Message = s.member().Error()
	case address == "":
		r.Message = ErrNoLeader.Error()
	case !r.GetQuorum():
		r.Message = "the leader does not hear of a majority"
	}
	return r
}

func (s *Store) memberStatus(x raft.Server, leads bool, leader string, commit uint64) *clusterv1.MemberStatus {
	id := string(x.ID)
	m := &clusterv1.MemberStatus{
		Host: id, Id: id, Address: string(x.Address),
		Voter: x.Suffrage == raft.Voter, Leader: leader != "" && string(x.Address) == leader,
	}
	h := s.fsm.state.View().HostByID(id)
	if h != nil {
		m.Host, m.Version, m.Message = h.GetName(), h.GetVersion(), h.GetMessage()
	} else {
		m.Message = "has not reported itself"
	}
	switch {
	case id == s.cfg.ID:
		m.Version, m.Healthy = s.cfg.Version, s.Health() == nil
		if m.Healthy {
			break
		}
		m.Message = s.Health().Error()
	case !leads:
		m.Healthy = h != nil && !h.GetDown()
	default:
		silent, heard := s.pulse.silent(id)
		m.LastContactMs = uint64(max(silent.Milliseconds(), 0))
		b, _ := s.pulse.last(id)
		m.Behind = commit - min(b.applied, commit)
		m.Healthy = heard && silent < s.cfg.Timing.Down && m.Behind <= s.cfg.Members.Behind
		switch {
		case !heard:
			m.Message, m.Behind = "not heard of yet", 0
		case silent >= s.cfg.Timing.Down:
			m.Message = fmt.Sprintf("not heard of for %v", silent.Round(time.Second))
		case !m.Healthy:
			m.Message = fmt.Sprintf("%d entries behind", m.Behind)
		}
	}
	return m
}
