package hostd

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpuctl/gpuctl/hostd/cards/platform"
	"github.com/gpuctl/gpuctl/hostd/mediated"
	"github.com/gpuctl/gpuctl/internal/durable"
	"github.com/gpuctl/gpuctl/internal/hook/wire"
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
func (m *wiring) mediate(o Options) (*mediated.Keeper, error) {
	var gpus []mediated.GPU
	for _, g := range o.Config.MMIO.GPUs {
		model, err := g.Model()
		if err != nil {
			return nil, err
		}
		gpus = append(gpus, mediated.GPU{Name: g.Name, Model: model})
	}
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	processes := &mediated.Processes{Program: program, Dir: filepath.Join(o.Dir, "mmio"), GPUs: gpus, Log: o.Log}
	return mediated.New(mediated.Config{
		GPUs: gpus, File: filepath.Join(o.records(), "mediated.json"), Domains: domains{m.platform}, VMs: m.platform.Cards.VMs, Cluster: m.node,
		Process: func(ctx context.Context, gpu string) (mediated.Process, error) {
			if !m.platform.Xen() {
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
		Over: m.records.Over, Settled: &m.partsSettled, Event: m.node.NoteGPU, Log: o.Log,
	})
}
