package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/program"
	"github.com/gpuctl/gpuctl/internal/rundir"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
)

// client is HostService as commands use it.
type client = gpuctlv1connect.HostServiceClient

// app is what all commands share.
type app struct {
	program.Stdio
	dirs   rundir.Dirs
	getenv func(string) string
	host   string // --host
	output string // --output
}

// errNoHost says that no daemon was named and none answers.
var errNoHost = errors.New("no hostd is running")

// Run is gpuctl. Its error says which exit status (program.Code) is due.
func Run(ctx context.Context, args []string, stdio program.Stdio) error {
	root := Command(stdio)
	root.SetArgs(args)
	root.SetIn(stdio.In)
	root.SetOut(stdio.Out)
	root.SetErr(stdio.Err)
	return explain(root.ExecuteContext(ctx))
}

// Command is gpuctl as cobra knows it, for the manual.
func Command(stdio program.Stdio) *cobra.Command {
	a := &app{Stdio: stdio, dirs: rundir.FromEnv(os.Getenv), getenv: os.Getenv}
	return a.command()
}

func (a *app) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "gpuctl",
		Short: "Swap the GPU under a running application",
		Long: `gpuctl runs unmodified OpenCL applications on GPUs that can be swapped under
them: for a bigger model, a smaller one, or another vendor's.`,
		Example: `  gpuctl inventory
  gpuctl run --gpu 'memory >= 4*GiB' -- x264 --opencl -o out.264 in.y4m
  gpuctl sessions
  gpuctl downgrade --plan
  gpuctl upgrade 3f2a --to large`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          noSuchCommand,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return program.Usage(fmt.Errorf("%w; see %s --help", err, cmd.CommandPath()))
	})
	flags := root.PersistentFlags()
	flags.StringVar(&a.host, "host", "", "hostd's socket, as `unix://PATH` (default $GPUCTL_HOST, else the one that runs)")
	flags.StringVarP(&a.output, "output", "o", "table", "table, wide, json or yaml")
	root.PersistentPreRunE = func(*cobra.Command, []string) error {
		if !slices.Contains(outputs(), a.output) {
			return program.Usage(fmt.Errorf("output %q is not one of %s", a.output, strings.Join(outputs(), ", ")))
		}
		return nil
	}
	_ = root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(outputs(), cobra.ShellCompDirectiveNoFileComp))
	root.AddCommand(
		a.runCommand(), a.sessionsCommand(), a.inventoryCommand(), a.describeCommand(),
		a.swapCommand(upgrade()), a.swapCommand(downgrade()), a.swapCommand(migrate()),
		a.suspendCommand(), a.resumeCommand(), a.versionCommand(),
	)
	return root
}

func outputs() []string { return []string{"table", "wide", "json", "yaml"} }

// noSuchCommand is for arguments that name none of the commands.
func noSuchCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	text := fmt.Sprintf("there is no command %q", args[0])
	cmd.SuggestionsMinimumDistance = 2
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		text += " (did you mean " + strings.Join(near, " or ") + "?)"
	}
	return program.Usage(errors.New(text + "; see gpuctl --help"))
}

// arguments checks the number of arguments as cobra does, with our exit status.
func arguments(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return program.Usage(fmt.Errorf("%w; usage: %s", err, cmd.UseLine()))
		}
		return nil
	}
}

// socket finds the daemon. explicit says that the user named it.
func (a *app) socket() (path string, explicit bool, err error) {
	for _, named := range []string{a.host, a.getenv("GPUCTL_HOST")} {
		if named != "" {
			path, err := socketPath(named)
			return path, true, err
		}
	}
	for _, path := range a.dirs.Sockets() {
		if rundir.Answers(path) {
			return path, false, nil
		}
	}
	return "", false, errNoHost
}

func socketPath(address string) (string, error) {
	path, unix := strings.CutPrefix(address, "unix://")
	if !unix && strings.Contains(address, "://") || path == "" {
		return "", program.Usage(fmt.Errorf("host %q: want unix://PATH", address))
	}
	return path, nil
}

// connect returns a client of the daemon, or of the only private one.
func (a *app) connect() (client, error) {
	path, _, err := a.socket()
	if errors.Is(err, errNoHost) {
		private := a.dirs.PrivateSockets()
		switch len(private) {
		case 0:
			return nil, fmt.Errorf("%w (no socket at %s); start hostd --dev, or an application with gpuctl run", errNoHost, strings.Join(a.dirs.Sockets(), ", "))
		case 1:
			path = private[0]
		default:
			return nil, fmt.Errorf("%d private daemons are running; name one with --host unix://PATH: %s", len(private), strings.Join(private, ", "))
		}
	} else if err != nil {
		return nil, err
	}
	return dial(path), nil
}

func dial(path string) client {
	return gpuctlv1connect.NewHostServiceClient(unixrpc.Client(path), "http://host")
}

// explain turns an answer's error into words and an exit status.
func explain(err error) error {
	var c *connect.Error
	if !errors.As(err, &c) {
		return err
	}
	text := c.Message()
	for _, prefix := range []string{"not found: ", "invalid: "} {
		text = strings.TrimPrefix(text, prefix)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("hostd does not answer (%w); start hostd --dev, or check --host and $GPUCTL_HOST", c.Unwrap())
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("hostd's socket belongs to somebody else (%w)", c.Unwrap())
	case c.Code() == connect.CodeInvalidArgument:
		return program.Usage(errors.New(text))
	case c.Code() == connect.CodeUnavailable:
		return fmt.Errorf("hostd went away: %s", text)
	}
	return errors.New(text)
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := struct {
				Version  string `json:"version"`
				Go       string `json:"go"`
				Revision string `json:"revision,omitempty"`
			}{Version: "devel"}
			if info, ok := debug.ReadBuildInfo(); ok {
				v.Go = info.GoVersion
				if info.Main.Version != "" && info.Main.Version != "(devel)" {
					v.Version = info.Main.Version
				}
				for _, s := range info.Settings {
					if s.Key == "vcs.revision" {
						v.Revision = s.Value
					}
				}
			}
			if a.structured() {
				return a.print(v)
			}
			_, err := fmt.Fprintln(a.Out, strings.TrimSpace("gpuctl "+v.Version+" "+v.Go+" "+v.Revision))
			return err
		},
	}
}
