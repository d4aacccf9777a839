package cli

import (
	"context"
	"slices"
	"strconv"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
)

// maxCompletions is how many completions are shown at most.
const maxCompletions = 1000

type completer = func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective)

// repetition is whether a command takes one name or several.
type repetition bool

const many repetition = true

// completeArgs completes the names of one kind as arguments.
func (a *app) completeArgs(of clusterv1.Kind, several ...repetition) completer {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 && len(several) == 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return a.completeNames(cmd.Context(), a.must(of), prefix, args...), cobra.ShellCompDirectiveNoFileComp
	}
}

// completeWhere completes the names of objects for which the expression where is true.
func (a *app) completeWhere(of clusterv1.Kind, where string) completer {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return a.completeSome(cmd.Context(), a.must(of), where, prefix), cobra.ShellCompDirectiveNoFileComp
	}
}

func (a *app) completeFlag(of clusterv1.Kind) completer {
	return func(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
		return a.completeNames(cmd.Context(), a.must(of), prefix), cobra.ShellCompDirectiveNoFileComp
	}
}

// completeNames returns the names of a kind's objects, except those in without.
func (a *app) completeNames(ctx context.Context, k kind, prefix string, without ...string) []string {
	return a.completeSome(ctx, k, "", prefix, without...)
}

func (a *app) completeSome(ctx context.Context, k kind, where, prefix string, without ...string) []string {
	if prefix != "" { // so that the host sends only those that match, of possibly many
		begins := string(k.key) + ".startsWith(" + strconv.Quote(prefix) + ")"
		if where != "" {
			begins += " && " + where
		}
		where = begins
	}
	c, err := a.connectCluster()
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, completionTimeout)
	defer cancel()
	res, err := c.List(ctx, connect.NewRequest(&clusterv1.ListRequest{Kind: k.kind, Where: where, Stale: true, Limit: maxCompletions}))
	if err != nil {
		return nil
	}
	var out []string
	for _, o := range inners(res.Msg.GetObjects()) {
		if name := k.name(o); !slices.Contains(without, name) {
			out = append(out, cobra.CompletionWithDesc(clean(name), clean(k.about(o))))
		}
	}
	return out
}

func (a *app) completeKinds(one bool) []string {
	var out []string
	for _, k := range a.kinds() {
		name := k.many
		if one {
			name = k.one
		}
		out = append(out, cobra.CompletionWithDesc(name, k.what))
	}
	return out
}

// completeKindName completes KIND/NAME.
func (a *app) completeKindName(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	word, name, ok := strings.Cut(prefix, "/")
	if !ok {
		var out []string
		for _, k := range a.kinds() {
			out = append(out, cobra.CompletionWithDesc(k.one+"/", k.what))
		}
		return out, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
	}
	k, err := a.kind(word)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []string
	for _, n := range a.completeNames(cmd.Context(), k, name) {
		out = append(out, word+"/"+n)
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

func (a *app) completeDescribe(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) == 0 {
		if strings.Contains(prefix, "/") {
			return a.completeKindName(cmd, args, prefix)
		}
		return a.completeKinds(true), cobra.ShellCompDirectiveNoFileComp
	}
	k, err := a.kind(args[0])
	if err != nil || len(args) > 1 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTimeout) // limits all calls together
	defer cancel()
	out := a.completeNames(ctx, k, prefix)
	switch k.kind { // also those of the host itself
	case clusterv1.Kind_KIND_GPU:
		out = append(out, a.completeGPUs(ctx, false)...)
	case clusterv1.Kind_KIND_SESSION:
		out = append(out, a.completeSessions(ctx)...)
	default:
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

// completeLabel completes `host NAME KEY=`, and KEY- for the labels that the host has.
func (a *app) completeLabel(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	switch len(args) {
	case 0:
		return []string{"host"}, cobra.ShellCompDirectiveNoFileComp
	case 1:
		return a.completeNames(cmd.Context(), a.must(clusterv1.Kind_KIND_HOST), prefix), cobra.ShellCompDirectiveNoFileComp
	}
	c, err := a.connectCluster()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTimeout)
	defer cancel()
	res, err := c.List(ctx, connect.NewRequest(&clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_HOST, Stale: true, Limit: maxCompletions}))
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []string
	for _, o := range res.Msg.GetObjects() {
		for key, value := range o.GetHost().GetLabels() {
			out = append(out, cobra.CompletionWithDesc(clean(key)+"=", "set"))
			if o.GetHost().GetName() == args[1] {
				out = append(out, cobra.CompletionWithDesc(clean(key)+"-", "remove "+clean(value)))
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out), cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
}

func (a *app) completeTokens(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	c, err := a.connectCluster()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTimeout)
	defer cancel()
	res, err := c.ListTokens(ctx, connect.NewRequest(&clusterv1.ListTokensRequest{}))
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []string
	for _, t := range res.Msg.GetTokens() {
		if !slices.Contains(args, t.GetId()) {
			out = append(out, cobra.CompletionWithDesc(clean(t.GetId()), strings.TrimSpace(view.Word(t.GetRole())+" "+clean(t.GetName()))))
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

func (a *app) completeIdentities(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	c, err := a.connectCluster()
	if err != nil || len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTimeout)
	defer cancel()
	res, err := c.ListIdentities(ctx, connect.NewRequest(&clusterv1.ListIdentitiesRequest{}))
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []string
	for _, i := range res.Msg.GetIdentities() {
		out = append(out, cobra.CompletionWithDesc(clean(i.GetId()), view.Word(i.GetRole())))
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

// completeClusters completes --host.
func (a *app) completeClusters(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	if a.remote == nil {
		return nil, cobra.ShellCompDirectiveDefault
	}
	clusters, err := a.remote.Clusters()
	if err != nil {
		return nil, cobra.ShellCompDirectiveDefault
	}
	return clusters, cobra.ShellCompDirectiveDefault // a path of a socket is possible, too
}
