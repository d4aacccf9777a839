package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/cli/view"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/size"
)

// connectDevices does the same as connect, for the cards and VMs.
func (a *app) connectDevices() (gpuctlv1connect.DeviceServiceClient, error) {
	h, url, err := a.dialer()
	if err != nil {
		return nil, err
	}
	return gpuctlv1connect.NewDeviceServiceClient(h, url, a.patience()), nil
}

// onFlag adds the flag --on, which names the host of a VM or card.
func onFlag(cmd *cobra.Command, host *string, usage string) {
	cmd.Flags().StringVar(host, "on", "", usage)
}

func (a *app) cardsCommand() *cobra.Command {
	req := &gpuctlv1.ListCardsRequest{}
	cmd := &cobra.Command{
		Use: "cards", Short: "List the PCI cards of a host, and which VM has which",
		Long: `List the display and accelerator cards and the mediated GPUs of a host with the phase
of their life:
free, reserved, cutting, taking, ready, attaching, attached, detaching, resetting,
returning or quarantined.`,
		Example: `  gpuctl cards
  gpuctl cards --on h2 -o wide`,
		Args: arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.connectDevices()
			if err != nil {
				return err
			}
			res, err := c.ListCards(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			return a.printCards(res.Msg)
		},
	}
	onFlag(cmd, &req.Host, "`host` of the cards (default the one that is asked)")
	return cmd
}

func phaseName(p gpuctlv1.CardPhase) string { return view.Word(p) }

func (a *app) printCards(res *gpuctlv1.ListCardsResponse) error {
	if a.structured() {
		return a.print(view.Of(res))
	}
	if len(res.GetCards()) == 0 {
		return a.sayNone("display or accelerator cards on host " + clean(res.GetHost()))
	}
	heading := []string{"GPU", "MODEL", "MEMORY", "DRIVER", "PHASE", "VM"}
	if a.wide() {
		heading = append(heading, "FUNCTIONS", "GROUP", "DOM0", "RESET", "CLAIM", "PROFILES")
	}
	var rows [][]string
	for _, c := range res.GetCards() {
		driver := ""
		var functions []string
		for _, f := range c.GetFunctions() {
			if f.GetAddress() == c.GetAddress() {
				driver = f.GetDriver()
			}
			functions = append(functions, f.GetAddress())
		}
		phase := phaseName(c.GetPhase())
		if m := c.GetMessage(); m != "" {
			phase += " (" + m + ")"
		}
		row := []string{c.GetGpu(), a.cut(c.GetModel(), 40), bytesOr(c.GetMemory(), ""), driver, phase, c.GetMachineName()}
		if a.wide() {
			row = append(row, strings.Join(functions, ","), c.GetGroup(), c.GetDom0Access(), c.GetResetMethod(), c.GetClaim(), sliceProfiles(c))
		}
		rows = append(rows, row)
		for _, s := range c.GetSlices() {
			rows = append(rows, a.sliceRow(c, s, len(heading)))
		}
	}
	return table(a.Out, heading, rows)
}

// sliceProfiles returns the profiles of a card's slices, with how many more of each are
// possible.
func sliceProfiles(c *gpuctlv1.Card) string {
	var out []string
	for _, p := range c.GetProfiles() {
		out = append(out, fmt.Sprintf("%s×%d", p.GetName(), p.GetFree()))
	}
	return strings.Join(out, ",")
}

// sliceRow returns the row of a slice, which follows its card's.
func (a *app) sliceRow(c *gpuctlv1.Card, s *gpuctlv1.Slice, width int) []string {
	var memory uint64
	for _, p := range c.GetProfiles() {
		if p.GetName() == s.GetProfile() {
			memory = p.GetMemory()
		}
	}
	phase := phaseName(s.GetPhase())
	if m := s.GetMessage(); m != "" {
		phase += " (" + m + ")"
	}
	row := []string{"  " + s.GetProfile(), s.GetId(), bytesOr(memory, ""), s.GetKind(), phase, s.GetMachineName()}
	if a.wide() {
		row = append(row, s.GetFunction(), "", "", "", s.GetClaim())
	}
	return append(row, make([]string, width-len(row))...)
}

func (a *app) machinesCommand() *cobra.Command {
	req := &gpuctlv1.ListMachinesRequest{}
	cmd := &cobra.Command{
		Use: "vms", Aliases: []string{"machines"}, Short: "List the VMs of all hosts and the GPUs that they have",
		Example: `  gpuctl vms
  gpuctl vms --on h2 -o json`,
		Args: arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if req.GetHost() == "" {
				req.Host = "*"
			}
			c, err := a.connectDevices()
			if err != nil {
				return err
			}
			res, err := c.ListMachines(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			return a.printMachines(res.Msg)
		},
	}
	onFlag(cmd, &req.Host, "only those of this `host`")
	return cmd
}

func (a *app) printMachines(res *gpuctlv1.ListMachinesResponse) error {
	if a.structured() {
		return a.print(view.Of(res))
	}
	for _, m := range res.GetMissing() {
		fmt.Fprintln(a.Err, "no answer from host", clean(m))
	}
	if len(res.GetMachines()) == 0 {
		return a.sayNone("VMs")
	}
	heading := []string{"VM", "HOST", "STATE", "TYPE", "CPUS", "MEMORY", "GPUS"}
	if a.wide() {
		heading = append(heading, "AGENT", "UUID")
	}
	var rows [][]string
	for _, m := range res.GetMachines() {
		row := []string{m.GetName(), m.GetHost(), m.GetState(), m.GetType(), fmt.Sprint(m.GetCpus()), size.Format(m.GetMemory()), strings.Join(gpusOf(m), ",")}
		if a.wide() {
			row = append(row, m.GetAgent(), m.GetUuid())
		}
		rows = append(rows, row)
	}
	return table(a.Out, heading, rows)
}

// gpusOf returns what a VM has: GPUs of its host, and the one that a host lends to it.
func gpusOf(m *gpuctlv1.Machine) []string {
	out := slices.Clone(m.GetGpus())
	if r := m.GetRemote(); r != nil {
		text := r.GetGpu() + " (remote"
		if r.GetMemory() > 0 {
			text += " " + size.Format(r.GetMemory())
		}
		out = append(out, text+")")
	}
	for _, g := range m.GetService().GetGpus() {
		out = append(out, g+" (serves)")
	}
	return out
}

func (a *app) attachCommand() *cobra.Command {
	req := &gpuctlv1.AttachRequest{}
	var memory string
	var remote, serves bool
	cmd := &cobra.Command{
		Use: "attach VM [GPU]", Short: "Give a GPU to a VM, also while it runs",
		Long: `Give a card with all of its functions to a VM: a claim is bound in the cluster, the
card is taken from its driver, reset and read back, and attached. It is done when
the hypervisor confirms it. On a failure every step is undone. Without GPU the
cluster chooses among the cards of the VM's host.

With --profile the VM gets a slice of a card: a virtual function, a mediated device
or an NVIDIA vGPU is made for it, and deleted when it comes back. gpuctl cards -o wide
lists the profiles. A card of which slices are out is given to nobody as a whole.

A part of a mediated GPU is given to an HVM guest that does not run, for all of its
starts until gpuctl detach. --weight is its share of the GPU's time beside the other
VMs', --mode how the host keeps its page tables.

With --remote a GPU of any host is lent to the VM, whose sessions compute on it over the
VM's network: without GPU the best one of the cluster, with --min-memory the lowest
that has so much left, which others share. New sessions begin there as long as the VM
has no card. It lasts until gpuctl detach or the VM's end, with --persistent until its
end or that of its definition, and goes with the VM to other hosts.

With --serves the cards of the VM, with GPU this one first, are for sessions of other VMs
and hosts: the VM is a service VM, in whose gpuguest.yaml lend must be set. The inventory
shows what it lends as GPUs of its host. It lasts until gpuctl detach --serves.`,
		Example: `  gpuctl attach web1 0000:65:00.0
  gpuctl attach web1 h1/nvidia-0 --persistent
  gpuctl attach web1 --where 'model == "A10"' --min-memory 16GiB
  gpuctl attach web1 nvidia-0 --profile A40-8Q
  gpuctl attach web1 soft0 --profile 1of4 --weight 2
  gpuctl attach web1 --remote --min-memory 8GiB
  gpuctl attach web1 h2/nvidia-0 --remote --plan
  gpuctl attach gpuvm 0000:65:00.0 --serves
  gpuctl attach web1 nvidia-0 --plan`,
		Args: arguments(cobra.RangeArgs(1, 2)), ValidArgsFunction: a.completeMachineAndGPU,
		RunE: func(cmd *cobra.Command, args []string) error {
			req.Machine = args[0]
			if len(args) > 1 {
				req.Gpu = args[1]
			}
			if memory != "" {
				var err error
				if req.MinMemory, err = size.Parse(memory); err != nil {
					return cmdutil.Usage(fmt.Errorf("--min-memory: %w", err))
				}
			}
			c, err := a.connectDevices()
			if err != nil {
				return err
			}
			switch {
			case serves:
				if err := without(cmd, "a service VM", "remote", "profile", "weight", "mode", "stored", "where", "min-memory"); err != nil {
					return err
				}
				return a.serve(cmd.Context(), c, req)
			case remote:
				if err := without(cmd, "a remote GPU", "profile", "weight", "mode", "stored", "accept-care"); err != nil {
					return err
				}
				return a.attachRemote(cmd.Context(), c, req)
			}
			return followDevice(cmd.Context(), a, c.Attach, req, "VM %s has %s", true)
		},
	}
	f := cmd.Flags()
	f.StringVar(&req.Expr, "where", "", "`condition` on the GPU, in CEL")
	f.StringVar(&memory, "min-memory", "", "the least memory that will do (`size`)")
	f.StringVar(&req.Profile, "profile", "", "a slice of this `profile` instead of the whole card")
	_ = cmd.RegisterFlagCompletionFunc("profile", a.completeProfile) // fails only if the flag does not exist
	f.Uint32Var(&req.Weight, "weight", 0, "share of a mediated GPU's time, in proportion to other VMs' (default 1)")
	f.StringVar(&req.Mode, "mode", "", "how a mediated GPU keeps the VM's page tables: lazy (the default), eager or para")
	f.BoolVar(&remote, "remote", false, "lend it a GPU of any host, over the VM's network")
	f.BoolVar(&serves, "serves", false, "have its cards serve sessions of other VMs and hosts")
	f.BoolVar(&req.Persistent, "persistent", false, "also in the VM's stored definition, for its next start")
	f.BoolVar(&req.StoredOnly, "stored", false, "only in the VM's stored definition")
	f.BoolVar(&req.AcceptCare, "accept-care", false, "although the isolation report says care")
	f.BoolVar(&req.Plan, "plan", false, "only say what would be done, and what is against it")
	onFlag(cmd, &req.Host, "`host` of the VM (default where it is found)")
	return cmd
}

// without returns an error if a flag is set that makes no sense for something.
func without(cmd *cobra.Command, what string, flags ...string) error {
	for _, name := range flags {
		if cmd.Flags().Changed(name) {
			return cmdutil.Usage(fmt.Errorf("--%s is not for %s", name, what))
		}
	}
	return nil
}

// serve has a VM serve others. A card that it is to get first is named by the caller.
func (a *app) serve(ctx context.Context, c gpuctlv1connect.DeviceServiceClient, r *gpuctlv1.AttachRequest) error {
	if r.GetGpu() == "" && (r.GetPersistent() || r.GetAcceptCare()) {
		return cmdutil.Usage(errors.New("--persistent and --accept-care are about a card: name it"))
	}
	return followDevice(ctx, a, c.Serve, &gpuctlv1.ServeRequest{
		Host: r.GetHost(), Machine: r.GetMachine(), Gpu: r.GetGpu(), Persistent: r.GetPersistent(), AcceptCare: r.GetAcceptCare(), Plan: r.GetPlan(),
	}, "VM %s serves other VMs and hosts (%s)", true)
}

// attachRemote lends a VM a GPU of a host.
func (a *app) attachRemote(ctx context.Context, c gpuctlv1connect.DeviceServiceClient, r *gpuctlv1.AttachRequest) error {
	return followDevice(ctx, a, c.AttachRemote, &gpuctlv1.AttachRemoteRequest{
		Host: r.GetHost(), Machine: r.GetMachine(), Gpu: r.GetGpu(), Expr: r.GetExpr(), MinMemory: r.GetMinMemory(), Persistent: r.GetPersistent(), Plan: r.GetPlan(),
	}, "VM %s may use %s over the network", true)
}

// hasRemote reports whether a VM has no card but a remote GPU, or that one is named.
func (a *app) hasRemote(ctx context.Context, c gpuctlv1connect.DeviceServiceClient, r *gpuctlv1.DetachRequest) bool {
	res, err := c.ListMachines(ctx, connect.NewRequest(&gpuctlv1.ListMachinesRequest{Host: "*"}))
	if err != nil {
		return false // the next call says why
	}
	for _, m := range res.Msg.GetMachines() {
		if m.GetRemote() == nil || m.GetName() != r.GetMachine() && m.GetUuid() != r.GetMachine() || r.GetHost() != "" && r.GetHost() != m.GetHost() {
			continue
		}
		return r.GetGpu() == m.GetRemote().GetGpu() || r.GetGpu() == "" && len(m.GetGpus()) == 0
	}
	return false
}

// detachRemote takes a remote GPU back from a VM.
func (a *app) detachRemote(ctx context.Context, c gpuctlv1connect.DeviceServiceClient, r *gpuctlv1.DetachRequest) error {
	return followDevice(ctx, a, c.DetachRemote, &gpuctlv1.DetachRemoteRequest{
		Host: r.GetHost(), Machine: r.GetMachine(), Gpu: r.GetGpu(), Unconfirmed: r.GetUnconfirmed(), Plan: r.GetPlan(),
	}, "VM %s has given %s back", true)
}

// endServe ends that a VM serves others.
func (a *app) endServe(ctx context.Context, c gpuctlv1connect.DeviceServiceClient, r *gpuctlv1.DetachRequest) error {
	return followDevice(ctx, a, c.EndServe, &gpuctlv1.EndServeRequest{
		Host: r.GetHost(), Machine: r.GetMachine(), Unconfirmed: r.GetUnconfirmed(), Plan: r.GetPlan(),
	}, "VM %s serves nobody any more (%s)", true)
}

func (a *app) detachCommand() *cobra.Command {
	req := &gpuctlv1.DetachRequest{}
	var remote, serves bool
	cmd := &cobra.Command{
		Use: "detach VM [GPU]", Short: "Take a GPU back from a VM",
		Long: `Take a card back from a VM: its gpuguest lets go of it and confirms that it can be
detached, it is detached, reset, read back and returned to its driver. A card that
no reset brings back is quarantined. A detach that the VM does not answer cannot be
undone on Xen; so nothing is begun before the VM has confirmed. A slice is named by
its card, or by its id or function where the VM has several of one card.

A remote GPU is taken back with --remote, or where the VM has no card, or by its name.
Sessions that compute on it come home to the VM's own card first. If it has none, it is
refused; with --unconfirmed they are lost.

With --serves the VM is no service VM any more, and keeps its cards. It is refused while
others have parts of its GPUs; with --unconfirmed what computes there is lost. No card of
it is detached while others have parts of them.`,
		Example: `  gpuctl detach web1
  gpuctl detach web1 nvidia-0 --persistent
  gpuctl detach web1 --remote
  gpuctl detach gpuvm --serves
  gpuctl detach web1 --unconfirmed --plan`,
		Args: arguments(cobra.RangeArgs(1, 2)), ValidArgsFunction: a.completeMachineAndGPU,
		RunE: func(cmd *cobra.Command, args []string) error {
			req.Machine = args[0]
			if len(args) > 1 {
				req.Gpu = args[1]
			}
			c, err := a.connectDevices()
			if err != nil {
				return err
			}
			if serves {
				if err := without(cmd, "a service VM", "remote", "persistent"); err != nil {
					return err
				}
				if req.GetGpu() != "" {
					return cmdutil.Usage(errors.New("--serves is about all cards of the VM: name none"))
				}
				return a.endServe(cmd.Context(), c, req)
			}
			if remote {
				if err := without(cmd, "a remote GPU", "persistent"); err != nil {
					return err
				}
			}
			if remote || !req.GetPersistent() && a.hasRemote(cmd.Context(), c, req) {
				return a.detachRemote(cmd.Context(), c, req)
			}
			return followDevice(cmd.Context(), a, c.Detach, req, "VM %s has given %s back", true)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&remote, "remote", false, "the GPU that a host lends to the VM")
	f.BoolVar(&serves, "serves", false, "end that the VM's cards serve others")
	f.BoolVar(&req.Persistent, "persistent", false, "also from the VM's stored definition")
	f.BoolVar(&req.Unconfirmed, "unconfirmed", false, "although no gpuguest says that the VM has let go of it")
	f.BoolVar(&req.Plan, "plan", false, "only say what would be done, and what is against it")
	onFlag(cmd, &req.Host, "`host` of the VM (default where it is found)")
	return cmd
}

func (a *app) resetCommand() *cobra.Command {
	req := &gpuctlv1.ResetRequest{}
	cmd := &cobra.Command{
		Use: "reset GPU", Short: "Reset a card that no VM has, and read it back",
		Long: `Reset a free or quarantined card by the ways that it has, the gentlest first, and
read its configuration space back after each. A card that comes back leaves
quarantine.`,
		Example: `  gpuctl reset 0000:65:00.0
  gpuctl reset h2/nvidia-0 --plan`,
		Args: arguments(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			req.Gpu = args[0]
			c, err := a.connectDevices()
			if err != nil {
				return err
			}
			return followDevice(cmd.Context(), a, c.Reset, req, "%s is reset", false)
		},
	}
	cmd.Flags().BoolVar(&req.Plan, "plan", false, "only say what would be done, and what is against it")
	onFlag(cmd, &req.Host, "`host` of the card (default the one that is asked)")
	return cmd
}

func (a *app) resizeCommand() *cobra.Command {
	req := &gpuctlv1.ResizeRequest{}
	cmd := &cobra.Command{
		Use: "resize GPU --functions N", Short: "Set the number of a card's virtual functions",
		Long: `Set how many SR-IOV virtual functions a card has. They stay until they are resized
again or the host restarts, and VMs may have them in their stored definitions. All
of them go when the number changes: none may be out. gpuctl attach --profile makes
functions where there are none, and takes them away with the last slice.`,
		Example: `  gpuctl resize 0000:65:00.0 --functions 4
  gpuctl resize h2/0000:65:00.0 --functions 0 --plan`,
		Args: arguments(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			req.Gpu = args[0]
			c, err := a.connectDevices()
			if err != nil {
				return err
			}
			return followDevice(cmd.Context(), a, c.Resize, req, "%s is resized", false)
		},
	}
	cmd.Flags().Uint32Var(&req.Functions, "functions", 0, "how many virtual functions (`number`)")
	_ = cmd.MarkFlagRequired("functions") // fails only if the flag does not exist
	cmd.Flags().BoolVar(&req.Plan, "plan", false, "only say what would be done, and what is against it")
	onFlag(cmd, &req.Host, "`host` of the card (default the one that is asked)")
	return cmd
}

// completeProfile completes profiles of the named card, or of all cards of the host.
func (a *app) completeProfile(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	var out []string
	if c, err := a.connectDevices(); err == nil {
		if res, err := c.ListCards(cmd.Context(), connect.NewRequest(&gpuctlv1.ListCardsRequest{})); err == nil {
			for _, k := range res.Msg.GetCards() {
				if len(args) > 1 && args[1] != k.GetGpu() && args[1] != k.GetAddress() {
					continue
				}
				for _, p := range k.GetProfiles() {
					if !slices.Contains(out, p.GetName()) {
						out = append(out, p.GetName())
					}
				}
			}
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

// followDevice begins a change, and shows it until it ends. done is the format of the final
// message, with the VM and the GPU, or only the GPU.
func followDevice[Req any](ctx context.Context, a *app, begin func(context.Context, *connect.Request[Req]) (*connect.ServerStreamForClient[gpuctlv1.DeviceUpdate], error), req *Req, done string, machine bool) error {
	ctx, stop := interruptible(ctx)
	defer stop()
	var last *gpuctlv1.DeviceUpdate
	stream, err := begin(ctx, connect.NewRequest(req))
	if err == nil {
		defer stream.Close()
		last, err = a.showDevice(stream)
	}
	switch {
	case last == nil && ctx.Err() != nil:
		return errors.New("interrupted; what has begun goes on, and gpuctl cards and gpuctl vms say how far it is")
	case err != nil:
		return err
	case last == nil:
		return errors.New("hostd went away; when it is back, gpuctl cards says where the card is")
	case len(last.GetPlan()) > 0:
		return a.printPlan(last.GetPlan(), last.GetReasons())
	case a.structured():
		return nil
	case machine:
		return a.say(clean(fmt.Sprintf(done, last.GetMachine(), last.GetGpu())))
	}
	return a.say(clean(fmt.Sprintf(done, last.GetGpu())))
}

// showDevice shows a change until it ends, and returns its last message; nil: the stream has
// ended before.
func (a *app) showDevice(stream *connect.ServerStreamForClient[gpuctlv1.DeviceUpdate]) (*gpuctlv1.DeviceUpdate, error) {
	show := a.newProgress()
	defer show.end()
	for stream.Receive() {
		u := stream.Msg()
		if a.structured() {
			if err := a.printLine(view.Of(u)); err != nil {
				return nil, err
			}
		}
		if u.GetDone() {
			return u, nil
		}
		if u.GetTookNs() == 0 {
			show.update(&gpuctlv1.Progress{Step: u.GetStep(), StepIndex: max(u.GetStepIndex(), 1) - 1, Steps: u.GetSteps(), Message: u.GetMessage()})
		}
	}
	return nil, stream.Err()
}

func (a *app) printPlan(plan []*gpuctlv1.PlannedStep, reasons []*gpuctlv1.Reason) error {
	refused := func() error {
		if len(reasons) == 0 {
			return nil
		}
		return cmdutil.WithCode(errors.New("it would be refused"), cmdutil.Refused)
	}
	if a.structured() {
		return refused() // the plan is printed already
	}
	var rows [][]string
	for _, s := range plan {
		rows = append(rows, []string{s.GetName(), s.GetWhat(), s.GetUndo()})
	}
	if err := table(a.Out, []string{"STEP", "WHAT", "UNDO"}, rows); err != nil {
		return err
	}
	for _, r := range reasons {
		if err := a.say("against it: " + clean(r.GetMessage())); err != nil {
			return err
		}
	}
	return refused()
}

// printIsolation prints whether a card may be given to a VM.
func (a *app) printIsolation(ctx context.Context, gpu string) error {
	c, err := a.connectDevices()
	if err != nil {
		return err
	}
	res, err := c.Isolation(ctx, connect.NewRequest(&gpuctlv1.IsolationRequest{Gpu: gpu}))
	if err != nil {
		return err
	}
	m := res.Msg
	if a.structured() {
		return a.print(view.Of(m))
	}
	if err := a.say(clean(fmt.Sprintf("%s: %s (%s; known from %s)", m.GetGpu(), m.GetSummary(), m.GetVerdict(), m.GetSource()))); err != nil {
		return err
	}
	if len(m.GetTogether()) > 0 {
		if err := a.say("to be given away together: " + strings.Join(m.GetTogether(), ", ")); err != nil {
			return err
		}
	}
	for _, f := range m.GetFindings() {
		line := fmt.Sprintf("  %-7s %s", f.GetSeverity(), f.GetMessage())
		if f.GetAdvice() != "" {
			line += ": " + f.GetAdvice()
		}
		if err := a.say(clean(line)); err != nil {
			return err
		}
	}
	return nil
}

// completeMachineAndGPU completes a VM's name, and then a card's.
func (a *app) completeMachineAndGPU(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	c, err := a.connectDevices()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []string
	switch len(args) {
	case 0:
		if res, err := c.ListMachines(cmd.Context(), connect.NewRequest(&gpuctlv1.ListMachinesRequest{Host: "*"})); err == nil {
			for _, m := range res.Msg.GetMachines() {
				out = append(out, m.GetName())
			}
		}
	case 1:
		if res, err := c.ListCards(cmd.Context(), connect.NewRequest(&gpuctlv1.ListCardsRequest{})); err == nil {
			for _, k := range res.Msg.GetCards() {
				out = append(out, k.GetGpu())
			}
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}
