package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/user"

	"github.com/spf13/cobra"

	"github.com/gpuctl/gpuctl/guest/session"
)

func serveCommand(log *slog.Logger) *cobra.Command {
	var api, apps, dir, executorUser, config, root string
	var vm bool
	cmd := &cobra.Command{
		Use:   "serve --socket PATH --app-socket PATH --rundir DIR | --vm [--config FILE]",
		Short: "Serve applications and the host",
		Long: `Serve applications and the host until told to end. Running applications and
their executors go on without it; the next gpuguest with the same run folder
takes them over.

With --vm it is the agent of a VM: it serves all applications of the VM with the
GPU that the VM has been given, and the host over the VM's channel.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if vm {
				o, err := loadVM(config, cmd.Flags().Changed("config"))
				if err != nil {
					return err
				}
				return serveVM(cmd.Context(), o, root, log)
			}
			launcher := &session.ExecLauncher{}
			if executorUser != "" {
				u, err := lookupUser(executorUser)
				if err != nil {
					return err
				}
				launcher.User = u
			}
			return session.Serve(cmd.Context(), session.Config{
				Dir:      dir,
				Launcher: launcher,
				Logger:   log,
				Faults:   os.Getenv("GPUCTL_FAULTS") == "1",
			}, api, apps)
		},
	}
	f := cmd.Flags()
	f.StringVar(&api, "socket", "", "unix socket to serve the host on")
	f.StringVar(&apps, "app-socket", "", "unix socket to serve applications on")
	f.StringVar(&dir, "rundir", "", "folder for sessions, made if missing")
	f.StringVar(&executorUser, "executor-user", "", "user, by name or number, whom executors run as (needs root)")
	f.BoolVar(&vm, "vm", false, "be the agent of a VM")
	f.StringVar(&config, "config", vmConfig, "with --vm: its configuration")
	f.StringVar(&root, "root", "/", "with --vm: the folder below which the machine's files are")
	if err := f.MarkHidden("root"); err != nil {
		panic(err) // no such flag
	}
	needed := []string{"socket", "app-socket", "rundir"}
	cmd.MarkFlagsRequiredTogether(needed...)
	for _, name := range needed {
		cmd.MarkFlagsOneRequired(name, "vm")
		cmd.MarkFlagsMutuallyExclusive(name, "vm")
	}
	return cmd
}

func lookupUser(name string) (*user.User, error) {
	if os.Getuid() != 0 {
		return nil, errors.New("--executor-user needs root")
	}
	u, err := user.Lookup(name)
	if err == nil {
		return u, nil
	}
	if byID, iderr := user.LookupId(name); iderr == nil {
		return byID, nil
	}
	return nil, fmt.Errorf("--executor-user: %w", err)
}
