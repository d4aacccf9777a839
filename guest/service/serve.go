package service

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/gpuctl/gpuctl/internal/rundir"
)

// Time limits of the server.
const (
	headerTimeout = 10 * time.Second
	stopTimeout   = 30 * time.Second // for calls that go on when gpuguest is told to end
)

// Apps is what applications connect to.
type Apps interface {
	ServeApps(l *net.UnixListener) error
}

// Serve runs gpuguest on a host until ctx is done. It serves GuestService on the unix
// socket api, and applications on the unix socket apps.
func Serve(ctx context.Context, log *slog.Logger, api, apps string, to Apps, engines ...Engine) error {
	// The end of ctx ends all calls: operations in progress are rolled back.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	apiMode, appMode := os.FileMode(0o600), os.FileMode(0o600)
	if os.Getuid() == 0 {
		appMode = 0o666 // applications of any user; their tokens identify them
	}
	apiListener, err := rundir.ListenMode(api, apiMode)
	if err != nil {
		return err
	}
	defer apiListener.Close()
	appListener, err := rundir.ListenMode(apps, appMode)
	if err != nil {
		return err
	}
	defer appListener.Close()

	mux := http.NewServeMux()
	mux.Handle(Handler(engines...))
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: headerTimeout, BaseContext: func(net.Listener) context.Context { return ctx }}
	failed := make(chan error, 2)
	go func() { failed <- srv.Serve(apiListener) }()
	go func() { failed <- to.ServeApps(appListener) }()
	log.Info("serving", "api", api, "apps", apps)
	select {
	case <-ctx.Done():
		err = nil
	case err = <-failed:
		err = fmt.Errorf("serve: %w", err)
	}
	cancel()
	_ = appListener.Close()
	sctx, end := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer end()
	if serr := srv.Shutdown(sctx); serr != nil && !errors.Is(serr, context.DeadlineExceeded) {
		err = errors.Join(err, serr)
	}
	return err
}
