package cli

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
)

func (a *app) labelCommand() *cobra.Command {
	return &cobra.Command{
		Use: "label host NAME KEY=VALUE… KEY-…", Short: "Set and remove a host's labels",
		Long: "Set labels of a host with KEY=VALUE and remove them with KEY-. Placement and --where\ncan use them.",
		Example: `  gpuctl label host h1 rack=r7 spot-
  gpuctl get hosts --where '"rack" in labels && labels.rack == "r7"'`,
		Args: arguments(cobra.MinimumNArgs(3)), ValidArgsFunction: a.completeLabel,
		RunE: func(cmd *cobra.Command, args []string) error {
			k, err := a.kind(args[0])
			if err != nil {
				return err
			}
			if k.kind != clusterv1.Kind_KIND_HOST {
				return cmdutil.Usage(fmt.Errorf("only hosts have labels, a %s has none", k.one))
			}
			req := &clusterv1.SetLabelsRequest{Host: args[1]}
			if req.Set, req.Remove, err = parseLabels(args[2:]); err != nil {
				return cmdutil.Usage(err)
			}
			c, err := a.connectCluster()
			if err != nil {
				return err
			}
			res, err := callOn(cmd.Context(), c, k, args[1], c.SetLabels, req)
			if err != nil {
				return err
			}
			h := res.GetHost()
			return a.result(view.Of(h), "host %s: %s", h.GetName(), orWord(labels(h.GetLabels()), "no labels"))
		},
	}
}

func parseLabels(args []string) (set map[string]string, remove []string, err error) {
	set = map[string]string{}
	for _, arg := range args {
		key, value, isSet := strings.Cut(arg, "=")
		gone := !isSet && strings.HasSuffix(key, "-")
		if gone {
			key = strings.TrimSuffix(key, "-")
		}
		_, twice := set[key]
		switch {
		case key == "" || !isSet && !gone:
			return nil, nil, fmt.Errorf("label %q: want KEY=VALUE to set or KEY- to remove", arg)
		case twice || slices.Contains(remove, key):
			return nil, nil, fmt.Errorf("label %s is named twice", key)
		case gone:
			remove = append(remove, key)
		default:
			set[key] = value
		}
	}
	return set, remove, nil
}

func orWord(s, none string) string {
	if s == "" {
		return none
	}
	return s
}

func (a *app) rankCommand() *cobra.Command {
	var clearIt bool
	cmd := &cobra.Command{
		Use: "rank MODEL N", Short: "Set a model's place in the order of upgrade and downgrade",
		Long: "Set a model's place in the order that upgrade and downgrade follow: the higher, the\nbetter. --clear goes back to what the hosts say.",
		Example: `  gpuctl rank 'NVIDIA H200' 90
  gpuctl rank 'NVIDIA H200' --clear`,
		Args: arguments(cobra.RangeArgs(1, 2)), ValidArgsFunction: a.completeArgs(clusterv1.Kind_KIND_MODEL),
		RunE: func(cmd *cobra.Command, args []string) error {
			if clearIt == (len(args) == 2) {
				return cmdutil.Usage(errors.New("want either a number or --clear; usage: " + cmd.UseLine()))
			}
			req := &clusterv1.SetRankRequest{Model: args[0], Clear: clearIt}
			if !clearIt {
				n, err := strconv.ParseUint(args[1], 10, 32)
				if err != nil {
					return cmdutil.Usage(fmt.Errorf("rank %q is not a number from 0 to 4294967295", args[1]))
				}
				req.Rank = uint32(n)
			}
			c, err := a.connectCluster()
			if err != nil {
				return err
			}
			res, err := callOn(cmd.Context(), c, a.must(clusterv1.Kind_KIND_MODEL), args[0], c.SetRank, req)
			if err != nil {
				return err
			}
			m := res.GetModel()
			by := "as hosts say"
			if m.GetRanked() {
				by = "by an operator"
			}
			return a.result(view.Of(m), "model %s has rank %d, %s", m.GetName(), m.GetRank(), by)
		},
	}
	cmd.Flags().BoolVar(&clearIt, "clear", false, "back to the rank that hosts say")
	return cmd
}
