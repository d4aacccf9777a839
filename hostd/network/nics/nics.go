package nics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/config"
	"github.com/gpuctl/gpuctl/hostd/network"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/suggest"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

const (
	changeTime = 2 * time.Minute // some cards need long to make their functions
	applyTime  = time.Minute     // limit for the whole configuration, as hostd's start waits for it
	askTime    = 3 * time.Second // limit for asking which VMs have functions, and for other hosts' addresses
	maxVFs     = 1 << 16
)

// Network is the network of this host, *network.Host.
type Network interface {
	NICs(ctx context.Context) ([]network.NIC, error)
	NIC(ctx context.Context, name string) (network.NIC, error)
	Resize(ctx context.Context, name string, n int) error
	ChangeVF(ctx context.Context, name string, index int, c network.Change) error
	// Toward returns the name of the interface by which packets to an address leave.
	Toward(ctx context.Context, to netip.Addr) (string, error)
}

var _ Network = (*network.Host)(nil)

// Manager manages the network cards of this host.
type Manager struct {
	Network Network
	// Owners returns the PCI functions that running VMs have.
	Owners func(ctx context.Context) (map[pci.Address]vm.VM, error)
	// Peers returns the other hosts, with the addresses that VMs are sent to.
	Peers func(ctx context.Context) map[string]netip.Addr
	// Event records an event for the operator.
	Event func(kind, message string)
	Log   *slog.Logger
}

// List returns the interfaces of hardware devices, and those that migrations use.
func (m *Manager) List(ctx context.Context) ([]*gpuctlv1.NIC, error) {
	all, err := m.Network.NICs(ctx)
	if err != nil {
		return nil, err
	}
	carries := m.carries(ctx)
	for name := range carries {
		if slices.ContainsFunc(all, func(n network.NIC) bool { return n.Name == name }) {
			continue
		}
		n, err := m.Network.NIC(ctx, name)
		if errors.Is(err, network.ErrNoLink) {
			continue
		} else if err != nil {
			return nil, err
		}
		all = append(all, n)
	}
	slices.SortFunc(all, func(a, b network.NIC) int { return strings.Compare(a.Name, b.Name) })
	owners := m.owners(ctx)
	out := make([]*gpuctlv1.NIC, len(all))
	for i, n := range all {
		out[i] = message(n, owners, carries[n.Name])
	}
	return out, nil
}

// carries returns, for each interface, the hosts that VMs are sent to through it. Hosts
// without a known address are left out.
func (m *Manager) carries(ctx context.Context) map[string][]string {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	out := map[string][]string{}
	for host, to := range m.Peers(ctx) {
		name, err := m.Network.Toward(ctx, to)
		if err != nil {
			m.Log.Debug("way to a host is not known", "host", host, "err", err)
			continue
		}
		out[name] = append(out[name], host)
	}
	for _, hosts := range out {
		slices.Sort(hosts)
	}
	return out
}

// owners returns the VMs that have functions, by PCI address. If the hypervisor does not
// answer, the result is empty.
func (m *Manager) owners(ctx context.Context) map[string]vm.VM {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	all, err := m.Owners(ctx)
	if err != nil {
		m.Log.Debug("VMs' functions are not known", "err", err)
	}
	out := map[string]vm.VM{}
	for a, d := range all {
		out[a.String()] = d
	}
	return out
}

// inUse says why a function must not be removed; empty: it may be. owners are the VMs
// that have functions.
func inUse(f *network.Function, owners map[string]vm.VM) string {
	if vm, ok := owners[f.Address]; ok && f.Address != "" {
		return fmt.Sprintf("VM %s has it: stop it, or detach its interface with virsh", vm.Name)
	}
	return f.InUse
}

func message(n network.NIC, owners map[string]vm.VM, hosts []string) *gpuctlv1.NIC {
	out := &gpuctlv1.NIC{
		Name: n.Name, Kind: n.Kind, Address: n.Address, Driver: n.Driver, Mtu: uint32(max(0, n.MTU)), Speed: n.Speed, Up: n.Up, Carrier: n.Carrier,
		Problems: n.Problems, Physical: n.Physical, Hosts: hosts, Sriov: n.SRIOV, FunctionsMost: uint32(max(0, n.Most)),
	}
	for _, f := range n.Functions {
		vm := owners[f.Address]
		out.Functions = append(out.Functions, &gpuctlv1.NetworkFunction{
			Index: uint32(f.Index), Address: f.Address, Driver: f.Driver, Interface: f.Interface, Mac: f.MAC.String(), Vlan: uint32(f.VLAN), Qos: uint32(f.QoS),
			MinRate: uint32(f.MinRate), MaxRate: uint32(f.MaxRate), SpoofCheck: f.SpoofCheck, Trust: f.Trust, LinkState: f.State(),
			Machine: vm.UUID, MachineName: vm.Name, InUse: inUse(&f, owners),
		})
	}
	return out
}

// find returns the interface with this name. If there is none, the error suggests similar
// names and wraps network.ErrNoLink.
func (m *Manager) find(ctx context.Context, name string) (network.NIC, error) {
	n, err := m.Network.NIC(ctx, name)
	if !errors.Is(err, network.ErrNoLink) {
		return n, err
	}
	var names []string
	if all, err := m.Network.NICs(ctx); err == nil {
		for _, n := range all {
			names = append(names, n.Name)
		}
	}
	return n, reason.Detail(fmt.Errorf("%w%s", err, suggest.Hint(name, names))).Do("gpuctl nics lists them")
}

// Resize sets the number of a card's virtual functions, or plans it. Errors wrap
// network.ErrNoLink, network.ErrInvalid or network.ErrInUse if it is refused.
func (m *Manager) Resize(ctx context.Context, r *gpuctlv1.ResizeNICRequest) (*gpuctlv1.ChangeNICResponse, error) {
	n, err := m.find(ctx, r.GetNic())
	if err != nil {
		return nil, err
	}
	owners := m.owners(ctx)
	for i := range n.Functions {
		f := &n.Functions[i]
		f.InUse = inUse(f, owners)
	}
	to := int(min(r.GetFunctions(), maxVFs))
	against := n.Resizable(to)
	if r.GetPlan() {
		res := &gpuctlv1.ChangeNICResponse{Nic: message(n, owners, nil), Plan: []*gpuctlv1.PlannedStep{{
			Name: "resize", What: fmt.Sprintf("set the number of virtual functions of %s from %d to %d; settings of those that there are go, and the link may break for seconds", n.Name, len(n.Functions), to),
			Undo: "as many as before are made again, without settings",
		}}}
		if against != nil {
			for _, text := range against.Reasons {
				res.Reasons = append(res.Reasons, &gpuctlv1.Reason{Code: "functions", Message: text})
			}
		}
		return res, nil
	}
	if against != nil {
		return nil, against
	}
	return m.outlive(ctx, n.Name, func(ctx context.Context) error { return m.resize(ctx, n, to) })
}

func (m *Manager) resize(ctx context.Context, n network.NIC, to int) error {
	if to == len(n.Functions) {
		return nil
	}
	if err := m.Network.Resize(ctx, n.Name, to); err != nil {
		return err
	}
	m.Log.Info("virtual functions made", "interface", n.Name, "before", len(n.Functions), "now", to)
	m.Event("NetworkFunctions", fmt.Sprintf("%s has %d virtual functions, before it had %d", n.Name, to, len(n.Functions)))
	return nil
}

// Set changes the settings of a virtual function, or plans it. Errors wrap
// network.ErrNoLink, network.ErrNoVF or network.ErrInvalid if it is refused.
func (m *Manager) Set(ctx context.Context, r *gpuctlv1.SetVFRequest) (*gpuctlv1.ChangeNICResponse, error) {
	n, err := m.find(ctx, r.GetNic())
	if err != nil {
		return nil, err
	}
	index := int(min(r.GetFunction(), maxVFs))
	i := slices.IndexFunc(n.Functions, func(f network.Function) bool { return f.Index == index })
	if i < 0 {
		return nil, reason.Detail(fmt.Errorf("%w: %s has %d, and none is number %d", network.ErrNoVF, n.Name, len(n.Functions), index)).On("nic", n.Name).Do("gpuctl nic resize makes some")
	}
	c := network.Change{
		MAC: r.GetMac(), LinkState: r.GetLinkState(), SpoofCheck: r.SpoofCheck, Trust: r.Trust,
		VLAN: number(r.Vlan), QoS: number(r.Qos), MinRate: number(r.MinRate), MaxRate: number(r.MaxRate),
	}
	before := n.Functions[i].VF
	want, err := c.Of(n.Name, before)
	if err != nil {
		return nil, err
	}
	differences := before.Differences(want)
	if r.GetPlan() {
		res := &gpuctlv1.ChangeNICResponse{Nic: message(n, m.owners(ctx), nil)}
		for _, d := range differences {
			res.Plan = append(res.Plan, &gpuctlv1.PlannedStep{
				Name: d.Name, What: fmt.Sprintf("%s of virtual function %d of %s: %s instead of %s", d.Name, index, n.Name, d.To, d.From), Undo: "it is " + d.From + " again",
			})
		}
		return res, nil
	}
	return m.outlive(ctx, n.Name, func(ctx context.Context) error {
		if err := m.Network.ChangeVF(ctx, n.Name, index, c); err != nil {
			return err
		}
		for _, d := range differences {
			m.Log.Info("virtual function set", "interface", n.Name, "function", index, "setting", d.Name, "from", d.From, "to", d.To)
		}
		return nil
	})
}

// number converts a number of a request to package network's form. Values of uint32 fit;
// ChangeVF checks the limits.
func number(n *uint32) *int {
	if n == nil {
		return nil
	}
	return new(int(*n))
}

// outlive makes a change that goes on if its caller leaves, and returns the interface as
// it is after the change.
func (m *Manager) outlive(ctx context.Context, name string, change func(ctx context.Context) error) (*gpuctlv1.ChangeNICResponse, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), changeTime)
	defer cancel()
	if err := change(ctx); err != nil {
		return nil, err
	}
	n, err := m.Network.NIC(ctx, name)
	if err != nil {
		return nil, err
	}
	return &gpuctlv1.ChangeNICResponse{Nic: message(n, m.owners(ctx), nil)}, nil
}

// Apply changes the network cards as the configuration says. A setting that fails is
// logged and recorded as an event; the others are applied nevertheless.
func (m *Manager) Apply(ctx context.Context, c config.Network) {
	ctx, cancel := context.WithTimeout(ctx, applyTime)
	defer cancel()
	for _, v := range c.VFs {
		if err := m.apply(ctx, v); err != nil {
			m.Log.Error("network.vfs of the configuration not applied", "interface", v.Interface, "err", err)
			m.Event("NetworkFunctionsFailed", fmt.Sprintf("network.vfs of %s: %v", v.Interface, err))
		}
	}
}

func (m *Manager) apply(ctx context.Context, v config.NetworkVFs) error {
	n, err := m.Network.NIC(ctx, v.Interface)
	if err != nil {
		return err
	}
	if err := m.resize(ctx, n, v.Count); err != nil {
		return err // without the functions, the settings cannot be made
	}
	var failures []error
	for _, set := range v.Set {
		failures = append(failures, m.Network.ChangeVF(ctx, v.Interface, set.VF, set.Change))
	}
	return errors.Join(failures...)
}
