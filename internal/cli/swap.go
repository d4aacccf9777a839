package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/size"
)

// verb is upgrade, downgrade or migrate, as a command.
type verb struct {
	verb                          gpuctlv1.Verb
	name, short, long, to, sample string
}

func upgrade() verb {
	return verb{
		verb: gpuctlv1.Verb_VERB_UPGRADE, name: "upgrade", short: "Give a session or a VM a higher model of GPU",
		long: `Move a session to a higher model while its application runs: the highest that is
free, or the one named with --to. Of a VM, the whole card is exchanged for one of a
higher model on the same host, while the VM and the applications in it go on.`,
		to:     "`model or GPU` to go to (default the highest that is free)",
		sample: "  gpuctl upgrade\n  gpuctl upgrade 3f2a --to large\n  gpuctl upgrade 3f2a --plan\n  gpuctl upgrade web --plan",
	}
}

func downgrade() verb {
	return verb{
		verb: gpuctlv1.Verb_VERB_DOWNGRADE, name: "downgrade", short: "Give a session or a VM a lower model that still suffices",
		long: `Move a session to a lower model while its application runs: the lowest that is
free and can honour all that the application uses already, or the one named with
--to. Of a VM, the whole card is exchanged for one of a lower model on the same
host, while the VM and the applications in it go on.`,
		to:     "`model or GPU` to go to (default the lowest that suffices)",
		sample: "  gpuctl downgrade\n  gpuctl downgrade 3f2a --to small\n  gpuctl downgrade --plan -o json\n  gpuctl downgrade web --to A10",
	}
}

func migrate() verb {
	return verb{
		verb: gpuctlv1.Verb_VERB_MIGRATE, name: "migrate", short: "Move a session to another GPU, or a VM with its GPU to another host",
		long: `Move a session to the GPU or model named with --to while its application runs,
whether that is higher, lower or the same. HOST/GPU, or HOST for the best GPU there,
is on another host: the application stays here and computes over the network. --plan
shows the way, the downtime, and how much slower it computes there. A session that was
moved away with this command stays there until it is moved again. A session of CUDA
programs goes to GPUs of the same chip here; --to may be a UUID or PCI address.
--rehearse finds out whether it can: some of what NVIDIA's driver can't move shows only
when it is tried.

A VM moves to another host: its applications are frozen with the state of its GPU in
the VM's own memory, the card is detached, the VM migrates live, gets a card there
and its applications go on. With --live they compute on a remote GPU meanwhile, which
is done by itself where that shortens their downtime. Without --to the best host is chosen; --to names a host,
a GPU or a model. Every step has its undo: when one fails the next candidate is
tried, and then the way back. --rehearse tries it with the VM's CUDA programs, and
moves nothing.`,
		to:     "`GPU, model or host` to go to (default the best; of a session it must be said)",
		sample: "  gpuctl migrate --to oclgrind\n  gpuctl migrate 3f2a --to nvidia-1 --plan\n  gpuctl migrate 3f2a --to h2/nvidia-0\n  gpuctl migrate 3f2a --rehearse\n  gpuctl migrate web --plan\n  gpuctl migrate web --to h2 --deadline 60s\n  gpuctl migrate web --rehearse\n  gpuctl migrate web --live --plan\n  gpuctl migrate 3f2a --vm --on h1 --no-wait\n  gpuctl migrate web --force-cold --plan",
	}
}

func (a *app) swapCommand(v verb) *cobra.Command {
	req := &gpuctlv1.HostSwapRequest{Verb: v.verb}
	var plan, build, rehearse bool
	var freeze, timeout time.Duration
	var machine machineFlags
	cmd := &cobra.Command{
		Use: v.name + " [SESSION | VM]", Short: v.short,
		Long: v.long + `

SESSION is an id, a unique part of its beginning or a process id; it can be left out
when there is only one. What is no session is the name or UUID of a VM of the
cluster; --vm and --on say that a VM is meant. When nothing can serve, all goes on as
it is, every reason is listed and the exit status is 3.`,
		Example: v.sample, Args: arguments(cobra.MaximumNArgs(1)), ValidArgsFunction: a.completeSessionOrMachine,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := times(cmd, "freeze-timeout", "timeout", "deadline"); err != nil {
				return err
			}
			if build && !plan {
				return cmdutil.Usage(errors.New("--build is for --plan, which moves nothing; say both, or leave it out"))
			}
			if len(args) > 0 {
				req.Session = args[0]
			}
			m, err := a.subject(cmd.Context(), v.name, req.GetSession(), machine)
			if err != nil {
				return err
			}
			if m != nil {
				if err := machine.check(cmd); err != nil {
					return err
				}
				if rehearse {
					return a.rehearseMachine(cmd, &gpuctlv1.MachineRehearseRequest{Machine: req.GetSession(), Host: m.GetHost(), FreezeTimeoutMs: freeze.Milliseconds()})
				}
				return a.moveMachine(cmd.Context(), &gpuctlv1.MachinePlanRequest{
					Machine: req.GetSession(), Host: m.GetHost(), Verb: v.name, To: req.GetTo(), DeadlineMs: machine.deadline.Milliseconds(), ForceCold: machine.cold, Live: machine.live, Wait: machine.wait,
					FreezeTimeoutMs: freeze.Milliseconds(),
				}, plan, machine.noWait)
			}
			if err := machine.named(cmd); err != nil {
				return err
			}
			req.FreezeTimeoutMs, req.TimeoutMs = freeze.Milliseconds(), timeout.Milliseconds()
			if req.Rehearse = rehearse; rehearse && (req.GetTo() != "" || build) {
				return cmdutil.Usage(errors.New("--rehearse goes back to where the session runs: leave out --to and --build"))
			}
			return a.swap(cmd.Context(), v, req, plan, build)
		},
	}
	flags := cmd.Flags()
	if v.verb == gpuctlv1.Verb_VERB_MIGRATE {
		flags.BoolVar(&rehearse, "rehearse", false, "take the state of CUDA programs, a session or all of a VM, from the GPU and put it back where it was, to see whether they can be moved")
	}
	flags.StringVar(&req.To, "to", "", v.to)
	flags.BoolVar(&plan, "plan", false, "only say what would happen and what it would cost")
	flags.BoolVar(&build, "build", false, "of a session, with --plan: build the programs at the target, too")
	flags.DurationVar(&freeze, "freeze-timeout", 0, "how long to wait for what was launched to end (default 10s, of a VM 2m)")
	flags.DurationVar(&timeout, "timeout", 0, "of a session: "+stillUsage)
	machine.add(cmd)
	faultFlag(cmd, &req.FailAt)
	_ = cmd.RegisterFlagCompletionFunc("to", a.completeAnyTo)
	_ = cmd.RegisterFlagCompletionFunc("on", a.completeFlag(clusterv1.Kind_KIND_HOST))
	return cmd
}

// swap executes a verb for a session.
func (a *app) swap(ctx context.Context, v verb, req *gpuctlv1.HostSwapRequest, plan, build bool) error {
	if v.verb == gpuctlv1.Verb_VERB_MIGRATE && req.GetTo() == "" && !req.GetRehearse() {
		return cmdutil.Usage(errors.New("migrate of a session needs --to GPU; gpuctl inventory lists them"))
	}
	c, err := a.connect()
	if err != nil {
		return err
	}
	if plan {
		return a.plan(ctx, c, &gpuctlv1.HostPlanRequest{Session: req.GetSession(), Verb: req.GetVerb(), To: req.GetTo(), Build: build, Rehearse: req.GetRehearse()})
	}
	what := v.name
	if req.GetRehearse() {
		what = "rehearsal"
	}
	return follow(ctx, a, what, c.Swap, req)
}

// stillUsage describes --timeout.
const stillUsage = "how `long` a downtime may be without progress while the session's executors live (default 2m, or twice --freeze-timeout)"

// times refuses times that hosts, which count milliseconds, would take for none.
func times(cmd *cobra.Command, flags ...string) error {
	for _, name := range flags {
		f := cmd.Flags().Lookup(name)
		if f == nil || !f.Changed {
			continue
		}
		if d, err := time.ParseDuration(f.Value.String()); err != nil || d < time.Millisecond {
			return cmdutil.Usage(fmt.Errorf("--%s %v: want a time, as 60s", name, f.Value))
		}
	}
	return nil
}

func faultFlag(cmd *cobra.Command, at *string) {
	cmd.Flags().StringVar(at, "fail-at", "", "fail at this step, to test the way back (gpuguest needs GPUCTL_FAULTS=1)")
	_ = cmd.Flags().MarkHidden("fail-at")
}

// predictionView is how reliable a prediction is.
type predictionView struct {
	Low      int64 `json:"low_ns"`
	High     int64 `json:"high_ns"`
	Measured bool  `json:"measured"`
}

func viewPrediction(p *gpuctlv1.Prediction) *predictionView {
	if p == nil {
		return nil
	}
	return &predictionView{p.GetLowNs(), p.GetHighNs(), p.GetMeasured()}
}

// expected formats a predicted time. If nothing was measured on this host, it formats the
// range.
func expected(likely int64, p *gpuctlv1.Prediction, show func(int64) string) string {
	if p == nil || p.GetMeasured() || p.GetHighNs() == 0 {
		return show(likely)
	}
	return show(p.GetLowNs()) + " to " + show(p.GetHighNs())
}

func notMeasured(p *gpuctlv1.Prediction) string {
	if p == nil || p.GetMeasured() {
		return ""
	}
	return " (not measured here yet)"
}

// candidateView is a GPU that does not fit.
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
		out = append(out, candidateView{c.GetGpu(), c.GetModel(), viewReasons(c.GetReasons())})
	}
	return out
}

// refuse prints all reasons and returns the exit status.
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
	return cmdutil.WithCode(errors.New(line(what)), cmdutil.Refused)
}

// planRefused says what a plan was refused.
func planRefused(req *gpuctlv1.HostPlanRequest, m *gpuctlv1.HostPlanResponse) string {
	switch {
	case req.GetFolder() != "":
		return fmt.Sprintf("session %s can't be suspended to %s", m.GetSession(), req.GetFolder())
	case req.GetFrom() != "":
		return fmt.Sprintf("session %s stays in %s: no GPU can serve it", m.GetSession(), req.GetFrom())
	}
	return fmt.Sprintf("session %s stays on %s: no GPU can serve it", m.GetSession(), strings.Join(m.GetFrom(), ","))
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
			Total         *predictionView `json:"total,omitempty"`
			Stop          *predictionView `json:"stop,omitempty"`
			Rejected      []candidateView `json:"rejected"`
			Path          []string        `json:"path,omitempty"`
			PerSecond     int64           `json:"per_second_ns,omitempty"` // how much longer a second of computing takes at the target
			PerSecondSpan *predictionView `json:"per_second,omitempty"`
		}{
			m.GetSession(), append([]string{}, m.GetFrom()...), append([]string{}, m.GetGpus()...), m.GetModel(), append([]string{}, m.GetSteps()...),
			m.GetBytes(), m.GetPredictedNs(), m.GetPredictedStopNs(), viewPrediction(m.GetTotal()), viewPrediction(m.GetStop()), viewCandidates(m.GetRejected()),
			m.GetPath(), m.GetPerSecondNs(), viewPrediction(m.GetPerSecond()),
		}); err != nil {
			return err
		}
	}
	if len(m.GetGpus()) == 0 {
		return a.refuse(planRefused(req, m), m.GetRejected())
	}
	if a.structured() {
		return nil
	}
	to := fmt.Sprintf("%s (%s)", strings.Join(m.GetGpus(), ","), m.GetModel())
	if req.GetFolder() != "" {
		to = req.GetFolder()
	}
	rows := [][2]string{
		{"Session", m.GetSession()},
		{"From", strings.Join(m.GetFrom(), ",")},
		{"To", to},
		{"Steps", strings.Join(m.GetSteps(), " → ")},
		{"Copies", size.Format(m.GetBytes())},
	}
	if len(m.GetPath()) > 1 {
		rows = append(rows, [2]string{"Path", strings.Join(m.GetPath(), " → ")})
	}
	if p := m.GetPerSecond(); p != nil {
		rows = append(rows, [2]string{"There", "each second of computing takes about " + expected(m.GetPerSecondNs(), p, duration) + " longer" + notMeasured(p)})
	}
	if m.GetPredictedNs() > 0 {
		rows = append(rows, [2]string{"Takes", "about " + expected(m.GetPredictedNs(), m.GetTotal(), duration) + ", downtime " + expected(m.GetPredictedStopNs(), m.GetStop(), duration) + notMeasured(m.GetTotal())})
	}
	for _, r := range m.GetRejected() {
		for _, why := range r.GetReasons() {
			rows = append(rows, [2]string{"Not", r.GetGpu() + ": " + why.GetMessage()})
		}
	}
	return a.pairs(rows)
}
