package main

import (
	"context"
	"sync"

	"github.com/gpuctl/gpuctl/guest/service"
	"github.com/gpuctl/gpuctl/guest/session"
)

// serveHost runs gpuguest on a host until ctx is done. Running applications and their
// executors outlive it. ways makes connections of carriers.
func serveHost(ctx context.Context, cfg session.Config, api, apps string, ways func(context.Context) error) error {
	m, err := session.New(cfg) // from here on, m has the lock of the run folder
	if err != nil {
		return err
	}
	defer m.Close()
	driver, err := newDriverEngine(cfg.Dir, false, cfg.Whose, cfg.Logger)
	if err != nil {
		return err
	}
	defer driver.Close()
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		if err := ways(ctx); err != nil {
			cfg.Logger.Error("connections over RDMA", "err", err)
		}
	})
	return service.Serve(ctx, cfg.Logger, api, apps, m, m, driver)
}
