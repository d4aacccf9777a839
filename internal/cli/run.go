package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/expr"
	"github.com/gpuctl/gpuctl/internal/rundir"
	"github.com/gpuctl/gpuctl/internal/size"
)

const (
	icdName        = "libgpuctl-opencl.so"
	hostdStart     = 90 * time.Second // long, because the discovery of GPUs starts each runtime once
	hostdStop      = 30 * time.Second
	releaseTimeout = 10 * time.Second
	exitNotFound   = 127
	exitNoExec     = 126
)

type runFlags struct {
	gpu, min, prefer string
	count            uint32
	name, kind       string
	owner            string
	weight           uint32
	engine           string
	config           string
	remote           string
	local, wait      bool
}

func (a *app) runCommand() *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use: "run [flags] -- COMMAND [ARGS…]", Short: "Run an OpenCL or CUDA application on a GPU that can be swapped",
		Long: `Run an unmodified OpenCL or CUDA application in the foreground, on a GPU that fits
and is free. Its exit status is the application's (128 + N if signal N ended it).

A CUDA application sees the GPUs of its claim and no others (CUDA_VISIBLE_DEVICES).
It has them alone, and its session appears when it opens CUDA. Say --engine driver
where GPUs for OpenCL might be chosen.

If no GPU of this host is free, or large enough, one of another host of the cluster
serves the application over the network; under the cluster's policy mrq it comes home
when a GPU is free here (gpuctl cluster queue). All GPUs of a session are on one host.

Without a running hostd, a private one is started for the application's lifetime.

` + fieldsHelp("GPU", expr.OfGPU(&gpuctlv1.GPU{})),
		Example: `  gpuctl run -- clinfo
  gpuctl run --gpu 'vendor.contains("NVIDIA") && memory >= 16*GiB' -- ./simulate
  gpuctl run --local --wait -- ./simulate
  gpuctl run --min-memory 2GiB --weight 50 -- ./nightly
  gpuctl run --min-memory 1GiB --prefer-memory 4GiB --device-type gpu -- x264 --opencl -o out.264 in.y4m
  gpuctl run --engine driver -- python train.py`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmdutil.Usage(errors.New("name a command to run: gpuctl run [flags] -- COMMAND [ARGS…]"))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error { return a.run(cmd.Context(), f, args) },
	}
	flags := cmd.Flags()
	flags.SetInterspersed(false)
	flags.StringVar(&f.gpu, "gpu", "", "CEL `expression` that the GPU must meet")
	flags.StringVar(&f.min, "min-memory", "", "the least memory that will do (`size`); the GPU may then be shared")
	flags.StringVar(&f.prefer, "prefer-memory", "", "memory that would be better (`size`)")
	flags.Uint32Var(&f.count, "count", 1, "number of GPUs, of one runtime")
	flags.Uint32Var(&f.weight, "weight", 0, "its owner's share of a shared GPU, in proportion to others' (default 100; users may not have more than the configuration allows)")
	flags.StringVar(&f.owner, "owner", "", "whose share of a shared GPU it uses (default the calling user; for root only)")
	flags.StringVar(&f.kind, "device-type", "", "what the application sees: gpu, cpu or accelerator")
	flags.StringVar(&f.name, "device-name", "", "the device's name that the application sees")
	flags.StringVar(&f.engine, "engine", "", "what the application uses: portable (OpenCL) or driver (CUDA); default either")
	flags.StringVar(&f.remote, "remote", "allowed", "GPUs of other hosts: `never`, allowed (if none here will do) or only")
	flags.BoolVar(&f.local, "local", false, "GPUs of this host only: --remote never")
	flags.BoolVar(&f.wait, "wait", false, "wait in the cluster's queue until a GPU is free")
	flags.StringVar(&f.config, "config", "", "configuration `file` of the private hostd")
	cmd.MarkFlagsMutuallyExclusive("remote", "local")
	_ = cmd.RegisterFlagCompletionFunc("remote", cobra.FixedCompletions(remotes(), cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("engine", cobra.FixedCompletions([]string{"portable", "driver"}, cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("device-type", cobra.FixedCompletions([]string{"gpu", "cpu", "accelerator"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func remotes() []string { return []string{"never", "allowed", "only"} }

func (f runFlags) request() (*gpuctlv1.CreateClaimRequest, error) {
	req := &gpuctlv1.CreateClaimRequest{
		Expr: f.gpu, Count: f.count, WhileCallerLives: true, Remote: f.remote, Wait: f.wait, Owner: f.owner, Weight: f.weight, Engine: f.engine,
		Device: &gpuctlv1.VirtualDevice{Name: f.name, Type: f.kind},
	}
	var err error
	if f.min != "" {
		if req.MinMemory, err = size.Parse(f.min); err != nil {
			return nil, cmdutil.Usage(fmt.Errorf("--min-memory: %w", err))
		}
	}
	if f.prefer != "" {
		if req.PreferMemory, err = size.Parse(f.prefer); err != nil {
			return nil, cmdutil.Usage(fmt.Errorf("--prefer-memory: %w", err))
		}
	}
	if f.local {
		req.Remote = "never"
	}
	if !slices.Contains(remotes(), req.GetRemote()) {
		return nil, cmdutil.Usage(fmt.Errorf("--remote: %q is not never, allowed or only", req.GetRemote()))
	}
	if f.count == 0 {
		return nil, cmdutil.Usage(errors.New("--count: at least 1"))
	}
	if !slices.Contains([]string{"", "gpu", "cpu", "accelerator"}, f.kind) {
		return nil, cmdutil.Usage(fmt.Errorf("--device-type: %q is not gpu, cpu or accelerator", f.kind))
	}
	switch {
	case !slices.Contains([]string{"", "portable", "driver"}, f.engine):
		return nil, cmdutil.Usage(fmt.Errorf("--engine: %q is not portable or driver", f.engine))
	case f.engine == "driver" && f.min+f.prefer != "":
		return nil, cmdutil.Usage(errors.New("a CUDA program has its GPUs alone: leave out --min-memory and --prefer-memory, or say --gpu 'memory >= …'"))
	}
	if _, err := expr.Compile(f.gpu, expr.GPU()); err != nil {
		return nil, cmdutil.Usage(fmt.Errorf("--gpu: %w", err))
	}
	return req, nil
}

func (a *app) run(ctx context.Context, f runFlags, args []string) (err error) {
	req, err := f.request()
	if err != nil {
		return err
	}
	path, err := exec.LookPath(args[0])
	if err != nil {
		code := exitNotFound
		if errors.Is(err, os.ErrPermission) {
			code = exitNoExec
		}
		return cmdutil.WithCode(fmt.Errorf("command %s: %w", args[0], err), code)
	}
	icd, err := a.findICD()
	if err != nil {
		return err
	}
	// From now on, signals must not end this process before it has cleaned up.
	signals := make(chan os.Signal, 64)
	signal.Notify(signals, forwarded()...)
	defer signal.Stop(signals)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	socket, explicit, err := a.socket()
	switch {
	case errors.Is(err, errNoHost):
		private, err := a.startPrivate(ctx, f.config, signals)
		if err != nil {
			return err
		}
		defer private.stop()
		socket = private.socket
	case err != nil:
		return err
	case f.config != "":
		return cmdutil.Usage(fmt.Errorf("--config is for a private hostd, but one runs at %s: give it the file instead", socket))
	case explicit && !rundir.Answers(socket):
		return fmt.Errorf("no hostd answers at %s; start it, or leave --host and $GPUCTL_HOST out to use a private one", socket)
	}
	host := a.dial(socket)
	claim, err := claimUntil(ctx, host, req, signals)
	if err != nil {
		return err
	}
	if claim.GetClaim() == nil {
		return a.refusedClaim(claim.GetRejected())
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
		defer cancel()
		// Otherwise hostd releases it when it notices that this process has ended.
		res, err := host.ReleaseClaim(ctx, connect.NewRequest(&gpuctlv1.ReleaseClaimRequest{Claim: claim.GetClaim().GetId()}))
		if err != nil {
			return
		}
		for _, l := range res.Msg.GetLost() {
			fmt.Fprintf(a.Err, "gpuctl: session %s was lost: %s\n", l.GetId(), line(l.GetReason()))
		}
	}()
	a.dirs.Sweep()
	vendors, err := vendorsFolder(a.dirs.Default(), icd)
	if err != nil {
		return err
	}
	defer os.RemoveAll(vendors)
	cmd := &exec.Cmd{
		Path: path, Args: args, Stdin: a.In, Stdout: a.Out, Stderr: a.Err,
		Env: appEnv(os.Environ(), vendors, claim.GetAppSocket(), claim.GetToken(), visible(req, claim.GetGpus())),
	}
	if err := cmd.Start(); err != nil {
		return cmdutil.WithCode(fmt.Errorf("command %s: %w", args[0], err), exitNoExec)
	}
	return wait(cmd, signals)
}

// claimUntil makes a claim, which may wait in the cluster's queue. A signal ends that: hostd then
// takes back what the claim has, or is getting.
func claimUntil(ctx context.Context, host client, req *gpuctlv1.CreateClaimRequest, signals <-chan os.Signal) (*gpuctlv1.CreateClaimResponse, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var res *connect.Response[gpuctlv1.CreateClaimResponse]
	answered := make(chan error, 1)
	go func() {
		var err error
		res, err = host.CreateClaim(ctx, connect.NewRequest(req))
		answered <- err
	}()
	for {
		select {
		case err := <-answered:
			return answer(res), err
		case s := <-signals:
			number, ok := s.(syscall.Signal)
			if number == syscall.SIGCONT {
				continue // it was stopped, and goes on
			}
			cancel()
			<-answered
			if !ok {
				return nil, context.Canceled
			}
			return nil, cmdutil.Status(128 + int(number))
		}
	}
}

// wait passes signals to the command until the command ends.
func wait(cmd *exec.Cmd, signals <-chan os.Signal) error {
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case s := <-signals:
			// The terminal has already sent these to the command.
			if (s == syscall.SIGINT || s == syscall.SIGQUIT) && inForeground() {
				continue
			}
			_ = cmd.Process.Signal(s)
		case err := <-ended:
			var exit *exec.ExitError
			if err == nil {
				return nil
			}
			if !errors.As(err, &exit) {
				return fmt.Errorf("command %s: %w", cmd.Args[0], err)
			}
			if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
				return cmdutil.Status(128 + int(status.Signal()))
			}
			return cmdutil.Status(exit.ExitCode())
		}
	}
}

func forwarded() []os.Signal {
	return []os.Signal{
		syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGCONT, syscall.SIGALRM,
	}
}

// inForeground reports whether a terminal sends Ctrl-C to this process group.
func inForeground() bool {
	tty, err := os.Open("/dev/tty")
	if err != nil {
		return false
	}
	defer tty.Close()
	group, err := unix.IoctlGetInt(int(tty.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

// findICD returns the path of the library that applications load.
func (a *app) findICD() (string, error) {
	if named := a.getenv("GPUCTL_ICD"); named != "" {
		path, err := filepath.Abs(named)
		if err == nil {
			_, err = os.Stat(path)
		}
		if err != nil {
			return "", fmt.Errorf("$GPUCTL_ICD: %w", err)
		}
		return path, nil
	}
	var tried []string
	if self, err := os.Executable(); err == nil {
		dir := filepath.Dir(self)
		tried = append(tried, filepath.Join(dir, "..", "lib", icdName), filepath.Join(dir, "..", "lib", "gpuctl", icdName))
	}
	tried = append(tried, filepath.Join("/usr/lib/gpuctl", icdName))
	for _, path := range tried {
		if _, err := os.Stat(path); err == nil {
			return filepath.Clean(path), nil
		}
	}
	return "", fmt.Errorf("%s is not installed (looked at %s); build it, or name it with $GPUCTL_ICD", icdName, strings.Join(tried, ", "))
}

// vendorsFolder makes a folder in which OpenCL loaders find only gpuctl's library.
func vendorsFolder(base, icd string) (string, error) {
	if err := rundir.Make(base); err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp(base, fmt.Sprintf("vendors-%d-", os.Getpid()))
	if err != nil {
		return "", fmt.Errorf("vendors folder: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "gpuctl.icd"), []byte(icd+"\n"), 0o600); err != nil {
		_ = os.RemoveAll(dir)
		return "", fmt.Errorf("vendors folder: %w", err)
	}
	return dir, nil
}

// visible returns the UUIDs of the GPUs that CUDA may use: those of the claim, if it has
// all of them and all of each. Otherwise there are none: what a CUDA program uses without a
// claim would have two owners.
func visible(req *gpuctlv1.CreateClaimRequest, gpus []*gpuctlv1.GPU) string {
	var uuids []string
	for _, g := range gpus {
		if g.GetDriverGpu() == nil || req.GetMinMemory() > 0 {
			return ""
		}
		uuids = append(uuids, g.GetDriverGpu().GetUuid())
	}
	return strings.Join(uuids, ",")
}

// appEnv sets the environment variables of both OpenCL loaders to the vendors folder, and
// that of CUDA to the GPUs. It removes OCL_ICD_FILENAMES, which would add vendors'
// libraries.
func appEnv(env []string, vendors, socket, token, visible string) []string {
	var out []string
	for _, v := range env {
		name, _, _ := strings.Cut(v, "=")
		switch name {
		case "OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH", "OCL_ICD_FILENAMES", "GPUCTL_SOCKET", "GPUCTL_TOKEN", "CUDA_VISIBLE_DEVICES":
		default:
			out = append(out, v)
		}
	}
	vendors = strings.TrimSuffix(vendors, "/") + "/" // CUDA's loader joins folder and file without a slash
	return append(out, "OCL_ICD_VENDORS="+vendors, "OPENCL_VENDOR_PATH="+vendors, "GPUCTL_SOCKET="+socket, "GPUCTL_TOKEN="+token, "CUDA_VISIBLE_DEVICES="+visible)
}

// private is a hostd that lives as long as this process.
type private struct {
	a      *app
	dir    string
	socket string
	cmd    *exec.Cmd
	line   io.Closer // hostd ends when it is closed, also by the end of this process
	ended  chan error
}

func (a *app) startPrivate(ctx context.Context, config string, signals <-chan os.Signal) (*private, error) {
	binary, err := findHostd()
	if err != nil {
		return nil, err
	}
	dir := a.dirs.Private(os.Getpid())
	for _, d := range []string{a.dirs.Default(), filepath.Dir(dir), dir} {
		if err := rundir.Make(d); err != nil {
			return nil, err
		}
	}
	p := &private{a: a, dir: dir, socket: filepath.Join(dir, rundir.SocketName), ended: make(chan error, 1)}
	args := []string{"--dev", "--private", "--rundir", dir, "--socket", p.socket}
	if config != "" {
		path, err := filepath.Abs(config)
		if err != nil {
			return nil, fmt.Errorf("configuration %s: %w", config, err)
		}
		args = append(args, "--config", path)
	}
	log, err := os.OpenFile(filepath.Join(dir, "hostd.log"), os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("private hostd: %w", err)
	}
	defer log.Close()
	p.cmd = exec.Command(binary, args...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C is for the application only
	if p.line, err = p.cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("private hostd: %w", err)
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("private hostd: %w", err)
	}
	go func() { p.ended <- p.cmd.Wait() }()
	deadline := time.After(hostdStart)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if !rundir.Answers(p.socket) {
				continue
			}
			fmt.Fprintf(a.Err, "gpuctl: no hostd is running, so a private one serves this run; from another terminal: gpuctl --host unix://%s sessions\n", p.socket)
			return p, nil
		case err := <-p.ended:
			p.ended <- err
			text := lastLines(log.Name())
			p.stop()
			return nil, fmt.Errorf("private hostd ended at its start (%w)%s", errors.Join(err), text)
		case s := <-signals:
			p.stop()
			if number, ok := s.(syscall.Signal); ok {
				return nil, cmdutil.Status(128 + int(number))
			}
			return nil, context.Canceled
		case <-deadline:
			text := lastLines(log.Name())
			p.stop()
			return nil, fmt.Errorf("private hostd did not start within %v%s", hostdStart, text)
		case <-ctx.Done():
			p.stop()
			return nil, ctx.Err()
		}
	}
}

// stop ends hostd, which ends gpuguest, and removes their folder.
func (p *private) stop() {
	_ = p.line.Close()
	select {
	case <-p.ended:
	case <-time.After(hostdStop):
		fmt.Fprintf(p.a.Err, "gpuctl: the private hostd (process %d) does not end; its log is in %s\n", p.cmd.Process.Pid, p.dir)
		_ = p.cmd.Process.Kill()
		return
	}
	_ = os.RemoveAll(p.dir)
}

func findHostd() (string, error) {
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), "hostd")
		if info, err := os.Stat(beside); err == nil && info.Mode()&0o111 != 0 {
			return beside, nil
		}
	}
	path, err := exec.LookPath("hostd")
	if err != nil {
		return "", errors.New("no hostd is running, and none is beside gpuctl or in PATH to start: install it, or name a running one with --host")
	}
	return path, nil
}

func lastLines(path string) string {
	const most = 2048
	data, err := os.ReadFile(path)
	if err != nil || len(data) == 0 {
		return ""
	}
	return ":\n" + strings.TrimSpace(string(data[max(0, len(data)-most):]))
}
