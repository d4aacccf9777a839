package endpoint

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/excerpt"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

// Remote calls a host's SiteService for one migration. The driver's own host is called in
// the same way.
type Remote struct {
	Host      string
	Migration string
	Token     uint64 // fencing token of the migration's record
	Service   gpuctlv1connect.SiteServiceClient
}

var _ migrate.Site = (*Remote)(nil)

// fromConnect maps a Connect error back to its sentinel, by its reason.
func (r *Remote) fromConnect(err error) error {
	var c *connect.Error
	switch {
	case err == nil:
		return nil
	case !errors.As(err, &c):
		return fmt.Errorf("host %s: %w: %w", r.Host, migrate.ErrUnreachable, err)
	case connect.IsWireError(err) && reason.Is(err, reason.Stale):
		return fmt.Errorf("host %s: %w: %s", r.Host, migrate.ErrStale, c.Message())
	case connect.IsWireError(err) && reason.Is(err, reason.NoCapacity):
		return fmt.Errorf("host %s: %w: %s", r.Host, migrate.ErrTaken, c.Message())
	}
	return peerError(r.Host, err)
}

func (r *Remote) request(m vm.VM) *gpuctlv1.SiteMachine {
	return &gpuctlv1.SiteMachine{Uuid: m.UUID, Name: m.Name, Migration: r.Migration, Token: r.Token}
}

func (r *Remote) card(m vm.VM, gpu, claim string) *connect.Request[gpuctlv1.SiteCardRequest] {
	return connect.NewRequest(&gpuctlv1.SiteCardRequest{Machine: r.request(m), Gpu: gpu, Claim: claim})
}

// Where returns the VM's state on the host.
func (r *Remote) Where(ctx context.Context, m vm.VM) (migrate.Presence, error) {
	res, err := r.Service.Where(ctx, connect.NewRequest(r.request(m)))
	if err != nil {
		return 0, r.fromConnect(err)
	}
	if res.Msg.GetKept() {
		return migrate.Kept, nil
	}
	for _, p := range []migrate.Presence{migrate.Absent, migrate.Running, migrate.Moving, migrate.Stopped} {
		if p.String() == res.Msg.GetPresence() {
			return p, nil
		}
	}
	return 0, fmt.Errorf("host %s says that the VM is %q, which this gpuctl does not know", r.Host, res.Msg.GetPresence())
}

// Reserve assigns a card of the host to a claim.
func (r *Remote) Reserve(ctx context.Context, m vm.VM, gpu, claim string) error {
	_, err := r.Service.Reserve(ctx, r.card(m, gpu, claim))
	return r.fromConnect(err)
}

// Prepare takes and resets a reserved card.
func (r *Remote) Prepare(ctx context.Context, m vm.VM, gpu, claim string) (*gpuctlv1.PCIIdentity, error) {
	res, err := r.Service.Prepare(ctx, r.card(m, gpu, claim))
	if err != nil {
		return nil, r.fromConnect(err)
	}
	return res.Msg.GetId(), nil
}

// Expect tells the VM to load the runtime for a card that is about to come.
func (r *Remote) Expect(ctx context.Context, m vm.VM, id *gpuctlv1.PCIIdentity) error {
	_, err := r.Service.Expect(ctx, connect.NewRequest(&gpuctlv1.SiteExpectRequest{Machine: r.request(m), Id: id}))
	return r.fromConnect(err)
}

// Attach attaches a card to the VM, where its card was before.
func (r *Remote) Attach(ctx context.Context, m vm.VM, gpu string, stored bool, at string) error {
	req := r.card(m, gpu, "")
	req.Msg.Stored, req.Msg.GuestAddress = stored, at
	_, err := r.Service.Attach(ctx, req)
	return r.fromConnect(err)
}

// Detach detaches a card from the VM and resets it.
func (r *Remote) Detach(ctx context.Context, m vm.VM, gpu string) (at string, err error) {
	res, err := r.Service.Detach(ctx, r.card(m, gpu, ""))
	if err != nil {
		return "", r.fromConnect(err)
	}
	return res.Msg.GetGuestAddress(), nil
}

// Stop ends the VM.
func (r *Remote) Stop(ctx context.Context, m vm.VM, gpu string) error {
	_, err := r.Service.Stop(ctx, r.card(m, gpu, ""))
	return r.fromConnect(err)
}

// Start starts the VM with a card.
func (r *Remote) Start(ctx context.Context, m vm.VM, gpu string, stored bool) error {
	req := r.card(m, gpu, "")
	req.Msg.Stored = stored
	_, err := r.Service.Start(ctx, req)
	return r.fromConnect(err)
}

// Definition returns the VM's stored definition.
func (r *Remote) Definition(ctx context.Context, m vm.VM) (string, error) {
	res, err := r.Service.Definition(ctx, connect.NewRequest(r.request(m)))
	if err != nil {
		return "", r.fromConnect(err)
	}
	return res.Msg.GetXml(), nil
}

// Define stores a VM's definition on the host.
func (r *Remote) Define(ctx context.Context, m vm.VM, xml string) error {
	_, err := r.Service.Define(ctx, connect.NewRequest(&gpuctlv1.SiteDefinition{Machine: r.request(m), Xml: xml}))
	return r.fromConnect(err)
}

// Undefine removes it.
func (r *Remote) Undefine(ctx context.Context, m vm.VM) error {
	_, err := r.Service.Undefine(ctx, connect.NewRequest(r.request(m)))
	return r.fromConnect(err)
}

// GiveBack makes a card free.
func (r *Remote) GiveBack(ctx context.Context, m vm.VM, gpu string) error {
	_, err := r.Service.GiveBack(ctx, r.card(m, gpu, ""))
	return r.fromConnect(err)
}

// Release makes the VM release a card.
func (r *Remote) Release(ctx context.Context, m vm.VM, gpu string) error {
	_, err := r.Service.Release(ctx, r.card(m, gpu, ""))
	return r.fromConnect(err)
}

// TakeUp makes the VM use a released card again.
func (r *Remote) TakeUp(ctx context.Context, m vm.VM, gpu string) error {
	_, err := r.Service.TakeUp(ctx, r.card(m, gpu, ""))
	return r.fromConnect(err)
}

// Await waits until the VM can use a card.
func (r *Remote) Await(ctx context.Context, m vm.VM, gpu string) error {
	_, err := r.Service.Await(ctx, r.card(m, gpu, ""))
	return r.fromConnect(err)
}

// Sessions returns the running sessions, and how much room the VM has for states.
func (r *Remote) Sessions(ctx context.Context, m vm.VM) (*migrate.AgentFacts, error) {
	res, err := r.Service.Sessions(ctx, connect.NewRequest(r.request(m)))
	if err != nil {
		return nil, r.fromConnect(err)
	}
	facts := AgentFacts(res.Msg.GetHello(), res.Msg.GetRunning(), res.Msg.GetRefused())
	if len(facts.Sessions) == 0 { // an older host sends ids only
		for _, id := range res.Msg.GetSessions() {
			facts.Sessions = append(facts.Sessions, migrate.SessionFacts{ID: id})
		}
	}
	return facts, nil
}

// AgentFacts converts what a VM's agent has reported for a plan.
func AgentFacts(h *gpuctlv1.HelloResponseSummary, sessions []*gpuctlv1.SiteSession, refused []*gpuctlv1.AdoptRefusal) *migrate.AgentFacts {
	out := &migrate.AgentFacts{
		Version: h.GetVersion(), Protocol: h.GetProtocol(), Hotplug: h.GetHotplug(), HotplugReason: h.GetHotplugReason(),
		FreeMemory: h.GetFreeMemory(), Bulk: h.GetBulk(),
	}
	for _, s := range sessions {
		one := migrate.SessionFacts{ID: s.GetId(), Command: s.GetCommand(), Memory: s.GetUsage().GetMemory(), Need: s.GetUsage(), Driver: s.GetEngine() == driverEngine}
		if s.GetFrozen() {
			one.Resident = one.Memory
		}
		out.Sessions = append(out.Sessions, one)
	}
	for _, r := range refused {
		var why []string
		for _, reason := range r.GetReasons() {
			why = append(why, reason.GetMessage())
		}
		out.Stuck = append(out.Stuck, migrate.Stuck{PID: r.GetPid(), Command: excerpt.Of(r.GetCommand(), 60), Why: strings.Join(why, "; ")})
	}
	return out
}

// follow reports a step's progress until its end.
func (r *Remote) follow(in *connect.ServerStreamForClient[gpuctlv1.SiteProgress], err error, report migrate.Progress) error {
	if err != nil {
		return r.fromConnect(err)
	}
	defer func() { _ = in.Close() }()
	for in.Receive() {
		report(in.Msg().GetDone(), in.Msg().GetTotal(), in.Msg().GetMessage())
	}
	return r.fromConnect(in.Err())
}

// Pause pauses a VM that runs on another host, too.
func (r *Remote) Pause(ctx context.Context, m vm.VM) error {
	_, err := r.Service.Pause(ctx, connect.NewRequest(r.request(m)))
	return r.fromConnect(err)
}

// Unpause continues it.
func (r *Remote) Unpause(ctx context.Context, m vm.VM) error {
	_, err := r.Service.Unpause(ctx, connect.NewRequest(r.request(m)))
	return r.fromConnect(err)
}

// Move migrates the VM to another host.
func (r *Remote) Move(ctx context.Context, m vm.VM, to string, report migrate.Progress) error {
	in, err := r.Service.Move(ctx, connect.NewRequest(&gpuctlv1.SiteMoveRequest{Machine: r.request(m), To: to}))
	return r.follow(in, err, report)
}

func (r *Remote) sessions(m vm.VM, gpu string, ids []string) *connect.Request[gpuctlv1.SiteSessionsRequest] {
	return connect.NewRequest(&gpuctlv1.SiteSessionsRequest{Machine: r.request(m), Gpu: gpu, Sessions: ids})
}

// Lost returns which of the sessions are lost.
func (r *Remote) Lost(ctx context.Context, m vm.VM, sessions []string) ([]*gpuctlv1.LostSession, error) {
	res, err := r.Service.Lost(ctx, r.sessions(m, "", sessions))
	if err != nil {
		return nil, r.fromConnect(err)
	}
	return res.Msg.GetLost(), nil
}

// Freeze suspends sessions.
func (r *Remote) Freeze(ctx context.Context, m vm.VM, f migrate.Freezing, report migrate.Progress) error {
	req := r.sessions(m, "", f.Sessions)
	req.Msg.Away, req.Msg.To, req.Msg.FreezeTimeoutMs = f.Away, f.To, f.Patience.Milliseconds()
	in, err := r.Service.Freeze(ctx, req)
	return r.follow(in, err, report)
}

// Deposit makes sure that another host has a copy of the states that this one keeps.
func (r *Remote) Deposit(ctx context.Context, m vm.VM, away []string, to string, report migrate.Progress) error {
	req := r.sessions(m, "", away)
	req.Msg.To = to
	in, err := r.Service.Deposit(ctx, req)
	return r.follow(in, err, report)
}

// Forget removes the states that are kept of the VM.
func (r *Remote) Forget(ctx context.Context, m vm.VM) error {
	_, err := r.Service.Forget(ctx, connect.NewRequest(r.request(m)))
	return r.fromConnect(err)
}

// Thaw resumes sessions on a card.
func (r *Remote) Thaw(ctx context.Context, m vm.VM, gpu string, ids []string, report migrate.Progress) error {
	in, err := r.Service.Thaw(ctx, r.sessions(m, gpu, ids))
	return r.follow(in, err, report)
}
