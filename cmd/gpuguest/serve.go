package main

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/confine"
	"github.com/gpuctl/gpuctl/guest/lease"
	"github.com/gpuctl/gpuctl/guest/session"
	"github.com/gpuctl/gpuctl/guest/turn"
	"github.com/gpuctl/gpuctl/internal/size"
	"github.com/gpuctl/gpuctl/internal/subid"
)

func serveCommand(log *slog.Logger) *cobra.Command {
	var api, apps, dir, users, memory, config, root string
	var lend, passed []string
	var vm, anew, fast bool
	var share turn.Settings
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
			launcher, err := newLauncher(dir, hostUsers, users, memory, log)
			if err != nil {
				return err
			}
			c := session.Config{
				Dir:         dir,
				Launcher:    launcher,
				Logger:      log,
				Faults:      os.Getenv("GPUCTL_FAULTS") == "1",
				Verify:      os.Getenv("GPUCTL_VERIFY") == "1",
				CompileAnew: anew,
				Sharing:     share,
				Whose:       subid.New(subid.File).Of,
			}
			leases, err := lease.New(lease.Config{Dir: dir, Launcher: launcher, Logger: log, Listen: lend})
			if err != nil {
				return err
			}
			defer leases.Close()
			c.Lender = leases
			ways, end, err := overRDMA(fast, launcher, users, append(passed, lend...), log)
			if err != nil {
				return err
			}
			defer end()
			return serveHost(cmd.Context(), c, api, apps, ways)
		},
	}
	f := cmd.Flags()
	f.StringVar(&api, "socket", "", "unix socket to serve the host on")
	f.StringVar(&apps, "app-socket", "", "unix socket to serve applications on")
	f.StringVar(&dir, "rundir", "", "folder for sessions, made if missing")
	f.StringVar(&users, "executor-users", confine.DefaultRange().String(), "numbers of users, of which each session's executors get one if gpuguest is root")
	f.StringVar(&memory, "executor-memory", "", "most memory of a session's executors, as 8GiB (default 7/8 of the machine's)")
	f.StringSliceVar(&lend, "lend", nil, "addresses (HOST:PORT) where carriers of other hosts reach the GPUs that are lent to them")
	f.BoolVar(&fast, "rdma", false, "connect to other hosts over RDMA where that is possible, and take their connections at the addresses of --lend and --rdma-lend")
	f.StringSliceVar(&passed, "rdma-lend", nil, "addresses (HOST:PORT) where something else takes the connections of carriers of other hosts: what comes over RDMA is passed on to it")
	f.BoolVar(&anew, "compile-anew", false, "keep nothing that runtimes have compiled for a user's program for its next session")
	f.StringVar(&share.Policy, "sharing-policy", "", "how sessions share a GPU: fair (the default), credit, band or fifo")
	f.IntVar(&share.WaitCharge, "sharing-wait-charge", 0, "percent of the time for which a GPU is kept idle for an owner that this owner pays for (default 50)")
	f.StringVar(&share.Limit, "sharing-limit", "", "how long a command may keep a GPU while others wait (default 5s)")
	f.StringVar(&share.EndAfter, "sharing-end-after", "", "after how long a session is ended that keeps a GPU nevertheless, or never (default 10m)")
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

const (
	// hostUsers is the folder that records which users of executors are taken on a host, by
	// any gpuguest.
	hostUsers = "/run/gpuctl/users"
	// sessionsGroup is created by the unit gpuctl-sessions, and delegated to gpuguest.
	sessionsGroup = "/sys/fs/cgroup/system.slice/gpuctl-sessions.service"
)

// newLauncher returns a launcher that starts executors with all isolation that is available
// here.
func newLauncher(dir, taken, users, memory string, log *slog.Logger) (*session.ExecLauncher, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("run folder: %w", err)
	}
	l := &session.ExecLauncher{Dir: dir}
	r, err := confine.ParseRange(users)
	if err != nil {
		return nil, fmt.Errorf("users of executors: %w", err)
	}
	most, err := mostMemory(memory)
	if err != nil {
		return nil, fmt.Errorf("memory of executors: %w", err)
	}
	if v := confine.Landlock(); v == 0 {
		log.Warn("the kernel has no Landlock: executors reach what their user may reach")
	}
	if os.Geteuid() != 0 {
		log.Info("executors run as this user: other users are protected from them, this one's processes and sockets are not")
		return l, nil
	}
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return nil, fmt.Errorf("run folder: %w", err)
	}
	if err := confine.MakeLoadable(dir); err != nil {
		log.Warn("GPUs of runtimes that compile for the processor, as PoCL, can't be used from this run folder", "err", err)
	}
	l.Users = &confine.Users{Range: r, Dir: taken}
	if l.Limits, err = confine.FindLimits(sessionsGroup, most); err != nil {
		log.Info("the memory of executors is not limited", "err", err)
	}
	return l, nil
}

func mostMemory(text string) (uint64, error) {
	if text != "" {
		return size.Parse(text)
	}
	var si unix.Sysinfo_t
	if err := unix.Sysinfo(&si); err != nil {
		return 0, fmt.Errorf("sysinfo: %w", err)
	}
	return si.Totalram * uint64(si.Unit) / 8 * 7, nil
}
