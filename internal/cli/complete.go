package cli

import (
	"context"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

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
