// Package command is hostd's command line.
package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gpuctl/gpuctl/hostd"
	"github.com/gpuctl/gpuctl/hostd/config"
	"github.com/gpuctl/gpuctl/hostd/member"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/rundir"
	"github.com/gpuctl/gpuctl/passthrough/catalog"
)

type flags struct {
	dev      bool
	config   string
	dir      string
	data     string
	socket   string
	private  bool
	gpuguest string
	level    string
	json     bool
}

// Run runs hostd with command-line arguments. cmdutil.Code returns the exit status for
// its error.
func Run(ctx context.Context, args []string, stdio cmdutil.Stdio) error {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	root := Command(stdio)
	root.SetArgs(args)
	root.SetIn(stdio.In)
	root.SetOut(stdio.Out)
	root.SetErr(stdio.Err)
	return root.ExecuteContext(ctx)
}

// Command returns hostd's cobra command; the manual is generated from it.
func Command(stdio cmdutil.Stdio) *cobra.Command {
	var f flags
	root := &cobra.Command{
		Use:   "hostd",
		Short: "Manage the GPUs of this host",
		Long: `hostd knows the GPUs of this host, agrees with the other hosts of its cluster
which application gets which, and swaps them. A new host is in no cluster:
gpuctl cluster init makes one, gpuctl cluster join enters one.

With --dev it is a cluster of one in memory, for trying things out on any
machine. hostd starts gpuguest, which outlives it as long as there are
sessions.`,
		Example: `  hostd --config /etc/gpuctl/hostd.yaml
  hostd --dev
  hostd config default`,
		Args:              usage(cobra.NoArgs),
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: true},
		RunE:              func(cmd *cobra.Command, _ []string) error { return serve(cmd.Context(), f, stdio) },
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return cmdutil.Usage(err) })
	flags := root.Flags()
	flags.BoolVar(&f.dev, "dev", false, "a cluster of one in memory, for this user alone")
	flags.StringVar(&f.config, "config", "", "configuration `file` (hostd config default prints what holds without one)")
	flags.StringVar(&f.dir, "rundir", "", "`folder` for sockets and state (default $XDG_RUNTIME_DIR/gpuctl or /run/gpuctl)")
	flags.StringVar(&f.data, "data-dir", "", "`folder` of the membership in a cluster (default /var/lib/gpuctl)")
	flags.StringVar(&f.socket, "socket", "", "`path` of the API's socket (default hostd.sock in the run folder)")
	flags.BoolVar(&f.private, "private", false, "end, and end gpuguest, when standard input ends")
	flags.StringVar(&f.gpuguest, "gpuguest", "", "`path` of gpuguest (default beside hostd, else in PATH)")
	flags.StringVar(&f.level, "log-level", "info", "debug, info, warn or error")
	flags.BoolVar(&f.json, "log-json", false, "log as JSON")
	root.AddCommand(configCommand(), recoverCommand(), mmioCommand(stdio))
	return root
}

// defaultData is the folder of the host's membership in its cluster.
const defaultData = "/var/lib/gpuctl"

func usage(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return cmdutil.Usage(err)
		}
		return nil
	}
}

func serve(ctx context.Context, f flags, stdio cmdutil.Stdio) error {
	switch {
	case f.dev && f.data != "":
		return cmdutil.Usage(errors.New("--dev keeps the cluster's state in memory: it takes no --data-dir"))
	case !f.dev && f.data == "":
		f.data = defaultData
	}
	log, err := newLog(f, stdio.Err)
	if err != nil {
		return cmdutil.Usage(err)
	}
	c := config.Default()
	if f.config != "" {
		if c, err = config.Load(f.config); err != nil {
			return err
		}
	}
	if f.dir == "" {
		f.dir = rundir.FromEnv(os.Getenv).Default()
	}
	if f.dir, err = filepath.Abs(f.dir); err != nil {
		return fmt.Errorf("run folder: %w", err)
	}
	if f.data != "" {
		if f.data, err = filepath.Abs(f.data); err != nil {
			return fmt.Errorf("data folder: %w", err)
		}
	}
	if f.socket == "" {
		f.socket = filepath.Join(f.dir, rundir.SocketName)
	}
	if f.socket, err = filepath.Abs(f.socket); err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	if f.private {
		var cancel context.CancelFunc
		ctx, cancel = context.WithCancel(ctx)
		defer cancel()
		go func() {
			// The process that started hostd has the other end of this pipe. The kernel
			// closes it even if that process is killed.
			_, _ = io.Copy(io.Discard, stdio.In)
			cancel()
		}()
	}
	return hostd.Run(ctx, hostd.Options{
		Dir: f.dir, Data: f.data, Version: cmdutil.Version(), Socket: f.socket, Config: c, Private: f.private, Gpuguest: f.gpuguest, Root: os.DirFS("/"), Log: log,
	})
}

func newLog(f flags, w io.Writer) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(f.level)); err != nil {
		return nil, fmt.Errorf("log level %q is not debug, info, warn or error", f.level)
	}
	options := &slog.HandlerOptions{Level: level}
	if f.json {
		return slog.New(slog.NewJSONHandler(w, options)), nil
	}
	return slog.New(slog.NewTextHandler(w, options)), nil
}

func configCommand() *cobra.Command {
	parent := &cobra.Command{Use: "config", Short: "Check and print configurations"}
	dump := func(cmd *cobra.Command, c config.Config) error {
		text, err := c.Dump()
		if err == nil {
			_, err = cmd.OutOrStdout().Write(text)
		}
		return err
	}
	parent.AddCommand(
		&cobra.Command{
			Use: "check FILE", Short: "Say what is wrong with a configuration", Args: usage(cobra.ExactArgs(1)),
			RunE: func(cmd *cobra.Command, args []string) error {
				c, err := config.Load(args[0])
				if err != nil {
					return err
				}
				if _, err := catalog.Open(c.Devices.Catalog...); err != nil {
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s is valid\n", args[0])
				return err
			},
		},
		&cobra.Command{
			Use: "default", Short: "Print the configuration that holds without a file", Args: usage(cobra.NoArgs),
			RunE: func(cmd *cobra.Command, _ []string) error { return dump(cmd, config.Default()) },
		},
		&cobra.Command{
			Use: "dump FILE", Short: "Print a configuration with all defaults filled in", Args: usage(cobra.ExactArgs(1)),
			RunE: func(cmd *cobra.Command, args []string) error {
				c, err := config.Load(args[0])
				if err != nil {
					return err
				}
				return dump(cmd, c)
			},
		},
	)
	return parent
}

func recoverCommand() *cobra.Command {
	var dir string
	var yes bool
	cmd := &cobra.Command{
		Use: "recover", Short: "Go on alone after the majority of the cluster is lost for good", Args: usage(cobra.NoArgs),
		Long: `recover makes this host the only voter of its cluster, with what it knows.
Stop every hostd of the cluster first, and recover one host only: the one whose
gpuctl cluster status showed the highest entry. What only lost hosts knew is
lost. Start this hostd again, then the others; remove the lost ones with
gpuctl cluster remove --force.`,
		Example: "  systemctl stop gpuctl-hostd && hostd recover --yes && systemctl start gpuctl-hostd",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !yes {
				return cmdutil.Usage(errors.New("recover gives up what only lost hosts know: say --yes, and see hostd recover --help"))
			}
			if err := rundir.Own(dir); err != nil {
				return fmt.Errorf("data folder: %w", err)
			}
			host, err := member.Recover(dir)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s is the only voter of its cluster now; start hostd\n", host)
			return err
		},
	}
	cmd.Flags().StringVar(&dir, "data-dir", defaultData, "`folder` of the membership")
	cmd.Flags().BoolVar(&yes, "yes", false, "do it")
	return cmd
}
