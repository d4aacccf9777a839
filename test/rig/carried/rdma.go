package main

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"

	"github.com/gpuctl/gpuctl/guest/fabric"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/session"
	"github.com/gpuctl/gpuctl/internal/rdma"
	"github.com/gpuctl/gpuctl/internal/rundir"
)

// overRDMA has carriers connect over RDMA only, and returns the address for that. What comes is
// passed on to a port. GPUCTL_TEST_RDMA is the IP address of a device; without one, the C
// library's sockets stand in for rsockets.
func overRDMA(ctx context.Context, l *session.ExecLauncher, port string, log *slog.Logger) (address string, err error) {
	ip, open := os.Getenv("GPUCTL_TEST_RDMA"), rdma.Open
	if ip == "" {
		ip, open = "127.0.0.1", func() (*rdma.Library, error) { return rdma.Load("libc.so.6", "") }
	}
	lib, err := open()
	if err != nil {
		return "", err
	}
	s, err := lib.Listen(ctx, net.JoinHostPort(ip, "0"))
	if err != nil {
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
			Carriers: carriers, May: func(uint32) bool { return true }, Open: func() (*rdma.Library, error) { return lib, nil }, Log: log,
		}).Serve(ctx)
	}()
	return remote.RDMAPrefix + s.Addr().String(), nil
}
