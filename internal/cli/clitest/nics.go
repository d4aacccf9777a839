package clitest

import (
	"context"
	"fmt"
	"net"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// AddNIC adds a network interface to a host.
func (m *Machines) AddNIC(host string, n *gpuctlv1.NIC) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.nics[host] = append(m.nics[host], n)
}

// nic finds an interface. The caller holds the lock.
func (m *Machines) nic(host, name string) (*gpuctlv1.NIC, error) {
	host, err := m.host(host)
	if err != nil {
		return nil, err
	}
	for _, n := range m.nics[host] {
		if n.GetName() == name {
			return n, nil
		}
	}
	return nil, reason.Coded(reason.Errorf(reason.NotFound, "no such network interface: %q", name).On("nic", name).Do("gpuctl nics lists them"))
}

// ListNICs implements the RPC.
func (m *Machines) ListNICs(_ context.Context, r *connect.Request[gpuctlv1.ListNICsRequest]) (*connect.Response[gpuctlv1.ListNICsResponse], error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	host, err := m.host(r.Msg.GetHost())
	if err != nil {
		return nil, err
	}
	res := &gpuctlv1.ListNICsResponse{Host: host}
	for _, n := range m.nics[host] {
		res.Nics = append(res.Nics, proto.CloneOf(n))
	}
	return connect.NewResponse(res), nil
}

// ResizeNIC implements the RPC. None of the functions may be in use.
func (m *Machines) ResizeNIC(_ context.Context, r *connect.Request[gpuctlv1.ResizeNICRequest]) (*connect.Response[gpuctlv1.ChangeNICResponse], error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, err := m.nic(r.Msg.GetHost(), r.Msg.GetNic())
	if err != nil {
		return nil, err
	}
	to, now := r.Msg.GetFunctions(), len(n.GetFunctions())
	if !n.GetSriov() || to > n.GetFunctionsMost() {
		return nil, fail(connect.CodeInvalidArgument, "invalid: %s can have 0 to %d virtual functions, not %d", n.GetName(), n.GetFunctionsMost(), to)
	}
	var reasons []*gpuctlv1.Reason
	for _, f := range n.GetFunctions() {
		if f.GetInUse() != "" {
			reasons = append(reasons, &gpuctlv1.Reason{Message: fmt.Sprintf("number %d of %s is in use: %s", f.GetIndex(), n.GetName(), f.GetInUse())})
		}
	}
	if r.Msg.GetPlan() {
		return connect.NewResponse(&gpuctlv1.ChangeNICResponse{Nic: proto.CloneOf(n), Reasons: reasons, Plan: []*gpuctlv1.PlannedStep{
			{Name: "resize", What: fmt.Sprintf("set the number from %d to %d", now, to), Undo: "as many as before"},
		}}), nil
	}
	if len(reasons) > 0 {
		return nil, fail(connect.CodeFailedPrecondition, "refused: %s", reasons[0].GetMessage())
	}
	n.Functions = nil
	for i := range to {
		n.Functions = append(n.Functions, &gpuctlv1.NetworkFunction{Index: i, Address: fmt.Sprintf("0000:3b:11.%d", i%8), Mac: "00:00:00:00:00:00", LinkState: "auto"})
	}
	return connect.NewResponse(&gpuctlv1.ChangeNICResponse{Nic: proto.CloneOf(n)}), nil
}

// SetVF implements the RPC. Settings that are not given stay.
func (m *Machines) SetVF(_ context.Context, r *connect.Request[gpuctlv1.SetVFRequest]) (*connect.Response[gpuctlv1.ChangeNICResponse], error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, err := m.nic(r.Msg.GetHost(), r.Msg.GetNic())
	if err != nil {
		return nil, err
	}
	if int(r.Msg.GetFunction()) >= len(n.GetFunctions()) {
		return nil, fail(connect.CodeNotFound, "no such virtual function: %s has %d", n.GetName(), len(n.GetFunctions()))
	}
	f := n.GetFunctions()[r.Msg.GetFunction()]
	now := proto.CloneOf(f)
	if r.Msg.Mac != nil {
		mac, err := net.ParseMAC(r.Msg.GetMac())
		if err != nil {
			return nil, fail(connect.CodeInvalidArgument, "invalid: MAC %q", r.Msg.GetMac())
		}
		now.Mac = mac.String()
	}
	set(&now.Vlan, r.Msg.Vlan)
	set(&now.Qos, r.Msg.Qos)
	set(&now.MinRate, r.Msg.MinRate)
	set(&now.MaxRate, r.Msg.MaxRate)
	set(&now.SpoofCheck, r.Msg.SpoofCheck)
	set(&now.Trust, r.Msg.Trust)
	set(&now.LinkState, r.Msg.LinkState)
	res := &gpuctlv1.ChangeNICResponse{Nic: proto.CloneOf(n)}
	if r.Msg.GetPlan() {
		if !proto.Equal(f, now) {
			res.Plan = []*gpuctlv1.PlannedStep{{Name: "set", What: fmt.Sprintf("set up number %d of %s", f.GetIndex(), n.GetName()), Undo: "it is as before"}}
		}
		return connect.NewResponse(res), nil
	}
	n.Functions[f.GetIndex()] = now
	res.Nic = proto.CloneOf(n)
	return connect.NewResponse(res), nil
}

func set[T any](to, from *T) {
	if from != nil {
		*to = *from
	}
}
