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
	"github.com/gpuctl/gpuctl/migrate"
)

const (
	lookEvery = 3 * time.Second
	lookFor   = 5 * time.Second  // for libvirt and gpuguest to answer
	silentFor = 15 * time.Second // how long gpuguest may be silent before its GPUs are given to nobody
)

// Claims are what others have of the GPUs. A keeper calls them without a lock.
type Claims interface {
	// GPUUsers returns in words who has parts of the GPUs, by their names on this host.
	GPUUsers(gpus []string) []string
	// EndUsers ends what computes on GPUs of a service VM, and the claims of VMs to them. If
	// there is an error, something may still compute there.
	EndUsers(ctx context.Context, server string, gpus []string, why string) error
	// ServersChanged tells the cluster of a change of the GPUs of service VMs.
	ServersChanged(ctx context.Context)
	// NotServing looks at what computes in a service VM if that is not known, and returns why its
	// GPUs are given to nobody yet; empty: they are.
	NotServing(ctx context.Context, server string) string
}

// Config has what a Keeper depends on.
type Config struct {
	*Registry
	Claims Claims
	// Loopback reports whether this host is itself reached at an address of this machine only.
	Loopback func() bool
	Log      *slog.Logger
	Silent   time.Duration // how long gpuguest may be silent; 0: 15 s
}

// Keeper looks after the service VMs of this host: it asks them what they lend, and knows who
// has parts of it. It is safe for concurrent use.
type Keeper struct {
	Config
	wake chan struct{}
}

// NewKeeper returns a Keeper. It asks VMs only while Run runs.
func NewKeeper(c Config) *Keeper {
	c.Silent = cmp.Or(c.Silent, silentFor)
	return &Keeper{Config: c, wake: make(chan struct{}, 1)}
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
	p, err := k.site.Where(call, uuid)
	var hello *gpuctlv1.HelloResponse
	if err == nil && p == migrate.Running {
		hello, err = k.site.Hello(call, uuid)
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

// Users returns who has parts of the GPUs of a VM; none, if it is no service VM.
func (k *Keeper) Users(uuid string) []string {
	return slices.Clip(k.Claims.GPUUsers(k.namesOf(uuid)))
}
