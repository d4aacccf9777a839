package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/suggest"
)

// queues are the policies of the queue, with what they do.
func queues() [][2]string {
	return [][2]string{
		{"fcfs", "on GPUs of their own host only"},
		{"rq", "on GPUs of other hosts, too; they stay where they began"},
		{"mrq", "on GPUs of other hosts, too; they move home when a GPU is free there, once"},
	}
}

func (a *app) queueCommand() *cobra.Command {
	var help strings.Builder
	var names []string
	for _, q := range queues() {
		fmt.Fprintf(&help, "\n  %-4s  %s", q[0], q[1])
		names = append(names, q[0])
	}
	return &cobra.Command{
		Use: "queue [POLICY]", Short: "Say, or set, where sessions run whose own host has no GPU for them",
		Long: "Say, or set, how the cluster serves claims of sessions and those that wait, the oldest\nfirst. Sessions run" + help.String() + `

A single run can forbid other hosts (gpuctl run --local) or ask for them (--remote
only).`,
		Example: "  gpuctl cluster queue\n  gpuctl cluster queue rq",
		Args:    arguments(cobra.MaximumNArgs(1)), ValidArgsFunction: cobra.FixedCompletions(names, cobra.ShellCompDirectiveNoFileComp),
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &clusterv1.SetQueueRequest{}
			if len(args) > 0 {
				n, ok := clusterv1.QueuePolicy_value["QUEUE_POLICY_"+strings.ToUpper(args[0])]
				if !ok || n == 0 {
					return cmdutil.Usage(fmt.Errorf("policy %q%s is not one of %s", args[0], suggest.Hint(args[0], names), strings.Join(names, ", ")))
				}
				req.Policy = clusterv1.QueuePolicy(n)
			}
			c, err := a.connectCluster()
			if err != nil {
				return err
			}
			if len(args) == 0 {
				s, err := call(cmd.Context(), c, c.Status, &clusterv1.StatusRequest{})
				if err != nil {
					return err
				}
				req.Policy = s.GetQueue()
				return a.printQueue(&clusterv1.SetQueueResponse{Policy: s.GetQueue()})
			}
			res, err := call(cmd.Context(), c, c.SetQueue, req)
			if err != nil {
				return err
			}
			return a.printQueue(res)
		},
	}
}

func (a *app) printQueue(res *clusterv1.SetQueueResponse) error {
	word := view.Word(res.GetPolicy())
	what := ""
	for _, q := range queues() {
		if q[0] == word {
			what = q[1]
		}
	}
	return a.result(view.Of(res), "%s: sessions run %s", word, what)
}
