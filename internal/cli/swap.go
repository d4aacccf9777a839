package cli

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/program"
	"github.com/gpuctl/gpuctl/internal/size"
)

// verb is one of the three swaps, as a command.
type verb struct {
	verb                          gpuctlv1.Verb
	name, short, long, to, sample string
	needsTo                       bool
}

func upgrade() verb {
	return verb{
		verb: gpuctlv1.Verb_VERB_UPGRADE, name: "upgrade", short: "Give a session a higher model of GPU",
		long:   "Move a session to a higher model while its application runs: the highest that is\nfree, or the one named with --to.",
		to:     "`model or GPU` to go to (default the highest that is free)",
		sample: "  gpuctl upgrade\n  gpuctl upgrade 3f2a --to large\n  gpuctl upgrade 3f2a --plan",
	}
}

func downgrade() verb {
	return verb{
		verb: gpuctlv1.Verb_VERB_DOWNGRADE, name: "downgrade", short: "Give a session a lower model that still suffices",
		long:   "Move a session to a lower model while its application runs: the lowest that is\nfree and can honour all that the application uses already, or the one named with\n--to.",
		to:     "`model or GPU` to go to (default the lowest that suffices)",
		sample: "  gpuctl downgrade\n  gpuctl downgrade 3f2a --to small\n  gpuctl downgrade --plan -o json",
	}
}

func migrate() verb {
	return verb{
		verb: gpuctlv1.Verb_VERB_MIGRATE, name: "migrate", short: "Move a session to a GPU of any model", needsTo: true,
		long:   "Move a session to the GPU or model named with --to while its application runs,\nwhether that is higher, lower or the same.",
		to:     "`GPU or model` to go to",
		sample: "  gpuctl migrate --to oclgrind\n  gpuctl migrate 3f2a --to nvidia-1 --plan",
	}
}

func (a *app) swapCommand(v verb) *cobra.Command {
	req := &gpuctlv1.HostSwapRequest{Verb: v.verb}
	var plan, build bool
	var freeze time.Duration
	cmd := &cobra.Command{
		Use: v.name + " [SESSION]", Short: v.short,
		Long:    v.long + "\n\nSESSION is an id, a unique part of its beginning or a process id; it can be left\nout when there is only one. When no GPU can serve, the session stays as it is, all\nreasons are listed and the exit status is 3.",
		Example: v.sample, Args: arguments(cobra.MaximumNArgs(1)), ValidArgsFunction: a.completeSession,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				req.Session = args[0]
			}
			if v.needsTo && req.To == "" {
				return program.Usage(errors.New("migrate needs --to GPU; gpuctl inventory lists them"))
			}
			req.FreezeTimeoutMs = freeze.Milliseconds()
			c, err := a.connect()
			if err != nil {
				return err
			}
			if plan {
				return a.plan(cmd.Context(), c, &gpuctlv1.HostPlanRequest{Session: req.Session, Verb: req.Verb, To: req.To, Build: build})
			}
			stream, err := c.Swap(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			return a.follow(v.name, stream)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&req.To, "to", "", v.to)
	flags.BoolVar(&plan, "plan", false, "only say what would happen and what it would cost")
	flags.BoolVar(&build, "build", false, "with --plan: build the programs at the target, too")
	flags.DurationVar(&freeze, "freeze-timeout", 0, "how long to wait for the device before giving up")
	faultFlag(cmd, &req.FailAt)
	_ = cmd.RegisterFlagCompletionFunc("to", a.completeTo)
	return cmd
}

func faultFlag(cmd *cobra.Command, at *string) {
	cmd.Flags().StringVar(at, "fail-at", "", "fail at this step, to test the way back (gpuguest needs GPUCTL_FAULTS=1)")
	_ = cmd.Flags().MarkHidden("fail-at")
}

func (a *app) suspendCommand() *cobra.Command {
	req := &gpuctlv1.HostSuspendRequest{}
	var freeze time.Duration
	cmd := &cobra.Command{
		Use: "suspend [SESSION]", Short: "Free a session's GPU; its application waits",
		Long: "Keep a session's state in host memory, or in a file, and free its GPU. The\napplication waits until gpuctl resume.",
		Example: `  gpuctl suspend
  gpuctl suspend 3f2a --file /var/tmp/3f2a.state`,
		Args: arguments(cobra.MaximumNArgs(1)), ValidArgsFunction: a.completeSession,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				req.Session = args[0]
			}
			if req.File != "" {
				path, err := filepath.Abs(req.File)
				if err != nil {
					return fmt.Errorf("file %s: %w", req.File, err)
				}
				req.File = path
			}
			req.FreezeTimeoutMs = freeze.Milliseconds()
			c, err := a.connect()
			if err != nil {
				return err
			}
			stream, err := c.Suspend(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			return a.follow("suspend", stream)
		},
	}
	cmd.Flags().StringVar(&req.File, "file", "", "`file` for the state (default host memory)")
	cmd.Flags().DurationVar(&freeze, "freeze-timeout", 0, "how long to wait for the device before giving up")
	faultFlag(cmd, &req.FailAt)
	return cmd
}

func (a *app) resumeCommand() *cobra.Command {
	req := &gpuctlv1.HostResumeRequest{}
	cmd := &cobra.Command{
		Use: "resume [SESSION]", Short: "Let a suspended session go on",
		Long: "Let a suspended session go on, on the GPU that it had if that is free, else on the\nmost similar one, or on the one named with --to.",
		Example: `  gpuctl resume
  gpuctl resume 3f2a --to oclgrind`,
		Args: arguments(cobra.MaximumNArgs(1)), ValidArgsFunction: a.completeSession,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				req.Session = args[0]
			}
			c, err := a.connect()
			if err != nil {
				return err
			}
			stream, err := c.Resume(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			return a.follow("resume", stream)
		},
	}
	cmd.Flags().StringVar(&req.To, "to", "", "`GPU or model` to go on with")
	faultFlag(cmd, &req.FailAt)
	_ = cmd.RegisterFlagCompletionFunc("to", a.completeTo)
	return cmd
}

// candidateView is a GPU that cannot serve.
type candidateView struct {
	GPU     string       `json:"gpu"`
	Model   string       `json:"model"`
	Reasons []reasonView `json:"reasons"`
}

type reasonView struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

func viewCandidates(all []*gpuctlv1.Candidate) []candidateView {
	out := []candidateView{}
	for _, c := range all {
		v := candidateView{c.GetGpu(), c.GetModel(), []reasonView{}}
		for _, r := range c.GetReasons() {
			v.Reasons = append(v.Reasons, reasonView{r.GetCode(), r.GetMessage()})
		}
		out = append(out, v)
	}
	return out
}

// refuse lists every reason and returns the exit status.
func (a *app) refuse(what string, rejected []*gpuctlv1.Candidate) error {
	if !a.structured() {
		var rows [][]string
		for _, c := range rejected {
			for i, r := range c.GetReasons() {
				gpu := c.GetGpu()
				if i > 0 {
					gpu = " "
				}
				rows = append(rows, []string{gpu, r.GetMessage()})
			}
		}
		if len(rows) > 0 {
			if err := table(a.Err, []string{"GPU", "REASON"}, rows); err != nil {
				return err
			}
		}
	}
	if len(rejected) == 0 {
		what += ": the inventory has none (gpuctl inventory)"
	}
	return program.WithCode(errors.New(what), program.Refused)
}

func (a *app) plan(ctx context.Context, c client, req *gpuctlv1.HostPlanRequest) error {
	res, err := c.Plan(ctx, connect.NewRequest(req))
	if err != nil {
		return err
	}
	m := res.Msg
	if a.structured() {
		if err := a.print(struct {
			Session       string          `json:"session"`
			From          []string        `json:"from"`
			GPUs          []string        `json:"gpus"`
			Model         string          `json:"model"`
			Steps         []string        `json:"steps"`
			Bytes         uint64          `json:"bytes"`
			Predicted     int64           `json:"predicted_ns"`
			PredictedStop int64           `json:"predicted_stop_ns"`
			Rejected      []candidateView `json:"rejected"`
		}{
			m.GetSession(), append([]string{}, m.GetFrom()...), append([]string{}, m.GetGpus()...), m.GetModel(), append([]string{}, m.GetSteps()...),
			m.GetBytes(), m.GetPredictedNs(), m.GetPredictedStopNs(), viewCandidates(m.GetRejected()),
		}); err != nil {
			return err
		}
	}
	if len(m.GetGpus()) == 0 {
		return a.refuse(fmt.Sprintf("session %s stays on %s: no GPU can serve it", m.GetSession(), strings.Join(m.GetFrom(), ",")), m.GetRejected())
	}
	if a.structured() {
		return nil
	}
	rows := [][2]string{
		{"Session", m.GetSession()},
		{"From", strings.Join(m.GetFrom(), ",")},
		{"To", fmt.Sprintf("%s (%s)", strings.Join(m.GetGpus(), ","), m.GetModel())},
		{"Steps", strings.Join(m.GetSteps(), " → ")},
		{"Copies", size.Format(m.GetBytes())},
	}
	if m.GetPredictedNs() > 0 {
		rows = append(rows, [2]string{"Takes", fmt.Sprintf("about %s, the application stands still for %s of it", duration(m.GetPredictedNs()), duration(m.GetPredictedStopNs()))})
	}
	for _, r := range m.GetRejected() {
		for _, why := range r.GetReasons() {
			rows = append(rows, [2]string{"Not", r.GetGpu() + ": " + why.GetMessage()})
		}
	}
	return a.pairs(rows)
}
