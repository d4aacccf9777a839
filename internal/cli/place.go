package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/size"
)

func (a *app) planCommand() *cobra.Command {
	var f claimFlags
	var limit uint32
	var stale bool
	cmd := &cobra.Command{
		Use: "plan", Short: "Say where a claim would go, and why not elsewhere",
		Long: "Say where a claim would go, the best place first and with what made it the best,\nand of every other host or GPU why it is not one. Nothing is changed. When there is\nno place, the exit status is 3.",
		Example: `  gpuctl plan --min-memory 16GiB
  gpuctl plan --count 4 --one-runtime --policy pack -o yaml`,
		Args: arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			claim, err := f.claim()
			if err != nil {
				return err
			}
			if claim.Id, err = newClaimName(); err != nil {
				return err
			}
			c, err := a.connectCluster()
			if err != nil {
				return err
			}
			return a.place(cmd.Context(), c, &clusterv1.PlaceRequest{Claim: claim, Limit: limit, Stale: stale})
		},
	}
	f.register(a, cmd)
	cmd.Flags().Uint32Var(&limit, "limit", 10, "at most so many places")
	cmd.Flags().BoolVar(&stale, "stale", false, "as the asked host knows it, even without a leader")
	return cmd
}

// place prints where a claim would go.
func (a *app) place(ctx context.Context, c clusterClient, req *clusterv1.PlaceRequest) error {
	res, err := call(ctx, c, c.Place, req)
	if err != nil {
		return err
	}
	if a.structured() {
		if err := a.print(view.Of(res)); err != nil {
			return err
		}
	}
	if len(res.GetCandidates()) == 0 {
		return a.refuseHosts("nothing can meet the claim", res.GetRejected())
	}
	if a.structured() {
		return nil
	}
	var rows [][]string
	for i, p := range res.GetCandidates() {
		rows = append(rows, []string{
			fmt.Sprint(i + 1), p.GetHost(), choices(p), p.GetModel(), fmt.Sprintf("%.3g", p.GetScore()), strings.Join(p.GetBecause(), "; "),
		})
	}
	if err := table(a.Out, []string{"#", "HOST", "GPUS", "MODEL", "SCORE", "BECAUSE"}, rows); err != nil {
		return err
	}
	if len(res.GetRejected()) == 0 {
		return nil
	}
	if err := a.say(""); err != nil {
		return err
	}
	return table(a.Out, []string{"NOT", "MODEL", "REASON"}, rejections(res.GetRejected()))
}

func choices(p *clusterv1.PlaceCandidate) string {
	var all []string
	for _, c := range p.GetChoices() {
		text := strings.TrimPrefix(c.GetGpu(), p.GetHost()+"/")
		if c.GetProfile() != "" {
			text += " " + c.GetProfile()
		}
		if c.GetMemory() > 0 {
			text += " (" + size.Format(c.GetMemory()) + ")"
		}
		all = append(all, text)
	}
	return strings.Join(all, ", ")
}

func rejections(rejected []*clusterv1.Rejection) [][]string {
	var rows [][]string
	for _, r := range rejected {
		where := r.GetGpu()
		if where == "" {
			where = r.GetHost()
		}
		if len(r.GetReasons()) == 0 {
			rows = append(rows, []string{where, r.GetModel(), ""})
		}
		for i, why := range r.GetReasons() {
			if i == 0 {
				rows = append(rows, []string{where, r.GetModel(), why.GetMessage()})
				continue
			}
			rows = append(rows, []string{" ", " ", why.GetMessage()})
		}
	}
	return rows
}

// refuseHosts prints all reasons and returns the exit status.
func (a *app) refuseHosts(what string, rejected []*clusterv1.Rejection) error {
	if len(rejected) == 0 {
		what += ": the inventory has no GPU (gpuctl get gpus)"
	} else if !a.structured() {
		if err := table(a.Err, []string{"NOT", "MODEL", "REASON"}, rejections(rejected)); err != nil {
			return err
		}
	}
	return cmdutil.WithCode(errors.New(what), cmdutil.Refused)
}
