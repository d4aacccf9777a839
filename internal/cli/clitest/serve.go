package clitest

import (
	"context"
	"slices"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// Serve implements the RPC. A service VM lends its first card, as HOST/vm-NAME.
func (m *Machines) Serve(_ context.Context, r *connect.Request[gpuctlv1.ServeRequest], out *connect.ServerStream[gpuctlv1.DeviceUpdate]) error {
	return m.change(r.Msg.GetPlan(), out, func() (*script, error) {
		vm, err := m.machine(r.Msg.GetHost(), r.Msg.GetMachine())
		if err != nil {
			return nil, err
		}
		s := &script{gpu: r.Msg.GetGpu(), machine: vm.GetName(), plan: []*gpuctlv1.PlannedStep{
			{Name: "declare", What: "record that the cards of " + vm.GetName() + " serve others", Undo: "it is not recorded any more"},
			{Name: "offer", What: "wait until gpuguest there lends a card", Undo: "what was done before is undone"},
		}}
		s.against(vm.GetService() != nil, "serves", "VM %s is a service VM already", vm.GetName())
		s.against(len(vm.GetGpus()) == 0 && r.Msg.GetGpu() == "", "offer", "VM %s has no card", vm.GetName())
		s.do = func() error {
			if id := r.Msg.GetGpu(); id != "" {
				if err := m.give(vm.GetHost()+"/"+id, vm); err != nil {
					return err
				}
				vm.Gpus = append(vm.Gpus, vm.GetHost()+"/"+id)
			}
			vm.Service = &gpuctlv1.Service{Gpus: []string{vm.GetHost() + "/vm-" + vm.GetName()}}
			return nil
		}
		return s, nil
	})
}

// EndServe implements the RPC. It is refused while another VM has the GPU.
func (m *Machines) EndServe(_ context.Context, r *connect.Request[gpuctlv1.EndServeRequest], out *connect.ServerStream[gpuctlv1.DeviceUpdate]) error {
	return m.change(r.Msg.GetPlan(), out, func() (*script, error) {
		vm, err := m.machine(r.Msg.GetHost(), r.Msg.GetMachine())
		if err == nil && vm.GetService() == nil {
			err = fail(connect.CodeNotFound, "VM %s is no service VM", vm.GetName())
		}
		if err != nil {
			return nil, err
		}
		s := &script{machine: vm.GetName(), plan: []*gpuctlv1.PlannedStep{{Name: "withdraw", What: "give the GPUs of " + vm.GetName() + " to nobody any more", Undo: "they are given to others again"}}}
		for _, other := range m.vms {
			used := slices.Contains(vm.GetService().GetGpus(), other.GetRemote().GetGpu())
			s.against(used && !r.Msg.GetUnconfirmed(), "in_use", "vm:%s has a part of a GPU of VM %s", other.GetName(), vm.GetName())
		}
		s.do = func() error {
			vm.Service = nil
			for _, other := range m.vms {
				if other.GetRemote().GetGpu() == vm.GetHost()+"/vm-"+vm.GetName() {
					other.Remote = nil
				}
			}
			return nil
		}
		return s, nil
	})
}

// served reports whether a service VM owns the GPU. The caller holds the lock.
func (m *Machines) served(id string) bool {
	for _, vm := range m.vms {
		if slices.Contains(vm.GetService().GetGpus(), id) {
			return true
		}
	}
	return false
}
