package metrics

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// maxGPUs is how many GPUs of this host have series.
const maxGPUs = 512

var errPatience = errors.New("the host takes too long to say how it is")

type hostFamilies struct {
	answers, load, memory, utilization, bus, used, temperature, power, limit, health, sessions, turns, waits, weight, lapses family
}

func (m *Metrics) hostFamilies() hostFamilies {
	return hostFamilies{
		answers:     m.family("gpuctl_host_facts_up", gauge, "1 if this host could say how it is; the other metrics gpuctl_host_* are missing if not."),
		load:        m.family("gpuctl_host_load1", gauge, "Load average of this host over one minute."),
		memory:      m.family("gpuctl_host_memory_available_bytes", gauge, "Memory of this host that programs can still get."),
		utilization: m.family("gpuctl_host_gpu_utilization_ratio", gauge, "How busy a GPU of this host is, 0 to 1.", "gpu"),
		bus:         m.family("gpuctl_host_gpu_memory_utilization_ratio", gauge, "How busy its memory's bus is, 0 to 1.", "gpu"),
		used:        m.family("gpuctl_host_gpu_memory_used_bytes", gauge, "Memory of it in use, as the device says, else as its sessions do.", "gpu"),
		temperature: m.family("gpuctl_host_gpu_temperature_celsius", gauge, "How warm it is.", "gpu"),
		power:       m.family("gpuctl_host_gpu_power_watts", gauge, "What it draws.", "gpu"),
		limit:       m.family("gpuctl_host_gpu_power_limit_watts", gauge, "What it may draw.", "gpu"),
		health:      m.family("gpuctl_host_gpu_health", gauge, "1 for the health that it has.", "gpu", "health"),
		sessions:    m.family("gpuctl_host_gpu_sessions", gauge, "Sessions on it.", "gpu"),
		turns:       m.family("gpuctl_host_gpu_owner_busy_seconds", gauge, "Time on a shared GPU that an owner's present sessions have had.", "gpu", "owner"),
		waits:       m.family("gpuctl_host_gpu_owner_waited_seconds", gauge, "Time that they have waited for it.", "gpu", "owner"),
		weight:      m.family("gpuctl_host_gpu_owner_weight", gauge, "Weight of the owner's share.", "gpu", "owner"),
		lapses:      m.family("gpuctl_host_gpu_owner_lapses", gauge, "Turns of its present sessions that were taken back, as they lasted too long while others waited.", "gpu", "owner"),
	}
}

// asking makes one call to the host at a time. Scrapes that come during the call wait for
// its answer. So they do not pile up if the host does not answer.
type asking struct {
	mu  sync.Mutex
	now *answer
}

type answer struct {
	done  chan struct{}
	facts *clusterv1.HostFacts
	err   error
}

// begin starts a call, or joins the one in progress. It returns nil if ask is nil.
func (a *asking) begin(ask func(context.Context) (*clusterv1.HostFacts, error)) *answer {
	if ask == nil {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.now != nil {
		return a.now
	}
	x := &answer{done: make(chan struct{})}
	a.now = x
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), factsPatience)
		defer cancel()
		x.facts, x.err = ask(ctx)
		a.mu.Lock()
		a.now = nil
		a.mu.Unlock()
		close(x.done)
	}()
	return x
}

func (x *answer) wait() (*clusterv1.HostFacts, error) {
	patience := time.NewTimer(factsPatience)
	defer patience.Stop()
	select {
	case <-x.done:
		return x.facts, x.err
	case <-patience.C:
		return nil, errPatience
	}
}

func (m *Metrics) collectHost(ch chan<- prometheus.Metric, x *answer) {
	if x == nil {
		return
	}
	f := m.host
	facts, err := x.wait()
	f.answers.truth(ch, err == nil && facts != nil)
	if err != nil || facts == nil {
		if m.sources.Log != nil {
			m.sources.Log.Debug("host not in metrics", "err", err)
		}
		return
	}
	f.load.put(ch, facts.GetLoad1())
	f.memory.put(ch, float64(facts.GetFreeMemory()))
	seen := map[string]bool{}
	for _, g := range facts.GetGpus() {
		name := clean(strings.TrimPrefix(g.GetGpu(), facts.GetHost()+"/"))
		if seen[name] || len(seen) == maxGPUs {
			continue
		}
		seen[name] = true
		f.gpu(ch, name, g)
	}
}

// gpu omits values that the device does not report.
func (f hostFamilies) gpu(ch chan<- prometheus.Metric, name string, g *clusterv1.GPUFacts) {
	if g.Utilization != nil {
		f.utilization.put(ch, float64(g.GetUtilization())/100, name)
	}
	if g.MemoryUtilization != nil {
		f.bus.put(ch, float64(g.GetMemoryUtilization())/100, name)
	}
	if g.UsedMemory != nil {
		f.used.put(ch, float64(g.GetUsedMemory()), name)
	}
	if g.Temperature != nil {
		f.temperature.put(ch, float64(g.GetTemperature()), name)
	}
	if g.Power != nil {
		f.power.put(ch, float64(g.GetPower())/1000, name)
	}
	if g.PowerLimit != nil {
		f.limit.put(ch, float64(g.GetPowerLimit())/1000, name)
	}
	f.health.put(ch, 1, name, enum(g.GetHealth(), clusterv1.Health_name, "HEALTH_"))
	f.sessions.put(ch, float64(len(g.GetSessions())), name)
	f.owners(ch, name, g)
}

// maxOwners is how many owners of one GPU have series.
const maxOwners = 64

// owners adds up what the sessions of each owner have had of a GPU.
func (f hostFamilies) owners(ch chan<- prometheus.Metric, name string, g *clusterv1.GPUFacts) {
	type sum struct {
		busy, waited, lapses float64
		weight               uint32
	}
	sums := map[string]*sum{}
	for _, s := range g.GetSessions() {
		share, owner := s.GetShare(), clean(s.GetOwner())
		if share == nil || owner == "" {
			continue
		}
		x := sums[owner]
		if x == nil {
			if len(sums) == maxOwners {
				continue
			}
			x = &sum{}
			sums[owner] = x
		}
		x.busy += time.Duration(share.GetBusyNs()).Seconds()
		x.waited += time.Duration(share.GetWaitedNs()).Seconds()
		x.lapses += float64(share.GetLapses())
		x.weight = max(x.weight, s.GetWeight())
	}
	for owner, x := range sums {
		f.turns.put(ch, x.busy, name, owner)
		f.waits.put(ch, x.waited, name, owner)
		f.lapses.put(ch, x.lapses, name, owner)
		f.weight.put(ch, float64(x.weight), name, owner)
	}
}
