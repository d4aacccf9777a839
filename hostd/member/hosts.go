package member

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/cluster/remote"
	"github.com/gpuctl/gpuctl/cluster/scheduler"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/hostd/member/clusterapi"
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/wait"
	"github.com/gpuctl/gpuctl/migrate"
)

// OtherHosts returns the names of the hosts that are up, without this one.
func (n *Node) OtherHosts() []string {
	v := n.View()
	if v == nil {
		return nil
	}
	var out []string
	for h := range v.Hosts() {
		if h.GetName() != n.HostName() && h.GetState() != clusterv1.HostState_HOST_STATE_DOWN {
			out = append(out, h.GetName())
		}
	}
	slices.Sort(out)
	return out
}

// Devices returns a client for the cards of another host.
func (n *Node) Devices(host string) (gpuctlv1connect.DeviceServiceClient, error) {
	v := n.View()
	if v == nil {
		return nil, clusterapi.ErrNotJoined
	}
	h := v.Host(host)
	switch {
	case h == nil:
		return nil, reason.Coded(reason.Errorf(reason.NotFound, "there is no host %q", host).On("host", host).Do("gpuctl get hosts lists them"))
	case h.GetState() == clusterv1.HostState_HOST_STATE_DOWN:
		return nil, reason.Coded(reason.Errorf(reason.HostDown, "host %s is down: %s", host, h.GetMessage()).On("host", host))
	}
	return gpuctlv1connect.NewDeviceServiceClient(n.http, "https://"+h.GetAddress(), remote.Options()...), nil
}

// Note adds an event to the cluster's log. It does not wait.
func (n *Node) Note(e *clusterv1.Event) {
	select {
	case n.notes <- e:
	default:
		n.Logger.Warn("event not noted: too many wait", "object", e.GetObject(), "type", e.GetType())
	}
}

// NoteGPU adds an event about a GPU of this host, by its name here, to the cluster's log.
func (n *Node) NoteGPU(gpu, kind, message string) {
	n.Note(&clusterv1.Event{Kind: clusterv1.Kind_KIND_GPU, Object: n.HostName() + "/" + gpu, Type: kind, Message: message})
}

// NoteHost adds an event about this host to the cluster's log.
func (n *Node) NoteHost(kind, message string) {
	n.Note(&clusterv1.Event{Kind: clusterv1.Kind_KIND_HOST, Object: n.HostName(), Type: kind, Message: message})
}

// keepNotes writes events in order. While there is no leader, they are kept.
func (n *Node) keepNotes(ctx context.Context, m *membership) {
	for {
		var e *clusterv1.Event
		select {
		case <-ctx.Done():
			return
		case e = <-n.notes:
		}
		e.Message = storable(e.GetMessage())
		c := &clusterv1.Command{Id: random.Hex(16), Op: &clusterv1.Command_Note{Note: &clusterv1.Note{Event: e}}}
		for ctx.Err() == nil {
			_, err := m.propose(ctx, c)
			var answer *scheduler.Error
			if errors.As(err, &answer) {
				n.Logger.Warn("event not noted", "object", e.GetObject(), "type", e.GetType(), "err", err)
			}
			if err == nil || answer != nil {
				break
			}
			_ = wait.For(ctx, retryAfter)
		}
	}
}

// address returns the address of a host, or of this one.
func (n *Node) address(host string) (string, error) {
	v := n.View()
	if v == nil {
		return "", clusterapi.ErrNotJoined
	}
	h := v.Host(host)
	if h == nil {
		return "", reason.Coded(reason.Errorf(reason.NotFound, "there is no host %q", host).On("host", host).Do("gpuctl get hosts lists them"))
	}
	return h.GetAddress(), nil
}

// Site returns a client for a host's part in migrations. The host may be this one.
func (n *Node) Site(host string) (gpuctlv1connect.SiteServiceClient, error) {
	address, err := n.address(host)
	if err != nil {
		return nil, err
	}
	return gpuctlv1connect.NewSiteServiceClient(n.http, "https://"+address, remote.Options()...), nil
}

// Migrations returns a client for another host's MigrationService.
func (n *Node) Migrations(host string) (gpuctlv1connect.MigrationServiceClient, error) {
	address, err := n.address(host)
	if err != nil {
		return nil, err
	}
	return gpuctlv1connect.NewMigrationServiceClient(n.http, "https://"+address, remote.Options()...), nil
}

// Address returns the address at which a host is reached, without the port.
func (n *Node) Address(host string) (string, error) {
	address, err := n.address(host)
	if err != nil {
		return "", err
	}
	name, _, err := net.SplitHostPort(address)
	return name, err
}

// PutMigration writes a migration's record with its token, and returns the record as it
// is stored. takeOver makes this host its driver. Errors wrap migrate.ErrStale if another
// host is the driver, and migrate.ErrUnreachable if it is unknown whether the record was
// written.
func (n *Node) PutMigration(ctx context.Context, r *clusterv1.Migration, takeOver bool) (*clusterv1.Migration, error) {
	m, err := n.membership()
	if err != nil {
		return nil, err
	}
	r = proto.CloneOf(r)
	r.Driver = m.Host
	if takeOver {
		r.Token = 0
	}
	c := &clusterv1.Command{Id: random.Hex(16), Op: &clusterv1.Command_PutMigration{
		PutMigration: &clusterv1.PutMigration{Migration: r, TakeOver: takeOver},
	}}
	// A record may be written late, after its writer has given it up and gone on.
	if r.GetMachine() != nil && m.store.State().View().Protocol() >= state.ProtocolMoves {
		c.Version = state.ProtocolMoves
	}
	res, err := m.propose(ctx, c)
	var answer *scheduler.Error
	switch {
	case err == nil:
		return proto.CloneOf(res.GetMigration()), nil // a copy, as the state's own objects must not be changed
	case errors.As(err, &answer) && answer.Result.GetOutcome() == clusterv1.Outcome_OUTCOME_STALE:
		return nil, fmt.Errorf("%w: %w", migrate.ErrStale, err)
	case answer != nil && answer.Result.GetOutcome() == clusterv1.Outcome_OUTCOME_INVALID:
		return nil, fmt.Errorf("%w: %w", migrate.ErrRefused, err)
	case answer != nil:
		return nil, err
	}
	return nil, fmt.Errorf("%w: %w", migrate.ErrUnreachable, err)
}
