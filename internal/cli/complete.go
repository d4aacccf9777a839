package cli

import (
	"context"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

const completionTimeout = 2 * time.Second // a shell waits for it

func (a *app) completeSession(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.completeSessions(cmd.Context()), cobra.ShellCompDirectiveNoFileComp
}

func (a *app) completeTo(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	return a.completeGPUs(cmd.Context(), true), cobra.ShellCompDirectiveNoFileComp
}

func (a *app) completeSessions(ctx context.Context) []string {
	c, err := a.connect()
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, completionTimeout)
	defer cancel()
	res, err := c.ListSessions(ctx, connect.NewRequest(&gpuctlv1.HostListSessionsRequest{}))
	if err != nil {
		return nil
	}
	var out []string
	for _, s := range res.Msg.GetSessions() {
		out = append(out, cobra.CompletionWithDesc(s.GetId(), clean(s.GetCommand())+" on "+s.GetTarget().GetGpu()))
	}
	return out
}

func (a *app) completeGPUs(ctx context.Context, models bool) []string {
	c, err := a.connect()
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, completionTimeout)
	defer cancel()
	res, err := c.GetInventory(ctx, connect.NewRequest(&gpuctlv1.GetInventoryRequest{}))
	if err != nil {
		return nil
	}
	var out []string
	seen := map[string]bool{}
	for _, g := range res.Msg.GetGpus() {
		out = append(out, cobra.CompletionWithDesc(g.GetId(), clean(g.GetModel())))
		seen[g.GetId()] = true
	}
	for _, g := range res.Msg.GetGpus() {
		if models && !seen[g.GetModel()] {
			seen[g.GetModel()] = true
			out = append(out, cobra.CompletionWithDesc(clean(g.GetModel()), "model"))
		}
	}
	return out
}

// completeSessionOrMachine completes what can be migrated.
func (a *app) completeSessionOrMachine(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTimeout) // limits all calls together
	defer cancel()
	var out []string
	if vm, err := cmd.Flags().GetBool("vm"); err != nil || !vm {
		out = a.completeSessions(ctx)
	}
	return append(out, a.completeMachines(ctx, "*")...), cobra.ShellCompDirectiveNoFileComp
}

// completeMachines returns the names of the VMs of a host, or of all hosts.
func (a *app) completeMachines(ctx context.Context, host string) []string {
	ctx, cancel := context.WithTimeout(ctx, completionTimeout)
	defer cancel()
	res, err := a.machines(ctx, host)
	if err != nil {
		return nil
	}
	var out []string
	for _, m := range res.GetMachines() {
		about := "VM on " + m.GetHost()
		if len(m.GetGpus()) > 0 {
			about += " with " + strings.Join(m.GetGpus(), ",")
		}
		out = append(out, cobra.CompletionWithDesc(clean(m.GetName()), clean(about)))
	}
	return out
}

// completeAnyTo completes destinations of a session or a VM: GPUs of this host by their
// names on it, and hosts, GPUs and models of the cluster.
func (a *app) completeAnyTo(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTimeout) // limits all calls together
	defer cancel()
	out := a.completeGPUs(ctx, true)
	seen := map[string]bool{}
	for _, c := range out {
		name, _, _ := strings.Cut(c, "\t")
		seen[name] = true
	}
	for _, kind := range []clusterv1.Kind{clusterv1.Kind_KIND_HOST, clusterv1.Kind_KIND_GPU, clusterv1.Kind_KIND_MODEL} {
		if kind == clusterv1.Kind_KIND_HOST && cmd.Name() != "migrate" {
			continue
		}
		for _, c := range a.completeNames(ctx, a.must(kind), prefix) {
			if name, _, _ := strings.Cut(c, "\t"); !seen[name] {
				seen[name] = true
				out = append(out, c)
			}
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}
