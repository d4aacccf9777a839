package main

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"

	"github.com/gpuctl/gpuctl/guest/fabric"
	"github.com/gpuctl/gpuctl/guest/session"
)

// overRDMA has the launcher's carriers connect over RDMA too, and carriers of other hosts come
// so to the addresses, if that is wanted: while serve runs, until end.
func overRDMA(wanted bool, l *session.ExecLauncher, executors string, at []string, log *slog.Logger) (serve func(context.Context) error, end func(), err error) {
	if !wanted {
		return func(context.Context) error { return nil }, func() {}, nil
	}
	l.RDMA = filepath.Join(l.Dir, "rdma.sock")
	carriers, may, err := listenForCarriers(l.RDMA, executors)
	if err != nil {
		return nil, nil, fmt.Errorf("connections over RDMA: %w", err)
	}
	at = slices.DeleteFunc(at, func(a string) bool { return a == "" })
	w := fabric.New(fabric.Config{Carriers: carriers, May: may, At: at, Log: log})
	return w.Serve, func() { _ = carriers.Close() }, nil
}
