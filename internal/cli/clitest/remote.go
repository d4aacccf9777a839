package clitest

import (
	"context"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// AttachRemote implements the RPC. A VM has one remote GPU, whose name must be given.
func (m *Machines) AttachRemote(_ context.Context, r *connect.Request[gpuctlv1.AttachRemoteRequest], out *connect.ServerStream[gpuctlv1.DeviceUpdate]) error {
	return m.change(r.Msg.GetPlan(), out, func() (*script, error) {
		vm, err := m.machine(r.Msg.GetHost(), r.Msg.GetMachine())
		if err != nil {
			return nil, err
		}
		id := r.Msg.GetGpu()
		s := &script{gpu: id, machine: vm.GetName(), plan: []*gpuctlv1.PlannedStep{
			{Name: "claim", What: "bind a claim to " + id, Undo: "the claim is released"},
			{Name: "tell", What: "tell the gpuguest of " + vm.GetName(), Undo: "it is told that it has none"},
		}}
		s.against(m.cards[id] == nil && !m.served(id), "no_gpu", "there is no GPU %s", id)
		s.against(vm.GetRemote() != nil, "has_remote", "VM %s has %s already", vm.GetName(), vm.GetRemote().GetGpu())
		s.do = func() error {
			vm.Remote = &gpuctlv1.RemoteGPU{Gpu: id, Memory: r.Msg.GetMinMemory()}
			return nil
		}
		return s, nil
	})
}

// DetachRemote implements the RPC.
func (m *Machines) DetachRemote(_ context.Context, r *connect.Request[gpuctlv1.DetachRemoteRequest], out *connect.ServerStream[gpuctlv1.DeviceUpdate]) error {
	return m.change(r.Msg.GetPlan(), out, func() (*script, error) {
		vm, err := m.machine(r.Msg.GetHost(), r.Msg.GetMachine())
		if err == nil && vm.GetRemote() == nil {
			err = fail(connect.CodeNotFound, "VM %s has no remote GPU", vm.GetName())
		}
		if err != nil {
			return nil, err
		}
		s := &script{gpu: vm.GetRemote().GetGpu(), machine: vm.GetName(), plan: []*gpuctlv1.PlannedStep{
			{Name: "withdraw", What: "tell the gpuguest of " + vm.GetName() + " that it has none", Undo: "it is told of it again"},
			{Name: "end", What: "release the claim"},
		}}
		s.do = func() error {
			vm.Remote = nil
			return nil
		}
		return s, nil
	})
}
