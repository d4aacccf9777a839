package inventory

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/config"
	"github.com/gpuctl/gpuctl/internal/size"
	"github.com/gpuctl/gpuctl/internal/suggest"
)

const (
	probeTimeout = 30 * time.Second
	probesAtOnce = 2
	maxDevices   = 64                  // most devices of one runtime
	poclMemory   = "POCL_MEMORY_LIMIT" // PoCL's environment variable for its memory, in GiB
)

// Prober loads a runtime in another process, and returns the runtime's devices.
type Prober interface {
	Probe(ctx context.Context, runtime *gpuctlv1.Runtime) (*gpuctlv1.ProbeResponse, error)
}

// source is one runtime with an environment, and the configuration that declares it.
type source struct {
	lib      Library
	runtime  *gpuctlv1.Runtime
	declared *config.GPU // nil: it was discovered
}

// Discover returns the host's GPUs, sorted by id, and a warning for each runtime or
// declared GPU that cannot be used. names are those that cards have already, by their
// addresses: a runtime counts only the cards that are bound to its driver, so its numbers
// change when a VM has one. It returns an error only if ctx has ended.
func Discover(ctx context.Context, root fs.FS, c config.Config, names map[string]string, prober Prober) ([]*gpuctlv1.GPU, []string, error) {
	sources, warnings := plan(root, c)
	answers := make([]*gpuctlv1.ProbeResponse, len(sources))
	failures := make([]error, len(sources))
	slots := make(chan struct{}, probesAtOnce)
	var wg sync.WaitGroup
	for i, s := range sources {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			ctx, cancel := context.WithTimeout(ctx, probeTimeout)
			defer cancel()
			answers[i], failures[i] = prober.Probe(ctx, s.runtime)
			if offered, limited := s.belowLimit(answers[i]); limited && !s.operators() {
				// While less memory is free than its limit, PoCL offers only the free
				// memory. Half of that stays available.
				s.runtime.Env[poclMemory] = strconv.FormatUint(max(1, offered/size.GiB/2), 10)
				answers[i], failures[i] = prober.Probe(ctx, s.runtime)
			}
		})
	}
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	var gpus []*gpuctlv1.GPU
	taken := map[string]bool{}
	for _, g := range c.GPUs { // ids in the configuration are never changed
		taken[g.ID] = true
	}
	kept := map[string]string{}
	for address, id := range names {
		if !taken[id] {
			kept[address], taken[id] = id, true
		}
	}
	for i, s := range sources {
		what := "runtime " + s.lib.Path
		if s.declared != nil {
			what = "gpu " + s.declared.ID
		}
		if failures[i] != nil {
			warnings = append(warnings, fmt.Sprintf("%s: %v", what, failures[i]))
			continue
		}
		if offered, limited := s.belowLimit(answers[i]); limited {
			warnings = append(warnings, fmt.Sprintf("%s: PoCL offers %s, less than %s=%s GiB, and follows the free memory from there: lower the limit to keep the GPU's size fixed",
				what, size.Format(offered), poclMemory, s.runtime.GetEnv()[poclMemory]))
		}
		found, err := s.gpus(answers[i], taken, kept)
		if err != nil {
			warnings = append(warnings, fmt.Sprintf("%s: %v", what, err))
		}
		gpus = append(gpus, found...)
	}
	gpus, doubles := dropDoubles(gpus)
	warnings = append(warnings, doubles...)
	tellModelsApart(gpus)
	Rank(gpus, c.Models)
	slices.SortFunc(gpus, func(a, b *gpuctlv1.GPU) int { return strings.Compare(a.Id, b.Id) })
	return gpus, warnings, nil
}

func plan(root fs.FS, c config.Config) (sources []source, warnings []string) {
	limit := poclLimit(root)
	libs := Libraries(root, c.VendorDirs)
	for i := range c.GPUs {
		g := &c.GPUs[i]
		lib := Library{Path: g.Library}
		if g.Runtime != "" {
			at := slices.IndexFunc(libs, func(l Library) bool { return l.Runtime == g.Runtime })
			if at < 0 {
				var names []string
				for _, l := range libs {
					names = append(names, l.Runtime)
				}
				warnings = append(warnings, fmt.Sprintf("gpu %s: no runtime %q on this machine%s; install it or name its library", g.ID, g.Runtime, suggest.Hint(g.Runtime, names)))
				continue
			}
			lib = libs[at]
		} else {
			lib.Path = resolve(root, g.Library)
			lib.Runtime = runtimeName(lib.Path[strings.LastIndex(lib.Path, "/")+1:])
		}
		sources = append(sources, source{lib, newRuntime(lib, g.Env, limit), g})
	}
	if c.Discover {
		for _, lib := range libs {
			sources = append(sources, source{lib, newRuntime(lib, nil, limit), nil})
		}
	}
	return sources, warnings
}

func newRuntime(lib Library, env map[string]string, limit string) *gpuctlv1.Runtime {
	env = maps.Clone(env)
	if env == nil {
		env = map[string]string{}
	}
	if _, ok := env[poclMemory]; !ok && lib.Runtime == "pocl" {
		env[poclMemory] = limit
	}
	return &gpuctlv1.Runtime{Library: lib.Path, Env: env}
}

// operators reports whether the operator has set the limit of PoCL's memory.
func (s source) operators() bool {
	if s.declared == nil {
		return false
	}
	_, set := s.declared.Env[poclMemory]
	return set
}

// belowLimit reports whether PoCL offers less memory than its limit, and how many bytes
// it offers.
func (s source) belowLimit(answer *gpuctlv1.ProbeResponse) (offered uint64, limited bool) {
	limit, err := strconv.ParseUint(s.runtime.GetEnv()[poclMemory], 10, 32)
	if s.lib.Runtime != "pocl" || err != nil || len(answer.GetDevices()) == 0 {
		return 0, false
	}
	offered = answer.GetDevices()[0].GetLimits().GetGlobalMemory()
	return offered, offered < limit*size.GiB
}

// gpus returns the GPUs of a runtime's answer. The error contains those that cannot be
// used.
func (s source) gpus(answer *gpuctlv1.ProbeResponse, taken map[string]bool, kept map[string]string) ([]*gpuctlv1.GPU, error) {
	devices := answer.GetDevices()
	if len(devices) == 0 {
		return nil, fmt.Errorf("%s has no devices", cmp.Or(answer.GetPlatform(), "it"))
	}
	if len(devices) > maxDevices {
		return nil, fmt.Errorf("%d devices, more than the %d of which gpuctl takes note", len(devices), maxDevices)
	}
	byIndex := map[uint32]*gpuctlv1.ProbedDevice{}
	var wanted []uint32
	for _, d := range devices {
		byIndex[d.GetIndex()] = d
		wanted = append(wanted, d.GetIndex())
	}
	if s.declared != nil && len(s.declared.Devices) > 0 {
		wanted = s.declared.Devices
	}
	var gpus []*gpuctlv1.GPU
	var missing error
	for n, index := range wanted {
		d := byIndex[index]
		if d == nil {
			missing = fmt.Errorf("it has no device %d (it has %d devices, from 0)", index, len(devices))
			continue
		}
		gpu := &gpuctlv1.GPU{
			Model: strings.TrimSpace(d.GetName()), Vendor: cmp.Or(d.GetVendor(), answer.GetVendor()), Type: d.GetType(),
			RuntimeName: s.lib.Runtime, Platform: answer.GetPlatform(), Driver: answer.GetDriver(),
			Uuid: d.GetUuid(), PciAddress: d.GetPciAddress(), Limits: d.GetLimits(),
			Runtime:  &gpuctlv1.Runtime{Library: s.runtime.Library, Env: s.runtime.Env, Devices: []uint32{index}},
			Declared: s.declared != nil,
		}
		if gpu.Limits == nil {
			gpu.Limits = &gpuctlv1.Limits{}
		}
		if s.declared != nil {
			gpu.Model = cmp.Or(s.declared.Model, gpu.Model)
		}
		gpu.Id = s.id(d, n, len(wanted), taken, kept)
		gpu.Model = cmp.Or(gpu.Model, gpu.Id)
		gpus = append(gpus, gpu)
	}
	return gpus, missing
}

// id returns the name of a device: the one that its card has already, or a new one.
func (s source) id(d *gpuctlv1.ProbedDevice, n, of int, taken map[string]bool, kept map[string]string) string {
	address := canonical(d.GetPciAddress())
	if id, is := kept[address]; is && (s.declared == nil || strings.HasPrefix(id, s.declared.ID+"-")) {
		delete(kept, address) // of one device only
		return id
	}
	switch {
	case s.declared == nil:
		return unique(s.baseID(d, n, of), taken)
	case of > 1:
		return unique(s.declared.ID+"-"+strconv.Itoa(n), taken)
	}
	return s.declared.ID
}

// Names returns the names of cards by their addresses: of these, and those from before of
// cards that are not among them now.
func Names(gpus []*gpuctlv1.GPU, before map[string]string) map[string]string {
	out := map[string]string{}
	maps.Copy(out, before)
	for _, g := range gpus {
		if a := canonical(g.GetPciAddress()); a != "" {
			out[a] = g.GetId()
		}
	}
	return out
}

// baseID returns the name of a discovered device. Cards are named by their index in the
// runtime, devices that compute on the processor by their kind.
func (s source) baseID(d *gpuctlv1.ProbedDevice, n, of int) string {
	name := s.lib.Runtime
	if name == "pocl" {
		// PoCL's names begin with the driver: pthread-…, basic-…, cpu-…, CUDA-…
		kind, _, _ := strings.Cut(d.GetName(), "-")
		return name + "-" + slug(kind)
	}
	if of > 1 || d.GetPciAddress() != "" || slices.Contains([]string{"nvidia", "amd", "intel"}, name) {
		return name + "-" + strconv.Itoa(n)
	}
	return name
}

func unique(id string, taken map[string]bool) string {
	name := id
	for n := 2; taken[name]; n++ {
		name = id + "-" + strconv.Itoa(n)
	}
	taken[name] = true
	return name
}

// dropDoubles removes cards that are in the list twice under different names, so that one
// card cannot get two owners. Declared GPUs come first and are kept.
func dropDoubles(gpus []*gpuctlv1.GPU) (kept []*gpuctlv1.GPU, warnings []string) {
	card := map[string]string{}
	for _, g := range gpus {
		if g.PciAddress == "" {
			kept = append(kept, g)
			continue
		}
		if first, ok := card[g.PciAddress]; ok {
			warnings = append(warnings, fmt.Sprintf("gpu %s is the same card as %s (%s): left out", g.Id, first, g.PciAddress))
			continue
		}
		card[g.PciAddress] = g.Id
		kept = append(kept, g)
	}
	return kept, warnings
}

// tellModelsApart adds the memory to a model's name if different devices have the same
// name.
func tellModelsApart(gpus []*gpuctlv1.GPU) {
	sizes := map[string]map[uint64]bool{}
	for _, g := range gpus {
		if sizes[g.Model] == nil {
			sizes[g.Model] = map[uint64]bool{}
		}
		sizes[g.Model][g.Limits.GetGlobalMemory()] = true
	}
	for _, g := range gpus {
		if len(sizes[g.Model]) > 1 {
			g.Model += " " + size.Format(g.Limits.GetGlobalMemory())
		}
	}
}

// Rank sets the rank of all GPUs in the order of models, from 1. Models with equal rank
// in the configuration are ordered by their properties: a card is above a runtime that
// computes on the processor; then memory, compute units and the largest allocation
// decide.
func Rank(gpus []*gpuctlv1.GPU, models []config.Model) {
	given := map[string]int{}
	for _, m := range models {
		given[m.Name] = m.Rank
	}
	compare := func(a, b *gpuctlv1.GPU) int {
		return cmp.Or(
			cmp.Compare(given[a.Model], given[b.Model]),
			cmp.Compare(isCard(a), isCard(b)),
			cmp.Compare(a.Limits.GetGlobalMemory(), b.Limits.GetGlobalMemory()),
			cmp.Compare(a.Limits.GetComputeUnits(), b.Limits.GetComputeUnits()),
			cmp.Compare(a.Limits.GetMaxAlloc(), b.Limits.GetMaxAlloc()),
		)
	}
	order := slices.SortedStableFunc(slices.Values(gpus), compare)
	rank := uint32(0)
	for i, g := range order {
		if i == 0 || compare(order[i-1], g) != 0 {
			rank++
		}
		g.Rank = rank
	}
}

func isCard(g *gpuctlv1.GPU) int {
	if g.PciAddress != "" {
		return 1
	}
	return 0
}
