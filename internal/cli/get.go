package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/suggest"
)

type getFlags struct {
	where, sortBy string
	watch, stale  bool
	limit         uint32
}

func (a *app) getCommand() *cobra.Command {
	var kinds strings.Builder
	for _, k := range a.kinds() {
		fmt.Fprintf(&kinds, "  %-13s %-5s %s\n", k.many, strings.Join(k.short, ","), k.what)
	}
	cmd := &cobra.Command{
		Use: "get KIND [NAME…]", Short: "List objects of the cluster's inventory",
		Long: "List objects of the cluster's inventory. Kinds can be written in the singular, in\nthe plural and short:\n\n" + kinds.String() +
			"\ngpuctl get KIND --help lists what --where and --sort-by can name.",
		Example: `  gpuctl get hosts
  gpuctl get gpus --where 'free && memory >= 16*GiB' --sort-by -rank
  gpuctl get gpus --watch -o json
  gpuctl get claim c1 -o yaml`,
		Annotations: map[string]string{outputName: "yes"},
		Args:        cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			if strings.Contains(args[0], "/") { // KIND/NAME
				var k kind
				var names []string
				for i, arg := range args {
					ki, name, err := a.splitName(arg)
					switch {
					case err != nil:
						return err
					case i > 0 && ki.kind != k.kind:
						return cmdutil.Usage(fmt.Errorf("get one kind at a time: %s and %s are two", k.many, ki.many))
					}
					k, names = ki, append(names, name)
				}
				return a.get(cmd.Context(), k, names, getFlags{})
			}
			_, err := a.kind(args[0])
			return err
		},
	}
	for _, k := range a.kinds() {
		cmd.AddCommand(a.getKindCommand(k))
	}
	return cmd
}

func (a *app) getKindCommand(k kind) *cobra.Command {
	var f getFlags
	cmd := &cobra.Command{
		Use: k.many + " [NAME…]", Aliases: append([]string{k.one}, k.short...), Short: "List " + k.what,
		Long: fmt.Sprintf("List %s.\n\n--where is a CEL expression and --sort-by names one of these fields of a %s;\nsizes are in bytes (KiB, MiB, GiB and TiB can be used):\n\n%s",
			k.what, k.one, k.fieldsHelp()),
		Example:     fmt.Sprintf("  gpuctl get %s\n  gpuctl get %s -o wide\n  gpuctl get %s --watch -o json", k.many, k.one, k.short[0]),
		Annotations: map[string]string{outputName: "yes"},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
			return a.completeNames(cmd.Context(), k, prefix, args...), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, names []string) error { return a.get(cmd.Context(), k, names, f) },
	}
	flags := cmd.Flags()
	flags.StringVar(&f.where, "where", "", "only those for which this CEL `expression` is true")
	flags.StringVar(&f.sortBy, "sort-by", "", "`field` to sort by, -field for the largest first (default the name)")
	flags.BoolVarP(&f.watch, "watch", "w", false, "go on and print every change")
	flags.BoolVar(&f.stale, "stale", false, "as the asked host knows it, even without a leader")
	flags.Uint32Var(&f.limit, "limit", 0, "at most so many (0: all)")
	_ = cmd.RegisterFlagCompletionFunc("sort-by", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		var out []string
		for _, field := range k.fields() {
			out = append(out, cobra.CompletionWithDesc(field.Name, field.Type))
		}
		return out, cobra.ShellCompDirectiveNoFileComp
	})
	return cmd
}

func (a *app) get(ctx context.Context, k kind, names []string, f getFlags) error {
	order, err := ordering(k, f.sortBy)
	if err != nil {
		return err
	}
	if f.watch && (f.sortBy != "" || f.limit > 0 || f.stale) {
		return cmdutil.Usage(errors.New("--watch shows changes as they come: it cannot be sorted, limited or stale"))
	}
	c, err := a.connectCluster()
	if err != nil {
		return err
	}
	if f.watch {
		return a.watch(ctx, c, k, f.where, names)
	}
	var objects []proto.Message
	var missing []error
	if len(names) == 0 {
		req := &clusterv1.ListRequest{Kind: k.kind, Where: f.where, Stale: f.stale}
		if order == nil { // otherwise the host does not know which objects are the first ones
			req.Limit = f.limit
		}
		res, err := call(ctx, c, c.List, req)
		if err != nil {
			return err
		}
		objects = inners(res.GetObjects())
		if res.GetMore() {
			fmt.Fprintf(a.Err, "there are more than %d; --limit 0 shows all\n", f.limit)
		}
	}
	for _, name := range names {
		res, err := c.List(ctx, connect.NewRequest(&clusterv1.ListRequest{Kind: k.kind, Where: f.where, Stale: f.stale, Name: name}))
		switch {
		case connect.CodeOf(err) == connect.CodeNotFound, err == nil && len(res.Msg.GetObjects()) == 0 && f.where == "":
			missing = append(missing, withSuggestion(ctx, c, k, name, fmt.Errorf("there is no %s %q", k.one, name)))
		case err != nil:
			return advise(ctx, c, err)
		default:
			objects = append(objects, inners(res.Msg.GetObjects())...)
		}
	}
	if order != nil {
		slices.SortStableFunc(objects, order)
	}
	if f.limit > 0 && len(objects) > int(f.limit) {
		objects = objects[:f.limit]
	}
	if len(objects) > 0 || len(missing) == 0 {
		if err := a.printObjects(k, objects, f.where != ""); err != nil {
			return err
		}
	}
	return errors.Join(missing...)
}

func inners(objects []*clusterv1.Object) []proto.Message {
	var out []proto.Message
	for _, o := range objects {
		if m := inner(o); m != nil {
			out = append(out, m)
		}
	}
	return out
}

// ordering returns a comparison by a field; nil if by is empty.
func ordering(k kind, by string) (func(x, y proto.Message) int, error) {
	if by == "" {
		return nil, nil //nolint:nilnil // no order is what was asked for
	}
	field, down := strings.CutPrefix(by, "-")
	var names []string
	path := ""
	for _, f := range k.fields() {
		if f.Path == "" {
			continue
		}
		names = append(names, f.Name)
		if f.Name == field {
			path = f.Path
		}
	}
	if path == "" {
		return nil, cmdutil.Usage(fmt.Errorf("--sort-by: a %s has no field %q%s; gpuctl get %s --help lists them", k.one, field, suggest.Hint(field, names), k.many))
	}
	return func(x, y proto.Message) int {
		n := view.Compare(view.Value(x, path), view.Value(y, path))
		if down {
			return -n
		}
		return n
	}, nil
}

// printObjects prints a list in the format of --output.
func (a *app) printObjects(k kind, objects []proto.Message, filtered bool) error {
	switch {
	case a.structured():
		return a.print(view.List(objects))
	case a.output == "name":
		for _, o := range objects {
			if _, err := fmt.Fprintf(a.Out, "%s/%s\n", k.one, clean(k.name(o))); err != nil {
				return err
			}
		}
		return nil
	case len(objects) == 0 && filtered:
		fmt.Fprintf(a.Err, "no %s match\n", k.many)
		return nil
	case len(objects) == 0:
		fmt.Fprintf(a.Err, "no %s\n", k.many)
		return nil
	}
	var rows [][]string
	for _, o := range objects {
		rows = append(rows, a.row(k, o))
	}
	return table(a.Out, a.heading(k), rows)
}
