package main

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/gpuctl/gpuctl/guest/fabric"
	"github.com/gpuctl/gpuctl/guest/fabric/fabrictest"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/session"
	"github.com/gpuctl/gpuctl/internal/rundir"
)

// overRDMA has carriers connect as over RDMA only, with TCP in its place, and returns the address
// for that. What comes is passed on to a port.
func overRDMA(ctx context.Context, l *session.ExecLauncher, port string, log *slog.Logger) (address string, err error) {
	file := filepath.Join(l.Dir, "rdma-port")
	s, at, err := fabrictest.TCP{}.Listen(ctx, sameAs(file))
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(file, []byte(at.String()), 0o600); err != nil {
		return "", err
	}
	l.RDMA = filepath.Join(l.Dir, "rdma.sock")
	carriers, err := rundir.ListenMode(l.RDMA, 0o666)
	if err != nil {
		return "", err
	}
	go fabric.Pass(ctx, s, port, log)
	go func() {
		_ = fabric.New(fabric.Config{
			Carriers: carriers, May: func(uint32) bool { return true }, Open: func() (fabric.Network, error) { return fabrictest.TCP{}, nil }, Log: log,
		}).Serve(ctx)
	}()
	return remote.RDMAPrefix + at.String(), nil
}
