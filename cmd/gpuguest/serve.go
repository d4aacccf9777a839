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
	var api, apps, dir, executorUser string
	cmd := &cobra.Command{
		Use:   "serve --socket PATH --app-socket PATH --rundir DIR",
		Short: "Serve applications and the host",
		Long: `Serve applications and the host until told to end. Running applications and
their executors go on without it; the next gpuguest with the same run folder
takes them over.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
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
	for _, name := range []string{"socket", "app-socket", "rundir"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err) // no such flag
		}
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
