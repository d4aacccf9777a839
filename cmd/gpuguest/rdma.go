package main

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"

	"github.com/gpuctl/gpuctl/guest/fabric"
	"github.com/gpuctl/gpuctl/guest/session"
)

// newWays has the launcher's carriers connect over RDMA too, and carriers of other hosts come
// so to the addresses. The caller closes its Carriers.
func newWays(l *session.ExecLauncher, executors string, at []string, log *slog.Logger) (*fabric.Ways, error) {
	l.RDMA = filepath.Join(l.Dir, "rdma.sock")
	carriers, may, err := listenForCarriers(l.RDMA, executors)
	if err != nil {
		return nil, fmt.Errorf("connections over RDMA: %w", err)
	}
	at = slices.DeleteFunc(at, func(a string) bool { return a == "" })
	return fabric.New(fabric.Config{Carriers: carriers, May: may, At: at, Log: log}), nil
}
