package cli

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/hook/install"
	"github.com/gpuctl/gpuctl/internal/hook/wire"
	"github.com/gpuctl/gpuctl/internal/suggest"
)

const hookName = "gpuctl-hook"

type hookFlags struct {
	drivers []string
	root    string
	program string
	plan    bool
}

func (a *app) hookCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "hook", Short: "Install, remove and check the hook that libvirt calls",
		Long: `libvirt calls gpuctl's hook when a domain starts, ends or moves. The hook asks
hostd, which takes the domain's GPUs from the host and gives them back, and
refuses a start that would give a GPU two owners. libvirt 6.5 or later.

When hostd does not answer, domains without GPUs start, and those with one do
not. /etc/gpuctl/hook.yaml can have it otherwise:

  on-unreachable: deny-managed  # or allow, or deny
  timeout: 31s                  # for domains with GPUs
  notify-timeout: 5s            # for all others`,
		Args: noSuchCommand, RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.hookInstallCommand(), a.hookRemoveCommand(), a.hookStatusCommand())
	return cmd
}

func (f *hookFlags) add(cmd *cobra.Command, changes bool) {
	flags := cmd.Flags()
	flags.StringSliceVar(&f.drivers, "driver", nil, "libvirt's `driver`, "+strings.Join(wire.Drivers(), " or ")+" (default those that are installed)")
	flags.StringVar(&f.root, "root", "/", "`folder` with the files of the system that is meant")
	flags.StringVar(&f.program, "program", "", "`path` of gpuctl-hook (default beside gpuctl, or in /usr/lib/gpuctl)")
	if changes {
		flags.BoolVar(&f.plan, "plan", false, "say what would be done, and do nothing")
	}
	_ = cmd.RegisterFlagCompletionFunc("driver", cobra.FixedCompletions(wire.Drivers(), cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.MarkFlagDirname("root")
	_ = cmd.MarkFlagFilename("program")
}

func (f *hookFlags) check() error {
	for _, d := range f.drivers {
		if !slices.Contains(wire.Drivers(), d) {
			return cmdutil.Usage(fmt.Errorf("--driver: %q is not %s%s", d, strings.Join(wire.Drivers(), " or "), suggest.Hint(d, wire.Drivers())))
		}
	}
	root, err := filepath.Abs(f.root)
	if err != nil {
		return fmt.Errorf("--root: %w", err)
	}
	f.root = root
	if len(f.drivers) == 0 {
		f.drivers = install.Machine{Root: root}.Drivers()
	}
	slices.Sort(f.drivers)
	f.drivers = slices.Compact(f.drivers)
	return nil
}

// hookProgram returns the path of the hook program that belongs to this gpuctl; empty:
// there is none.
func (f *hookFlags) hookProgram() string {
	if f.program != "" {
		return f.program
	}
	tried := []string{filepath.Join("/usr/lib/gpuctl", hookName)}
	if self, err := os.Executable(); err == nil {
		dir := filepath.Dir(self)
		tried = []string{filepath.Join(dir, hookName), filepath.Join(dir, "..", "lib", "gpuctl", hookName), tried[0]}
	}
	for _, path := range tried {
		if _, err := os.Stat(path); err == nil {
			return filepath.Clean(path)
		}
	}
	return ""
}

func (a *app) hookInstallCommand() *cobra.Command {
	var f hookFlags
	cmd := &cobra.Command{
		Use: "install", Short: "Put the hook where libvirt looks for it",
		Long: `Put the hook into /etc/libvirt/hooks/DRIVER.d/50-gpuctl, or bring it up to date.
Other hooks go on being called. libvirtd looks for hooks when it starts: if it
had none, it must be started anew, and this says so. Running domains are not
touched by that.`,
		Example: `  gpuctl hook install --plan
  gpuctl hook install
  gpuctl hook install --driver libxl --root /mnt/image`,
		Args: arguments(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			if err := f.check(); err != nil {
				return err
			}
			m := install.Machine{Root: f.root, Source: f.hookProgram()}
			if m.Source == "" {
				return fmt.Errorf("%s is not installed beside gpuctl; build it, or name it with --program", hookName)
			}
			return a.changeHooks(f, m.PlanInstall)
		},
	}
	f.add(cmd, true)
	return cmd
}

func (a *app) hookRemoveCommand() *cobra.Command {
	var f hookFlags
	cmd := &cobra.Command{
		Use: "remove", Short: "Remove the hook from libvirt",
		Long: `Take the hook away. libvirtd need not be started anew. From then on nothing keeps
libvirt from starting a domain with a GPU that is somebody else's.`,
		Example: "  gpuctl hook remove --driver qemu",
		Args:    arguments(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			if err := f.check(); err != nil {
				return err
			}
			return a.changeHooks(f, install.Machine{Root: f.root}.PlanRemove)
		},
	}
	f.add(cmd, true)
	return cmd
}

// changeHooks makes plans for all drivers before it changes anything.
func (a *app) changeHooks(f hookFlags, plan func(driver string) (install.Change, error)) error {
	var changes []install.Change
	for _, d := range f.drivers {
		c, err := plan(d)
		switch {
		case errors.Is(err, install.ErrForeign):
			return cmdutil.WithCode(err, cmdutil.Refused)
		case err != nil:
			return err
		}
		changes = append(changes, c)
	}
	if !f.plan {
		for _, c := range changes {
			if err := install.Apply(c); err != nil {
				return err
			}
		}
	}
	if a.structured() {
		return a.print(changes)
	}
	restart := map[string]bool{}
	for _, c := range changes {
		if err := a.say(clean(hookLine(c, f.plan))); err != nil {
			return err
		}
		if c.Restart != "" && !restart[c.Restart] {
			restart[c.Restart] = true
			fmt.Fprintf(a.Err, "%s began before it had a hook to find: systemctl restart %s\n", c.Restart, c.Restart)
		}
	}
	return nil
}

func hookLine(c install.Change, plan bool) string {
	is := "is"
	if plan {
		is = "would be"
	}
	switch c.Action {
	case install.Install:
		return fmt.Sprintf("%s %s installed, version %s", c.Path, is, c.To)
	case install.Update:
		return fmt.Sprintf("%s %s updated from version %s to %s", c.Path, is, c.From, c.To)
	case install.Remove:
		return fmt.Sprintf("%s %s removed, version %s", c.Path, is, c.From)
	case install.Nothing:
		if c.From == "" {
			return c.Path + " is not there"
		}
	}
	return fmt.Sprintf("%s is there already, version %s", c.Path, c.From)
}

func (a *app) hookStatusCommand() *cobra.Command {
	var f hookFlags
	cmd := &cobra.Command{
		Use: "status", Short: "Say whether the hook is there, is called, and is heard",
		Long: `Say for each of libvirt's drivers whether the hook is installed and up to date,
whether libvirtd has begun since, and whether hostd answers. What is wrong is
listed with what to do about it, and makes the exit status 1.`,
		Example: `  gpuctl hook status
  gpuctl hook status --driver libxl -o json`,
		Args: arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.check(); err != nil {
				return err
			}
			m := install.Machine{Root: f.root, Source: f.hookProgram()}
			var all []install.Status
			var wrong bool
			for _, d := range f.drivers {
				s := m.Check(cmd.Context(), d)
				all, wrong = append(all, s), wrong || len(s.Problems) > 0
			}
			if err := a.printHooks(all); err != nil {
				return err
			}
			if wrong {
				return cmdutil.Status(cmdutil.Failed)
			}
			return nil
		},
	}
	f.add(cmd, false)
	return cmd
}

func (a *app) printHooks(all []install.Status) error {
	if a.structured() {
		return a.print(all)
	}
	var rows [][]string
	var problems []string
	for _, s := range all {
		daemon := "not running"
		switch {
		case s.Restart:
			daemon = s.Daemon.Name + ", does not call it"
		case s.Daemon != nil && (s.State == install.Absent || s.State == install.Foreign):
			daemon = s.Daemon.Name
		case s.Daemon != nil:
			daemon = s.Daemon.Name + ", calls it"
		}
		hostd := "does not answer"
		if s.Hostd != "" {
			hostd = "answers, " + s.Hostd
		}
		row := []string{s.Driver, string(s.State), s.Version, daemon, hostd, s.Policy}
		if a.wide() {
			row = append(row, s.Path, strings.Join(s.Others, ", "))
		}
		rows = append(rows, row)
		for _, p := range s.Problems {
			if !slices.Contains(problems, p) { // both drivers use the same hostd, so a problem may be found twice
				problems = append(problems, p)
			}
		}
	}
	heading := []string{"DRIVER", "HOOK", "VERSION", "LIBVIRT", "HOSTD", "WITHOUT HOSTD"}
	if a.wide() {
		heading = append(heading, "PATH", "OTHER HOOKS")
	}
	if err := table(a.Out, heading, rows); err != nil {
		return err
	}
	for _, p := range problems {
		fmt.Fprintln(a.Err, clean(p))
	}
	return nil
}
