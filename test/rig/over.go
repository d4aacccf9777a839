package rig

import (
	"context"
	"net"
	"path/filepath"

	"github.com/gpuctl/gpuctl/guest/handover"
	"github.com/gpuctl/gpuctl/guest/lease"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/test/lossy"
)

// StartOver starts a rig whose carriers reach their GPUs over a link: hostd and all that it
// starts are at its near end, and the far executors' connections end at the other, until ctx
// ends.
func StartOver(ctx context.Context, l *lossy.Link, o Options) (*Rig, error) {
	ln, err := l.Listen()
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { ln.Close() })
	go handOver(ctx, ln, filepath.Join(o.Dir, "guest", lease.SocketName))
	o.Env = append(o.Env, "GPUCTL_TEST_CARRIER_AT="+ln.Addr().String())
	var r *Rig
	l.InNear(func() { r, err = Start(ctx, o) })
	return r, err
}

// handOver takes carriers' connections and gives them to gpuguest, as hostd does.
func handOver(ctx context.Context, ln net.Listener, socket string) {
	for {
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			p, err := remote.ReadPreamble(conn)
			if err != nil {
				return
			}
			tcp, _ := conn.(*net.TCPConn)
			f, err := tcp.File()
			if err != nil {
				return
			}
			defer f.Close()
			c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
			if err == nil {
				_ = handover.Give(ctx, c, lease.HandName(p), f)
			}
		}()
	}
}
