package cli

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/size"
)

func (a *app) adoptCommand() *cobra.Command {
	req := &gpuctlv1.HostAdoptRequest{}
	cmd := &cobra.Command{
		Use: "adopt PID | --all", Short: "Make sessions of CUDA programs that run already",
		Long: `Make a session of a CUDA program that was not started with gpuctl run: of the
process PID, with all processes of its job that use CUDA, or of every one on this
host. The program is not touched. From then on it can be suspended, resumed and
moved, and its GPUs are nobody else's until it has ended or is suspended.

What can't be adopted is listed with every reason, and the exit status is 3.`,
		Example: `  gpuctl adopt 4711
  gpuctl adopt --all --plan
  gpuctl adopt --all -o json`,
		Args: arguments(cobra.MaximumNArgs(1)), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case len(args) == 0 && !req.GetAll():
				return cmdutil.Usage(errors.New("name a process, or say --all"))
			case len(args) == 1 && req.GetAll():
				return cmdutil.Usage(errors.New("name a process or say --all, not both"))
			case len(args) == 1:
				pid, err := strconv.ParseUint(args[0], 10, 31)
				if err != nil || pid == 0 {
					return cmdutil.Usage(fmt.Errorf("%q is not the number of a process", args[0]))
				}
				req.Pid = uint32(pid)
			}
			c, err := a.connect()
			if err != nil {
				return err
			}
			res, err := c.Adopt(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			return a.printAdopted(req, res.Msg)
		},
	}
	cmd.Flags().BoolVar(&req.All, "all", false, "every CUDA program of this host that is in no session")
	cmd.Flags().BoolVar(&req.Plan, "plan", false, "only say what would be adopted, and what not")
	return cmd
}

// adoptRefusalView is a process that can't be adopted.
type adoptRefusalView struct {
	PID     uint32       `json:"pid"`
	Command string       `json:"command"`
	Reasons []reasonView `json:"reasons"`
}

func (a *app) printAdopted(req *gpuctlv1.HostAdoptRequest, res *gpuctlv1.HostAdoptResponse) error {
	var refused error
	if n := len(res.GetRefused()); n > 0 {
		refused = cmdutil.WithCode(fmt.Errorf("%d of %d can't be adopted; nothing of them was touched", n, n+len(res.GetSessions())), cmdutil.Refused)
	}
	if a.structured() {
		view := struct {
			Sessions []sessionView      `json:"sessions"`
			Refused  []adoptRefusalView `json:"refused"`
		}{[]sessionView{}, []adoptRefusalView{}}
		for _, s := range res.GetSessions() {
			view.Sessions = append(view.Sessions, viewSession(s))
		}
		for _, r := range res.GetRefused() {
			view.Refused = append(view.Refused, adoptRefusalView{r.GetPid(), r.GetCommand(), viewReasons(r.GetReasons())})
		}
		if err := a.print(view); err != nil {
			return err
		}
		return refused
	}
	var rows [][]string
	for _, s := range res.GetSessions() {
		id := s.GetId()
		if id == "" {
			id = "would be one"
		}
		rows = append(rows, []string{
			id, strconv.Itoa(int(s.GetPid())), cut(s.GetCommand(), 32), strconv.Itoa(len(s.GetDriver().GetProcesses())), s.GetTarget().GetGpu(), size.Format(s.GetUsage().GetMemory()),
		})
	}
	if len(rows) > 0 {
		if err := table(a.Out, []string{"SESSION", "PID", "COMMAND", "PROCESSES", "GPU", "MEMORY"}, rows); err != nil {
			return err
		}
	}
	rows = nil
	for _, r := range res.GetRefused() {
		for i, why := range r.GetReasons() {
			pid, command := strconv.Itoa(int(r.GetPid())), cut(r.GetCommand(), 32)
			if i > 0 {
				pid, command = " ", " "
			}
			rows = append(rows, []string{pid, command, why.GetMessage()})
		}
	}
	if len(rows) > 0 {
		if err := table(a.Err, []string{"PID", "COMMAND", "REASON"}, rows); err != nil {
			return err
		}
	}
	if req.GetAll() && len(res.GetSessions())+len(res.GetRefused()) == 0 {
		fmt.Fprintln(a.Err, "no CUDA program runs on this host")
	}
	return refused
}

func viewReasons(all []*gpuctlv1.Reason) []reasonView {
	out := []reasonView{}
	for _, r := range all {
		out = append(out, reasonView{r.GetCode(), r.GetMessage()})
	}
	return out
}

// driverRows describes what a session of CUDA processes has.
func driverRows(s *gpuctlv1.Session) [][2]string {
	d := s.GetDriver()
	if d == nil {
		return nil
	}
	var rows [][2]string
	for _, p := range d.GetProcesses() {
		text := fmt.Sprintf("%d (%s)", p.GetPid(), p.GetCommand())
		if p.GetState() != "" {
			text += ", " + p.GetState()
		}
		rows = append(rows, [2]string{"Uses CUDA", text + usedBy(p.GetGpus())})
	}
	for _, g := range d.GetGpus() {
		rows = append(rows, [2]string{"On", strings.TrimSpace(g.GetUuid()+" "+g.GetPciAddress()) + usedBy([]*gpuctlv1.DriverGPU{g})})
	}
	if d.GetHostMemory() > 0 {
		rows = append(rows, [2]string{"Host memory", size.Format(d.GetHostMemory()) + " for its state"})
	}
	if d.GetDriverVersion() != "" {
		rows = append(rows, [2]string{"Driver", d.GetDriverVersion()})
	}
	return rows
}

func usedBy(gpus []*gpuctlv1.DriverGPU) string {
	var used uint64
	for _, g := range gpus {
		used += g.GetUsed()
	}
	if used == 0 {
		return ""
	}
	return ", " + size.Format(used) + " on the GPU"
}
