package migration

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/suggest"
	"github.com/gpuctl/gpuctl/migrate"
)

// Service implements MigrationService.
type Service struct{ m *Manager }

var _ gpuctlv1connect.MigrationServiceHandler = (*Service)(nil)

// Handle adds the service to a mux.
func (m *Manager) Handle(mux *http.ServeMux, options ...connect.HandlerOption) {
	options = append(options, connect.WithReadMaxBytes(64<<10))
	mux.Handle(gpuctlv1connect.NewMigrationServiceHandler(&Service{m}, options...))
}

// find returns the VM, with its host and its name.
func (m *Manager) find(ctx context.Context, r *gpuctlv1.MachinePlanRequest) (*gpuctlv1.Machine, error) {
	all, missing := m.VMs(ctx)
	var found []*gpuctlv1.Machine
	var names []string
	for _, one := range all {
		names = append(names, one.GetName())
		if (one.GetName() == r.GetMachine() || one.GetUuid() == r.GetMachine()) && (r.GetHost() == "" || r.GetHost() == one.GetHost()) {
			found = append(found, one)
		}
	}
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1:
		return nil, reason.Coded(reason.Errorf(reason.Ambiguous, "vm %s is on %s and %s", r.GetMachine(), found[0].GetHost(), found[1].GetHost()).On("vm", r.GetMachine()).Do("say which with --on"))
	}
	text := fmt.Sprintf("vm %q: not found%s", r.GetMachine(), suggest.Hint(r.GetMachine(), names))
	if len(missing) > 0 {
		text += "; no answer from " + strings.Join(missing, ", ")
	}
	return nil, reason.Coded(reason.Errorf(reason.NotFound, "%s", text).On("vm", r.GetMachine()).Do("gpuctl vms lists them"))
}

func check(r *gpuctlv1.MachinePlanRequest) error {
	if !slices.Contains([]string{"migrate", "upgrade", "downgrade"}, r.GetVerb()) {
		return reason.Coded(reason.Errorf(reason.Invalid, "verb %q is not migrate, upgrade or downgrade", r.GetVerb()))
	}
	if !slices.Contains([]migrate.Live{migrate.LiveAuto, migrate.LiveAlways, migrate.LiveNever}, migrate.Live(r.GetLive())) {
		return reason.Coded(reason.Errorf(reason.Invalid, "live %.40q is not always or never", r.GetLive()))
	}
	if r.GetWait() && r.GetLive() != string(migrate.LiveAlways) {
		return reason.Coded(reason.Errorf(reason.Invalid, "a migration waits only while its applications compute on a remote GPU: live is to be always"))
	}
	if r.GetMachine() == "" {
		return reason.Coded(reason.Errorf(reason.Invalid, "no VM is named"))
	}
	return nil
}

// here returns the VM. If the VM is on another host, it also returns a client for that
// host's service.
func (s *Service) here(ctx context.Context, r *gpuctlv1.MachinePlanRequest) (*gpuctlv1.Machine, gpuctlv1connect.MigrationServiceClient, error) {
	if err := check(r); err != nil {
		return nil, nil, err
	}
	machine, err := s.m.find(ctx, r)
	if err != nil || machine.GetHost() == s.m.Node.HostName() {
		return machine, nil, err
	}
	c, err := s.m.Node.Migrations(machine.GetHost())
	r.Host = machine.GetHost()
	return machine, c, err
}

// Plan returns what a migration would do.
func (s *Service) Plan(ctx context.Context, req *connect.Request[gpuctlv1.MachinePlanRequest]) (*connect.Response[gpuctlv1.MachinePlanResponse], error) {
	machine, there, err := s.here(ctx, req.Msg)
	if err != nil {
		return nil, err
	}
	if there != nil {
		res, err := there.Plan(ctx, connect.NewRequest(req.Msg))
		if err != nil {
			return nil, err
		}
		return connect.NewResponse(res.Msg), nil
	}
	p, _, err := s.m.plan(ctx, s.m.Node.View(), req.Msg, machine.GetUuid())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(planProto(p)), nil
}

// Start plans, records and starts a migration.
func (s *Service) Start(ctx context.Context, req *connect.Request[gpuctlv1.MachineStartRequest], out *connect.ServerStream[gpuctlv1.MachineProgress]) error {
	machine, there, err := s.here(ctx, req.Msg.GetPlan())
	if err != nil {
		return err
	}
	if there != nil {
		in, err := there.Start(ctx, connect.NewRequest(req.Msg))
		return pass(in, err, out)
	}
	// No other migration of this VM may start between the plan and the record.
	end, err := s.m.alone(machine.GetUuid(), machine.GetName())
	if err != nil {
		return err
	}
	defer func() { end() }()
	v, err := s.m.current(ctx, machine.GetName())
	if err != nil {
		return err
	}
	p, facts, err := s.m.plan(ctx, v, req.Msg.GetPlan(), machine.GetUuid())
	if err != nil {
		return err
	}
	if !p.Possible() {
		return out.Send(&gpuctlv1.MachineProgress{Refused: planProto(p), End: "refused"})
	}
	best := p.Candidates[0]
	self := s.m.Node.HostName()
	r := &clusterv1.Migration{
		Id: "m-" + random.Hex(6), Verb: req.Msg.GetPlan().GetVerb(), Object: facts.GetName(), Driver: self, From: self, To: best.Host,
		State: clusterv1.MigrationState_MIGRATION_STATE_RUNNING, StartedUnixMs: time.Now().UnixMilli(),
		Machine: &clusterv1.MachineMove{
			Uuid: facts.GetUuid(), Name: facts.GetName(), FromHost: self, ToHost: best.Host, ToGpu: best.GPU.ID,
			PredictedNs: int64(best.Cost.Total), PredictedStopNs: int64(best.Cost.Stop), Cold: p.Cold, AwayBytes: p.Away, FreezeTimeoutMs: req.Msg.GetPlan().GetFreezeTimeoutMs(),
		},
	}
	for _, p := range facts.GetParts() {
		r.Machine.Parts = append(r.Machine.Parts, p.GetGpu())
	}
	if len(facts.GetGpus()) > 0 {
		r.Machine.FromGpu, r.From, r.To = facts.GetGpus()[0], facts.GetGpus()[0], best.GPU.ID
		r.Machine.ToClaim, r.Machine.Stored = "vm-"+random.Hex(6), facts.GetStored()
		r.Machine.FromClaim = s.m.claimOf(r.GetMachine().GetFromGpu())
	}
	if l := p.Live; l != nil && l.Far != nil {
		r.Machine.FarGpu, r.Machine.FarClaim = l.Far.ID, "vm-"+random.Hex(6)
		r.Machine.Live = req.Msg.GetPlan().GetLive() == string(migrate.LiveAlways)
		r.Machine.Wait = req.Msg.GetPlan().GetWait()
	}
	for _, c := range p.Candidates[1:] {
		if c.GPU.ID != "" && len(r.GetMachine().GetCandidates()) < mostCandidates {
			r.Machine.Candidates = append(r.Machine.Candidates, c.GPU.ID)
		}
	}
	kept, err := s.m.Node.PutMigration(ctx, r, false)
	if err != nil {
		return err
	}
	w := s.m.begin(kept)
	end()
	end = func() {}
	if req.Msg.GetNoWait() {
		return out.Send(progress(kept, 0, 0))
	}
	return s.m.watch(ctx, w, out.Send)
}

// Rehearse finds out whether a VM's CUDA programs can be moved: each goes through it, and back.
func (s *Service) Rehearse(ctx context.Context, req *connect.Request[gpuctlv1.MachineRehearseRequest], out *connect.ServerStream[gpuctlv1.OperationUpdate]) error {
	who := &gpuctlv1.MachinePlanRequest{Machine: req.Msg.GetMachine(), Host: req.Msg.GetHost(), Verb: string(migrate.Migrate)}
	machine, there, err := s.here(ctx, who)
	if err != nil {
		return err
	}
	if there != nil {
		req.Msg.Host = who.GetHost()
		in, err := there.Rehearse(ctx, connect.NewRequest(req.Msg))
		return pass(in, err, out)
	}
	end, err := s.m.alone(machine.GetUuid(), machine.GetName())
	if err != nil {
		return err
	}
	defer end()
	if s.m.Node.View() != nil { // a host without a cluster migrates nothing
		v, err := s.m.current(ctx, machine.GetName())
		if err != nil {
			return err
		}
		if id := s.m.moving(ctx, v, machine.GetUuid()); id != "" {
			return reason.Coded(reason.Errorf(reason.Busy, "migration %s of vm %s runs", id, machine.GetName()).On("vm", machine.GetName()))
		}
	}
	return s.m.Rehearse(ctx, machine.GetUuid(), machine.GetName(), time.Duration(req.Msg.GetFreezeTimeoutMs())*time.Millisecond, out.Send)
}

// current returns the state by which something is begun with a VM. The leader answers a record
// before this host has applied it: a second start right after the first would not see that one in
// the state applied here, and two drivers would fence each other. So it is what is committed. That
// needs a leader, as the record does.
func (m *Manager) current(ctx context.Context, name string) (*state.View, error) {
	v, err := m.committed(ctx)
	if err != nil {
		return nil, fmt.Errorf("vm %s: whether it is migrated already is not known: %w", name, err)
	}
	return v, nil
}

// alone marks a VM's migration as starting until end is called. It fails if another call
// has done so.
func (m *Manager) alone(uuid, name string) (end func(), err error) {
	end, ok := m.starting.Begin(uuid)
	if !ok {
		return nil, reason.Coded(reason.Errorf(reason.Busy, "a migration of vm %s is just being begun", name).On("vm", name))
	}
	return end, nil
}

// mostCandidates is how many other destinations are tried after the first.
const mostCandidates = 8

// claimOf returns the claim that has the GPU.
func (m *Manager) claimOf(gpu string) string {
	v := m.Node.View()
	if v == nil {
		return ""
	}
	for as := range v.AssignmentsOfGPU(gpu) {
		return as.GetClaim()
	}
	return ""
}

// pass forwards the stream of another host.
func pass[T any](in *connect.ServerStreamForClient[T], err error, out *connect.ServerStream[T]) error {
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	for in.Receive() {
		if err := out.Send(in.Msg()); err != nil {
			return err
		}
	}
	return in.Err()
}

// record returns the record of a VM's migration.
func (s *Service) record(id string) (*clusterv1.Migration, error) {
	v := s.m.Node.View()
	if v == nil {
		return nil, reason.Coded(reason.Errorf(reason.NotJoined, "this host is in no cluster"))
	}
	r := v.Migration(id)
	if r.GetMachine() == nil {
		return nil, reason.Coded(reason.Errorf(reason.NotFound, "migration %q of a VM: not found", id).On("migration", id).Do("gpuctl migrations lists them"))
	}
	return r, nil
}

// Watch streams the progress of a migration until its end.
func (s *Service) Watch(ctx context.Context, req *connect.Request[gpuctlv1.MachineWatchRequest], out *connect.ServerStream[gpuctlv1.MachineProgress]) error {
	for {
		r, err := s.record(req.Msg.GetId())
		if err != nil {
			return err
		}
		if r.GetState() != clusterv1.MigrationState_MIGRATION_STATE_RUNNING {
			p := progress(r, 0, 0)
			p.End = endOf(r)
			return out.Send(p)
		}
		if ok, err := s.m.follow(ctx, r.GetId(), out.Send); ok || err != nil {
			return err
		}
		if r.GetDriver() != s.m.Node.HostName() {
			c, err := s.m.Node.Migrations(r.GetDriver())
			if err != nil {
				return err
			}
			in, err := c.Watch(ctx, connect.NewRequest(req.Msg))
			return pass(in, err, out)
		}
		// This host is the driver, and does not drive it: it is about to, or the
		// migration has just ended.
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// Abort makes a migration roll back.
func (s *Service) Abort(ctx context.Context, req *connect.Request[gpuctlv1.MachineAbortRequest]) (*connect.Response[gpuctlv1.MachineAbortResponse], error) {
	r, err := s.record(req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	if over(r) {
		return nil, reason.Coded(reason.Errorf(reason.MigrationOver, "migration %s is over", r.GetId()).On("migration", r.GetId()))
	}
	if r.GetDriver() != s.m.Node.HostName() {
		c, err := s.m.Node.Migrations(r.GetDriver())
		if err != nil {
			return nil, err
		}
		res, err := c.Abort(ctx, connect.NewRequest(req.Msg))
		if err != nil {
			return nil, err
		}
		return connect.NewResponse(res.Msg), nil
	}
	if slices.Contains(r.GetDone(), migrate.StepCommit) {
		return nil, committed(r)
	}
	if migrate.Waiting(r) {
		return s.abortWaiting(ctx, r)
	}
	s.m.mu.Lock()
	w := s.m.runs[r.GetId()]
	s.m.mu.Unlock()
	err = migrate.ErrStale
	if w != nil {
		err = w.records.abort(ctx)
	}
	unrecorded := errors.Is(err, migrate.ErrUnreachable)
	switch {
	case errors.Is(err, errCommitted):
		return nil, committed(r)
	case errors.Is(err, migrate.ErrStale):
		return nil, reason.Coded(reason.Errorf(reason.MigrationNotDriven, "migration %s is not driven now", r.GetId()).On("migration", r.GetId()).Do("try again in a moment, or gpuctl migrations resume %s", r.GetId()))
	case err != nil && !unrecorded:
		return nil, err
	}
	message := "it is undone after the step that runs"
	if r.GetStep() == "move" {
		message = "the VM is on its way, which can't be stopped: it is moved back after that"
	}
	if unrecorded {
		message += "; the cluster does not record that now, so say it again if hostd on host " + r.GetDriver() + " is restarted before"
	}
	return connect.NewResponse(&gpuctlv1.MachineAbortResponse{Message: message}), nil
}

// committed returns the error for a migration from which there is no way back.
func committed(r *clusterv1.Migration) error {
	return reason.Coded(reason.Errorf(reason.MigrationCommitted, "migration %s is committed: what is left is to clean up", r.GetId()).On("migration", r.GetId()))
}

// abortWaiting makes a migration that waits for an operator roll back.
func (s *Service) abortWaiting(ctx context.Context, r *clusterv1.Migration) (*connect.Response[gpuctlv1.MachineAbortResponse], error) {
	end, err := s.m.alone(r.GetMachine().GetUuid(), r.GetMachine().GetName())
	if err != nil {
		return nil, err
	}
	defer end()
	kept, err := s.m.Node.PutMigration(ctx, r, true)
	if err != nil {
		return nil, err
	}
	next := proto.CloneOf(kept)
	next.State, next.Message, next.Machine.Aborting = clusterv1.MigrationState_MIGRATION_STATE_RUNNING, "", true
	if kept, err = s.m.Node.PutMigration(ctx, next, false); err != nil {
		return nil, err
	}
	s.m.begin(kept)
	return connect.NewResponse(&gpuctlv1.MachineAbortResponse{Message: "it is undone: gpuctl migrations watch " + r.GetId() + " shows it"}), nil
}

// Resume continues a held migration.
func (s *Service) Resume(ctx context.Context, req *connect.Request[gpuctlv1.MachineResumeRequest]) (*connect.Response[gpuctlv1.MachineResumeResponse], error) {
	r, err := s.record(req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	if r.GetState() != clusterv1.MigrationState_MIGRATION_STATE_HELD {
		return nil, reason.Coded(reason.Errorf(reason.MigrationNotHeld, "migration %s is not held", r.GetId()).On("migration", r.GetId()))
	}
	move, host := r.GetMachine(), req.Msg.GetAbsentOn()
	if host != "" && host != move.GetFromHost() && host != move.GetToHost() {
		return nil, reason.Coded(reason.Errorf(reason.Invalid, "host %q has no part in migration %s: it is between %s and %s", host, r.GetId(), move.GetFromHost(), move.GetToHost()).On("host", host))
	}
	end, err := s.m.alone(move.GetUuid(), move.GetName())
	if err != nil {
		return nil, err
	}
	defer end()
	kept, err := s.m.Node.PutMigration(ctx, r, true)
	if err != nil {
		return nil, err
	}
	next := proto.CloneOf(kept)
	next.State = clusterv1.MigrationState_MIGRATION_STATE_RUNNING
	if migrate.Waiting(r) {
		next.Machine.Wait, next.Message = false, ""
	}
	if host != "" {
		s.m.Log.Warn("an operator says that a VM is not on a host that cannot be asked", "migration", r.GetId(), "machine", move.GetName(), "host", host)
		s.m.Node.Note(&clusterv1.Event{Kind: clusterv1.Kind_KIND_MIGRATION, Object: r.GetId(), Type: "MachineSaidAbsent", Message: "an operator says that VM " + move.GetName() + " does not run on host " + host})
		if !slices.Contains(move.GetAbsentOn(), host) {
			next.Machine.AbsentOn = append(next.GetMachine().GetAbsentOn(), host)
		}
	}
	if kept, err = s.m.Node.PutMigration(ctx, next, false); err != nil {
		return nil, err
	}
	s.m.begin(kept)
	return connect.NewResponse(&gpuctlv1.MachineResumeResponse{Message: "it goes on: gpuctl migrations watch " + r.GetId() + " shows it"}), nil
}
