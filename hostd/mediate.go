package hostd

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpuctl/gpuctl/hostd/cards/platform"
	"github.com/gpuctl/gpuctl/hostd/mediated"
	"github.com/gpuctl/gpuctl/hostd/sessions"
	"github.com/gpuctl/gpuctl/internal/durable"
	"github.com/gpuctl/gpuctl/internal/hook/wire"
	"github.com/gpuctl/gpuctl/mmio/server"
)

// domains asks Xen for the domains of VMs.
type domains struct{ p *platform.Platform }

func (d domains) Of(ctx context.Context) (map[string]mediated.Domain, error) {
	all, err := d.p.Domains(ctx)
	out := make(map[string]mediated.Domain, len(all))
	for uuid, x := range all {
		out[uuid] = mediated.Domain(x)
	}
	return out, err
}

// errNoXen means that there are mediated GPUs in the configuration, and nobody could use
// them.
var errNoXen = errors.New("this host is no control domain of Xen, so no VM can have a part of it")

// mediate makes the keeper of the mediated GPUs in the configuration.
func (m *wiring) mediate(o Options, host *sessions.Host, dir string) (err error) {
	var gpus []mediated.GPU
	for _, g := range o.Config.MMIO.GPUs {
		model, err := g.Model()
		if err != nil {
			return err
		}
		gpus = append(gpus, mediated.GPU{Name: g.Name, Model: model})
	}
	program, err := os.Executable()
	if err != nil {
		return err
	}
	processes := &mediated.Processes{Program: program, Dir: filepath.Join(o.Dir, "mmio"), GPUs: gpus, Log: o.Log}
	m.mediated, err = mediated.New(mediated.Config{
		GPUs: gpus, File: filepath.Join(dir, "mediated.json"), Domains: domains{m.cards}, VMs: m.cards.Keeper.VMs, Cluster: m.node,
		Process: func(ctx context.Context, gpu string) (mediated.Process, error) {
			if !m.cards.Xen() {
				return nil, errNoXen
			}
			return processes.Get(ctx, gpu)
		},
		List: func(have, arrive []string) error { // gpuctl-hook reads these when hostd does not run
			if len(have) == 0 && len(gpus) == 0 {
				return nil
			}
			lines := func(name string, uuids []string) error {
				return durable.Replace(filepath.Join(o.Dir, name), []byte(strings.Join(uuids, "\n")+"\n"), 0o600)
			}
			return errors.Join(lines(wire.PartsName, have), lines(wire.ArrivalsName, arrive))
		},
		Over: func(ctx context.Context, migration string) (over, here bool) {
			return host.Migrations.Over(ctx, migration)
		},
		Event: host.RecordCardEvent, Log: o.Log,
	})
	if err != nil {
		return err
	}
	host.Mediated = m.mediated
	m.cards.PrepareStart, m.cards.Arrived = m.mediated.PrepareStart, m.mediated.Arrived
	return nil
}

// statuses returns what is known of parts of mediated GPUs, for metrics.
func (m *wiring) statuses() map[string][]server.Status {
	if m.mediated == nil {
		return nil
	}
	return m.mediated.Statuses()
}
