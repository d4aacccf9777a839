package mediated

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/gpuctl/gpuctl/internal/rundir"
	"github.com/gpuctl/gpuctl/mmio/server"
)

// Processes starts the processes that have GPUs. They go on when hostd ends.
type Processes struct {
	Program string // path of hostd
	Dir     string // folder of sockets and journals
	GPUs    []GPU
	Log     *slog.Logger

	mu sync.Mutex // held while one is started
}

const (
	startWithin = 15 * time.Second
	lookEvery   = 10 * time.Millisecond
)

// Get returns the process that has a GPU, and starts it if none has.
func (p *Processes) Get(ctx context.Context, gpu string) (Process, error) {
	c := server.Client{Socket: server.Socket(p.Dir, gpu)}
	if rundir.Answers(c.Socket) {
		return c, nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if rundir.Answers(c.Socket) {
		return c, nil
	}
	for _, g := range p.GPUs {
		if g.Name == gpu {
			return c, p.start(ctx, g, c.Socket)
		}
	}
	return nil, fmt.Errorf("mediated gpu %s: it is not in the configuration (mmio.gpus)", gpu)
}

func (p *Processes) start(ctx context.Context, g GPU, socket string) error {
	if err := os.MkdirAll(p.Dir, 0o700); err != nil {
		return fmt.Errorf("mediated gpu %s: %w", g.Name, err)
	}
	path := filepath.Join(p.Dir, g.Name+".log")
	out, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("mediated gpu %s: log: %w", g.Name, err)
	}
	defer out.Close()
	m := g.Model
	c := exec.Command(
		p.Program, "mmio-server", "--dir", p.Dir, "--gpu", g.Name, "--memory", strconv.FormatUint(m.Memory, 10),
		"--parts", strconv.Itoa(m.Parts), "--policy", string(m.Policy),
	)
	c.Stdout, c.Stderr, c.Dir = out, out, "/"
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := c.Start(); err != nil {
		return fmt.Errorf("mediated gpu %s: %w", g.Name, err)
	}
	p.Log.Info("process of a mediated gpu started", "gpu", g.Name, "pid", c.Process.Pid)
	exited := make(chan error, 1)
	go func() { exited <- c.Wait() }() // also reaps it, whenever it ends
	deadline := time.After(startWithin)
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if rundir.Answers(socket) {
				return nil
			}
		case err := <-exited:
			return fmt.Errorf("mediated gpu %s: its process ended at its start: %w; its log is %s", g.Name, errors.Join(err), path)
		case <-deadline:
			_ = c.Process.Kill()
			return fmt.Errorf("mediated gpu %s: its process does not answer within %v; its log is %s", g.Name, startWithin, path)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
