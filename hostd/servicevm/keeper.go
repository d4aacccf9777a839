package servicevm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/internal/busy"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

const (
	lookEvery = 3 * time.Second
	lookFor   = 5 * time.Second  // for libvirt and gpuguest to answer
	silentFor = 15 * time.Second // how long gpuguest may be silent before its GPUs are given to nobody
	offerFor  = time.Minute      // how long a VM may take to lend its first card
)

// Site knows the VMs of this host and their gpuguests. endpoint.Local implements it.
type Site interface {
	Where(ctx context.Context, uuid string) (migrate.Presence, error)
	Hello(ctx context.Context, uuid string) (*gpuctlv1.HelloResponse, error)
	GuestService(ctx context.Context, uuid string) (gpuctlv1connect.GuestServiceClient, error)
}

// VMs finds VMs of this host by name or UUID.
type VMs interface {
	Find(ctx context.Context, ref string) (vm.Info, error)
}

// Cards gives cards to VMs, and takes them back.
type Cards interface {
	Attach(ctx context.Context, r *gpuctlv1.AttachRequest, report cards.Report) error
	Detach(ctx context.Context, r *gpuctlv1.DetachRequest, report cards.Report) error
}

// Claims are what others have of the GPUs. A keeper calls them without a lock.
type Claims interface {
	// GPUUsers returns in words who has parts of the GPUs, by their names on this host.
	GPUUsers(gpus []string) []string
	// EndUsers ends what computes on GPUs of a service VM, and the claims of VMs to them. If
	// there is an error, something may still compute there.
	EndUsers(ctx context.Context, server string, gpus []string, why string) error
	// ServersChanged tells the cluster of a change of the GPUs of service VMs.
	ServersChanged(ctx context.Context)
}

// Config has what a Keeper depends on.
type Config struct {
	File   string // of the record; empty: it does not outlive hostd
	Host   string // name of this host, for messages
	Site   Site
	VMs    VMs
	Cards  Cards
	Claims Claims
	// Loopback reports whether this host is itself reached at an address of this machine only.
	Loopback func() bool
	Log      *slog.Logger
	Offer    time.Duration // how long a VM may take to lend its first card; 0: a minute
	Silent   time.Duration // how long gpuguest may be silent; 0: 15 s
}

// Keeper has the service VMs of this host. It is safe for concurrent use.
type Keeper struct {
	Config
	wake chan struct{}
	busy busy.Set // VMs, by UUID, of which something is being changed

	mu      sync.Mutex
	servers map[string]*server // by UUID
}

// server is a service VM. Its fields are guarded by Keeper.mu.
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

// New returns a Keeper with the record on disk.
func New(c Config) (*Keeper, error) {
	r, err := readRecord(c.File)
	if err != nil {
		return nil, err
	}
	c.Offer, c.Silent = cmp.Or(c.Offer, offerFor), cmp.Or(c.Silent, silentFor)
	k := &Keeper{Config: c, wake: make(chan struct{}, 1), servers: map[string]*server{}}
	for _, d := range r.VMs {
		k.servers[d.UUID] = &server{declared: d, why: "hostd was just started and has not asked the VM yet"}
	}
	return k, nil
}

// save writes the record. The caller holds k.mu.
func (k *Keeper) save() error {
	var r record
	for _, s := range k.servers {
		r.VMs = append(r.VMs, s.declared)
	}
	slices.SortFunc(r.VMs, func(a, b *declared) int { return strings.Compare(a.UUID, b.UUID) })
	return writeRecord(k.File, r)
}

// Kick makes Run look now.
func (k *Keeper) Kick() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// Run looks after the service VMs until ctx ends.
func (k *Keeper) Run(ctx context.Context) {
	for ctx.Err() == nil {
		k.look(ctx)
		t := time.NewTimer(lookEvery)
		select {
		case <-ctx.Done():
		case <-t.C:
		case <-k.wake:
		}
		t.Stop()
	}
}

// look asks all service VMs at once, so that one that is silent does not delay the others.
func (k *Keeper) look(ctx context.Context) {
	k.mu.Lock()
	var uuids []string
	for uuid := range k.servers {
		uuids = append(uuids, uuid)
	}
	k.mu.Unlock()
	changed := make([]bool, len(uuids))
	var wg sync.WaitGroup
	for i, uuid := range uuids {
		wg.Go(func() { changed[i] = k.ask(ctx, uuid) })
	}
	wg.Wait()
	if slices.Contains(changed, true) && ctx.Err() == nil {
		k.Claims.ServersChanged(ctx)
	}
}

// ask asks one service VM what it lends, and reports whether something has changed.
func (k *Keeper) ask(ctx context.Context, uuid string) (changed bool) {
	call, cancel := context.WithTimeout(ctx, lookFor)
	defer cancel()
	p, err := k.Site.Where(call, uuid)
	var hello *gpuctlv1.HelloResponse
	if err == nil && p == migrate.Running {
		hello, err = k.Site.Hello(call, uuid)
	}
	if ctx.Err() != nil {
		return false
	}
	var o *offer
	if err == nil && hello != nil {
		o, err = check(hello, k.Loopback())
	}
	used := map[string]bool{} // asked before the lock
	for _, name := range k.namesOf(uuid) {
		used[name] = len(k.Claims.GPUUsers([]string{name})) > 0
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.servers[uuid]
	if s == nil {
		return false
	}
	before := k.sum(s)
	k.enter(s, p, o, hello != nil, err, used)
	if s.Ending && !slices.ContainsFunc(s.GPUs, func(g *known) bool { return used[g.Name] }) && !k.busy.Has(uuid) {
		delete(k.servers, uuid)
		k.Log.Info("a VM is no service VM any more", "machine", s.Name)
	}
	if after := k.sum(s); before != after || k.servers[uuid] == nil {
		if err := k.save(); err != nil {
			k.Log.Error("service VMs are not recorded", "err", err)
		}
		k.Log.Info("service VM", "machine", s.Name, "gpus", after)
		return true
	}
	return false
}

// sum is what others see of a service VM. The caller holds k.mu.
func (k *Keeper) sum(s *server) string {
	var b strings.Builder
	for _, g := range k.gpus(s) {
		fmt.Fprintf(&b, "%s %s %d %v %v %s; ", g.Name, g.Target.GetModel(), g.Target.GetLimits().GetGlobalMemory(), g.Addresses, g.Present, g.Why)
	}
	return b.String()
}

// enter enters what was found out about a service VM. answered means that its gpuguest has
// said something. The caller holds k.mu.
func (k *Keeper) enter(s *server, p migrate.Presence, o *offer, answered bool, err error, used map[string]bool) {
	now := time.Now()
	switch {
	case err == nil && o != nil:
		s.running, s.offer, s.seen, s.why = true, o, now, ""
		k.name(s, used)
	case err == nil && p != migrate.Running:
		s.running, s.offer, s.why = p == migrate.Moving, nil, fmt.Sprintf("VM %s is %s", s.Name, p)
	case answered: // it has said what it must not
		s.running, s.offer, s.why = true, nil, fmt.Sprintf("VM %s: %v", s.Name, err)
	case s.offer != nil && now.Sub(s.seen) < k.Silent: // it may be restarting
	default:
		s.offer = nil
		s.why = fmt.Sprintf("the gpuguest of VM %s does not answer: %v", s.Name, err)
	}
}

// name gives each card that the VM lends its name, and forgets those that it has not any
// more and nobody uses. The caller holds k.mu.
func (k *Keeper) name(s *server, used map[string]bool) {
	taken := map[string]bool{}
	for _, other := range k.servers {
		for _, g := range other.GPUs {
			taken[g.Name] = true
		}
	}
	var keep []*known
	for _, g := range s.GPUs {
		d := s.offer.at(g.Address)
		_, withheld := s.offer.withheld[g.Address]
		if d == nil && !withheld && !used[g.Name] {
			continue
		}
		if d != nil && !used[g.Name] { // otherwise it stays what it was for those who have it
			g.Model, g.Memory = d.target.GetModel(), d.target.GetLimits().GetGlobalMemory()
		}
		keep = append(keep, g)
	}
	for _, d := range s.offer.devices {
		if !slices.ContainsFunc(keep, func(g *known) bool { return g.Address == d.address }) {
			name := nameOf(s.Name, taken)
			taken[name] = true
			keep = append(keep, &known{Name: name, Address: d.address, Model: d.target.GetModel(), Memory: d.target.GetLimits().GetGlobalMemory()})
		}
	}
	s.GPUs = keep
}

// at returns the device at an address in the VM, or nil.
func (o *offer) at(address string) *device {
	if o == nil {
		return nil
	}
	i := slices.IndexFunc(o.devices, func(d device) bool { return d.address == address })
	if i < 0 {
		return nil
	}
	return &o.devices[i]
}

// gpus returns the GPUs of a service VM. The caller holds k.mu.
func (k *Keeper) gpus(s *server) (out []GPU) {
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
func (k *Keeper) GPUs() (out []GPU) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, s := range k.servers {
		out = append(out, k.gpus(s)...)
	}
	slices.SortFunc(out, func(a, b GPU) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// namesOf returns the names of a service VM's GPUs.
func (k *Keeper) namesOf(uuid string) (out []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if s := k.servers[uuid]; s != nil {
		for _, g := range s.GPUs {
			out = append(out, g.Name)
		}
	}
	return out
}

// Client returns the way to the gpuguest of a service VM.
func (k *Keeper) Client(ctx context.Context, uuid string) (gpuctlv1connect.GuestServiceClient, error) {
	return k.Site.GuestService(ctx, uuid)
}

// Ended reports whether libvirt says that a VM is not on this host, so that nothing computes
// in it here.
func (k *Keeper) Ended(ctx context.Context, uuid string) bool {
	ctx, cancel := context.WithTimeout(ctx, lookFor)
	defer cancel()
	p, err := k.Site.Where(ctx, uuid)
	return err == nil && (p == migrate.Absent || p == migrate.Stopped)
}

// Of returns what a VM serves others with, or nil if it is no service VM.
func (k *Keeper) Of(uuid string) *gpuctlv1.Service {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.servers[uuid]
	if s == nil {
		return nil
	}
	out := &gpuctlv1.Service{Message: words(s.why)}
	for _, g := range k.gpus(s) {
		out.Gpus = append(out.Gpus, k.Host+"/"+g.Name)
		out.Message = cmp.Or(out.Message, g.Why)
	}
	if len(out.Gpus) == 0 {
		out.Message = cmp.Or(out.Message, "it lends no card")
	}
	return out
}

// Serves returns why a VM must stay where it is, as a service VM; empty: it is none.
func (k *Keeper) Serves(uuid string) string {
	k.mu.Lock()
	s := k.servers[uuid]
	name := ""
	if s != nil {
		name = s.Name
	}
	k.mu.Unlock()
	if s == nil {
		return ""
	}
	return fmt.Sprintf("VM %s is a service VM, whose cards sessions of other VMs and hosts use: gpuctl detach %s --serves ends that", name, name)
}

// errUsed is wrapped by errors about GPUs that others have parts of.
var errUsed = errors.New("others have parts of its GPUs")

// Hold keeps the GPUs of a VM from being given to anybody until end is called, for a detach of
// a card. The error says who has parts of them; then nothing is held.
func (k *Keeper) Hold(uuid string) (end func(), err error) {
	k.mu.Lock()
	s := k.servers[uuid]
	if s == nil {
		k.mu.Unlock()
		return func() {}, nil
	}
	s.held++
	k.mu.Unlock()
	end = func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		s.held--
		k.Kick()
	}
	// Asked after they are held: who comes now gets nothing.
	if users := k.Claims.GPUUsers(k.namesOf(uuid)); len(users) > 0 {
		end()
		return nil, fmt.Errorf("VM %s is a service VM, and %w (%s): gpuctl detach %s --serves takes them back", s.Name, errUsed, strings.Join(users, ", "), s.Name)
	}
	return end, nil
}
