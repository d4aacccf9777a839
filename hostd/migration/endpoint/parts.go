package endpoint

import (
	"bufio"
	"context"
	"fmt"
	"io"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/hostd/mediated"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

// Parts manages this host's parts of mediated GPUs.
type Parts interface {
	Parts(uuid string) []*gpuctlv1.SitePart
	Room() []*gpuctlv1.SitePartRoom
	ParkParts(ctx context.Context, m vm.VM, migration string) ([]*gpuctlv1.SitePart, error)
	ExpectParts(ctx context.Context, m vm.VM, migration string, parts []*gpuctlv1.SitePart) error
	TakeParts(ctx context.Context, m vm.VM, migration string, from mediated.Source) error
	DropParts(ctx context.Context, m vm.VM, migration string) error
	Contents(ctx context.Context, m vm.VM, migration string, slot uint32, w io.Writer) error
	GivePart(ctx context.Context, m vm.VM, migration string, slot uint32, seal string) error
}

// partChunk is how much of a part's contents one message has.
const partChunk = 64 << 10

// otherParts is the other host of a migration, as a source of contents.
type otherParts struct {
	l       *Local
	machine *gpuctlv1.SiteMachine
	host    string
}

func (o otherParts) request(slot uint8, seal string) *connect.Request[gpuctlv1.SitePartRequest] {
	return connect.NewRequest(&gpuctlv1.SitePartRequest{Machine: o.machine, Slot: uint32(slot), Seal: seal})
}

// Contents writes the contents of a part that the other host has.
func (o otherParts) Contents(ctx context.Context, slot uint8, w io.Writer) error {
	peer, err := o.l.Peer(o.host)
	if err != nil {
		return err
	}
	in, err := peer.PartContents(ctx, o.request(slot, ""))
	if err != nil {
		return peerError(o.host, err)
	}
	defer func() { _ = in.Close() }()
	for in.Receive() {
		if _, err := w.Write(in.Msg().GetData()); err != nil {
			return err
		}
	}
	if err := in.Err(); err != nil {
		return peerError(o.host, err)
	}
	return nil
}

// Give has the other host give a part.
func (o otherParts) Give(ctx context.Context, slot uint8, seal string) error {
	peer, err := o.l.Peer(o.host)
	if err != nil {
		return err
	}
	if _, err = peer.GivePart(ctx, o.request(slot, seal)); err != nil {
		return peerError(o.host, err)
	}
	return nil
}

// parts returns the keeper of mediated GPUs.
func (l *Local) parts() (Parts, error) {
	if l.Parts == nil {
		return nil, fmt.Errorf("host %s has no mediated GPUs", l.Name)
	}
	return l.Parts, nil
}

// ParkParts has no command of a VM's parts begin any more.
func (s *Service) ParkParts(ctx context.Context, req *connect.Request[gpuctlv1.SiteMachine]) (*connect.Response[gpuctlv1.SiteParts], error) {
	out := &gpuctlv1.SiteParts{Machine: req.Msg}
	err := s.step(req.Msg, func() error {
		p, err := s.local.parts()
		if err == nil {
			out.Parts, err = p.ParkParts(ctx, vmOf(req.Msg), req.Msg.GetMigration())
		}
		return err
	})
	if err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(out), nil
}

// ExpectParts reserves such parts for a VM that is to arrive.
func (s *Service) ExpectParts(ctx context.Context, req *connect.Request[gpuctlv1.SiteParts]) (*connect.Response[gpuctlv1.SiteDone], error) {
	m := req.Msg.GetMachine()
	return done(s.step(m, func() error {
		p, err := s.local.parts()
		if err != nil {
			return err
		}
		return p.ExpectParts(ctx, vmOf(m), m.GetMigration(), req.Msg.GetParts())
	}))
}

// TakeParts has the parts of a VM that is on this host work.
func (s *Service) TakeParts(ctx context.Context, req *connect.Request[gpuctlv1.SitePartsRequest]) (*connect.Response[gpuctlv1.SiteDone], error) {
	m := req.Msg.GetMachine()
	return done(s.step(m, func() error {
		p, err := s.local.parts()
		if err != nil {
			return err
		}
		if err := s.local.Party(m, req.Msg.GetOther()); err != nil {
			return err
		}
		return p.TakeParts(ctx, vmOf(m), m.GetMigration(), otherParts{s.local, m, req.Msg.GetOther()})
	}))
}

// DropParts gives the parts of a VM back that is not on this host.
func (s *Service) DropParts(ctx context.Context, req *connect.Request[gpuctlv1.SiteMachine]) (*connect.Response[gpuctlv1.SiteDone], error) {
	return done(s.step(req.Msg, func() error {
		if s.local.Parts == nil {
			return nil
		}
		return s.local.Parts.DropParts(ctx, vmOf(req.Msg), req.Msg.GetMigration())
	}))
}

// PartContents returns the contents of a part to the host to which the VM has moved.
func (s *Service) PartContents(ctx context.Context, req *connect.Request[gpuctlv1.SitePartRequest], out *connect.ServerStream[gpuctlv1.SitePartChunk]) error {
	m := req.Msg.GetMachine()
	return toConnect(s.step(m, func() error {
		p, err := s.party(ctx, m)
		if err != nil {
			return err
		}
		w := bufio.NewWriterSize(chunkSender{out}, partChunk)
		if err := p.Contents(ctx, vmOf(m), m.GetMigration(), req.Msg.GetSlot(), w); err != nil {
			return err
		}
		return w.Flush()
	}))
}

// GivePart ends a part's use on this host for good.
func (s *Service) GivePart(ctx context.Context, req *connect.Request[gpuctlv1.SitePartRequest]) (*connect.Response[gpuctlv1.SiteDone], error) {
	m := req.Msg.GetMachine()
	return done(s.step(m, func() error {
		p, err := s.party(ctx, m)
		if err != nil {
			return err
		}
		return p.GivePart(ctx, vmOf(m), m.GetMigration(), req.Msg.GetSlot(), req.Msg.GetSeal())
	}))
}

// party returns the keeper of mediated GPUs, if the calling host takes part in the VM's
// migration.
func (s *Service) party(ctx context.Context, m *gpuctlv1.SiteMachine) (Parts, error) {
	p, err := s.local.parts()
	if err == nil {
		caller, _ := access.From(ctx)
		err = s.local.Party(m, caller.Host)
	}
	return p, err
}

// chunkSender sends what is written.
type chunkSender struct {
	out *connect.ServerStream[gpuctlv1.SitePartChunk]
}

func (c chunkSender) Write(p []byte) (n int, err error) {
	for len(p) > 0 {
		some := p[:min(len(p), partChunk)]
		if err := c.out.Send(&gpuctlv1.SitePartChunk{Data: some}); err != nil {
			return n, err
		}
		n, p = n+len(some), p[len(some):]
	}
	return n, nil
}

var _ migrate.Parts = (*Remote)(nil)

// ParkParts has no command of the VM's parts of mediated GPUs begin any more.
func (r *Remote) ParkParts(ctx context.Context, m vm.VM) ([]*gpuctlv1.SitePart, error) {
	res, err := r.Service.ParkParts(ctx, connect.NewRequest(r.request(m)))
	if err != nil {
		return nil, r.fromConnect(err)
	}
	return res.Msg.GetParts(), nil
}

// ExpectParts reserves such parts for the VM's arrival.
func (r *Remote) ExpectParts(ctx context.Context, m vm.VM, parts []*gpuctlv1.SitePart) error {
	_, err := r.Service.ExpectParts(ctx, connect.NewRequest(&gpuctlv1.SiteParts{Machine: r.request(m), Parts: parts}))
	return r.fromConnect(err)
}

// TakeParts has the parts work on the host.
func (r *Remote) TakeParts(ctx context.Context, m vm.VM, other string) error {
	_, err := r.Service.TakeParts(ctx, connect.NewRequest(&gpuctlv1.SitePartsRequest{Machine: r.request(m), Other: other}))
	return r.fromConnect(err)
}

// DropParts gives the parts back.
func (r *Remote) DropParts(ctx context.Context, m vm.VM) error {
	_, err := r.Service.DropParts(ctx, connect.NewRequest(r.request(m)))
	return r.fromConnect(err)
}
