package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
)

func (a *app) nicsCommand() *cobra.Command {
	req := &gpuctlv1.ListNICsRequest{}
	cmd := &cobra.Command{
		Use: "nics", Short: "List the network interfaces of a host and their virtual functions",
		Long: `List the interfaces of a host that have a device of the machine behind them, and
those that VMs are sent to other hosts by: their speed, what is wrong with them, and
how many SR-IOV virtual functions they have of how many they can have. The virtual
functions stand below, with the VM or the interface of the host that uses each.`,
		Example: `  gpuctl nics
  gpuctl nics --on h2 -o wide
  gpuctl nics -o name`,
		Args: arguments(cobra.NoArgs), Annotations: map[string]string{outputName: "yes"},
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.connectDevices()
			if err != nil {
				return err
			}
			res, err := c.ListNICs(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			return a.printNICs(res.Msg)
		},
	}
	onFlag(cmd, &req.Host, "`host` of the interfaces (default the one that is asked)")
	return cmd
}

func (a *app) printNICs(res *gpuctlv1.ListNICsResponse) error {
	switch {
	case a.structured():
		return a.print(view.Of(res))
	case a.output == "name":
		for _, n := range res.GetNics() {
			if err := a.say(clean(n.GetName())); err != nil {
				return err
			}
		}
		return nil
	case len(res.GetNics()) == 0:
		return a.sayNone("network interfaces with a device on host " + clean(res.GetHost()))
	}
	heading := []string{"NIC", "ADDRESS", "DRIVER", "SPEED", "STATE", "FUNCTIONS", "USE"}
	if a.wide() {
		heading = append(heading, "MAC", "VLAN", "SPOOF CHECK", "TRUST", "KIND", "MTU")
	}
	var rows [][]string
	for _, n := range res.GetNics() {
		rows = append(rows, a.nicRow(n))
		for _, f := range n.GetFunctions() {
			rows = append(rows, a.functionRow(f))
		}
	}
	return table(a.Out, heading, rows)
}

func (a *app) nicRow(n *gpuctlv1.NIC) []string {
	state, functions, use := "healthy", "", ""
	if len(n.GetProblems()) > 0 {
		state = strings.Join(n.GetProblems(), "; ")
	}
	if n.GetSriov() {
		functions = strconv.Itoa(len(n.GetFunctions()))
		if most := n.GetFunctionsMost(); most > 0 {
			functions += fmt.Sprintf(" of %d", most)
		}
	}
	if hosts := n.GetHosts(); len(hosts) > 0 {
		use = "migrations to " + strings.Join(hosts, ", ")
	}
	row := []string{n.GetName(), n.GetAddress(), n.GetDriver(), bitRate(n.GetSpeed()), state, functions, use}
	if a.wide() {
		row = append(row, "", "", "", "", n.GetKind(), strconv.Itoa(int(n.GetMtu())))
	}
	return row
}

// functionRow returns the row of a virtual function, which follows its card's.
func (a *app) functionRow(f *gpuctlv1.NetworkFunction) []string {
	rate, use := "", f.GetInterface()
	if f.GetMaxRate() > 0 {
		rate = "to " + bitRate(uint64(f.GetMaxRate())*1_000_000)
	}
	if f.GetMinRate() > 0 {
		rate = strings.TrimSpace(bitRate(uint64(f.GetMinRate())*1_000_000) + " " + rate)
	}
	if f.GetMachineName() != "" {
		use = "VM " + f.GetMachineName()
	}
	row := []string{fmt.Sprintf("  %d", f.GetIndex()), f.GetAddress(), f.GetDriver(), rate, "link " + f.GetLinkState(), "", use}
	if a.wide() {
		row = append(row, f.GetMac(), vlan(f), yes(f.GetSpoofCheck()), yes(f.GetTrust()), "", "")
	}
	return row
}

func vlan(f *gpuctlv1.NetworkFunction) string {
	switch {
	case f.GetVlan() == 0:
		return ""
	case f.GetQos() == 0:
		return strconv.Itoa(int(f.GetVlan()))
	}
	return fmt.Sprintf("%d priority %d", f.GetVlan(), f.GetQos())
}

// bitRate formats a speed in bits per second; 0: empty.
func bitRate(n uint64) string {
	switch {
	case n == 0:
		return ""
	case n >= 1_000_000_000:
		return strconv.FormatFloat(float64(n)/1e9, 'f', -1, 64) + " Gbit/s"
	}
	return strconv.FormatFloat(float64(n)/1e6, 'f', -1, 64) + " Mbit/s"
}

func (a *app) nicCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "nic", Short: "Make virtual functions of a network card, and set them up",
		Long: `Make the SR-IOV virtual functions of a network card, and set one up: its MAC, VLAN and
rates, and what its VM may do. A VM gets one by <interface type='hostdev'> in libvirt,
which sets MAC and VLAN itself. All of it is gone when the host restarts: network.vfs in
hostd's configuration makes it anew.`,
		Args: noSuchCommand, RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.nicResizeCommand(), a.nicSetCommand())
	return cmd
}

func (a *app) nicResizeCommand() *cobra.Command {
	req := &gpuctlv1.ResizeNICRequest{}
	cmd := &cobra.Command{
		Use: "resize NIC --functions N", Short: "Set the number of a network card's virtual functions",
		Long: `Set how many SR-IOV virtual functions a network card has. All of them go when the
number changes, with their settings: no VM, container, bridge or address may be on one.
If the new ones cannot be made there are as many as before. Some drivers break the link
for seconds meanwhile.`,
		Example: `  gpuctl nic resize ens1f0 --functions 4
  gpuctl nic resize ens1f0 --functions 0 --on h2 --plan`,
		Args: arguments(cobra.ExactArgs(1)), ValidArgsFunction: a.completeNIC,
		RunE: func(cmd *cobra.Command, args []string) error {
			req.Nic = args[0]
			c, err := a.connectDevices()
			if err != nil {
				return err
			}
			res, err := c.ResizeNIC(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			if req.GetPlan() {
				return a.printNICPlan(res.Msg)
			}
			n := res.Msg.GetNic()
			return a.result(view.Of(n), "%s has %d virtual functions", n.GetName(), len(n.GetFunctions()))
		},
	}
	cmd.Flags().Uint32Var(&req.Functions, "functions", 0, "how many virtual functions (`number`)")
	_ = cmd.MarkFlagRequired("functions") // fails only if the flag does not exist
	cmd.Flags().BoolVar(&req.Plan, "plan", false, "only say what would be done, and what is against it")
	onFlag(cmd, &req.Host, "`host` of the card (default the one that is asked)")
	return cmd
}

func (a *app) nicSetCommand() *cobra.Command {
	var all struct {
		mac, state              string
		vlan, qos, least, most  uint32
		spoofCheck, trust, plan bool
		host                    string
	}
	cmd := &cobra.Command{
		Use: "set NIC FUNCTION", Short: "Set up a virtual function of a network card",
		Long: `Set up a virtual function, by its number. What is not said stays as it is. What is set
is read back; if the card's driver refuses a part, or takes and forgets it, nothing is
changed. A VM that has the function keeps it; a new MAC is its own after its next start.`,
		Example: `  gpuctl nic set ens1f0 2 --mac 02:00:00:00:01:02 --vlan 10
  gpuctl nic set ens1f0 2 --max-rate 1000 --trust --spoof-check=false
  gpuctl nic set ens1f0 0 --on h2 --link-state disable --plan`,
		Args: arguments(cobra.ExactArgs(2)), ValidArgsFunction: a.completeNIC,
		RunE: func(cmd *cobra.Command, args []string) error {
			index, err := strconv.ParseUint(args[1], 10, 16)
			if err != nil {
				return cmdutil.Usage(fmt.Errorf("virtual function %q is no number; gpuctl nics lists them", args[1]))
			}
			req := &gpuctlv1.SetVFRequest{Host: all.host, Nic: args[0], Function: uint32(index), Plan: all.plan}
			something := false
			said := func(flag string) bool {
				changed := cmd.Flags().Changed(flag)
				something = something || changed
				return changed
			}
			req.Mac, req.LinkState = given(said("mac"), all.mac), given(said("link-state"), all.state)
			req.Vlan, req.Qos = given(said("vlan"), all.vlan), given(said("qos"), all.qos)
			req.MinRate, req.MaxRate = given(said("min-rate"), all.least), given(said("max-rate"), all.most)
			req.SpoofCheck, req.Trust = given(said("spoof-check"), all.spoofCheck), given(said("trust"), all.trust)
			if !something {
				return cmdutil.Usage(fmt.Errorf("nothing to set of virtual function %d of %s: say --mac, --vlan or another; see gpuctl nic set --help", index, args[0]))
			}
			c, err := a.connectDevices()
			if err != nil {
				return err
			}
			res, err := c.SetVF(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			if all.plan {
				return a.printNICPlan(res.Msg)
			}
			return a.result(view.Of(res.Msg.GetNic()), "virtual function %d of %s is set up", index, args[0])
		},
	}
	f := cmd.Flags()
	f.StringVar(&all.mac, "mac", "", "its hardware `address`")
	f.Uint32Var(&all.vlan, "vlan", 0, "`VLAN` that its frames are in, 1 to 4094; 0: none")
	f.Uint32Var(&all.qos, "qos", 0, "`priority` of the VLAN's frames, 0 to 7")
	f.Uint32Var(&all.least, "min-rate", 0, "`Mbit/s` that it can always send; 0: no promise")
	f.Uint32Var(&all.most, "max-rate", 0, "`Mbit/s` that it can send at most; 0: no limit")
	f.BoolVar(&all.spoofCheck, "spoof-check", false, "its VM can only send from its MAC")
	f.BoolVar(&all.trust, "trust", false, "its VM may change its MAC and see others' frames")
	f.StringVar(&all.state, "link-state", "", "auto (as the card's), enable or disable (`state`)")
	_ = cmd.RegisterFlagCompletionFunc("link-state", cobra.FixedCompletions([]string{"auto", "enable", "disable"}, cobra.ShellCompDirectiveNoFileComp))
	f.BoolVar(&all.plan, "plan", false, "only say what would be done, and what is against it")
	onFlag(cmd, &all.host, "`host` of the card (default the one that is asked)")
	return cmd
}

// given returns a pointer to a value that was given; nil: it was not given.
func given[T any](said bool, v T) *T {
	if !said {
		return nil
	}
	return &v
}

func (a *app) printNICPlan(res *gpuctlv1.ChangeNICResponse) error {
	if a.structured() {
		if err := a.print(view.Of(res)); err != nil {
			return err
		}
	}
	if len(res.GetPlan()) == 0 && !a.structured() {
		return a.say("nothing would change")
	}
	return a.printPlan(res.GetPlan(), res.GetReasons())
}

// completeNIC completes an interface, and then one of its virtual functions.
func (a *app) completeNIC(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	host, _ := cmd.Flags().GetString("on")
	all, err := a.listNICs(cmd.Context(), host)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []string
	for _, n := range all {
		switch {
		case len(args) == 0 && n.GetSriov():
			out = append(out, cobra.CompletionWithDesc(clean(n.GetName()), clean(strings.TrimSpace(n.GetAddress()+" "+bitRate(n.GetSpeed())))))
		case len(args) == 1 && cmd.Name() == "set" && n.GetName() == args[0]:
			for _, f := range n.GetFunctions() {
				out = append(out, cobra.CompletionWithDesc(strconv.Itoa(int(f.GetIndex())), clean(f.GetAddress()+" "+f.GetMac())))
			}
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

func (a *app) listNICs(ctx context.Context, host string) ([]*gpuctlv1.NIC, error) {
	ctx, cancel := context.WithTimeout(ctx, completionTimeout)
	defer cancel()
	c, err := a.connectDevices()
	if err != nil {
		return nil, err
	}
	res, err := c.ListNICs(ctx, connect.NewRequest(&gpuctlv1.ListNICsRequest{Host: host}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetNics(), nil
}
