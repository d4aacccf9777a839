package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/budget"
	"github.com/gpuctl/gpuctl/guest/confine"
	"github.com/gpuctl/gpuctl/guest/opencl/carrier"
	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/executor"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/session"
	"github.com/gpuctl/gpuctl/internal/compress"
	"github.com/gpuctl/gpuctl/internal/throttle"
)

// orphanGrace is how long an executor waits, after its application has ended, until it
// ends.
const orphanGrace = 10 * time.Second

const maxConfig = 1 << 20 // bytes

// Limits of what an executor logs, because applications can cause messages.
const (
	logBurst = 50
	logEvery = time.Second
)

func executorCommand(log *slog.Logger) *cobra.Command {
	var (
		config string
		ahead  ahead
	)
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
			// The log, or what a runtime writes to, may be a pipe that has no reader any
			// more.
			signal.Ignore(syscall.SIGPIPE)
			if err := ahead.load(); err != nil {
				return err
			}
			return runExecutor(cmd.Context(), in, throttle.Logger(log, logBurst, logEvery))
		},
	}
	cmd.Flags().StringVar(&config, "config", "-", "configuration, - for standard input")
	ahead.flags(cmd)
	return cmd
}

// ahead is the work before the input is read. First, the process gives up rights. Then it
// loads a library, while the device may not be there yet.
type ahead struct {
	library string
	fd      uint
	tasks   uint64
}

func (a *ahead) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&a.library, "load", "", "library to load before the input is read")
	cmd.Flags().UintVar(&a.fd, "loaded-fd", 0, "descriptor to tell of that")
	cmd.Flags().Uint64Var(&a.tasks, session.TasksFlag, 0, "most tasks of this process's user, which is its own")
	for _, f := range []string{"load", "loaded-fd", session.TasksFlag} {
		if err := cmd.Flags().MarkHidden(f); err != nil {
			panic(err) // no such flag
		}
	}
}

func (a *ahead) load() error {
	if err := confine.Settle(a.tasks); err != nil {
		return err
	}
	if a.library == "" {
		return nil
	}
	if err := cl.Load(a.library); err != nil {
		return err
	}
	tell := os.NewFile(uintptr(a.fd), "loaded")
	defer tell.Close()
	if _, err := tell.Write([]byte{1}); err != nil {
		return fmt.Errorf("gpuguest has gone: %w", err)
	}
	return nil
}

func runExecutor(ctx context.Context, in io.Reader, log *slog.Logger) error {
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
		Dir: c.Dir, Generation: c.Generation, Socket: c.Socket, ImportSocket: c.ImportSocket, FileSocket: c.FileSocket, TurnSocket: c.TurnSocket,
		Runtime: &gpuctlv1.Runtime{}, Device: &gpuctlv1.VirtualDevice{},
		CacheKey: c.CacheKey, Logger: log.With("generation", c.Generation),
	}
	if err := protojson.Unmarshal(c.Runtime, cfg.Runtime); err != nil {
		return fmt.Errorf("runtime: %w", err)
	}
	if c.Dir != "" { // options of builds name files there
		if err := os.Chdir(c.Dir); err != nil {
			return fmt.Errorf("the session's folder: %w", err)
		}
	}
	if len(c.Device) > 0 {
		if err := protojson.Unmarshal(c.Device, cfg.Device); err != nil {
			return fmt.Errorf("virtual device: %w", err)
		}
	}
	if c.BudgetFD != 0 {
		unix.CloseOnExec(c.BudgetFD) // a runtime's compiler has no use for it
		var err error
		if cfg.Budget, err = budget.Use(os.NewFile(uintptr(c.BudgetFD), "budget"), c.BudgetLine, cfg.Device.GetGlobalMemory()); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if c.AppPID != 0 {
		go func() {
			// Without a gpuguest, nobody else would end this process.
			if session.WaitProcess(ctx, c.AppPID, c.AppStart) == nil {
				time.Sleep(orphanGrace)
				cancel()
			}
		}()
	}
	switch {
	case c.Far != nil:
		cfg.Far = &executor.Far{
			Acceptor: remote.Acceptor{
				Plain: c.Far.Plain, Own: remote.Identity{Certificate: c.Far.Certificate, Key: c.Far.Key}, Peer: c.Far.Peer,
				Compress: remote.Compress{Always: c.Far.CompressAlways, Counts: &compress.Counts{}},
			},
			Outage: c.Far.Outage,
		}
	case cfg.Runtime.Remote != nil:
		return carrier.Main(ctx, carrier.Config{
			Generation: c.Generation, Socket: c.Socket, ImportSocket: c.ImportSocket, FileSocket: c.FileSocket, Relay: c.Relay, RDMA: c.RDMA,
			Remote: cfg.Runtime.Remote, Logger: cfg.Logger,
		})
	}
	return executor.Main(ctx, cfg)
}
