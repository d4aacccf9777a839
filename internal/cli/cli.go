package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/rundir"
)

// client is a client of HostService.
type client = gpuctlv1connect.HostServiceClient

// app has what all commands share.
type app struct {
	cmdutil.Stdio
	dirs   rundir.Dirs
	getenv func(string) string
	now    func() time.Time
	remote Remote // nil: other computers cannot be reached
	// timeline draws migrations; nil: not possible.
	timeline Timeline
	host     string        // --host
	output   string        // --output
	timeout  time.Duration // --timeout
	timed    bool          // the user has said --timeout
}

// Run runs gpuctl with command-line arguments. cmdutil.Code returns the exit status for
// its error.
func Run(ctx context.Context, args []string, stdio cmdutil.Stdio, options ...Option) error {
	root := Command(stdio, options...)
	root.SetArgs(args)
	root.SetIn(stdio.In)
	root.SetOut(stdio.Out)
	root.SetErr(stdio.Err)
	return explain(root.ExecuteContext(ctx))
}

// Command returns gpuctl's cobra command; the manual is generated from it.
func Command(stdio cmdutil.Stdio, options ...Option) *cobra.Command {
	a := &app{Stdio: stdio, dirs: rundir.FromEnv(os.Getenv), getenv: os.Getenv, now: time.Now}
	for _, o := range options {
		o(a)
	}
	return a.command()
}

func (a *app) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "gpuctl",
		Short: "Swap the GPU under a running application",
		Long: `gpuctl runs unmodified OpenCL applications on GPUs that can be swapped under
them: for a bigger model, a smaller one, or another vendor's. CUDA programs it
suspends, resumes and moves to GPUs of the same model. It moves VMs with their GPUs
between hosts while the applications in them go on. It shows and manages the GPUs of
one machine, or of all machines of a cluster.

Exit statuses: 0 done; 1 failed; 2 used wrongly; 3 refused, with every reason
listed; 4 nobody answers, or the cluster has no leader.`,
		Example: `  gpuctl inventory
  gpuctl run --gpu 'memory >= 4*GiB' -- x264 --opencl -o out.264 in.y4m
  gpuctl sessions
  gpuctl downgrade --plan
  gpuctl upgrade 3f2a --to large
  gpuctl migrate web --to h2
  gpuctl get gpus --where 'free && host == "h1"'`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          noSuchCommand,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return cmdutil.Usage(fmt.Errorf("%w; see %s --help", err, cmd.CommandPath()))
	})
	flags := root.PersistentFlags()
	flags.StringVar(&a.host, "host", "", "hostd's socket, as unix://PATH, or another machine's `hostd`: a name from gpuctl cluster login, or https://HOST:PORT (default $GPUCTL_HOST, else the one that runs)")
	flags.StringVarP(&a.output, "output", "o", "table", "table, wide, json or yaml")
	flags.DurationVar(&a.timeout, "timeout", defaultPatience, "of a command that changes something: how long to wait for the cluster to have a leader, and for its answer")
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		a.timed = root.PersistentFlags().Changed("timeout")
		if a.timeout <= 0 {
			return cmdutil.Usage(errors.New("--timeout: a time greater than 0"))
		}
		if all := outputs(cmd); !slices.Contains(all, a.output) {
			return cmdutil.Usage(fmt.Errorf("output %q is not one of %s", a.output, strings.Join(all, ", ")))
		}
		return nil
	}
	_ = root.RegisterFlagCompletionFunc("output", func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		return outputs(cmd), cobra.ShellCompDirectiveNoFileComp
	})
	_ = root.RegisterFlagCompletionFunc("host", a.completeClusters)
	root.AddCommand(
		a.runCommand(), a.adoptCommand(), a.sessionsCommand(), a.inventoryCommand(), a.describeCommand(),
		a.swapCommand(upgrade()), a.swapCommand(downgrade()), a.swapCommand(migrate()),
		a.migrationsCommand(), a.suspendCommand(), a.resumeCommand(), a.versionCommand(),
		a.clusterCommand(), a.getCommand(), a.eventsCommand(), a.topCommand(), a.drainCommand(), a.undrainCommand(),
		a.cordonCommand(), a.uncordonCommand(), a.labelCommand(), a.rankCommand(), a.claimCommand(), a.planCommand(),
		a.cardsCommand(), a.machinesCommand(), a.attachCommand(), a.detachCommand(), a.resetCommand(), a.resizeCommand(),
		a.nicsCommand(), a.hookCommand(), a.hostCommand(),
	)
	return root
}

// Annotations of commands with additional output formats: -o name, -o svg.
const (
	outputName = "output-name"
	outputSVG  = "output-svg"
)

func outputs(cmd *cobra.Command) []string {
	all := []string{"table", "wide", "json", "yaml"}
	if cmd.Annotations[outputName] != "" {
		all = append(all, "name")
	}
	if cmd.Annotations[outputSVG] != "" {
		all = append(all, "svg")
	}
	return all
}

// noSuchCommand returns an error for arguments that name no command.
func noSuchCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	text := fmt.Sprintf("there is no command %q", args[0])
	cmd.SuggestionsMinimumDistance = 2
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		text += " (did you mean " + strings.Join(near, " or ") + "?)"
	}
	return cmdutil.Usage(errors.New(text + "; see gpuctl --help"))
}

// arguments checks the number of arguments as cobra does, and sets our exit status.
func arguments(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return cmdutil.Usage(fmt.Errorf("%w; usage: %s", err, cmd.UseLine()))
		}
		return nil
	}
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := struct {
				Version  string `json:"version"`
				Go       string `json:"go"`
				Revision string `json:"revision,omitempty"`
			}{Version: cmdutil.Version()}
			if info, ok := debug.ReadBuildInfo(); ok {
				v.Go = info.GoVersion
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
