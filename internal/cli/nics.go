package cli

import (
	"strconv"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
)

func (a *app) nicsCommand() *cobra.Command {
	req := &gpuctlv1.ListNICsRequest{}
	cmd := &cobra.Command{
		Use: "nics", Short: "List the network interfaces of a host",
		Long: `List the interfaces of a host that have a device of the machine behind them, and
those that VMs are sent to other hosts by: their speed, what is wrong with them, and
which hosts they lead to. SR-IOV virtual functions are left out.`,
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
	heading := []string{"NIC", "ADDRESS", "DRIVER", "SPEED", "STATE", "USE"}
	if a.wide() {
		heading = append(heading, "KIND", "MTU")
	}
	var rows [][]string
	for _, n := range res.GetNics() {
		rows = append(rows, a.nicRow(n))
	}
	return table(a.Out, heading, rows)
}

func (a *app) nicRow(n *gpuctlv1.NIC) []string {
	state, use := "healthy", ""
	if len(n.GetProblems()) > 0 {
		state = strings.Join(n.GetProblems(), "; ")
	}
	if hosts := n.GetHosts(); len(hosts) > 0 {
		use = "migrations to " + strings.Join(hosts, ", ")
	}
	row := []string{n.GetName(), n.GetAddress(), n.GetDriver(), bitRate(n.GetSpeed()), state, use}
	if a.wide() {
		row = append(row, n.GetKind(), strconv.Itoa(int(n.GetMtu())))
	}
	return row
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
