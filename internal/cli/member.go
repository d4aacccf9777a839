package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
)

func (a *app) removeCommand() *cobra.Command {
	var force, sure bool
	cmd := &cobra.Command{
		Use: "remove HOST", Short: "Remove a host from the cluster, with its identity",
		Long: `Remove a host from the cluster: its GPUs, its sessions and its certificate. While it
has assignments this is refused; drain it first. --force removes a host that is
lost for good all the same: if it still runs, its GPUs could then have two owners.`,
		Example: "  gpuctl drain h3 && gpuctl cluster remove h3\n  gpuctl cluster remove h3 --force --yes",
		Args:    arguments(cobra.ExactArgs(1)), ValidArgsFunction: a.completeArgs(clusterv1.Kind_KIND_HOST),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connectCluster()
			if err != nil {
				return err
			}
			question := fmt.Sprintf("Remove host %s from the cluster?", args[0])
			if force {
				question = fmt.Sprintf("Remove host %s even if it has assignments? Be sure that it is off.", args[0])
			}
			if err := a.confirm(sure, question); err != nil {
				return err
			}
			if _, err := callOn(cmd.Context(), c, a.must(clusterv1.Kind_KIND_HOST), args[0], c.RemoveHost, &clusterv1.RemoveHostRequest{Host: args[0], Force: force}); err != nil {
				return err
			}
			return a.result(map[string]string{"removed": args[0]}, "host %s is removed", args[0])
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "even if it has assignments")
	cmd.Flags().BoolVarP(&sure, "yes", "y", false, "do not ask")
	return cmd
}

func (a *app) identitiesCommand() *cobra.Command {
	return &cobra.Command{
		Use: "identities", Short: "List who has a certificate of the cluster",
		Example: "  gpuctl cluster identities",
		Args:    arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.connectCluster()
			if err != nil {
				return err
			}
			res, err := call(cmd.Context(), c, c.ListIdentities, &clusterv1.ListIdentitiesRequest{})
			if err != nil {
				return err
			}
			if a.structured() {
				return a.print(view.List(res.GetIdentities()))
			}
			if len(res.GetIdentities()) == 0 {
				return a.sayNone("identities")
			}
			var rows [][]string
			for _, i := range res.GetIdentities() {
				rows = append(rows, []string{i.GetId(), view.Word(i.GetRole()), i.GetHost(), a.age(i.GetCreatedUnixMs())})
			}
			return table(a.Out, []string{"IDENTITY", "ROLE", "HOST", "AGE"}, rows)
		},
	}
}

func (a *app) revokeCommand() *cobra.Command {
	var sure bool
	cmd := &cobra.Command{
		Use: "revoke ID", Short: "Revoke somebody's certificates",
		Long:    "Revoke somebody's certificates, at once and on every host. A host is removed with\ngpuctl cluster remove instead.",
		Example: "  gpuctl cluster revoke ada --yes",
		Args:    arguments(cobra.ExactArgs(1)), ValidArgsFunction: a.completeIdentities,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.connectCluster()
			if err != nil {
				return err
			}
			if err := a.confirm(sure, fmt.Sprintf("Revoke the certificates of %s?", args[0])); err != nil {
				return err
			}
			if _, err := call(cmd.Context(), c, c.RevokeIdentity, &clusterv1.RevokeIdentityRequest{Id: args[0]}); err != nil {
				return err
			}
			return a.result(map[string]string{"revoked": args[0]}, "%s is revoked", args[0])
		},
	}
	cmd.Flags().BoolVarP(&sure, "yes", "y", false, "do not ask")
	return cmd
}
