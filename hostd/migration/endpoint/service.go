package endpoint

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/migrate"
	"github.com/gpuctl/gpuctl/mmio/server"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Service serves SiteService: drivers on other hosts call it.
type Service struct{ local *Local }

var _ gpuctlv1connect.SiteServiceHandler = (*Service)(nil)

// Handle adds the service to a mux.
func (l *Local) Handle(mux *http.ServeMux, options ...connect.HandlerOption) {
	options = append(options, connect.WithReadMaxBytes(256<<10))
	mux.Handle(gpuctlv1connect.NewSiteServiceHandler(&Service{l}, options...))
}

// toConnect adds a reason to an error, from which [Remote] restores the sentinel. The
// reason of an agent's error is replaced, because it is about the VM and not about this
// host.
func toConnect(err error) error {
	if err == nil {
		return nil
	}
	code := reason.Refused
	switch {
	case errors.Is(err, migrate.ErrStale):
		code = reason.Stale
	case errors.Is(err, cards.ErrTaken), errors.Is(err, migrate.ErrTaken):
		code = reason.NoCapacity
	case errors.Is(err, virt.ErrLocked):
		code = reason.Locked
	case errors.Is(err, virt.ErrLockManager):
		code = reason.LockManagerDown
	case errors.Is(err, cards.ErrNotFound), errors.Is(err, virt.ErrNotFound):
		code = reason.NotFound
	case doubtful(err):
		code = reason.Unavailable
	}
	return reason.Refuse(reason.Errorf(code, "%w", err))
}

// doubtful reports whether it is unknown after this error if the step was done, or
// whether the step may succeed when it is repeated.
func doubtful(err error) bool {
	for _, e := range []error{virt.ErrDisconnected, virt.ErrTimeout, virt.ErrUnknownOutcome, cards.ErrBusy, server.ErrAgain, migrate.ErrUnreachable, context.DeadlineExceeded, context.Canceled} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

func done(err error) (*connect.Response[gpuctlv1.SiteDone], error) {
	if err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(&gpuctlv1.SiteDone{}), nil
}

// step does a step of a migration, unless another driver has taken over.
func (s *Service) step(m *gpuctlv1.SiteMachine, do func() error) error {
	if err := s.local.Fence.Admit(m); err != nil {
		return err
	}
	return do()
}

// MachineFacts returns what a plan needs to know about a VM.
func (s *Service) MachineFacts(ctx context.Context, req *connect.Request[gpuctlv1.SiteMachine]) (*connect.Response[gpuctlv1.SiteMachineFacts], error) {
	res, err := s.local.MachineFacts(ctx, req.Msg.GetUuid())
	if err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(res), nil
}

// Serves reports which cards the runtimes in a VM can use.
func (s *Service) Serves(ctx context.Context, req *connect.Request[gpuctlv1.SiteServesRequest]) (*connect.Response[gpuctlv1.ServesResponse], error) {
	o, err := s.local.Guests.get(ctx, req.Msg.GetUuid())
	if err != nil {
		return nil, toConnect(err)
	}
	res, err := o.agent.Serves(ctx, connect.NewRequest(&gpuctlv1.ServesRequest{Functions: req.Msg.GetFunctions()}))
	if err != nil {
		return nil, toConnect(err)
	}
	return res, nil
}

// HostFacts returns what a plan needs to know about this host.
func (s *Service) HostFacts(ctx context.Context, req *connect.Request[gpuctlv1.SiteHostFactsRequest]) (*connect.Response[gpuctlv1.SiteHostFacts], error) {
	res, err := s.local.HostFacts(ctx, req.Msg)
	if err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(res), nil
}

// Where returns a VM's state on this host.
func (s *Service) Where(ctx context.Context, req *connect.Request[gpuctlv1.SiteMachine]) (*connect.Response[gpuctlv1.SiteWhereResponse], error) {
	// The driver decides by the answer. So no late step of an earlier driver may follow.
	if req.Msg.GetMigration() != "" {
		if err := s.local.Fence.Admit(req.Msg); err != nil {
			return nil, toConnect(err)
		}
	}
	sending := s.local.sending.Has(req.Msg.GetUuid()) // asked first: later ones are of a later driver
	p, err := s.local.Where(ctx, req.Msg.GetUuid())
	if err != nil {
		return nil, toConnect(err)
	}
	if sending && p == migrate.Running {
		p = migrate.Moving
	}
	if p == migrate.Kept { // to hosts that do not know it, it is moving
		return connect.NewResponse(&gpuctlv1.SiteWhereResponse{Presence: migrate.Moving.String(), Kept: true}), nil
	}
	return connect.NewResponse(&gpuctlv1.SiteWhereResponse{Presence: p.String()}), nil
}

// Pause pauses a VM that runs on another host, too.
func (s *Service) Pause(ctx context.Context, req *connect.Request[gpuctlv1.SiteMachine]) (*connect.Response[gpuctlv1.SiteDone], error) {
	return done(s.step(req.Msg, func() error { return s.local.Pause(ctx, req.Msg.GetUuid()) }))
}

// Unpause continues it.
func (s *Service) Unpause(ctx context.Context, req *connect.Request[gpuctlv1.SiteMachine]) (*connect.Response[gpuctlv1.SiteDone], error) {
	return done(s.step(req.Msg, func() error { return s.local.Unpause(ctx, req.Msg.GetUuid()) }))
}

// Reserve assigns a card to a claim.
func (s *Service) Reserve(ctx context.Context, req *connect.Request[gpuctlv1.SiteCardRequest]) (*connect.Response[gpuctlv1.SiteDone], error) {
	m := req.Msg
	return done(s.step(req.Msg.GetMachine(), func() error {
		return s.local.Keeper.Reserve(ctx, vmOf(m.GetMachine()), local(m.GetGpu()), m.GetClaim(), m.GetMachine().GetMigration())
	}))
}

// Prepare takes and resets a reserved card.
func (s *Service) Prepare(ctx context.Context, req *connect.Request[gpuctlv1.SiteCardRequest]) (*connect.Response[gpuctlv1.SitePrepareResponse], error) {
	m := req.Msg
	err := s.step(m.GetMachine(), func() error {
		return s.local.Keeper.Prepare(ctx, vmOf(m.GetMachine()), local(m.GetGpu()), m.GetClaim(), m.GetMachine().GetMigration())
	})
	if err != nil {
		return nil, toConnect(err)
	}
	id, err := s.local.Keeper.Identity(ctx, local(m.GetGpu()))
	if err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(&gpuctlv1.SitePrepareResponse{Id: id}), nil
}

// Expect tells a VM to load the runtime for a card that is about to come.
func (s *Service) Expect(ctx context.Context, req *connect.Request[gpuctlv1.SiteExpectRequest]) (*connect.Response[gpuctlv1.SiteDone], error) {
	return done(s.step(req.Msg.GetMachine(), func() error { return s.local.Guests.expect(ctx, req.Msg.GetMachine().GetUuid(), req.Msg.GetId()) }))
}

// Attach attaches a card to a VM.
func (s *Service) Attach(ctx context.Context, req *connect.Request[gpuctlv1.SiteCardRequest]) (*connect.Response[gpuctlv1.SiteDone], error) {
	m := req.Msg
	return done(s.step(req.Msg.GetMachine(), func() error {
		at, err := guestAddress(m.GetGuestAddress())
		if err != nil {
			return err
		}
		return s.local.Keeper.AttachPrepared(ctx, vmOf(m.GetMachine()), local(m.GetGpu()), m.GetStored(), at)
	}))
}

// Detach detaches a card from a VM and resets it.
func (s *Service) Detach(ctx context.Context, req *connect.Request[gpuctlv1.SiteCardRequest]) (*connect.Response[gpuctlv1.SiteDetachResponse], error) {
	m, res := req.Msg, &gpuctlv1.SiteDetachResponse{}
	err := s.step(m.GetMachine(), func() error {
		at, err := s.local.Keeper.DetachReleased(ctx, vmOf(m.GetMachine()), local(m.GetGpu()), m.GetMachine().GetMigration())
		if at != nil {
			res.GuestAddress = at.String()
		}
		return err
	})
	if err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(res), nil
}

// guestAddress returns an address in a VM; nil: none is given.
func guestAddress(text string) (*pci.Address, error) {
	if text == "" {
		return nil, nil //nolint:nilnil // none is an answer
	}
	at, err := pci.ParseAddress(text)
	if err != nil {
		return nil, fmt.Errorf("address in the VM: %w", err)
	}
	return &at, nil
}

// GiveBack makes a card free.
func (s *Service) GiveBack(ctx context.Context, req *connect.Request[gpuctlv1.SiteCardRequest]) (*connect.Response[gpuctlv1.SiteDone], error) {
	return done(s.step(req.Msg.GetMachine(), func() error {
		return s.local.Keeper.GiveBack(ctx, vmOf(req.Msg.GetMachine()), local(req.Msg.GetGpu()))
	}))
}

// Release makes a VM release a card.
func (s *Service) Release(ctx context.Context, req *connect.Request[gpuctlv1.SiteCardRequest]) (*connect.Response[gpuctlv1.SiteDone], error) {
	return done(s.step(req.Msg.GetMachine(), func() error { return s.local.Release(ctx, req.Msg.GetMachine().GetUuid(), req.Msg.GetGpu()) }))
}

// TakeUp makes a VM use a released card again.
func (s *Service) TakeUp(ctx context.Context, req *connect.Request[gpuctlv1.SiteCardRequest]) (*connect.Response[gpuctlv1.SiteDone], error) {
	return done(s.step(req.Msg.GetMachine(), func() error { return s.local.TakeUp(ctx, req.Msg.GetMachine().GetUuid(), req.Msg.GetGpu()) }))
}

// Await waits until a VM can use a card.
func (s *Service) Await(ctx context.Context, req *connect.Request[gpuctlv1.SiteCardRequest]) (*connect.Response[gpuctlv1.SiteDone], error) {
	return done(s.step(req.Msg.GetMachine(), func() error { return s.local.Await(ctx, req.Msg.GetMachine().GetUuid(), req.Msg.GetGpu()) }))
}

// Stop ends a VM.
func (s *Service) Stop(ctx context.Context, req *connect.Request[gpuctlv1.SiteCardRequest]) (*connect.Response[gpuctlv1.SiteDone], error) {
	return done(s.step(req.Msg.GetMachine(), func() error { return s.local.Stop(ctx, req.Msg.GetMachine(), req.Msg.GetGpu()) }))
}

// Start starts a VM with a card.
func (s *Service) Start(ctx context.Context, req *connect.Request[gpuctlv1.SiteCardRequest]) (*connect.Response[gpuctlv1.SiteDone], error) {
	return done(s.step(req.Msg.GetMachine(), func() error { return s.local.Start(ctx, req.Msg.GetMachine(), req.Msg.GetGpu(), req.Msg.GetStored()) }))
}

// Definition returns a VM's stored definition.
func (s *Service) Definition(ctx context.Context, req *connect.Request[gpuctlv1.SiteMachine]) (*connect.Response[gpuctlv1.SiteDefinition], error) {
	xml, err := s.local.Definition(ctx, req.Msg.GetUuid())
	if err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(&gpuctlv1.SiteDefinition{Machine: req.Msg, Xml: xml}), nil
}

// Define stores the definition that a VM had on another host.
func (s *Service) Define(ctx context.Context, req *connect.Request[gpuctlv1.SiteDefinition]) (*connect.Response[gpuctlv1.SiteDone], error) {
	return done(s.step(req.Msg.GetMachine(), func() error { return s.local.Define(ctx, req.Msg.GetMachine(), req.Msg.GetXml()) }))
}

// Undefine removes a VM's definition.
func (s *Service) Undefine(ctx context.Context, req *connect.Request[gpuctlv1.SiteMachine]) (*connect.Response[gpuctlv1.SiteDone], error) {
	return done(s.step(req.Msg, func() error { return s.local.Undefine(ctx, req.Msg) }))
}

// Sessions returns the sessions that run in a VM.
func (s *Service) Sessions(ctx context.Context, req *connect.Request[gpuctlv1.SiteMachine]) (*connect.Response[gpuctlv1.SiteSessionsResponse], error) {
	res, err := s.local.Sessions(ctx, req.Msg.GetUuid())
	if err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(res), nil
}

// Lost returns which of a VM's sessions are lost.
func (s *Service) Lost(ctx context.Context, req *connect.Request[gpuctlv1.SiteSessionsRequest]) (*connect.Response[gpuctlv1.SiteLostResponse], error) {
	lost, err := s.local.Lost(ctx, req.Msg.GetMachine().GetUuid(), req.Msg.GetSessions())
	if err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(&gpuctlv1.SiteLostResponse{Lost: lost}), nil
}

// telling returns a function that sends progress to the driver.
func telling(out *connect.ServerStream[gpuctlv1.SiteProgress]) migrate.Progress {
	return func(done, total uint64, waits string) {
		_ = out.Send(&gpuctlv1.SiteProgress{Done: done, Total: total, Message: waits}) // fails if the driver has left; the step goes on
	}
}

// Move migrates a VM to another host.
func (s *Service) Move(ctx context.Context, req *connect.Request[gpuctlv1.SiteMoveRequest], out *connect.ServerStream[gpuctlv1.SiteProgress]) error {
	return toConnect(s.step(req.Msg.GetMachine(), func() error { return s.local.Move(ctx, req.Msg.GetMachine(), req.Msg.GetTo(), telling(out)) }))
}

// Freeze suspends sessions.
func (s *Service) Freeze(ctx context.Context, req *connect.Request[gpuctlv1.SiteSessionsRequest], out *connect.ServerStream[gpuctlv1.SiteProgress]) error {
	return toConnect(s.step(req.Msg.GetMachine(), func() error { return s.local.Freeze(ctx, req.Msg, telling(out)) }))
}

// Thaw resumes sessions on a card.
func (s *Service) Thaw(ctx context.Context, req *connect.Request[gpuctlv1.SiteSessionsRequest], out *connect.ServerStream[gpuctlv1.SiteProgress]) error {
	return toConnect(s.step(req.Msg.GetMachine(), func() error {
		return s.local.Thaw(ctx, req.Msg.GetMachine(), req.Msg.GetGpu(), req.Msg.GetSessions(), telling(out))
	}))
}
