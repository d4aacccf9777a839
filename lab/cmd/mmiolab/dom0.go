package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"time"

	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/mediate"
	"github.com/gpuctl/gpuctl/mmio/server"
	"github.com/gpuctl/gpuctl/mmio/xen"
)

// null is a device that does nothing: what an exit costs at least.
type null struct{}

func (null) Read(mmio.Access) uint64 { return 0x6e756c6c }
func (null) Write(mmio.Access)       {}

func nullFunction() mmio.Function {
	return mmio.Function{Vendor: 0x1234, Device: 0x6e75, Class: 0xff0000, BARs: [mmio.MaxBARs]mmio.Window{0: {Size: 4096}}}
}

const (
	gpuName   = "lab"
	guestEnd  = 1 << 30
	partBytes = 4 << 20
	patience  = time.Minute
)

// serve gives each domain a part of a GPU and a function that does nothing. It says when
// it is ready, and at its end what was counted.
func serve(ctx context.Context, dir string, domains []string) (err error) {
	hv, err := xen.OpenLinux("/dev/xen")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, hv.Close()) }()
	m := server.Model{Memory: 4 * partBytes, Parts: 4, Policy: timeshare.Fair}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	gpu, err := server.NewGPU(m, func(e mediate.Event) { log.Info("mediated", "what", e.String()) })
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	s := &server.Server{Dir: dir, Name: gpuName, Model: m, GPU: gpu, Xen: hv, Log: log}
	// It ends after this function has taken everything back.
	life, end := context.WithCancel(context.Background())
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- s.Run(life, func() { close(ready) }) }()
	select {
	case <-ready:
	case err := <-ended:
		end()
		return err
	}
	defer func() {
		end()
		<-ended
	}()
	client := server.Client{Socket: server.Socket(dir, gpuName)}
	for _, d := range domains {
		n, err := strconv.ParseUint(d, 10, 15)
		if err != nil {
			return err
		}
		p := server.Part{ID: d, Name: "domain " + d, Domain: uint16(n), Slot: slotMediated, Memory: partBytes, Guest: guestEnd}
		if err := client.Attach(ctx, p); err != nil {
			return err
		}
		stop, err := serveNull(hv, uint16(n))
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, stop()) }()
	}
	fmt.Println("ready") //nolint:forbidigo // a program of the lab
	<-ctx.Done()
	late, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	all, err := client.List(late)
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(all)
	}
	for _, d := range domains {
		err = errors.Join(err, client.Detach(late, d))
	}
	return err
}

// serveNull gives a domain the function that does nothing.
func serveNull(hv xen.Hypervisor, domain uint16) (stop func() error, err error) {
	x, err := xen.Create(hv, xen.Config{Domain: domain, Slot: slotNull, Function: nullFunction(), Memory: guestEnd})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = x.Serve(ctx, null{})
	}()
	return func() error {
		cancel()
		<-ended
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		return x.Destroy(ctx)
	}, nil
}
