package hostd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/net/netutil"

	"github.com/gpuctl/gpuctl/cluster/pki/throttle"
	"github.com/gpuctl/gpuctl/hostd/config"
	"github.com/gpuctl/gpuctl/hostd/telemetry/systemd"
	"github.com/gpuctl/gpuctl/internal/rundir"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
)

const shutdown = 5 * time.Second

// Most connections at a time.
const (
	connectionsOfUser = 64
	connections       = 1024
	scrapers          = 32 // on the port of the metrics
)

// Options has what Run needs to know.
type Options struct {
	Dir      string // run folder
	Data     string // folder of the membership in a cluster; empty: a cluster of this host alone, in memory
	Version  string // version of the program
	Socket   string // path of the API's socket
	Config   config.Config
	Private  bool   // ends gpuguest, with all sessions, when hostd ends
	Gpuguest string // path of gpuguest; empty: see Guest
	Root     fs.FS  // the host's root folder
	Log      *slog.Logger
}

// Run runs the daemon of a host until ctx ends.
func Run(ctx context.Context, o Options) (err error) {
	made, err := o.folders()
	if err != nil {
		return err
	}
	exec := o.Config.Executors
	guest := &Guest{Dir: o.Dir, Binary: o.Gpuguest, Users: exec.Users, Memory: exec.Memory, CompileAnew: exec.CompileAnew, Sharing: o.Config.Sharing.Settings, Log: o.Log}
	if c := o.Config.Cluster; o.Data != "" && c.RDMA { // hostd --dev has no other hosts
		guest.RDMA, guest.LendAt = true, c.LendAt()
	}
	if _, err := guest.Ensure(ctx); err != nil {
		return err
	}
	listener, err := listen(o, made)
	if err != nil {
		return err
	}
	defer listener.Close()
	work, stop := context.WithCancel(ctx)
	defer stop()
	wired, err := o.join(ctx, work, guest)
	if err != nil {
		return err
	}
	host := wired.host
	defer func() { err = errors.Join(err, wired.close()) }()
	var wg sync.WaitGroup
	failed := make(chan error, 4)
	watched, err := o.serveMetrics(wired, failed)
	if err != nil {
		return err
	}
	defer watched()
	notify := systemd.New(o.Log)
	wg.Go(func() { wired.metrics.Follow(work) })
	wg.Go(func() {
		if err := wired.runner.Run(work); err != nil {
			failed <- err
		}
	})
	wg.Go(func() { wired.mediated.Run(work) })
	wg.Go(func() { wired.platform.FollowDomains(work, wired.mediated.Kick) })
	wg.Go(func() { wired.migrations.Run(work) })
	wg.Go(func() { wired.borrow.Run(work) })
	wg.Go(func() { wired.serving.Run(work) })
	if wired.lend != nil {
		wg.Go(func() { wired.lend.Serve(work) })
	}
	wg.Go(func() { wired.sweep(work, o.Log) })
	wg.Go(func() { o.reload(work, wired, notify) })
	wg.Go(func() { notify.Watch(work, host.Alive) })
	server, limited := o.clients(wired, listener)
	wg.Go(func() {
		if err := server.Serve(limited); !errors.Is(err, http.ErrServerClosed) {
			failed <- fmt.Errorf("socket %s: %w", o.Socket, err)
		}
	})
	wg.Go(func() {
		guest.Keep(work, func(ctx context.Context) {
			if err := host.Resync(ctx); err != nil {
				o.Log.Warn("sessions not known", "err", err)
			}
			host.Reoffer(ctx)
		})
	})
	wg.Go(func() {
		if err := host.Start(work); err != nil {
			if work.Err() == nil {
				failed <- err
			}
			return
		}
		o.Log.Info("ready", "socket", o.Socket)
		notify.Ready("serving " + o.Socket)
		host.Watch(work)
	})
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	notify.Stopping("letting operations end")
	stop()
	host.Wait()
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdown)
	defer cancel()
	if server.Shutdown(closing) != nil {
		_ = server.Close()
	}
	wg.Wait()
	if n := host.Live(closing); n > 0 && !o.Private {
		o.Log.Info("gpuguest keeps running for its sessions", "sessions", n)
		return err
	}
	return errors.Join(err, guest.Stop())
}

// folders makes hostd's folders, and reports whether that of its socket is new.
func (o Options) folders() (made bool, err error) {
	if made, err = rundir.MakeNew(filepath.Dir(o.Socket)); err != nil {
		return made, err
	}
	if err := rundir.Make(o.Dir); err != nil {
		return made, err
	}
	if err := makeData(o.Data); err != nil {
		return made, err
	}
	if rundir.Answers(o.Socket) {
		return made, fmt.Errorf("socket %s: another hostd is using it", o.Socket)
	}
	return made, nil
}

// clients returns the server for clients of hostd's socket, and the listener with limits.
func (o Options) clients(wired *wiring, listener net.Listener) (*http.Server, net.Listener) {
	server := unixrpc.Server(wired.node.Handler(), func(p unixrpc.Peer) {
		o.Log.Debug("client connected", "pid", p.PID, "uid", p.UID)
	})
	peers := server.ConnContext
	server.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		return wired.node.ConnContext(peers(ctx, c), c)
	}
	quiet := throttle.New(10*time.Second, time.Now)
	limited := unixrpc.Limit(listener, uint32(os.Geteuid()), connectionsOfUser, connections, wired.users.Of, func(p unixrpc.Peer) {
		if skipped, ok := quiet.Allow(strconv.FormatUint(uint64(p.UID), 10)); ok {
			o.Log.Warn("connection refused: there are too many", "uid", p.UID, "pid", p.PID, "of_one_user", connectionsOfUser, "of_all", connections, "skipped", skipped)
		}
	})
	return server, limited
}

// serveMetrics serves metrics over HTTP, if an address is configured. end stops it.
func (o Options) serveMetrics(m *wiring, failed chan<- error) (end func(), err error) {
	address := o.Config.Metrics.Listen
	if address == "" {
		return func() {}, nil
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", m.metrics.Handler())
	// Anybody may call it, so requests are limited in size, time and number.
	server := &http.Server{
		Handler: mux, ReadHeaderTimeout: shutdown, ReadTimeout: shutdown, WriteTimeout: 30 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10,
	}
	l = netutil.LimitListener(l, scrapers)
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			failed <- fmt.Errorf("metrics: %w", err)
		}
	})
	return func() {
		_ = server.Close()
		wg.Wait()
	}, nil
}

// reload loads a new certificate from disk at each SIGHUP.
func (o Options) reload(ctx context.Context, m *wiring, notify *systemd.Notifier) {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	for {
		select {
		case <-ctx.Done():
			return
		case <-hup:
		}
		notify.Reloading()
		if err := m.node.Reload(); err != nil {
			o.Log.Error("certificate not reloaded", "err", err)
		}
		notify.Ready("serving " + o.Socket)
	}
}
