package session

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"
)

// Serve runs gpuguest's session manager until ctx is done. It serves GuestService on the
// unix socket api, and applications on the unix socket apps. Running applications and their
// executors outlive it.
func Serve(ctx context.Context, cfg Config, api, apps string) error {
	m, err := New(cfg) // from here on, m has the lock of the run folder
	if err != nil {
		return err
	}
	defer m.Close()
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
	mux.Handle(m.Handler())
	srv := &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: 10 * time.Second,
		// Operations in progress are rolled back when gpuguest gets the signal to end.
		BaseContext: func(net.Listener) context.Context { return m.ctx },
	}
	failed := make(chan error, 2)
	go func() { failed <- srv.Serve(apiListener) }()
	go func() { failed <- m.ServeApps(appListener) }()
	m.log.Info("serving", "api", api, "apps", apps, "sessions", len(m.list()))
	select {
	case <-ctx.Done():
		err = nil
	case err = <-failed:
		err = fmt.Errorf("serve: %w", err)
	}
	m.cancel()
	_ = appListener.Close()
	sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), quickTimeout)
	defer cancel()
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
