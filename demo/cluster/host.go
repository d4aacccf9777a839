package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/gpuctl/gpuctl/internal/rundir"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
)

// host is one hostd in its namespace.
type host struct {
	name, space, bin, dir string
	cmd                   *exec.Cmd
	ended                 chan error
}

const hostConfig = `version: 1
discover: false
cluster: {host: %s, listen: "%s:7650"}
`

// What a host may have.
const (
	smallGPU = `gpus:
  - id: small
    runtime: pocl
    env: {POCL_DEVICES: pthread, POCL_MAX_PTHREAD_COUNT: "1", POCL_MEMORY_LIMIT: "1"}
    model: Small 1 GiB
`
	bothGPUs = smallGPU + `  - id: large
    runtime: pocl
    env: {POCL_DEVICES: pthread, POCL_MEMORY_LIMIT: "4"}
    model: Large 4 GiB
models:
  - {name: Large 4 GiB, rank: 2}
  - {name: Small 1 GiB, rank: 1}
`
)

func newHost(gpus, name, space, address, bin, dir string) (*host, error) {
	h := &host{name: name, space: space, bin: bin, dir: dir}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	return h, os.WriteFile(h.path("hostd.yaml"), fmt.Appendf(nil, hostConfig+gpus, name, address), 0o600)
}

func (h *host) path(name string) string { return filepath.Join(h.dir, name) }
func (h *host) socket() string          { return h.path("hostd.sock") }

// startPatience is for hostd and gpuguest, which load the runtimes: seconds, and more where
// much else runs.
const startPatience = 3 * time.Minute

// start returns when the host answers.
func (h *host) start(ctx context.Context) error {
	log, err := os.OpenFile(h.path("hostd.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	h.cmd = exec.Command("ip", "netns", "exec", h.space, filepath.Join(h.bin, "hostd"),
		"--config", h.path("hostd.yaml"), "--rundir", h.dir, "--data-dir", h.path("data"))
	h.cmd.Stdout, h.cmd.Stderr = log, log
	h.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := h.cmd.Start(); err != nil {
		return fmt.Errorf("hostd of %s: %w", h.name, err)
	}
	h.ended = make(chan error, 1)
	go func(cmd *exec.Cmd, ended chan error) { ended <- cmd.Wait() }(h.cmd, h.ended)
	for end := time.Now().Add(startPatience); time.Now().Before(end); {
		select {
		case err := <-h.ended:
			text, _ := os.ReadFile(h.path("hostd.log"))
			return fmt.Errorf("hostd of %s ended (%w):\n%s", h.name, errors.Join(err), text)
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
		if rundir.Answers(h.socket()) {
			return nil
		}
	}
	return fmt.Errorf("hostd of %s does not answer after %v; its log is %s", h.name, startPatience, h.path("hostd.log"))
}

// kill ends hostd as a crash does. Its gpuguest and sessions go on.
func (h *host) kill() error {
	if err := h.cmd.Process.Kill(); err != nil {
		return fmt.Errorf("kill hostd of %s: %w", h.name, err)
	}
	<-h.ended
	return nil
}

// stop ends hostd and what it left running.
func (h *host) stop() error {
	if h.cmd != nil {
		_ = h.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-h.ended:
		case <-time.After(10 * time.Second):
			_ = h.cmd.Process.Kill()
		}
	}
	peer, err := unixrpc.PeerOf(h.path("guest.sock"))
	if err != nil {
		return nil //nolint:nilerr // gpuguest is gone already
	}
	return syscall.Kill(int(peer.PID), syscall.SIGTERM)
}

// command is gpuctl on this host.
func (h *host) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(h.bin, "gpuctl"), append([]string{"--host", "unix://" + h.socket()}, args...)...)
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// gpuctl returns what it prints.
func (h *host) gpuctl(ctx context.Context, args ...string) (string, error) {
	cmd := h.command(ctx, args...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return string(out), fmt.Errorf("gpuctl %s on %s: %w: %s", strings.Join(args, " "), h.name, err, strings.TrimSpace(stderr.String()))
	}
	return string(out), nil
}
