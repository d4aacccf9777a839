package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/confine"
	"github.com/gpuctl/gpuctl/guest/service"
	"github.com/gpuctl/gpuctl/guest/session"
	"github.com/gpuctl/gpuctl/guest/vm/agent"
	"github.com/gpuctl/gpuctl/guest/vm/channel"
	"github.com/gpuctl/gpuctl/guest/vm/profile"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/relay"
	"github.com/gpuctl/gpuctl/internal/rundir"
	"github.com/gpuctl/gpuctl/internal/subid"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
	"github.com/gpuctl/gpuctl/passthrough/bind"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
	"github.com/gpuctl/gpuctl/passthrough/uevent"
)

const (
	apiSocket   = "guest.sock"
	relaySocket = "relay.sock"
	endTime     = 10 * time.Second
)

// profiles returns the built-in profiles and those of the configured folder.
func (o vmOptions) profiles() (*profile.Set, error) {
	extra, err := profile.ReadDir(os.DirFS("/"), o.Profiles[1:])
	if err != nil {
		return nil, err
	}
	return profile.Load(profile.Options{Emulated: o.Emulated, Extra: extra})
}

// launcher makes the run folder, and what starts executors in it.
func (o vmOptions) launcher(log *slog.Logger) (*session.ExecLauncher, error) {
	if o.User != "" {
		log.Warn("executorUser is not used any more: each session has a user of its own, out of executorUsers")
	}
	if err := os.MkdirAll(o.RunDir, 0o755); err != nil {
		return nil, fmt.Errorf("run folder: %w", err)
	}
	l, err := newLauncher(o.RunDir, filepath.Join(o.RunDir, "users"), o.Users, o.Memory, log)
	if err != nil {
		return nil, err
	}
	l.Relay = filepath.Join(l.Dir, relaySocket)
	return l, nil
}

// listenForCarriers opens a socket at which carriers have connections made for them, and
// returns who may: root, this user and those of executors.
func listenForCarriers(path, executors string) (l *net.UnixListener, may func(uid uint32) bool, err error) {
	users, err := confine.ParseRange(executors)
	if err != nil {
		return nil, nil, err
	}
	if l, err = rundir.ListenMode(path, 0o666); err != nil {
		return nil, nil, err
	}
	own := uint32(os.Geteuid())
	return l, func(uid uint32) bool {
		return uid == 0 || uid == own || uid >= users.First && uid <= users.Last
	}, nil
}

// serveVM runs gpuguest in a VM. root is the folder with the VM's files: /, except in
// tests.
func serveVM(ctx context.Context, o vmOptions, root string, log *slog.Logger) error {
	profiles, err := o.profiles()
	if err != nil {
		return err
	}
	launcher, err := o.launcher(log)
	if err != nil {
		return err
	}
	var a *agent.Agent // made below, before applications and hosts are accepted
	leases, err := newLeases(o, launcher, func() *agent.Agent { return a }, log)
	if err != nil {
		return err
	}
	defer leases.Close()
	users := subid.New(subid.File)
	m, err := session.New(session.Config{
		Dir: o.RunDir, Launcher: launcher, Logger: log, Faults: os.Getenv("GPUCTL_FAULTS") == "1", Verify: os.Getenv("GPUCTL_VERIFY") == "1", MaxSessions: o.MaxSessions, CompileAnew: o.CompileAnew,
		Sharing: o.Sharing, Whose: users.Of, Lender: leases.forHost(), Lease: func(ctx context.Context, session string, offer *gpuctlv1.OfferRequest) (*gpuctlv1.Target, error) {
			return a.Lease(ctx, session, offer)
		},
	})
	if err != nil {
		return err
	}
	defer m.Close()
	driver, err := newDriverEngine(o.RunDir, true, users.Of, log)
	if err != nil {
		return err
	}
	defer driver.Close()
	apps, aerr := listenApps(o)
	api := filepath.Join(o.RunDir, apiSocket)
	host, herr := rundir.Listen(api)
	carriers, may, rerr := listenForCarriers(launcher.Relay, o.Users)
	if err := errors.Join(aerr, herr, rerr); err != nil {
		return err
	}
	defer apps.Close()
	defer host.Close()
	defer carriers.Close()
	outside := relay.NewGuest(may, log)
	rdma, endRDMA, err := overRDMA(o.RDMA, launcher, o.Users, []string{o.Lend}, log)
	if err != nil {
		return err
	}
	defer endRDMA()

	// The end of ctx ends all servers and their calls: operations roll back.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	events, stopEvents := kernelEvents(ctx, root, log)
	defer stopEvents()
	gate := agent.NewGate(apps, m.ServeApps, o.wait, log)
	machine := sysfs.Dir(root)
	client := unixrpc.Client(api)
	defer client.CloseIdleConnections()
	mux := http.NewServeMux()
	ways := newBulk(ctx, filepath.Join(root, "dev/xen/xenbus"), mux, log)
	defer ways.Close()
	a, err = agent.New(agent.Config{
		Root: machine, Dir: o.RunDir, Profiles: profiles, Prober: launcher, Version: cmdutil.Version(),
		Sessions: &agent.GuestSessions{Client: gpuctlv1connect.NewGuestServiceClient(client, "http://gpuguest"), RunDir: o.RunDir},
		Users:    usersOf(machine), Events: events, Ready: gate.Set, Bulk: ways.opener(), Logger: log, Driver: driver, Lender: leases.forAgent(), Relay: outside,
		Services: &units{machine: machine, binder: bind.New(machine, nil, bind.WithBootVGA()), may: o.Services},
	})
	if err != nil {
		return err
	}
	mux.Handle(service.Handler(m, driver))
	mux.Handle(a.Handler())
	mux.Handle(relay.Path, outside)
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: endTime, BaseContext: func(net.Listener) context.Context { return ctx }}
	port := channel.Port{Root: root, Name: o.Channel}

	failed := make(chan error, 6)
	var wg sync.WaitGroup
	start := func(what string, f func() error) {
		wg.Go(func() {
			if err := f(); err != nil && !errors.Is(err, http.ErrServerClosed) {
				failed <- fmt.Errorf("%s: %w", what, err)
			}
		})
	}
	start("sessions' socket", func() error { return srv.Serve(host) })
	start("applications", func() error { return gate.Run(ctx) })
	start("carriers", func() error { return outside.Serve(ctx, carriers) })
	start("connections over RDMA", func() error { return rdma(ctx) })
	start("devices", func() error { return a.Run(ctx) })
	start("channel", func() error { return channel.Serve(ctx, port.Open, mux, channel.WithLogger(log)) })
	log.Info("serving the VM", "apps", o.AppSocket, "api", api, "channel", o.Channel)
	_, _ = daemon.SdNotify(false, daemon.SdNotifyReady)

	err = untilEnd(ctx, cancel, failed, srv)
	wg.Wait()
	return err
}

// untilEnd waits until ctx ends or something has failed, and then ends the server.
func untilEnd(ctx context.Context, cancel func(), failed <-chan error, srv *http.Server) (err error) {
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	_, _ = daemon.SdNotify(false, daemon.SdNotifyStopping)
	cancel()
	sctx, end := context.WithTimeout(context.WithoutCancel(ctx), endTime)
	defer end()
	if serr := srv.Shutdown(sctx); serr != nil {
		_ = srv.Close()
	}
	return err
}

// listenApps opens the socket of the VM's applications.
func listenApps(o vmOptions) (*net.UnixListener, error) {
	u, err := rundir.Listen(o.AppSocket) // for its owner alone, until its group and mode are set
	if err != nil {
		return nil, err
	}
	if o.AppGroup != "" {
		gid, err := lookupGroup(o.AppGroup)
		if err == nil {
			err = os.Chown(o.AppSocket, -1, gid)
		}
		if err != nil {
			u.Close()
			return nil, fmt.Errorf("appGroup: %w", err)
		}
	}
	if err := os.Chmod(o.AppSocket, o.mode); err != nil {
		u.Close()
		return nil, fmt.Errorf("appMode: %w", err)
	}
	return u, nil
}

func lookupGroup(name string) (int, error) {
	g, err := user.LookupGroup(name)
	if err != nil {
		if byID, iderr := user.LookupGroupId(name); iderr == nil {
			g, err = byID, nil
		}
	}
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(g.Gid)
}

// usersOf returns a function that lists who has functions open, apart from sessions.
func usersOf(machine sysfs.Root) func(context.Context, []pci.Address) ([]string, error) {
	b := bind.New(machine, nil, bind.WithBootVGA())
	return func(ctx context.Context, functions []pci.Address) ([]string, error) {
		users, err := b.Users(ctx, functions)
		var words []string
		for _, u := range users {
			words = append(words, u.String())
		}
		return words, err
	}
}

// kernelEvents returns the kernel's events about devices. It returns nil if there are none,
// or if root is not the real root; then the agent looks for devices itself.
func kernelEvents(ctx context.Context, root string, log *slog.Logger) (<-chan agent.Event, func()) {
	if root != "/" {
		return nil, func() {}
	}
	l, err := uevent.Listen()
	if err != nil {
		log.Warn("the kernel's events are not heard; devices are looked for every other second", "err", err)
		return nil, func() {}
	}
	out := make(chan agent.Event)
	over := make(chan struct{})
	go func() {
		defer close(over)
		for {
			e, err := l.Next(ctx)
			if err != nil {
				if ctx.Err() == nil {
					log.Warn("the kernel's events", "err", err)
				}
				return
			}
			select {
			case out <- agent.Event{Address: e.Address, Gone: e.Action == uevent.Remove}:
			case <-ctx.Done():
				return
			}
		}
	}()
	return out, func() {
		_ = l.Close()
		<-over
	}
}
