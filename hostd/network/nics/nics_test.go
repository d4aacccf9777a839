package nics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/config"
	"github.com/gpuctl/gpuctl/hostd/network"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// host is a network as network.Host has it: functions of a card come and go at
// once, with their settings, and a change is made only if it makes sense.
type host struct {
	nics  map[string]network.NIC
	fails string // a setting that the driver refuses
	calls []string
}

func (h *host) NICs(ctx context.Context) ([]network.NIC, error) {
	var out []network.NIC
	for name, n := range h.nics {
		if n.Address != "" {
			n, err := h.NIC(ctx, name)
			if err != nil {
				return nil, err
			}
			out = append(out, n)
		}
	}
	return out, nil
}

func (h *host) NIC(ctx context.Context, name string) (network.NIC, error) {
	if err := ctx.Err(); err != nil {
		return network.NIC{}, err
	}
	n, ok := h.nics[name]
	if !ok {
		return n, fmt.Errorf("%w: %q", network.ErrNoLink, name)
	}
	n.Functions = slices.Clone(n.Functions)
	return n, nil
}

func (h *host) Resize(ctx context.Context, name string, to int) error {
	n, err := h.NIC(ctx, name)
	if err != nil {
		return err
	}
	if against := n.Resizable(to); against != nil {
		return against
	}
	h.calls = append(h.calls, fmt.Sprintf("resize %s %d", name, to))
	n.Functions = nil
	for i := range to {
		n.Functions = append(n.Functions, network.Function{VF: network.VF{Index: i, MAC: make(net.HardwareAddr, 6)}, Address: fmt.Sprintf("0000:3b:10.%d", i), Driver: "ixgbevf", Interface: fmt.Sprintf("v%d", i)})
	}
	h.nics[name] = n
	return nil
}

func (h *host) ChangeVF(ctx context.Context, name string, index int, c network.Change) error {
	n, err := h.NIC(ctx, name)
	if err != nil {
		return err
	}
	if index >= len(n.Functions) {
		return network.ErrNoVF
	}
	want, err := c.Of(name, n.Functions[index].VF)
	if err != nil {
		return err
	}
	for _, d := range n.Functions[index].Differences(want) {
		if d.Name == h.fails {
			return fmt.Errorf("%s of virtual function %d of %s: %w", d.Name, index, name, syscall.EOPNOTSUPP)
		}
		h.calls = append(h.calls, fmt.Sprintf("%s of %s/%d", d.Name, name, index))
	}
	n.Functions[index].VF = want
	h.nics[name] = n
	return nil
}

func (h *host) Toward(_ context.Context, to netip.Addr) (string, error) {
	if to.Is4() {
		return "bond0", nil
	}
	return "", network.ErrNoLink
}

func manager() (*Manager, *host, *[]string) {
	h := &host{nics: map[string]network.NIC{
		"ens1f0": {Link: network.Link{Name: "ens1f0", Kind: "device", Speed: 25_000_000_000}, Address: "0000:3b:00.0", Driver: "ixgbe", SRIOV: true, Most: 8},
		"eno1":   {Link: network.Link{Name: "eno1", Kind: "device"}, Address: "0000:01:00.0", Driver: "tg3"},
		"bond0":  {Link: network.Link{Name: "bond0", Kind: "bond", Physical: []string{"ens1f0"}}},
		"br0":    {Link: network.Link{Name: "br0", Kind: "bridge"}},
	}}
	events := &[]string{}
	return &Manager{
		Network: h, Log: slog.New(slog.DiscardHandler),
		Owners: func(context.Context) (map[pci.Address]vm.VM, error) {
			return map[pci.Address]vm.VM{{Bus: 0x3b, Device: 0x10, Function: 1}: {UUID: "u-web", Name: "web"}}, nil
		},
		Peers: func(context.Context) map[string]netip.Addr {
			return map[string]netip.Addr{"h3": netip.MustParseAddr("192.0.2.3"), "h2": netip.MustParseAddr("192.0.2.2"), "h4": netip.MustParseAddr("fd00::4")}
		},
		Event: func(kind, message string) { *events = append(*events, kind+": "+message) },
	}, h, events
}

func TestList(t *testing.T) {
	m, h, _ := manager()
	if err := h.Resize(t.Context(), "ens1f0", 2); err != nil {
		t.Fatal(err)
	}
	all, err := m.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, n := range all {
		got = append(got, fmt.Sprintf("%s %s %v %d", n.GetName(), n.GetKind(), n.GetHosts(), len(n.GetFunctions())))
	}
	if d := cmp.Diff([]string{"bond0 bond [h2 h3] 0", "eno1 device [] 0", "ens1f0 device [] 2"}, got); d != "" {
		t.Error(d)
	}
	if f := all[2].GetFunctions(); f[0].GetMachineName() != "" || f[0].GetInUse() != "" || f[1].GetMachineName() != "web" || f[1].GetMachine() != "u-web" || !strings.Contains(f[1].GetInUse(), "VM web has it") {
		t.Error(f)
	}
	// Without a hypervisor that answers there are no VMs, and all else.
	m.Owners = func(context.Context) (map[pci.Address]vm.VM, error) {
		return nil, errors.New("libvirt is away")
	}
	if all, err := m.List(t.Context()); err != nil || all[2].GetFunctions()[1].GetMachineName() != "" {
		t.Error(all, err)
	}
}

func TestResize(t *testing.T) {
	m, h, events := manager()
	plan, err := m.Resize(t.Context(), &gpuctlv1.ResizeNICRequest{Nic: "ens1f0", Functions: 1, Plan: true})
	if err != nil || len(plan.GetPlan()) != 1 || len(plan.GetReasons()) > 0 || len(h.calls) > 0 {
		t.Fatalf("%v, %v, %v", plan, err, h.calls)
	}
	res, err := m.Resize(t.Context(), &gpuctlv1.ResizeNICRequest{Nic: "ens1f0", Functions: 1})
	if err != nil || len(res.GetNic().GetFunctions()) != 1 {
		t.Fatal(res, err)
	}
	if res, err = m.Resize(t.Context(), &gpuctlv1.ResizeNICRequest{Nic: "ens1f0", Functions: 2}); err != nil || len(res.GetNic().GetFunctions()) != 2 {
		t.Fatal(res, err)
	}
	if d := cmp.Diff([]string{"NetworkFunctions: ens1f0 has 1 virtual functions, before it had 0", "NetworkFunctions: ens1f0 has 2 virtual functions, before it had 1"}, *events); d != "" {
		t.Error(d)
	}
	// The second one is a VM's, whatever driver it has.
	h.calls = nil
	_, err = m.Resize(t.Context(), &gpuctlv1.ResizeNICRequest{Nic: "ens1f0", Functions: 0})
	if !errors.Is(err, network.ErrInUse) || !strings.Contains(err.Error(), "number 1 of ens1f0 (0000:3b:10.1) is in use: VM web has it") || len(h.calls) > 0 {
		t.Error(err, h.calls)
	}
	if plan, err = m.Resize(t.Context(), &gpuctlv1.ResizeNICRequest{Nic: "ens1f0", Functions: 0, Plan: true}); err != nil || len(plan.GetReasons()) != 1 {
		t.Error(plan, err)
	}
	if _, err := m.Resize(t.Context(), &gpuctlv1.ResizeNICRequest{Nic: "ens1f0", Functions: 1 << 31}); !errors.Is(err, network.ErrInvalid) {
		t.Error(err)
	}
	if _, err := m.Resize(t.Context(), &gpuctlv1.ResizeNICRequest{Nic: "ens1f1"}); !errors.Is(err, network.ErrNoLink) || !strings.Contains(err.Error(), "did you mean ens1f0") {
		t.Error(err)
	}
	// A caller that leaves ends nothing.
	ctx, cancel := context.WithCancel(t.Context())
	m.Owners = func(context.Context) (map[pci.Address]vm.VM, error) { cancel(); return nil, nil }
	if _, err := m.Resize(ctx, &gpuctlv1.ResizeNICRequest{Nic: "ens1f0", Functions: 3}); err != nil || len(h.nics["ens1f0"].Functions) != 3 {
		t.Error(err)
	}
}

func TestSet(t *testing.T) {
	m, h, _ := manager()
	if err := h.Resize(t.Context(), "ens1f0", 2); err != nil {
		t.Fatal(err)
	}
	h.calls = nil
	r := &gpuctlv1.SetVFRequest{Nic: "ens1f0", Function: 1, Vlan: new(uint32(7)), MaxRate: new(uint32(100)), Plan: true}
	plan, err := m.Set(t.Context(), r)
	if err != nil || len(h.calls) > 0 || len(plan.GetPlan()) != 2 || plan.GetPlan()[0].GetWhat() != "VLAN of virtual function 1 of ens1f0: 7 with priority 0 instead of none" || plan.GetPlan()[0].GetUndo() != "it is none again" {
		t.Errorf("%v, %v", plan, err)
	}
	r.Plan = false
	res, err := m.Set(t.Context(), r)
	if f := res.GetNic().GetFunctions(); err != nil || f[1].GetVlan() != 7 || f[1].GetMaxRate() != 100 || f[0].GetVlan() != 0 {
		t.Fatal(res, err)
	}
	if res, err = m.Set(t.Context(), &gpuctlv1.SetVFRequest{Nic: "ens1f0", Function: 1, Trust: new(true)}); err != nil || res.GetNic().GetFunctions()[1].GetVlan() != 7 || !res.GetNic().GetFunctions()[1].GetTrust() {
		t.Error(res, err)
	}
	for name, c := range map[string]struct {
		r    *gpuctlv1.SetVFRequest
		want error
	}{
		"function": {&gpuctlv1.SetVFRequest{Nic: "ens1f0", Function: 2}, network.ErrNoVF},
		"huge":     {&gpuctlv1.SetVFRequest{Nic: "ens1f0", Function: 1 << 31}, network.ErrNoVF},
		"nic":      {&gpuctlv1.SetVFRequest{Nic: "x"}, network.ErrNoLink},
		"VLAN":     {&gpuctlv1.SetVFRequest{Nic: "ens1f0", Vlan: new(uint32(1 << 31))}, network.ErrInvalid},
		"MAC":      {&gpuctlv1.SetVFRequest{Nic: "ens1f0", Mac: new("x")}, network.ErrInvalid},
	} {
		if _, err := m.Set(t.Context(), c.r); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// What cannot be is said, and the rest is done; the same again does nothing.
func TestApply(t *testing.T) {
	m, h, events := manager()
	h.nics["ens1f1"] = network.NIC{Link: network.Link{Name: "ens1f1"}, Address: "0000:3b:00.1", SRIOV: true, Most: 8}
	c := config.Network{VFs: []config.NetworkVFs{
		{Interface: "gone", Count: 2},
		{Interface: "eno1", Count: 2},
		{Interface: "ens1f0", Count: 4, Set: []config.NetworkVF{
			{VF: 0, Change: network.Change{MAC: "02:00:00:00:00:01", VLAN: new(10), MaxRate: new(1000)}}, {VF: 1, Change: network.Change{Trust: new(true)}}, {VF: 2, Change: network.Change{VLAN: new(11)}},
		}},
		{Interface: "ens1f1", Count: 1},
	}}
	h.fails = "trust"
	m.Apply(t.Context(), c)
	if d := cmp.Diff([]string{"resize ens1f0 4", "MAC of ens1f0/0", "VLAN of ens1f0/0", "rate of ens1f0/0", "VLAN of ens1f0/2", "resize ens1f1 1"}, h.calls); d != "" {
		t.Error(d)
	}
	said := strings.Join(*events, "\n")
	for _, want := range []string{
		`NetworkFunctionsFailed: network.vfs of gone: no such network interface: "gone"`, "network.vfs of eno1: invalid: eno1 can have no virtual functions",
		"network.vfs of ens1f0: trust of virtual function 1 of ens1f0", "NetworkFunctions: ens1f1 has 1",
	} {
		if !strings.Contains(said, want) {
			t.Errorf("no %q in\n%s", want, said)
		}
	}
	h.calls, *events = nil, nil
	m.Apply(t.Context(), config.Network{VFs: c.VFs[3:]})
	c.VFs[2].Set[1].Trust = nil
	m.Apply(t.Context(), config.Network{VFs: c.VFs[2:3]})
	if len(h.calls) > 0 || len(*events) > 0 {
		t.Errorf("again: %v, %v", h.calls, *events)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	m.Apply(ctx, c) // it ends
	if len(h.calls) > 0 {
		t.Error(h.calls)
	}
}
