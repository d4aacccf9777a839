package hostd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gpuctl/gpuctl/guest/turn"
	"github.com/gpuctl/gpuctl/internal/rundir"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
	"github.com/gpuctl/gpuctl/internal/wait"
)

const (
	guestStart  = 15 * time.Second
	guestStop   = 10 * time.Second
	guestCheck  = time.Second
	guestRetry  = 2 * time.Second
	maxLogTail  = 2048
	guestBinary = "gpuguest"
)

// Guest manages the gpuguest process of a run folder. It starts gpuguest if none runs,
// and again if it dies. gpuguest goes on when hostd ends.
type Guest struct {
	Dir    string // run folder
	Binary string // path of gpuguest; empty: beside this program, or in PATH
	Users  string // range of user ids for executors if hostd is root, FIRST-LAST; empty: gpuguest's default
	Memory string // most memory of a session's executors; empty: gpuguest's default
	Log    *slog.Logger

	CompileAnew bool   // see config.Executors
	RDMA        bool   // see config.Cluster
	LendAt      string // HOST:PORT at which carriers reach this host; empty: nowhere
	Sharing     turn.Settings
}

// Socket is where gpuguest serves GuestService.
func (g *Guest) Socket() string { return filepath.Join(g.Dir, "guest.sock") }

// AppSocket is where applications connect to gpuguest.
func (g *Guest) AppSocket() string { return filepath.Join(g.Dir, "app.sock") }

// Ensure returns when gpuguest answers. It starts gpuguest if none runs; started reports
// whether it did.
func (g *Guest) Ensure(ctx context.Context) (started bool, err error) {
	if rundir.Answers(g.Socket()) {
		return false, nil
	}
	binary, err := g.find()
	if err != nil {
		return false, err
	}
	logPath := filepath.Join(g.Dir, "gpuguest.log")
	out, err := os.OpenFile(logPath, os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600) // read, too: gpuguest bounds it
	if err != nil {
		return false, fmt.Errorf("gpuguest: log: %w", err)
	}
	defer out.Close()
	args := []string{"serve", "--socket", g.Socket(), "--app-socket", g.AppSocket(), "--rundir", filepath.Join(g.Dir, "guest")}
	if g.Users != "" {
		args = append(args, "--executor-users", g.Users)
	}
	if g.Memory != "" {
		args = append(args, "--executor-memory", g.Memory)
	}
	if g.CompileAnew {
		args = append(args, "--compile-anew")
	}
	if g.RDMA {
		args = append(args, "--rdma")
		if g.LendAt != "" {
			args = append(args, "--rdma-lend", g.LendAt)
		}
	}
	if s := g.Sharing; s != (turn.Settings{}) {
		args = append(args, "--sharing-policy", s.Policy, "--sharing-wait-charge", strconv.Itoa(s.WaitCharge), "--sharing-limit", s.Limit, "--sharing-end-after", s.EndAfter)
	}
	if os.Geteuid() == 0 {
		// Executors reach their own folders through this one. Older versions of hostd
		// made it without that permission.
		if info, err := os.Stat(g.Dir); err == nil && info.Mode().Perm()&0o001 == 0 {
			err = os.Chmod(g.Dir, info.Mode().Perm()|0o001)
			if err != nil {
				return false, fmt.Errorf("gpuguest: %w", err)
			}
		}
	}
	cmd := exec.Command(binary, args...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Env = guestEnv(os.Environ())
	cmd.Dir = "/"
	// A new session (setsid(2)): gpuguest goes on when hostd's terminal is closed.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return false, fmt.Errorf("gpuguest: %w", err)
	}
	g.Log.Info("gpuguest started", "pid", cmd.Process.Pid, "path", binary)
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }() // also reaps the process, whenever it ends
	deadline := time.After(guestStart)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if rundir.Answers(g.Socket()) {
				return true, nil
			}
		case err := <-exited:
			return false, fmt.Errorf("gpuguest ended at its start: %w%s", errors.Join(err), tail(logPath))
		case <-deadline:
			_ = cmd.Process.Kill()
			return false, fmt.Errorf("gpuguest did not answer on %s within %v%s", g.Socket(), guestStart, tail(logPath))
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
}

// Keep starts gpuguest again whenever it has ended, until ctx ends. It calls restarted
// after each start.
func (g *Guest) Keep(ctx context.Context, restarted func(context.Context)) {
	for ctx.Err() == nil {
		started, err := g.Ensure(ctx)
		switch {
		case err != nil && ctx.Err() == nil:
			g.Log.Error("gpuguest is not running", "err", err)
			_ = wait.For(ctx, guestRetry)
		case started:
			g.Log.Warn("gpuguest was gone")
			restarted(ctx)
		}
		_ = wait.For(ctx, guestCheck)
	}
}

// Stop ends gpuguest: first it asks, then it kills.
func (g *Guest) Stop() error {
	peer, err := unixrpc.PeerOf(g.Socket())
	if err != nil {
		if !rundir.Answers(g.Socket()) {
			return nil // it is gone already
		}
		return fmt.Errorf("gpuguest: %w", err)
	}
	process, err := os.FindProcess(int(peer.PID))
	if err != nil {
		return fmt.Errorf("gpuguest: %w", err)
	}
	for _, signal := range []os.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		if err := process.Signal(signal); err != nil {
			if errors.Is(err, os.ErrProcessDone) {
				return nil
			}
			return fmt.Errorf("gpuguest: %w", err)
		}
		for end := time.Now().Add(guestStop); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			if !rundir.Answers(g.Socket()) && process.Signal(syscall.Signal(0)) != nil {
				return nil //nolint:nilerr // an error of the probe is what we wait for
			}
		}
		g.Log.Warn("gpuguest does not end", "pid", peer.PID, "signal", signal)
	}
	return fmt.Errorf("gpuguest (process %d) does not end", peer.PID)
}

func (g *Guest) find() (string, error) {
	if g.Binary != "" {
		return g.Binary, nil
	}
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), guestBinary)
		if info, err := os.Stat(beside); err == nil && info.Mode()&0o111 != 0 {
			return beside, nil
		}
	}
	path, err := exec.LookPath(guestBinary)
	if err != nil {
		return "", fmt.Errorf("%s is neither beside hostd nor in PATH: install it, or name it with --gpuguest", guestBinary)
	}
	return path, nil
}

// guestEnv removes the variables that would make a vendor's library, or an executor that
// uses OpenCL, load gpuctl's own library.
func guestEnv(env []string) []string {
	var out []string
	for _, v := range env {
		name, _, _ := strings.Cut(v, "=")
		switch name {
		case "GPUCTL_SOCKET", "GPUCTL_TOKEN", "OCL_ICD_VENDORS", "OCL_ICD_FILENAMES", "OPENCL_VENDOR_PATH":
		default:
			out = append(out, v)
		}
	}
	return out
}

// tail returns the end of a log, for an error message.
func tail(path string) string {
	data, err := os.ReadFile(path)
	if err != nil || len(data) == 0 {
		return ""
	}
	return ":\n" + strings.TrimSpace(string(data[max(0, len(data)-maxLogTail):]))
}
