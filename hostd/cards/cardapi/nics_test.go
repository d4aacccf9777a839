package cardapi

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuctl/gpuctl/hostd/network"
)

// interfaces is a network as network.Host has it.
type interfaces map[string]network.NIC

func (i interfaces) NICs(context.Context) ([]network.NIC, error) {
	var out []network.NIC
	for _, n := range i {
		if n.Address != "" {
			out = append(out, n)
		}
	}
	return out, nil
}

func (i interfaces) NIC(_ context.Context, name string) (network.NIC, error) {
	n, ok := i[name]
	if !ok {
		return n, fmt.Errorf("%w: %q", network.ErrNoLink, name)
	}
	return n, nil
}

func (i interfaces) Toward(_ context.Context, to netip.Addr) (string, error) {
	switch to.String() {
	case "192.0.2.9":
		return "gone", nil
	case "192.0.2.4":
		return "ens1f0", nil
	}
	if to.Is4() {
		return "bond0", nil
	}
	return "", network.ErrNoLink
}

// A bond that leads to other hosts is listed beside the devices, and a bridge that leads
// nowhere is not.
func TestNICsAreDevicesAndWaysToHosts(t *testing.T) {
	n := &NICs{
		Network: interfaces{
			"ens1f0": {Link: network.Link{Name: "ens1f0", Kind: "device"}, Address: "0000:3b:00.0", Driver: "ixgbe"},
			"eno1":   {Link: network.Link{Name: "eno1", Kind: "device"}, Address: "0000:01:00.0", Driver: "tg3"},
			"bond0":  {Link: network.Link{Name: "bond0", Kind: "bond", MTU: 9000, Physical: []string{"ens1f0"}, Problems: []string{"slow"}}},
			"br0":    {Link: network.Link{Name: "br0", Kind: "bridge"}},
		},
		Peers: func(context.Context) map[string]netip.Addr {
			return map[string]netip.Addr{
				"h3": netip.MustParseAddr("192.0.2.3"), "h2": netip.MustParseAddr("192.0.2.2"), "h4": netip.MustParseAddr("192.0.2.4"),
				"far": netip.MustParseAddr("fd00::4"), "h9": netip.MustParseAddr("192.0.2.9"),
			}
		},
		Log: slog.New(slog.DiscardHandler),
	}
	all, err := n.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, n := range all {
		got = append(got, fmt.Sprint(n.GetName(), n.GetKind(), n.GetAddress(), n.GetDriver(), n.GetMtu(), n.GetPhysical(), n.GetProblems(), n.GetHosts()))
	}
	want := []string{
		fmt.Sprint("bond0", "bond", "", "", 9000, []string{"ens1f0"}, []string{"slow"}, []string{"h2", "h3"}),
		fmt.Sprint("eno1", "device", "0000:01:00.0", "tg3", 0, []string{}, []string{}, []string{}),
		fmt.Sprint("ens1f0", "device", "0000:3b:00.0", "ixgbe", 0, []string{}, []string{}, []string{"h4"}),
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}
