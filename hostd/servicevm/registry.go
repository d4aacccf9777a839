package servicevm

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/busy"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

// Site knows the VMs of this host and their gpuguests. endpoint.Local implements it.
type Site interface {
	Where(ctx context.Context, uuid string) (migrate.Presence, error)
	Hello(ctx context.Context, uuid string) (*gpuctlv1.HelloResponse, error)
	GuestService(ctx context.Context, uuid string) (gpuctlv1connect.GuestServiceClient, error)
}

// Registry has the service VMs of this host, with what is known of their GPUs. It asks nobody
// what they lend: a Keeper does. It is safe for concurrent use.
type Registry struct {
	file string
	host string
	site Site
	busy busy.Set // VMs, by UUID, of which something is being changed

	mu      sync.Mutex
	servers map[string]*server // by UUID
}

// server is a service VM. Its fields are guarded by Registry.mu.
type server struct {
	*declared
	offer   *offer // what it lends; nil: it has not said so yet
	seen    time.Time
	running bool
	held    int    // detaches of its cards that are under way
	why     string // why its GPUs are given to nobody now; empty: they are
}

// GPU is a GPU that a service VM owns.
type GPU struct {
	Name      string // in the inventory, without the host's
	VM        vm.VM
	Target    *gpuctlv1.Target // how far executors use it; one without a runtime is known from before
	Addresses []string         // of carriers
	Present   bool             // the VM runs
	Why       string           // why it is given to nobody now; empty: it is
}

// NewRegistry returns a Registry with the record in a file; without one, it does not outlive
// hostd. host is the name of this host, for messages.
func NewRegistry(file, host string, site Site) (*Registry, error) {
	rec, err := readRecord(file)
	if err != nil {
		return nil, err
	}
	r := &Registry{file: file, host: host, site: site, servers: map[string]*server{}}
	for _, d := range rec.VMs {
		r.servers[d.UUID] = &server{declared: d, why: "hostd was just started and has not asked the VM yet"}
	}
	return r, nil
}

// save writes the record. The caller holds r.mu.
func (r *Registry) save() error {
	var rec record
	for _, s := range r.servers {
		rec.VMs = append(rec.VMs, s.declared)
	}
	slices.SortFunc(rec.VMs, func(a, b *declared) int { return strings.Compare(a.UUID, b.UUID) })
	return writeRecord(r.file, rec)
}

// sum is what others see of a service VM. The caller holds r.mu.
func (r *Registry) sum(s *server) string {
	var b strings.Builder
	for _, g := range r.gpus(s) {
		fmt.Fprintf(&b, "%s %s %d %v %v %s; ", g.Name, g.Target.GetModel(), g.Target.GetLimits().GetGlobalMemory(), g.Addresses, g.Present, g.Why)
	}
	return b.String()
}

// gpus returns the GPUs of a service VM. The caller holds r.mu.
func (r *Registry) gpus(s *server) (out []GPU) {
	for _, g := range s.GPUs {
		one := GPU{
			Name: g.Name, VM: vm.VM{UUID: s.UUID, Name: s.Name}, Present: s.running, Why: s.why,
			Target: &gpuctlv1.Target{Gpu: g.Name, Model: g.Model, Limits: &gpuctlv1.Limits{GlobalMemory: g.Memory}},
		}
		d := s.offer.at(g.Address)
		switch {
		case s.Ending:
			one.Why = "VM " + s.Name + " is no service VM any more"
		case s.held > 0:
			one.Why = "a card of VM " + s.Name + " is being detached"
		case s.why != "":
		case d == nil:
			one.Why = cmp.Or(s.offer.withheld[g.Address], "VM "+s.Name+" does not have it just now")
		case d.target.GetModel() != g.Model || d.target.GetLimits().GetGlobalMemory() != g.Memory:
			one.Why = "another card is in its place, and claims have parts of the former"
		default:
			one.Target, one.Addresses = d.target, s.offer.addresses
		}
		one.Why = words(one.Why)
		out = append(out, one)
	}
	return out
}

// GPUs returns the GPUs of all service VMs of this host, sorted by name.
func (r *Registry) GPUs() (out []GPU) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.servers {
		out = append(out, r.gpus(s)...)
	}
	slices.SortFunc(out, func(a, b GPU) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// namesOf returns the names of a service VM's GPUs.
func (r *Registry) namesOf(uuid string) (out []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.servers[uuid]; s != nil {
		for _, g := range s.GPUs {
			out = append(out, g.Name)
		}
	}
	return out
}

// Client returns the way to the gpuguest of a service VM.
func (r *Registry) Client(ctx context.Context, uuid string) (gpuctlv1connect.GuestServiceClient, error) {
	return r.site.GuestService(ctx, uuid)
}

// Ended reports whether libvirt says that a VM is not on this host, so that nothing computes
// in it here.
func (r *Registry) Ended(ctx context.Context, uuid string) bool {
	ctx, cancel := context.WithTimeout(ctx, lookFor)
	defer cancel()
	p, err := r.site.Where(ctx, uuid)
	return err == nil && (p == migrate.Absent || p == migrate.Stopped)
}

// Of returns what a VM serves others with, or nil if it is no service VM.
func (r *Registry) Of(uuid string) *gpuctlv1.Service {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.servers[uuid]
	if s == nil {
		return nil
	}
	out := &gpuctlv1.Service{Message: words(s.why)}
	for _, g := range r.gpus(s) {
		out.Gpus = append(out.Gpus, r.host+"/"+g.Name)
		out.Message = cmp.Or(out.Message, g.Why)
	}
	if len(out.Gpus) == 0 {
		out.Message = cmp.Or(out.Message, "it lends no card")
	}
	return out
}

// Serves returns why a VM must stay where it is, as a service VM; empty: it is none.
func (r *Registry) Serves(uuid string) string {
	r.mu.Lock()
	s := r.servers[uuid]
	name := ""
	if s != nil {
		name = s.Name
	}
	r.mu.Unlock()
	if s == nil {
		return ""
	}
	return fmt.Sprintf("VM %s is a service VM, whose cards sessions of other VMs and hosts use: gpuctl detach %s --serves ends that", name, name)
}
