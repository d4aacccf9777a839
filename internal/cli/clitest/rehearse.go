package clitest

import (
	"context"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// Compute has a VM run a CUDA program, as a session. refuses and fails are how its rehearsal ends;
// if both are empty, it goes well.
func (m *Machines) Compute(vm, session, refuses, fails string) {
	r := &gpuctlv1.SwapResult{Rehearsed: true, TotalNs: 2e9, StoppedNs: 1e9, BytesFrozen: 4 << 20}
	u := &gpuctlv1.OperationUpdate{Session: session, Progress: &gpuctlv1.Progress{Result: r}}
	if refuses != "" {
		r.Refused, r.Reasons = true, []*gpuctlv1.Reason{{Code: "canary", Message: refuses}}
		u.Rejected = []*gpuctlv1.Candidate{{Gpu: "vm/0000:00:05.0", Model: "H100", Reasons: r.GetReasons()}}
	}
	if fails != "" {
		r.RolledBack, r.Error = true, fails
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.moves.cuda[vm] = append(m.moves.cuda[vm], u)
}

// Rehearse implements the RPC.
func (s *Migrations) Rehearse(_ context.Context, r *connect.Request[gpuctlv1.MachineRehearseRequest], out *connect.ServerStream[gpuctlv1.OperationUpdate]) error {
	if err := s.m.operates(); err != nil {
		return err
	}
	vm, err := s.m.machine(r.Msg.GetHost(), r.Msg.GetMachine())
	var all []*gpuctlv1.OperationUpdate
	if err == nil {
		all = s.cuda[vm.GetName()]
	}
	s.m.mu.Unlock()
	switch {
	case err != nil:
		return err
	case len(all) == 0:
		return reason.Coded(reason.Errorf(reason.Refused, "vm %s: no CUDA program computes in it", vm.GetName()))
	}
	for _, u := range all {
		if err := out.Send(&gpuctlv1.OperationUpdate{Session: u.GetSession(), Progress: &gpuctlv1.Progress{Step: "lock", Steps: 6}}); err != nil {
			return err
		}
		if err := out.Send(u); err != nil {
			return err
		}
	}
	return nil
}
