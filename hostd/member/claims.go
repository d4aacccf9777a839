package member

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/cluster/scheduler"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/hostd/member/clusterapi"
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/wait"
)

// ErrTaken means that the cluster has given a GPU to another claim.
var ErrTaken = errors.New("given to others")

// Holding is which GPUs of this host a claim has, and how much of each.
type Holding struct {
	Claim  *clusterv1.Claim
	GPUs   []string
	Amount uint64 // bytes of each GPU; 0: whole GPUs
}

func (n *Node) membership() (*membership, error) {
	if m := n.member(); m != nil {
		return m, nil
	}
	return nil, clusterapi.ErrNotJoined
}

// own returns a copy of the claim that is marked as managed by this host.
func (m *membership) own(c *clusterv1.Claim) *clusterv1.Claim {
	c = proto.CloneOf(c)
	c.Owner = "host " + m.Host
	if elsewhere(c) && m.store.State().View().Protocol() >= state.ProtocolRemote {
		c.Home = m.Host
	} else {
		c.Host, c.Remote = m.Host, clusterv1.Remote_REMOTE_UNSPECIFIED
	}
	if c.Labels == nil {
		c.Labels = map[string]string{}
	}
	c.Labels[placement.LabelManagedBy] = m.ID
	return c
}

// Settle waits until the cluster knows everything that this host has given back, so that
// a claim that is made next finds it free. It waits settleTimeout at most.
func (n *Node) Settle(ctx context.Context) {
	m := n.member()
	if m == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	for ctx.Err() == nil {
		v := m.store.State().View()
		changed := v.Changed(clusterv1.Kind_KIND_ASSIGNMENT)
		if !n.unsettled(m, v) {
			return
		}
		n.Kick()
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

const settleTimeout = time.Second

func (n *Node) unsettled(m *membership, v *state.View) bool {
	for as := range v.AssignmentsOfHost(m.Host) {
		if n.manages(m, v.Claim(as.GetClaim())) && !n.served.Host.Uses(as.GetClaim(), m.name(as.GetGpu())) {
			return true
		}
	}
	return len(n.abroad(m, v, map[string]bool{})) > 0
}

// Known waits until the cluster knows the given GPUs of this host. A host that was just
// started must report them first. It waits for the time of one attempt at most.
func (n *Node) Known(ctx context.Context, gpus []string) {
	m := n.member()
	if m == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, attempt)
	defer cancel()
	for ctx.Err() == nil {
		v := m.store.State().View()
		changed := v.Changed(clusterv1.Kind_KIND_GPU, clusterv1.Kind_KIND_HOST)
		if !slices.ContainsFunc(gpus, func(g string) bool { return !v.GPU(m.id(g)).GetPresent() }) {
			return
		}
		if err := n.reportOnce(ctx, m); err != nil {
			n.Logger.Debug("host not reported yet", "err", err)
		}
		select {
		case <-changed:
		case <-ctx.Done():
		case <-time.After(retryAfter):
		}
	}
}

// HostName returns the name that the cluster uses for this host.
func (n *Node) HostName() string { return n.Self().Host }

// Claim assigns GPUs of this host to a claim, or returns why it cannot. Errors wrap
// clusterapi.ErrNotJoined or those of package replica.
func (n *Node) Claim(ctx context.Context, c *clusterv1.Claim) (*clusterv1.CreateClaimResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, attempt)
	defer cancel()
	m, err := n.membership()
	if err != nil {
		return nil, err
	}
	res, err := n.api.Bind(ctx, m.own(c))
	return res, clusterapi.Uncoded(err)
}

// Place finds where a claim of this host can go, best first. What the claim has given back
// just now, it may get again: hosts are given some time to confirm that it is free.
func (n *Node) Place(ctx context.Context, r placement.Request) (placement.Decision, error) {
	caller := ctx // the decision's explanation is made later, with the caller's context
	ctx, cancel := context.WithTimeout(ctx, attempt)
	defer cancel()
	m, err := n.membership()
	if err != nil {
		return placement.Decision{}, err
	}
	v, err := m.store.Read(ctx, false)
	if err != nil {
		return placement.Decision{}, err
	}
	if r.Verb != placement.New {
		v = awaitFreed(ctx, m, v, r.Claim.GetId(), nil)
	}
	r.Claim, r.Host, r.Context = m.own(r.Claim), m.Host, caller
	for i, g := range r.From {
		r.From[i] = m.id(g)
	}
	return m.scheduler.Place(v, r), nil
}

// awaitFreed returns v, or a newer view in which no host has still to confirm that a GPU is
// free that the claim has given back; freedFor at most. Hosts that are down confirm nothing.
// ids are the GPUs that count; nil: all.
func awaitFreed(ctx context.Context, m *membership, v *state.View, claim string, ids map[string]bool) *state.View {
	ctx, cancel := context.WithTimeout(ctx, freedFor)
	defer cancel()
	for leaves(v, claim, ids) && ctx.Err() == nil {
		select {
		case <-v.Changed(clusterv1.Kind_KIND_ASSIGNMENT, clusterv1.Kind_KIND_HOST):
		case <-ctx.Done():
		}
		v = m.store.State().View()
	}
	return v
}

// leaves reports whether a host that is up has to confirm that the claim's GPU is free.
func leaves(v *state.View, claim string, ids map[string]bool) bool {
	if v.Claim(claim).GetState() == clusterv1.ClaimState_CLAIM_STATE_RELEASING {
		return false // it gets nothing any more
	}
	for as := range v.AssignmentsOfClaim(claim) {
		h := v.Host(as.GetHost())
		if as.GetResidence() == releasing && (ids == nil || ids[as.GetGpu()]) && h != nil && !h.GetDown() {
			return true
		}
	}
	return false
}

// freedFor is the most time that a lease takes to end, and its host to say so.
const freedFor = 5 * time.Second

// Acquire gives a claim GPUs in addition to those that it has. If the cluster does not
// know the claim, it makes it. The error wraps ErrTaken if other claims have the GPUs, or
// this one has not quite left them.
func (n *Node) Acquire(ctx context.Context, c *clusterv1.Claim, gpus []string, amount uint64) error {
	ctx, cancel := context.WithTimeout(ctx, attempt)
	defer cancel()
	m, err := n.membership()
	if err != nil {
		return err
	}
	ids := m.ids(gpus)
	for deadline := time.Now().Add(freedFor); ; {
		// What was going to be said before the caller's claim used the GPUs has been said then.
		end, err := n.settle(ctx)
		if err != nil {
			return err
		}
		v, err := m.store.Read(ctx, false)
		if err == nil && !leaves(v, c.GetId(), ids) {
			err = n.acquire(ctx, m, v, c, gpus, amount)
			end()
			return err
		}
		end()
		if err == nil && time.Now().After(deadline) {
			err = fmt.Errorf("gpu %s: %w: its host has not confirmed that claim %s has left it", strings.Join(gpus, ","), ErrTaken, c.GetId())
		}
		if err != nil {
			return err
		}
		awaitFreed(ctx, m, v, c.GetId(), ids)
	}
}

// settle keeps this host from telling the log what its claims do not use, until end is called.
func (n *Node) settle(ctx context.Context) (end func(), err error) {
	select {
	case n.settling <- struct{}{}:
		return func() { <-n.settling }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (m *membership) ids(gpus []string) map[string]bool {
	ids := map[string]bool{}
	for _, g := range gpus {
		ids[m.id(g)] = true
	}
	return ids
}

// acquire is Acquire, of what the view says that the claim does not have.
func (n *Node) acquire(ctx context.Context, m *membership, v *state.View, c *clusterv1.Claim, gpus []string, amount uint64) error {
	c = m.own(c)
	ids := m.ids(gpus)
	known := v.Claim(c.GetId()) != nil
	for as := range v.AssignmentsOfClaim(c.GetId()) {
		delete(ids, as.GetGpu())
	}
	if len(ids) == 0 {
		return nil
	}
	var choices []*clusterv1.Choice
	for _, g := range gpus {
		if id := m.id(g); ids[id] {
			choices = append(choices, choice(v.GPU(id), id, c.GetProfile(), amount))
		}
	}
	cmd := &clusterv1.Command{}
	if known {
		cmd.Op = &clusterv1.Command_Assign{Assign: &clusterv1.Assign{Claim: c.GetId(), Choices: choices}}
	} else {
		c.Count = uint32(len(choices))
		cmd.Op = &clusterv1.Command_PutClaim{PutClaim: &clusterv1.PutClaim{Claim: c, Choices: choices}}
	}
	_, err := m.propose(ctx, cmd)
	var answer *scheduler.Error
	if errors.As(err, &answer) && answer.Result.GetOutcome() == clusterv1.Outcome_OUTCOME_NO_CAPACITY {
		return fmt.Errorf("gpu %s: %w: %s", strings.Join(gpus, ","), ErrTaken, answer.Result.GetMessage())
	}
	return err
}

// choice says what of a GPU a claim has: a slice of a profile, an amount of memory, or all.
func choice(g *clusterv1.GPU, id, profile string, amount uint64) *clusterv1.Choice {
	switch {
	case profile != "" && slices.Contains(g.GetKinds(), state.KindMediated):
		return &clusterv1.Choice{Gpu: id, Kind: clusterv1.VGPUKind_VGPU_KIND_MEDIATED, Profile: profile}
	case profile != "":
		return &clusterv1.Choice{Gpu: id, Kind: clusterv1.VGPUKind_VGPU_KIND_VENDOR, Profile: profile}
	case amount > 0:
		return &clusterv1.Choice{Gpu: id, Kind: clusterv1.VGPUKind_VGPU_KIND_SHARE, Memory: amount}
	}
	return &clusterv1.Choice{Gpu: id, Kind: clusterv1.VGPUKind_VGPU_KIND_WHOLE}
}

// AcquireHoldings tells the cluster what the claims of this host have, before new claims are
// made. A cluster that is in memory only has lost that. What fails here is repeated later.
func (n *Node) AcquireHoldings(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, holdTimeout)
	defer cancel()
	for _, held := range n.served.Host.Holdings() {
		if err := n.Acquire(ctx, held.Claim, held.GPUs, held.Amount); err != nil {
			n.Logger.Warn("the cluster does not know yet what a claim has", "claim", held.Claim.GetId(), "gpu", strings.Join(held.GPUs, ","), "err", err)
			if ctx.Err() != nil {
				return
			}
		}
	}
}

const holdTimeout = 3 * time.Second // for all of AcquireHoldings

// Announce reports this host to the cluster now. If the host has not joined a cluster, or
// there is no leader, it does nothing.
func (n *Node) Announce(ctx context.Context) error {
	m := n.member()
	if m == nil {
		return nil
	}
	if err := n.reportOnce(ctx, m); err != nil && !errors.Is(err, replica.ErrNoLeader) {
		return err
	}
	return nil
}

// Record writes the progress of a long operation to the cluster. It does not wait.
func (n *Node) Record(r *clusterv1.Migration) {
	select {
	case n.records <- r:
	default:
		n.Logger.Warn("operation not recorded: too many wait", "migration", r.GetId())
	}
}

// keepRecords writes records in order, each with its migration's token. While there is no
// leader, they are kept.
func (n *Node) keepRecords(ctx context.Context, m *membership) {
	tokens := map[string]uint64{}
	for {
		var r *clusterv1.Migration
		select {
		case <-ctx.Done():
			return
		case r = <-n.records:
		}
		r.Driver, r.Token = m.Host, tokens[r.GetId()]
		r.Object, r.Message = m.id(r.GetObject()), storable(r.GetMessage())
		token, err := n.keep(ctx, m, r)
		if err != nil {
			n.Logger.Warn("operation not recorded", "migration", r.GetId(), "err", err)
			continue
		}
		tokens[r.GetId()] = token
		if r.GetState() != clusterv1.MigrationState_MIGRATION_STATE_RUNNING {
			delete(tokens, r.GetId())
		}
	}
}

// keep writes a record, and returns the migration's token. It repeats that until the
// state machine has accepted or refused the record, or ctx has ended. A record that has
// ended stays as it is.
func (n *Node) keep(ctx context.Context, m *membership, r *clusterv1.Migration) (uint64, error) {
	c := &clusterv1.Command{Id: random.Hex(16), Op: &clusterv1.Command_PutMigration{
		PutMigration: &clusterv1.PutMigration{Migration: r},
	}}
	for {
		res, err := m.propose(ctx, c)
		var answer *scheduler.Error
		if kept := res.GetMigration(); errors.As(err, &answer) && r.GetToken() == 0 && kept.GetDriver() == m.Host {
			// An earlier hostd of this host has begun it.
			if kept.GetEndedUnixMs() > 0 {
				return kept.GetToken(), nil
			}
			c.Id, r.Token = random.Hex(16), kept.GetToken()
			continue
		}
		if err == nil || answer != nil || ctx.Err() != nil {
			return res.GetMigration().GetToken(), err
		}
		_ = wait.For(ctx, retryAfter)
	}
}
