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
	apiListener, err := listen(api, apiMode)
	if err != nil {
		return err
	}
	defer apiListener.Close()
	appListener, err := listen(apps, appMode)
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

// listen listens on a unix socket. It replaces a socket that a dead process left.
func listen(path string, mode os.FileMode) (*net.UnixListener, error) {
	if conn, err := net.DialTimeout("unix", path, time.Second); err == nil {
		conn.Close()
		return nil, fmt.Errorf("socket %s is in use", path)
	}
	if fi, err := os.Lstat(path); err == nil {
		if fi.Mode()&os.ModeSocket == 0 {
			return nil, fmt.Errorf("%s is not a socket", path)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("stale socket: %w", err)
		}
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	if err := os.Chmod(path, mode); err != nil {
		l.Close()
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	return l, nil
}
