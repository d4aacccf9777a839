package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/executor"
	"github.com/gpuctl/gpuctl/guest/session"
)

// orphanGrace is how long an executor waits to be ended after its application.
const orphanGrace = 10 * time.Second

const maxConfig = 1 << 20 // bytes

func executorCommand(log *slog.Logger) *cobra.Command {
	var config string
	cmd := &cobra.Command{
		Use:    "executor --config JSON",
		Short:  "Run one session's calls (started by serve)",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var in io.Reader = strings.NewReader(config)
			if config == "-" {
				in = cmd.InOrStdin()
			}
			return runExecutor(cmd.Context(), in, log)
		},
	}
	cmd.Flags().StringVar(&config, "config", "-", "configuration, - for standard input")
	return cmd
}

func runExecutor(ctx context.Context, in io.Reader, log *slog.Logger) error {
	// The application's output may be a pipe that nobody reads any more.
	signal.Ignore(syscall.SIGPIPE)
	var c session.ExecutorConfig
	b, err := io.ReadAll(io.LimitReader(in, maxConfig))
	if err != nil {
		return fmt.Errorf("configuration: %w", err)
	}
	if len(b) == 0 {
		return errors.New("no configuration: gpuguest has gone")
	}
	if err := json.Unmarshal(b, &c); err != nil {
		return fmt.Errorf("configuration: %w", err)
	}
	cfg := executor.Config{
		Dir: c.Dir, Generation: c.Generation, Socket: c.Socket, ImportSocket: c.ImportSocket,
		Runtime: &gpuctlv1.Runtime{}, Device: &gpuctlv1.VirtualDevice{},
		Logger: log.With("generation", c.Generation),
	}
	if err := protojson.Unmarshal(c.Runtime, cfg.Runtime); err != nil {
		return fmt.Errorf("runtime: %w", err)
	}
	if len(c.Device) > 0 {
		if err := protojson.Unmarshal(c.Device, cfg.Device); err != nil {
			return fmt.Errorf("virtual device: %w", err)
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if c.AppPID != 0 {
		go func() {
			// With no gpuguest alive nobody else would end this process.
			if session.WaitProcess(ctx, c.AppPID, c.AppStart) == nil {
				time.Sleep(orphanGrace)
				cancel()
			}
		}()
	}
	return executor.Main(ctx, cfg)
}
