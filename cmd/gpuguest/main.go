package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "gpuguest:", err)
		os.Exit(1)
	}
}

// run runs the program. It uses only its parameters, so tests can call it.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	root := &cobra.Command{
		Use:           "gpuguest",
		Short:         "Give applications GPUs that can be swapped under them",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	level := new(slog.LevelVar)
	verbose := root.PersistentFlags().Bool("verbose", false, "log details")
	root.PersistentPreRun = func(*cobra.Command, []string) {
		if *verbose {
			level.Set(slog.LevelDebug)
		}
	}
	log := slog.New(slog.NewTextHandler(boundLog(stderr, maxLog), &slog.HandlerOptions{Level: level}))
	root.AddCommand(serveCommand(log), executorCommand(log), probeCommand())
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	return root.ExecuteContext(ctx)
}
