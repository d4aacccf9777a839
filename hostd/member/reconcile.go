package member

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/cluster/scheduler"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/internal/excerpt"
	"github.com/gpuctl/gpuctl/internal/wait"
)

const (
	reportEvery    = 10 * time.Second
	reconcileEvery = 5 * time.Second
	retryAfter     = time.Second
	attempt        = 10 * time.Second // limit for one command
	// together is the time in which changes are collected. A log entry for each of them
	// would double the log.
	together = 20 * time.Millisecond
)

// Kick makes the node compare the host with the log now.
func (n *Node) Kick() {
	select {
	case n.kick <- struct{}{}:
	default:
	}
}

// propose proposes a command in this host's name.
func (m *membership) propose(ctx context.Context, c *clusterv1.Command) (*clusterv1.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, attempt)
	defer cancel()
	c.Actor = "host " + m.Host
	return scheduler.Check(m.store.Apply(ctx, c))
}

// id returns the name that the cluster uses for something of this host. name is the
// inverse.
// A GPU of another host has the cluster's name here, too.
func (m *membership) id(name string) string {
	if strings.Contains(name, "/") {
		return name
	}
	return m.Host + "/" + name
}

func (m *membership) name(id string) string { return strings.TrimPrefix(id, m.Host+"/") }

// report sends the host's report to the cluster whenever it has changed.
func (n *Node) report(ctx context.Context, m *membership) {
	for ctx.Err() == nil {
		pause := reportEvery
		if err := n.reportOnce(ctx, m); err != nil && ctx.Err() == nil {
			level := slog.LevelWarn
			if !n.served.Host.Ready() { // the host was just started and is finding its GPUs
				level = slog.LevelDebug
			}
			n.Logger.Log(ctx, level, "host not reported", "err", err)
			pause = retryAfter
		}
		v := m.store.State().View()
		t := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-t.C:
		case <-v.Changed(clusterv1.Kind_KIND_HOST): // the cluster may have removed this host's entry
			_ = wait.For(ctx, 100*time.Millisecond)
		}
		t.Stop()
	}
}

func (n *Node) reportOnce(ctx context.Context, m *membership) error {
	if m.store.State().View().Identity(m.ID) == nil {
		return nil // not admitted yet, as far as this host knows, or removed
	}
	h, gpus, err := n.served.Host.Report(ctx)
	if err != nil {
		return err
	}
	h = proto.CloneOf(h)
	h.Name, h.Id, h.Address, h.Version, h.Protocol = m.Host, m.ID, m.Address, n.Version, state.Protocol
	if n.served.Lender != nil {
		h.LendAddress = n.served.LendAddress(m.Address)
	}
	v := m.store.State().View()
	own := make([]*clusterv1.GPU, 0, len(gpus))
	for _, g := range gpus {
		if g.GetServer() != "" && v.Protocol() < state.ProtocolService {
			continue // some host would not know what it is
		}
		g = proto.CloneOf(g)
		g.Host, g.Id, g.Present = m.Host, m.id(g.GetName()), true
		// The state has these values where a report leaves them out.
		if g.GetLimits() == nil {
			g.Limits = &gpuctlv1.Limits{}
		}
		g.Health, g.HealthReason = cmp.Or(g.GetHealth(), clusterv1.Health_HEALTH_OK), storable(g.GetHealthReason())
		own = append(own, g)
	}
	if reported(v, h, own) {
		return nil
	}
	_, err = m.propose(ctx, &clusterv1.Command{Op: &clusterv1.Command_ReportHost{ReportHost: &clusterv1.ReportHost{Host: h, Gpus: own}}})
	return err
}

// reported reports whether the state already contains the whole report.
func reported(v *state.View, h *clusterv1.Host, gpus []*clusterv1.GPU) bool {
	old := v.Host(h.GetName())
	if old == nil || old.GetId() != h.GetId() {
		return false
	}
	want := proto.CloneOf(h)
	want.Labels, want.State, want.Draining, want.Down = old.GetLabels(), old.GetState(), old.GetDraining(), old.GetDown()
	want.Message, want.JoinedUnixMs, want.Revision = old.GetMessage(), old.GetJoinedUnixMs(), old.GetRevision()
	if !proto.Equal(want, old) {
		return false
	}
	present := 0
	for g := range v.GPUsOfHost(h.GetName()) {
		if g.GetPresent() {
			present++
		}
	}
	if present != len(gpus) {
		return false
	}
	for _, g := range gpus {
		old := v.GPU(g.GetId())
		if old == nil || !old.GetPresent() {
			return false
		}
		want := proto.CloneOf(g)
		want.Cordoned, want.CordonReason, want.UsedMemory = old.GetCordoned(), old.GetCordonReason(), old.GetUsedMemory()
		want.FreeMemory, want.Free, want.Revision = old.GetFreeMemory(), old.GetFree(), old.GetRevision()
		if !proto.Equal(want, old) {
			return false
		}
	}
	return true
}

// reconcile compares the assignments and sessions of this host in the log with the real
// ones, and makes them agree.
func (n *Node) reconcile(ctx context.Context, m *membership) {
	for ctx.Err() == nil {
		v := m.store.State().View()
		pause := reconcileEvery
		if v.Host(m.Host) != nil && n.served.Host.Ready() && m.store.CaughtUp() {
			if err := n.reconcileOnce(ctx, m, v); err != nil && ctx.Err() == nil {
				n.Logger.Warn("assignments not settled", "err", err)
				pause = retryAfter
			}
		} else {
			pause = retryAfter
		}
		t := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-t.C:
		case <-n.kick:
		case <-v.Changed(clusterv1.Kind_KIND_ASSIGNMENT):
			_ = wait.For(ctx, together)
		}
		t.Stop()
	}
}

func (n *Node) reconcileOnce(ctx context.Context, m *membership, v *state.View) error {
	end, err := n.settle(ctx)
	if err != nil {
		return err
	}
	defer end()
	var words []*clusterv1.Confirmation
	over := map[string]bool{}
	for as := range v.AssignmentsOfHost(m.Host) {
		gpu := m.name(as.GetGpu())
		used := n.served.Host.Uses(as.GetClaim(), gpu)
		mine := n.manages(m, v.Claim(as.GetClaim()))
		switch {
		case !used && (mine || as.GetResidence() == clusterv1.Residence_RESIDENCE_RELEASING):
			words = append(words, &clusterv1.Confirmation{Assignment: as.GetId(), Token: as.GetToken(), Gone: true})
			if mine && !n.served.Host.Knows(as.GetClaim()) {
				over[as.GetClaim()] = true
			}
		case !used && n.orphaned(m, v, v.Claim(as.GetClaim())):
			words = append(words, &clusterv1.Confirmation{Assignment: as.GetId(), Token: as.GetToken(), Gone: true})
		case as.GetResidence() == clusterv1.Residence_RESIDENCE_SCHEDULED:
			words = append(words, &clusterv1.Confirmation{Assignment: as.GetId(), Token: as.GetToken()})
		}
	}
	for c := range v.PendingClaims() {
		if n.manages(m, c) && len(c.GetAssignments()) == 0 && !n.served.Host.Knows(c.GetId()) {
			over[c.GetId()] = true
		}
	}
	unused := n.abroad(m, v, over)
	for c := range over {
		if _, err := m.propose(ctx, &clusterv1.Command{Op: &clusterv1.Command_DeleteClaim{DeleteClaim: &clusterv1.DeleteClaim{Claim: c}}}); err != nil {
			return err
		}
	}
	if len(unused) > 0 {
		if _, err := m.propose(ctx, &clusterv1.Command{Op: &clusterv1.Command_ReleaseAssignments{ReleaseAssignments: &clusterv1.ReleaseAssignments{Assignments: unused}}}); err != nil {
			return err
		}
	}
	// What a claim has on this host without an assignment in the log, usually after a
	// restart. It is in use. If another claim has the GPU in the log, an error is logged
	// for the operator.
	for _, held := range n.served.Host.Holdings() {
		if n.assigned(m, v, held) {
			continue
		}
		if err := n.hold(ctx, m, held); err != nil {
			n.Logger.Error("a claim uses a gpu that the cluster has not given to it", "claim", held.Claim.GetId(), "gpu", strings.Join(held.GPUs, ","), "err", err)
		}
	}
	if len(words) > 0 {
		_, err := m.propose(ctx, &clusterv1.Command{Op: &clusterv1.Command_ConfirmAssignments{
			ConfirmAssignments: &clusterv1.ConfirmAssignments{Host: m.Host, Confirmations: words},
		}})
		if err != nil {
			return err
		}
	}
	return n.tellSessions(ctx, m, v)
}

// hold tells the log of a holding. What is being released there is still in use, and has an
// assignment.
func (n *Node) hold(ctx context.Context, m *membership, held Holding) error {
	ctx, cancel := context.WithTimeout(ctx, attempt)
	defer cancel()
	v, err := m.store.Read(ctx, false)
	if err != nil {
		return err
	}
	return n.acquire(ctx, m, v, held.Claim, held.GPUs, held.Amount)
}

func (n *Node) assigned(m *membership, v *state.View, held Holding) bool {
	missing := slices.Clone(held.GPUs)
	for as := range v.AssignmentsOfClaim(held.Claim.GetId()) {
		missing = slices.DeleteFunc(missing, func(g string) bool { return m.id(g) == as.GetGpu() })
	}
	return len(missing) == 0
}

func (n *Node) manages(m *membership, c *clusterv1.Claim) bool {
	return c != nil && c.GetLabels()[placement.LabelManagedBy] == m.ID
}

// storable makes a text of others fit for the log, which refuses a whole command for one text
// that is too long or has a zero byte.
func storable(s string) string { return excerpt.Of(s, mostText) }

const mostText = 1024 // bytes

// tellSessions reports the sessions that differ from the log.
func (n *Node) tellSessions(ctx context.Context, m *membership, v *state.View) error {
	known := map[string]*clusterv1.Session{}
	for s := range v.SessionsOfHost(m.Host) {
		known[s.GetId()] = s
	}
	var news []*clusterv1.Session
	for _, s := range n.served.Host.Sessions() {
		s.Id, s.Host = m.id(s.GetId()), m.Host
		s.Command, s.Message = storable(s.GetCommand()), storable(s.GetMessage())
		for i, g := range s.GetGpus() {
			s.Gpus[i] = m.id(g)
		}
		old := known[s.GetId()]
		delete(known, s.GetId())
		if old != nil {
			s.Revision = old.GetRevision()
		}
		if old == nil || !proto.Equal(old, s) {
			s.Revision = 0
			news = append(news, s)
		}
	}
	for id := range known {
		news = append(news, &clusterv1.Session{Id: id, Host: m.Host, State: gpuctlv1.SessionState_SESSION_STATE_ENDED})
	}
	if len(news) == 0 {
		return nil
	}
	slices.SortFunc(news, func(a, b *clusterv1.Session) int { return strings.Compare(a.GetId(), b.GetId()) })
	_, err := m.propose(ctx, &clusterv1.Command{Op: &clusterv1.Command_ReportSessions{
		ReportSessions: &clusterv1.ReportSessions{Host: m.Host, Sessions: news},
	}})
	return err
}
