package cli

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
)

func (a *app) suspendCommand() *cobra.Command {
	req := &gpuctlv1.HostSuspendRequest{}
	var freeze, timeout time.Duration
	var with, plan bool
	cmd := &cobra.Command{
		Use: "suspend [SESSION]", Short: "Free a session's GPU; its application waits",
		Long: `Keep a session's state in host memory, or in a file, and free its GPU. The
application waits until gpuctl resume.

With --to and --with-process the programs of a session of CUDA programs are written to a
new folder, with their state, and end: nothing of them stays in memory. gpuctl resume
--from makes them again, here after a restart, or on a host with the same driver,
programs and files. This needs root and CRIU, and programs that are tied to no
terminal and to no other process, as after: setsid PROGRAM </dev/null >FILE 2>&1`,
		Example: `  gpuctl suspend
  gpuctl suspend 3f2a --file /var/tmp/3f2a.state
  gpuctl suspend 3f2a --to /srv/train --with-process --plan
  gpuctl suspend 3f2a --to /srv/train --with-process`,
		Args: arguments(cobra.MaximumNArgs(1)), ValidArgsFunction: a.completeSession,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := times(cmd, "freeze-timeout", "timeout"); err != nil {
				return err
			}
			if len(args) > 0 {
				req.Session = args[0]
			}
			switch {
			case (req.GetFolder() != "") != with:
				return cmdutil.Usage(errors.New("--to FOLDER and --with-process belong together: the programs end, and are in the folder; --file keeps only the state"))
			case with && req.GetFile() != "":
				return cmdutil.Usage(errors.New("name a file or a folder, not both"))
			case plan && !with:
				return cmdutil.Usage(errors.New("--plan is of a suspend with --to and --with-process"))
			}
			for _, path := range []*string{&req.File, &req.Folder} {
				if err := absolute(path); err != nil {
					return err
				}
			}
			req.FreezeTimeoutMs, req.TimeoutMs = freeze.Milliseconds(), timeout.Milliseconds()
			c, err := a.connect()
			if err != nil {
				return err
			}
			if plan {
				return a.plan(cmd.Context(), c, &gpuctlv1.HostPlanRequest{Session: req.GetSession(), Folder: req.GetFolder()})
			}
			return followTo(cmd.Context(), a, "suspend", "it goes on as it was", "it goes on as it was", c.Suspend, req)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&req.File, "file", "", "`file` for the state (default host memory)")
	flags.StringVar(&req.Folder, "to", "", "new `folder` for the programs with their state; with --with-process")
	flags.BoolVar(&with, "with-process", false, "write the programs, too; they end")
	flags.BoolVar(&plan, "plan", false, "with --to: only say what would happen and what is against it")
	flags.DurationVar(&freeze, "freeze-timeout", 0, "how long to wait for what was launched to end (default 10s)")
	flags.DurationVar(&timeout, "timeout", 0, stillUsage)
	faultFlag(cmd, &req.FailAt)
	_ = cmd.MarkFlagFilename("file")
	_ = cmd.MarkFlagDirname("to")
	return cmd
}

func (a *app) resumeCommand() *cobra.Command {
	var timeout time.Duration
	var plan bool
	req := &gpuctlv1.HostResumeRequest{}
	cmd := &cobra.Command{
		Use: "resume [SESSION]", Short: "Let a suspended session go on",
		Long: `Let a suspended session go on, on the GPU that it had if that is free, else on the
most similar one, or on the one named with --to.

With --from the programs are made again that gpuctl suspend --with-process has written
to a folder, with the numbers that they had. They get GPUs of the same chip. The folder
must be root's alone, and unchanged; it can be resumed once. If that fails, nothing of
the programs is left, and the folder can be resumed again.`,
		Example: `  gpuctl resume
  gpuctl resume 3f2a --to oclgrind
  gpuctl resume --from /srv/train --plan
  gpuctl resume --from /srv/train --to nvidia-1`,
		Args: arguments(cobra.MaximumNArgs(1)), ValidArgsFunction: a.completeSession,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := times(cmd, "timeout"); err != nil {
				return err
			}
			if len(args) > 0 {
				req.Session = args[0]
			}
			switch {
			case req.GetSession() != "" && req.GetFolder() != "":
				return cmdutil.Usage(errors.New("name a session or --from FOLDER, not both"))
			case plan && req.GetFolder() == "":
				return cmdutil.Usage(errors.New("--plan is of a resume with --from"))
			}
			if err := absolute(&req.Folder); err != nil {
				return err
			}
			c, err := a.connect()
			if err != nil {
				return err
			}
			if plan {
				return a.plan(cmd.Context(), c, &gpuctlv1.HostPlanRequest{From: req.GetFolder(), To: req.GetTo()})
			}
			req.TimeoutMs = timeout.Milliseconds()
			if dir := req.GetFolder(); dir != "" {
				return followTo(cmd.Context(), a, "resume", "no GPU can serve it; it is in "+dir+" as before", "it is in "+dir+" as before", c.Resume, req)
			}
			return follow(cmd.Context(), a, "resume", c.Resume, req)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&req.To, "to", "", "`GPU or model` to go on with")
	flags.StringVar(&req.Folder, "from", "", "`folder` that suspend --with-process has made, instead of a session")
	flags.BoolVar(&plan, "plan", false, "with --from: only say what would happen and what is against it")
	flags.DurationVar(&timeout, "timeout", 0, stillUsage)
	faultFlag(cmd, &req.FailAt)
	_ = cmd.RegisterFlagCompletionFunc("to", a.completeTo)
	_ = cmd.MarkFlagDirname("from")
	return cmd
}

// absolute makes a path absolute and clean; an empty one stays empty.
func absolute(path *string) error {
	if *path == "" {
		return nil
	}
	abs, err := filepath.Abs(*path)
	if err != nil {
		return fmt.Errorf("path %s: %w", *path, err)
	}
	*path = abs
	return nil
}
