package cli

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/spf13/cobra"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/suggest"
)

func (a *app) tokenCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "token", Short: "Make, list and delete the tokens that let hosts and users in",
		Args: noSuchCommand, RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.tokenCreateCommand(), a.tokenListCommand(), a.tokenDeleteCommand())
	return cmd
}

func roles() []string { return []string{"host", "viewer", "operator", "admin"} }

func parseRole(word string) (clusterv1.Role, error) {
	all := clusterv1.Role(0).Descriptor().Values()
	for i := range all.Len() {
		if r := clusterv1.Role(all.Get(i).Number()); r != clusterv1.Role_ROLE_UNSPECIFIED && view.Word(r) == strings.ToLower(word) {
			return r, nil
		}
	}
	return 0, cmdutil.Usage(fmt.Errorf("--role: %q is not one of %s%s", word, strings.Join(roles(), ", "), suggest.Hint(word, roles())))
}

func (a *app) tokenCreateCommand() *cobra.Command {
	role, name, ttl := "host", "", time.Hour
	cmd := &cobra.Command{
		Use: "create", Short: "Make a token that lets one host or user in, once",
		Long: `Make a token that lets one host or user in, once. It is all that standard output
gets. Whoever has it can use it: hand it over as you would a password.

Viewers look; operators also claim, drain and label; administrators also let
others in and remove them.`,
		Example: `  gpuctl cluster token create
  gpuctl cluster token create --role operator --name ada --ttl 24h`,
		Args: arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := parseRole(role)
			if err != nil {
				return err
			}
			if ttl < time.Second || ttl > math.MaxUint32*time.Second {
				return cmdutil.Usage(fmt.Errorf("--ttl: %v is less than a second, or too long", ttl))
			}
			c, err := a.connectCluster()
			if err != nil {
				return err
			}
			res, err := call(cmd.Context(), c, c.CreateToken, &clusterv1.CreateTokenRequest{Role: r, Name: name, TtlS: uint32(ttl / time.Second)})
			if err != nil {
				return err
			}
			if a.structured() {
				return a.print(view.Of(res))
			}
			next := "on the new host: gpuctl cluster join TOKEN"
			if r != clusterv1.Role_ROLE_HOST {
				next = "as " + orWord(name, "the new "+view.Word(r)) + ": gpuctl cluster login TOKEN"
			}
			fmt.Fprintf(a.Err, "token %s is good for one use within %s; %s\n", clean(res.GetId()), span(time.UnixMilli(res.GetExpiresUnixMs()).Sub(a.now())), clean(next))
			return a.say(res.GetToken())
		},
	}
	cmd.Flags().StringVar(&role, "role", role, "what it makes of who uses it: "+strings.Join(roles(), ", "))
	cmd.Flags().StringVar(&name, "name", "", "only the host or user of this `name` may use it")
	cmd.Flags().DurationVar(&ttl, "ttl", ttl, "how long it is good for")
	_ = cmd.RegisterFlagCompletionFunc("role", cobra.FixedCompletions(roles(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (a *app) tokenListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the tokens that were not used yet",
		Example: "  gpuctl cluster token list",
		Args:    arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.connectCluster()
			if err != nil {
				return err
			}
			res, err := call(cmd.Context(), c, c.ListTokens, &clusterv1.ListTokensRequest{})
			if err != nil {
				return err
			}
			if a.structured() {
				return a.print(view.List(res.GetTokens()))
			}
			if len(res.GetTokens()) == 0 {
				return a.sayNone("tokens")
			}
			var rows [][]string
			for _, t := range res.GetTokens() {
				expires := "expired"
				if left := time.UnixMilli(t.GetExpiresUnixMs()).Sub(a.now()); left > 0 {
					expires = "in " + span(left)
				}
				rows = append(rows, []string{t.GetId(), view.Word(t.GetRole()), orWord(t.GetName(), "any"), expires, t.GetCreatedBy()})
			}
			return table(a.Out, []string{"TOKEN", "ROLE", "FOR", "EXPIRES", "MADE BY"}, rows)
		},
	}
}

func (a *app) tokenDeleteCommand() *cobra.Command {
	return &cobra.Command{
		Use: "delete ID…", Short: "Delete tokens, so that nobody can use them",
		Example: "  gpuctl cluster token delete 7f3a",
		Args:    arguments(cobra.MinimumNArgs(1)), ValidArgsFunction: a.completeTokens,
		RunE: func(cmd *cobra.Command, ids []string) error {
			c, err := a.connectCluster()
			if err != nil {
				return err
			}
			var failed []error
			for _, id := range ids {
				_, err := call(cmd.Context(), c, c.DeleteToken, &clusterv1.DeleteTokenRequest{Id: id})
				if err != nil {
					failed = append(failed, err)
					continue
				}
				if a.structured() {
					err = a.printLine(map[string]string{"deleted": id}) // one of several
				} else {
					err = a.say(clean(fmt.Sprintf("token %s is deleted", id)))
				}
				if err != nil {
					return err
				}
			}
			return errors.Join(failed...)
		},
	}
}
