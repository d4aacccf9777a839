package cli

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/size"
	"github.com/gpuctl/gpuctl/internal/suggest"
)

// claimFlags are the needs of a claim, as flags of claim create and of plan.
type claimFlags struct {
	min, prefer, gpu, on, group, policy, profile, holder string
	notOn, labels                                        []string
	count                                                uint32
	oneRuntime                                           bool
}

func (f *claimFlags) register(a *app, cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.min, "min-memory", "", "the least memory that will do (`size`); the GPU may then be shared")
	flags.StringVar(&f.prefer, "prefer-memory", "", "memory that would be better (`size`)")
	flags.Uint32Var(&f.count, "count", 1, "number of GPUs")
	flags.StringVar(&f.gpu, "gpu", "", "CEL `expression` that each GPU must meet; gpuctl get gpus --help lists the fields")
	flags.StringVar(&f.on, "on", "", "only on this `host`")
	flags.StringSliceVar(&f.notOn, "not-on", nil, "not on these `hosts`")
	flags.StringVar(&f.group, "group", "", "claims of one `group` go to different hosts")
	flags.StringVar(&f.policy, "policy", "", strings.Join(policies(), ", ")+" (default cheapest with --min-memory, else best)")
	flags.StringVar(&f.profile, "profile", "", "only slices of this `profile`")
	flags.StringVar(&f.holder, "holder", "", "what it is for, in `words`")
	flags.StringSliceVar(&f.labels, "label", nil, "`KEY=VALUE` of the claim")
	flags.BoolVar(&f.oneRuntime, "one-runtime", false, "all GPUs on one host, of one runtime")
	_ = cmd.RegisterFlagCompletionFunc("policy", cobra.FixedCompletions(policies(), cobra.ShellCompDirectiveNoFileComp))
	for _, name := range []string{"on", "not-on"} {
		_ = cmd.RegisterFlagCompletionFunc(name, a.completeFlag(clusterv1.Kind_KIND_HOST))
	}
}

func policies() []string { return view.Words(clusterv1.Policy(0).Descriptor()) }

// claim checks the flags and returns a claim with them.
func (f *claimFlags) claim() (*clusterv1.Claim, error) {
	c := &clusterv1.Claim{
		Count: f.count, Expr: f.gpu, Host: f.on, HostsNot: f.notOn, Group: f.group, Profile: f.profile, OneRuntime: f.oneRuntime, Holder: f.holder,
		Labels: map[string]string{},
	}
	var err error
	for _, s := range []struct {
		name, text string
		to         *uint64
	}{{"--min-memory", f.min, &c.MinMemory}, {"--prefer-memory", f.prefer, &c.PreferMemory}} {
		if s.text == "" {
			continue
		}
		if *s.to, err = size.Parse(s.text); err != nil {
			return nil, cmdutil.Usage(fmt.Errorf("%s: %w", s.name, err))
		}
	}
	if c.PreferMemory > 0 && c.PreferMemory < c.MinMemory {
		return nil, cmdutil.Usage(errors.New("--prefer-memory is less than --min-memory"))
	}
	if f.count == 0 {
		return nil, cmdutil.Usage(errors.New("--count: at least 1"))
	}
	if f.on != "" && slices.Contains(f.notOn, f.on) {
		return nil, cmdutil.Usage(fmt.Errorf("--on and --not-on both name %s", f.on))
	}
	if f.policy != "" {
		all := clusterv1.Policy(0).Descriptor().Values()
		for i := range all.Len() {
			if p := clusterv1.Policy(all.Get(i).Number()); view.Word(p) == strings.ToLower(f.policy) {
				c.Policy = p
			}
		}
		if c.Policy == clusterv1.Policy_POLICY_UNSPECIFIED {
			return nil, cmdutil.Usage(fmt.Errorf("--policy: %q is not one of %s%s", f.policy, strings.Join(policies(), ", "), suggest.Hint(f.policy, policies())))
		}
	}
	for _, l := range f.labels {
		k, v, ok := strings.Cut(l, "=")
		if !ok || k == "" {
			return nil, cmdutil.Usage(fmt.Errorf("--label: %q is not KEY=VALUE", l))
		}
		c.Labels[k] = v
	}
	return c, nil
}

func (a *app) claimCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "claim", Short: "Claim GPUs for something, and give them back",
		Args: noSuchCommand, RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.claimCreateCommand(), a.claimDeleteCommand())
	return cmd
}

func (a *app) claimCreateCommand() *cobra.Command {
	var f claimFlags
	var plan, wait bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use: "create [NAME]", Short: "Claim GPUs",
		Long: `Claim GPUs. When nothing can meet the claim now, it is refused with the reason of
every host and the exit status is 3; with --wait it stays pending until something
can. A claim of the same name with the same needs is answered as it is.`,
		Example: `  gpuctl claim create trainer --min-memory 16GiB --gpu 'vendor.contains("NVIDIA")'
  gpuctl claim create --count 2 --policy spread --wait --timeout 10m
  gpuctl claim create big --policy best --plan`,
		Args: arguments(cobra.MaximumNArgs(1)), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			claim, err := f.claim()
			if err != nil {
				return err
			}
			if cmd.Flags().Changed("timeout") && (!wait || timeout <= 0) {
				return cmdutil.Usage(errors.New("--timeout needs --wait, and a time greater than 0"))
			}
			if len(args) > 0 {
				claim.Id = args[0]
			} else if claim.Id, err = newClaimName(); err != nil {
				return err
			}
			if err := times(cmd, "timeout"); err != nil {
				return err
			}
			if wait {
				claim.Unmet = clusterv1.Unmet_UNMET_WAIT
			}
			c, err := a.connectCluster()
			if err != nil {
				return err
			}
			if plan {
				return a.place(cmd.Context(), c, &clusterv1.PlaceRequest{Claim: claim})
			}
			return a.createClaim(cmd.Context(), c, claim, timeout)
		},
	}
	f.register(a, cmd)
	cmd.Flags().BoolVar(&plan, "plan", false, "only say where it would go, and why not elsewhere")
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until it can be met")
	cmd.Flags().DurationVar(&timeout, "timeout", 0, "with --wait: how long; the claim stays pending after that (default for ever)")
	return cmd
}

func newClaimName() (string, error) {
	b := make([]byte, 5)
	if _, err := rand.Read(b); err != nil {
		return "", fmt.Errorf("claim name: %w", err)
	}
	return "c-" + hex.EncodeToString(b), nil
}

func (a *app) createClaim(ctx context.Context, c clusterClient, claim *clusterv1.Claim, timeout time.Duration) error {
	res, err := call(ctx, c, c.CreateClaim, &clusterv1.CreateClaimRequest{Claim: claim})
	if err != nil {
		return err
	}
	if res.GetClaim() == nil {
		if a.structured() {
			if err := a.print(view.Of(res)); err != nil {
				return err
			}
		}
		return a.refuseHosts("nothing can meet the claim; --wait waits until something can", res.GetRejected())
	}
	if res.GetClaim().GetState() == clusterv1.ClaimState_CLAIM_STATE_PENDING && claim.GetUnmet() == clusterv1.Unmet_UNMET_WAIT {
		fmt.Fprintf(a.Err, "claim %s waits%s\n", clean(claim.GetId()), clean(colon(res.GetClaim().GetMessage())))
		if res, err = a.awaitClaim(ctx, c, claim.GetId(), timeout); err != nil {
			return err
		}
	}
	if err := unbound(res.GetClaim()); err != nil {
		if a.structured() {
			err = errors.Join(a.print(view.Of(res)), err)
		}
		return err
	}
	var gpus []string
	for _, s := range res.GetAssignments() {
		gpus = append(gpus, s.GetGpu())
	}
	return a.result(view.Of(res), "claim %s is %s: %s", claim.GetId(), claimState(res.GetClaim()), orWord(strings.Join(gpus, ", "), "no GPU"))
}

// unbound returns an error if a claim has no GPU that its holder may use: there was one of the
// name already, which is given back, or has lost what it had.
func unbound(c *clusterv1.Claim) error {
	name := clean(c.GetId())
	switch c.GetState() {
	case clusterv1.ClaimState_CLAIM_STATE_RELEASING:
		return cmdutil.WithCode(fmt.Errorf("claim %s was deleted, and its hosts still take its GPUs back: create it again when gpuctl get claims does not list it any more", name), cmdutil.Refused)
	case clusterv1.ClaimState_CLAIM_STATE_PENDING:
		return cmdutil.WithCode(fmt.Errorf("claim %s exists, and has no GPU%s; gpuctl claim delete %s, and create it again", name, clean(colon(c.GetMessage())), name), cmdutil.Refused)
	}
	return nil
}

func colon(s string) string {
	if s == "" {
		return ""
	}
	return ": " + s
}

// awaitClaim waits until a pending claim is bound.
func (a *app) awaitClaim(ctx context.Context, c clusterClient, name string, timeout time.Duration) (*clusterv1.CreateClaimResponse, error) {
	ctx, stop := interruptible(ctx)
	defer stop()
	watching, cancel := context.WithCancel(ctx)
	defer cancel()
	if timeout > 0 { // not a deadline: the host would apply it, too, and might report it first
		defer time.AfterFunc(timeout, cancel).Stop()
	}
	var bound *clusterv1.Claim
	last := ""
	gone := false
	err := a.stay(watching, c, func() (bool, error) {
		stream, err := c.Watch(watching, connect.NewRequest(&clusterv1.WatchRequest{Kind: clusterv1.Kind_KIND_CLAIM, Name: name}))
		if err != nil {
			return false, err
		}
		defer stream.Close()
		seen := false
		for stream.Receive() {
			m := stream.Msg()
			cl := m.GetObject().GetClaim()
			seen = seen || cl != nil && !m.GetDeleted()
			switch {
			case cl != nil && m.GetDeleted(), m.GetSynced() && !seen:
				gone = true
			case cl.GetState() == clusterv1.ClaimState_CLAIM_STATE_BOUND:
				bound = proto.CloneOf(cl)
			case cl != nil:
				last = cl.GetMessage()
			}
			if gone || bound != nil {
				cancel()
				return true, nil
			}
		}
		return true, stream.Err()
	})
	switch {
	case err != nil:
		return nil, err
	case ctx.Err() != nil:
		return nil, fmt.Errorf("claim %s is still pending; gpuctl claim delete %s takes it back", name, name)
	case gone:
		return nil, fmt.Errorf("claim %s was deleted while it waited", name)
	case bound == nil:
		return nil, fmt.Errorf("claim %s is still pending after %v%s; gpuctl claim delete %s takes it back", name, timeout, clean(colon(last)), name)
	}
	res, err := call(ctx, c, c.List, &clusterv1.ListRequest{Kind: clusterv1.Kind_KIND_ASSIGNMENT, Where: "claim == " + strconv.Quote(name)})
	if err != nil {
		return nil, err
	}
	out := &clusterv1.CreateClaimResponse{Claim: bound}
	for _, o := range res.GetObjects() {
		out.Assignments = append(out.Assignments, o.GetAssignment())
	}
	return out, nil
}

func (a *app) claimDeleteCommand() *cobra.Command {
	return &cobra.Command{
		Use: "delete NAME…", Short: "Give claims' GPUs back",
		Long:    "Give claims' GPUs back. A claim goes when its hosts have taken the last one.",
		Example: "  gpuctl claim delete trainer\n  gpuctl get claims --where 'state == \"pending\"' -o name | cut -d/ -f2 | xargs gpuctl claim delete",
		Args:    arguments(cobra.MinimumNArgs(1)), ValidArgsFunction: a.completeArgs(clusterv1.Kind_KIND_CLAIM, many),
		RunE: func(cmd *cobra.Command, names []string) error {
			c, err := a.connectCluster()
			if err != nil {
				return err
			}
			views := []view.Object{}
			var failed []error
			for _, name := range names {
				name = strings.TrimPrefix(name, "claim/") // -o name prints it with this prefix
				res, err := callOn(cmd.Context(), c, a.must(clusterv1.Kind_KIND_CLAIM), name, c.DeleteClaim, &clusterv1.DeleteClaimRequest{Claim: name})
				switch {
				case err != nil:
					failed = append(failed, err)
				case a.structured():
					views = append(views, view.Of(res.GetClaim()))
				default:
					text := "deleted"
					if res.GetClaim().GetState() == clusterv1.ClaimState_CLAIM_STATE_RELEASING {
						text = "releasing: its hosts take the GPUs back"
					}
					if err := a.say(clean(fmt.Sprintf("claim %s is %s", name, text))); err != nil {
						return err
					}
				}
			}
			if a.structured() {
				if err := a.print(views); err != nil {
					return err
				}
			}
			return errors.Join(failed...)
		},
	}
}
