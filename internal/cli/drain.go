package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
)

func (a *app) drainCommand() *cobra.Command {
	var message string
	var plan bool
	var f evacuation
	cmd := &cobra.Command{
		Use: "drain HOST", Short: "Give a host nothing new, and move its VMs away",
		Long: `Give a host nothing new, so that it becomes empty. What is on it stays until it is
moved or ends. With --move every VM with a GPU that another host can take is moved
there, with its GPU's state; the exit status is 1 if some stay. --plan says up front
which VMs can be moved and which would have to be stopped, and changes nothing.`,
		Example: `  gpuctl drain h1 --plan
  gpuctl drain h1 --move --message 'new power supply'
  gpuctl drain h1 --move --parallel 2 --all`,
		Args: arguments(cobra.ExactArgs(1)), ValidArgsFunction: a.completeWhere(clusterv1.Kind_KIND_HOST, "!draining"),
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, name := range []string{"parallel", "all", "deadline"} {
				if cmd.Flags().Changed(name) && !f.move && !plan {
					return cmdutil.Usage(fmt.Errorf("--%s says how VMs are moved: add --move", name))
				}
			}
			if f.parallel < 1 || f.parallel > maxParallel {
				return cmdutil.Usage(fmt.Errorf("--parallel %d: want 1 to %d", f.parallel, maxParallel))
			}
			if err := times(cmd, "deadline"); err != nil {
				return err
			}
			c, err := a.connectCluster()
			if err != nil {
				return err
			}
			if plan {
				return a.planDrain(cmd.Context(), c, args[0], f)
			}
			req := &clusterv1.SetDrainRequest{Host: args[0], Draining: true, Message: message}
			if f.move {
				return a.evacuate(cmd.Context(), c, req, f)
			}
			return a.drain(cmd.Context(), c, req)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&message, "message", "", "`why`, for others to read")
	flags.BoolVar(&plan, "plan", false, "only say what is on it, and which of its VMs can be moved")
	flags.BoolVar(&f.move, "move", false, "move every VM away that another host can take")
	flags.IntVar(&f.parallel, "parallel", 1, "with --move: the `number` that are moved at once; the hosts' limits hold all the same")
	flags.BoolVar(&f.all, "all", false, "with --move: VMs without a GPU, too")
	flags.DurationVar(&f.deadline, "deadline", 0, "with --move: the longest `time` that each may take (default any)")
	return cmd
}

func (a *app) undrainCommand() *cobra.Command {
	return &cobra.Command{
		Use: "undrain HOST", Short: "Let a drained host have new work again",
		Example: "  gpuctl undrain h1",
		Args:    arguments(cobra.ExactArgs(1)), ValidArgsFunction: a.completeWhere(clusterv1.Kind_KIND_HOST, "draining"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connectCluster()
			if err != nil {
				return err
			}
			return a.drain(cmd.Context(), c, &clusterv1.SetDrainRequest{Host: args[0]})
		},
	}
}

func (a *app) drain(ctx context.Context, c clusterClient, req *clusterv1.SetDrainRequest) error {
	res, err := callOn(ctx, c, a.must(clusterv1.Kind_KIND_HOST), req.GetHost(), c.SetDrain, req)
	if err != nil {
		return err
	}
	h := res.GetHost()
	if err := a.result(view.Of(h), "host %s is %s", h.GetName(), hostState(h)); err != nil || !req.GetDraining() {
		return err
	}
	// The drain is set. The rest is only a hint.
	if on, err := a.assignmentsOn(ctx, c, h.GetName()); err == nil && len(on) > 0 {
		fmt.Fprintf(a.Err, "%s still on it: gpuctl drain %s --plan lists them\n", plural(len(on), "assignment is", "assignments are"), clean(h.GetName()))
	}
	return nil
}

func (a *app) assignmentsOn(ctx context.Context, c clusterClient, host string) ([]*clusterv1.Assignment, error) {
	res, err := call(ctx, c, c.List, &clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_ASSIGNMENT, Where: "host == " + strconv.Quote(host)})
	if err != nil {
		return nil, err
	}
	var out []*clusterv1.Assignment
	for _, o := range res.GetObjects() {
		out = append(out, o.GetAssignment())
	}
	return out, nil
}

// planDrain shows what is on a host.
func (a *app) planDrain(ctx context.Context, c clusterClient, host string, f evacuation) error {
	o, err := resolve(ctx, c, a.must(clusterv1.Kind_KIND_HOST), host, false)
	if err != nil {
		return err
	}
	host = o.GetHost().GetName()
	on, err := a.assignmentsOn(ctx, c, host)
	if err != nil {
		return err
	}
	claims := map[string]*clusterv1.Claim{}
	for _, s := range on {
		if claims[s.GetClaim()] != nil {
			continue
		}
		res, err := call(ctx, c, c.List, &clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_CLAIM, Name: s.GetClaim()})
		if err != nil {
			return err
		}
		for _, o := range res.GetObjects() {
			claims[s.GetClaim()] = o.GetClaim()
		}
	}
	vms, err := a.movable(ctx, c, host, f)
	if err != nil {
		return err
	}
	if a.structured() {
		entries := []view.Object{}
		for _, s := range on {
			e := view.Object{{Name: "assignment", Value: view.Of(s)}}
			if cl := claims[s.GetClaim()]; cl != nil {
				e = append(e, view.Member{Name: "claim", Value: view.Of(cl)})
			}
			entries = append(entries, e)
		}
		if err := a.print(view.Object{{Name: "host", Value: host}, {Name: "vms", Value: vms.view()}, {Name: "on_it", Value: entries}}); err != nil {
			return err
		}
		return vms.unknown
	}
	if len(on) == 0 && len(vms.all) == 0 {
		switch {
		case vms.unknown != nil: // nobody knows whether it is
			return vms.unknown
		case vms.other > 0:
			a.hintOther(vms)
			return a.say("host " + clean(host) + " has no GPU in use: it would get nothing new")
		}
		return a.say("host " + clean(host) + " is empty: it would get nothing new")
	}
	if len(vms.all) > 0 {
		if err := table(a.Out, vmHeading(), vms.rows(host)); err != nil {
			return err
		}
		a.hintMove(host, vms)
	}
	if len(on) == 0 {
		return nil
	}
	if len(vms.all) == 0 {
		a.hintOther(vms)
	}
	if len(vms.all) > 0 {
		if err := a.say(""); err != nil {
			return err
		}
	}
	var rows [][]string
	for _, s := range on {
		cl := claims[s.GetClaim()]
		rows = append(rows, []string{s.GetClaim(), a.cut(cl.GetHolder(), 32), cl.GetOwner(), strings.TrimPrefix(s.GetGpu(), host+"/"), bytesOr(s.GetMemory(), "whole"), view.Word(s.GetResidence())})
	}
	if err := table(a.Out, []string{"CLAIM", "HOLDER", "OWNER", "GPU", "MEMORY", "RESIDENCE"}, rows); err != nil {
		return err
	}
	fmt.Fprintf(a.Err, "host %s would get nothing new; %s on it until moved or deleted\n", clean(host), plural(len(claims), "claim stays", "claims stay"))
	return vms.unknown
}

func (a *app) cordonCommand() *cobra.Command {
	var message string
	cmd := &cobra.Command{
		Use: "cordon GPU", Short: "Give a GPU nothing new",
		Long:    "Give a GPU nothing new. What is on it stays.",
		Example: "  gpuctl cordon h1/0000:65:00.0 --message 'ECC errors'",
		Args:    arguments(cobra.ExactArgs(1)), ValidArgsFunction: a.completeWhere(clusterv1.Kind_KIND_GPU, "!cordoned"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.cordon(cmd.Context(), &clusterv1.SetCordonRequest{Gpu: args[0], Cordoned: true, Message: message})
		},
	}
	cmd.Flags().StringVar(&message, "message", "", "`why`, for others to read")
	return cmd
}

func (a *app) uncordonCommand() *cobra.Command {
	return &cobra.Command{
		Use: "uncordon GPU", Short: "Let a cordoned GPU have new work again",
		Example: "  gpuctl uncordon h1/0000:65:00.0",
		Args:    arguments(cobra.ExactArgs(1)), ValidArgsFunction: a.completeWhere(clusterv1.Kind_KIND_GPU, "cordoned"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.cordon(cmd.Context(), &clusterv1.SetCordonRequest{Gpu: args[0]})
		},
	}
}

func (a *app) cordon(ctx context.Context, req *clusterv1.SetCordonRequest) error {
	c, err := a.connectCluster()
	if err != nil {
		return err
	}
	res, err := callOn(ctx, c, a.must(clusterv1.Kind_KIND_GPU), req.GetGpu(), c.SetCordon, req)
	if err != nil {
		return err
	}
	g := res.GetGpu()
	return a.result(view.Of(g), "GPU %s is %s", g.GetId(), clusterGPUState(g))
}
