package cards

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Errors of this package wrap one of these.
var (
	ErrNotFound = reason.New(reason.NotFound, "not found")
	ErrRefused  = reason.New(reason.Refused, "refused")
	ErrBusy     = reason.New(reason.Busy, "busy")
	ErrInvalid  = reason.New(reason.Invalid, "invalid")
)

// Binder binds all of the given functions to a driver, or none of them.
type Binder interface {
	Take(ctx context.Context, functions []pci.Address, driver string) error
	// Return binds functions to their former drivers. It may be repeated.
	Return(ctx context.Context, functions []pci.Address) error
}

// Resetter resets a card, reads it back, and returns the method that worked. An error
// means that no method worked.
type Resetter interface {
	Reset(ctx context.Context, card *pci.Card) (method string, err error)
}

// Hypervisor knows which VM has which function. If sources disagree, it is right.
type Hypervisor interface {
	// Driver returns the kernel driver that a card is bound to while a VM has it.
	Driver() string
	// Owners returns the functions that running VMs have, each with its VM.
	Owners(ctx context.Context) (map[pci.Address]vm.VM, error)
	// Building reports whether a VM has a domain that has not run yet, which may not have
	// its devices yet.
	Building(ctx context.Context, uuid string) (bool, error)
	// GuestAddress returns where a running VM has a function; nil: that is unknown, or the
	// VM does not have it.
	GuestAddress(ctx context.Context, uuid string, function pci.Address) (*pci.Address, error)
	// Dom0Access returns the state of a card as seen from dom0; empty: unknown.
	Dom0Access(card *pci.Card) string
	// HotplugBlocker returns why a card cannot be attached to a running VM, one function
	// after the other; empty: it can.
	HotplugBlocker(card *pci.Card) string
	// ForceDetach removes a function from the hypervisor's list of a VM that does not
	// have it any more. ForceAttach gives a function to a VM without libvirt. Both are
	// repairs after a libvirtd that died during a detach.
	ForceDetach(ctx context.Context, uuid string, function pci.Address) error
	ForceAttach(ctx context.Context, uuid string, function pci.Address) error
}

// VMs gives access to the VMs of the host. Errors wrap ErrNotFound if there is no such
// VM.
type VMs interface {
	List(ctx context.Context) ([]vm.Info, error)
	Find(ctx context.Context, ref string) (vm.Info, error)
	// Check returns the reasons why a running VM cannot get a device.
	Check(ctx context.Context, uuid string) ([]*gpuctlv1.Reason, error)
	// Attach and Detach ask libvirt to change the running VM. Even if there is no error,
	// only the hypervisor can confirm the change. at is where the function goes in the VM
	// if that is possible: the hypervisor can be told, and nothing else is there; nil:
	// anywhere.
	Attach(ctx context.Context, uuid string, function pci.Address, at *pci.Address) error
	Detach(ctx context.Context, uuid string, function pci.Address) error
	// Listed reports whether libvirt lists a function for the running VM. libvirt must
	// not be asked to detach a function that the VM does not have.
	Listed(ctx context.Context, uuid string, function pci.Address) (bool, error)
	// Store adds functions to the stored definition, and Unstore removes them. Both may
	// be repeated.
	Store(ctx context.Context, uuid string, functions []pci.Address) error
	Unstore(ctx context.Context, uuid string, functions []pci.Address) error
}

// Guests gives access to the agents in VMs.
type Guests interface {
	// LetGo returns after the VM has released a function, so that it can be detached.
	LetGo(ctx context.Context, uuid string, function pci.Address) error
	// Has reports whether the VM's agent sees a function. It returns an error for
	// functions that agents do not report, such as a card's audio function.
	Has(ctx context.Context, uuid string, function pci.Address) (bool, error)
	// Answers returns why a VM's agent cannot be asked, or nil if it can.
	Answers(ctx context.Context, uuid string) error
	// About returns a description of a VM's agent.
	About(uuid string) string
}

// Serving knows who computes on the cards of service VMs.
type Serving interface {
	// Users returns in words who has parts of a VM's GPUs; none if it serves nobody.
	Users(uuid string) []string
	// Hold keeps the VM's GPUs from being given to anybody until end is called. It returns
	// an error if somebody has parts of them.
	Hold(uuid string) (end func(), err error)
}

// Cluster assigns cards to claims.
type Cluster interface {
	HostName() string
	Claim(ctx context.Context, c *clusterv1.Claim) (*clusterv1.CreateClaimResponse, error)
	Settle(ctx context.Context)
	// Known waits until the cluster knows GPUs of this host, for a while.
	Known(ctx context.Context, gpus []string)
	Kick()
}

// Isolation judges whether a card may be given to a VM.
type Isolation interface {
	Report(ctx context.Context, card *pci.Card) (*gpuctlv1.IsolationResponse, error)
}

// Platform is what a Keeper needs of the host's hardware and hypervisor. Package platform
// finds it.
type Platform struct {
	PCI        *pci.Scanner // reads the host's PCI devices
	Binder     Binder
	Resetter   Resetter
	Hypervisor Hypervisor
	VMs        VMs
	Isolation  Isolation
	Slicer     Slicer   // nil: no slices, only whole cards
	Mediated   Mediated // nil: no mediated devices, only PCI functions
}

// Config has what a Keeper depends on, and its settings.
type Config struct {
	Platform
	File    string  // path of the record
	Guests  Guests  // nil: no VM has an agent
	Serving Serving // nil: no VM is a service VM
	Cluster Cluster
	// GPUs returns the host's GPUs as their sources name them. The keeper knows the names
	// that cards had when they were taken.
	GPUs func(ctx context.Context) ([]*clusterv1.GPU, error)
	// Settled is set when Uses, Knows and Held are complete: Reconcile has succeeded once.
	// nil: nobody asks.
	Settled *atomic.Bool
	// Pending reports whether a migration has not ended, or whether its state is unknown
	// now. nil: no migrations.
	Pending func(ctx context.Context, migration string) bool
	// Moving returns the migration of a VM that has not ended; empty: none. nil: no migrations.
	Moving func(ctx context.Context, uuid string) (migration string)
	// Event records an event about a card for the operator.
	Event func(gpu, kind, message string)
	Now   func() time.Time
	Log   *slog.Logger
	// Park leaves cards bound to the hypervisor's driver for the next VM, instead of
	// returning them.
	Park bool
	Timing
}

// Timing has the time limits of a Keeper. A zero means the default.
type Timing struct {
	Verify time.Duration // time for the hypervisor to confirm a change: 15 s
	Step   time.Duration // time for one step: 90 s
	Grace  time.Duration // time between the preparation of a VM's start and the VM having its cards, or a domain: 90 s
	Every  time.Duration // time between periodic reconciliations: 30 s
}

func (t *Timing) defaults() {
	for _, d := range []struct {
		at   *time.Duration
		with time.Duration
	}{{&t.Verify, 15 * time.Second}, {&t.Step, 90 * time.Second}, {&t.Grace, 90 * time.Second}, {&t.Every, 30 * time.Second}} {
		if *d.at == 0 {
			*d.at = d.with
		}
	}
}

// Keeper manages the cards of a host. It is safe for concurrent use.
type Keeper struct {
	Config
	wake chan struct{}
	work sync.WaitGroup

	mu          sync.Mutex
	ctx         context.Context                 // ends with the daemon; changes use it, as they go on after their caller has left
	assignments map[pci.Address]*cardAssignment // of cards
	slices      map[string]*cardAssignment      // assignments of slices, by the slices' ids
	busy        map[pci.Address]string          // what is being done to each locked card
	claiming    map[string]bool
	missing     map[string]time.Time   // since when the hypervisor has listed no owner for what a VM had, by the assignment's key
	rev         uint64                 // number of the last change of the record
	resets      map[pci.Address]string // method of each card's last reset
}

// New returns a keeper with the record on disk. A damaged record is an error, because its
// content cannot be recovered from elsewhere.
func New(c Config) (*Keeper, error) {
	c.defaults()
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Event == nil {
		c.Event = func(string, string, string) {}
	}
	if c.Settled == nil {
		c.Settled = new(atomic.Bool)
	}
	k := &Keeper{
		Config: c, wake: make(chan struct{}, 1), ctx: context.Background(), assignments: map[pci.Address]*cardAssignment{}, slices: map[string]*cardAssignment{},
		busy: map[pci.Address]string{}, claiming: map[string]bool{}, missing: map[string]time.Time{},
	}
	r, err := readRecord(c.File)
	if err != nil {
		return nil, err
	}
	if k.resets = r.Resets; k.resets == nil {
		k.resets = map[pci.Address]string{}
	}
	for _, a := range r.Assignments {
		if a.at = time.UnixMilli(a.Since); a.at.After(k.Now()) {
			a.at = k.Now() // the clock was wrong, and has been set back since
		}
		k.set(a, a)
	}
	return k, nil
}

// Run reconciles at once, at each Kick, and every Timing.Every. It returns when ctx has
// ended, and all changes that have begun have ended.
func (k *Keeper) Run(ctx context.Context) {
	k.mu.Lock()
	k.ctx = ctx
	k.mu.Unlock()
	tick := time.NewTicker(k.Every)
	defer tick.Stop()
	for {
		if err := k.Reconcile(ctx); err != nil && ctx.Err() == nil {
			k.Log.Warn("cards not reconciled", "err", err)
		}
		select {
		case <-ctx.Done():
			k.work.Wait()
			return
		case <-tick.C:
		case <-k.wake:
		}
	}
}

// Kick makes Run reconcile now.
func (k *Keeper) Kick() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// Knows reports whether a claim belongs to an assigned card, or is being made.
func (k *Keeper) Knows(claim string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.claiming[claim] {
		return true
	}
	for a := range k.each() {
		if a.Claim == claim {
			return true
		}
	}
	return false
}

// Uses reports whether a claim has a card, or is being made.
func (k *Keeper) Uses(claim, gpu string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.claiming[claim] {
		return true
	}
	for a := range k.each() {
		if a.Claim == claim && a.GPU == gpu {
			return true
		}
	}
	return false
}

// Held returns the claims of assigned cards, each with its GPU's name.
func (k *Keeper) Held() map[*clusterv1.Claim]string {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := map[*clusterv1.Claim]string{}
	for a := range k.each() {
		if a.Claim != "" {
			out[a.claim()] = a.GPU
		}
	}
	return out
}

// gpus returns the host's GPUs with their names in the inventory.
func (k *Keeper) gpus(ctx context.Context) ([]*clusterv1.GPU, error) {
	gpus, err := k.GPUs(ctx)
	if err != nil {
		return nil, err
	}
	k.Annotate(gpus)
	return gpus, nil
}

// Annotate adds what the keeper knows to a host's GPUs: the name that a card had when it
// was taken, and its health.
func (k *Keeper) Annotate(gpus []*clusterv1.GPU) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, g := range gpus {
		a, err := pci.ParseAddress(g.GetPciAddress())
		if err != nil {
			continue
		}
		for _, s := range k.slices {
			if s.Card == a && s.Phase == quarantined && g.GetHealth() < clusterv1.Health_HEALTH_DEGRADED {
				g.Health, g.HealthReason = clusterv1.Health_HEALTH_DEGRADED, s.label()+" is quarantined: "+s.Message
			}
		}
		h := k.assignments[a]
		if h == nil {
			continue
		}
		g.Name = h.GPU
		if h.Phase == quarantined || h.Phase == resetting && h.Claim == "" { // no claim keeps others away from it
			g.Health, g.HealthReason = clusterv1.Health_HEALTH_FAILED, "quarantined: "+h.Message
		} else if h.Message != "" && g.GetHealth() < clusterv1.Health_HEALTH_FAILED {
			g.Health, g.HealthReason = clusterv1.Health_HEALTH_DEGRADED, h.Message
		}
	}
}

// lockCard locks a card until end is called. what describes the change, for the errors of
// others. If the card is locked already, the error wraps ErrBusy.
func (k *Keeper) lockCard(card pci.Address, what string) (end func(), err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if other := k.busy[card]; other != "" {
		return nil, reason.Detail(fmt.Errorf("card %s: %w: %s is under way", card, ErrBusy, other)).On("gpu", card.String()).Do("wait for it to end (gpuctl cards shows its phase)")
	}
	k.busy[card] = what
	return func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		delete(k.busy, card)
	}, nil
}

// assignmentOf returns a copy of a card's assignment; nil: the card is free.
func (k *Keeper) assignmentOf(card pci.Address) *cardAssignment {
	k.mu.Lock()
	defer k.mu.Unlock()
	if a := k.assignments[card]; a != nil {
		c := *a
		return &c
	}
	return nil
}

// put records an assignment before the work for it begins. If that fails, the previous
// record stays in force.
func (k *Keeper) put(a cardAssignment) error {
	a.at = k.Now()
	a.Since = a.at.UnixMilli()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.rev++
	a.rev = k.rev
	old := k.at(&a)
	k.set(&a, &a)
	if err := k.save(); err != nil {
		k.set(&a, old)
		return fmt.Errorf("card %s: not recorded, so nothing is done to it: %w", a.Card, err)
	}
	return nil
}

// drop removes a card's assignment. The card is free afterwards.
func (k *Keeper) drop(card pci.Address) error { return k.remove(&cardAssignment{Card: card}) }

// remove removes the assignment of a card or a slice.
func (k *Keeper) remove(a *cardAssignment) error {
	k.mu.Lock()
	old := k.at(a)
	k.set(a, nil)
	err := k.save()
	if err != nil {
		k.set(a, old)
	}
	k.mu.Unlock()
	k.Cluster.Kick()
	return err
}

// save writes the record. The caller holds k.mu.
func (k *Keeper) save() error {
	holds := make([]*cardAssignment, 0, len(k.assignments))
	for a := range k.each() {
		holds = append(holds, a)
	}
	return writeRecord(k.File, record{Assignments: holds, Resets: k.resets})
}

// scan reads the cards in their present state.
func (k *Keeper) scan() ([]*pci.Card, error) {
	cards, err := k.PCI.Cards()
	if err != nil {
		return nil, fmt.Errorf("pci devices: %w", err)
	}
	return cards, nil
}

// find returns the card that the user's reference names, and its name in the inventory.
// Errors wrap ErrNotFound.
func (k *Keeper) find(ctx context.Context, ref string) (*pci.Card, string, error) {
	cards, err := k.scan()
	if err != nil {
		return nil, "", err
	}
	gpus, err := k.gpus(ctx)
	if err != nil {
		return nil, "", err
	}
	ref = strings.TrimPrefix(ref, k.Cluster.HostName()+"/")
	name := func(c *pci.Card) string {
		for _, g := range gpus {
			if a, err := pci.ParseAddress(g.GetPciAddress()); err == nil && a == c.Address {
				return g.GetName()
			}
		}
		return c.Address.String()
	}
	address, addressErr := pci.ParseAddress(ref)
	var names []string
	for _, c := range cards {
		n := name(c)
		if n == ref || addressErr == nil && slices.ContainsFunc(c.Functions, func(f *pci.Device) bool { return f.Address == address }) {
			return c, n, nil
		}
		names = append(names, n)
	}
	class, there := uint16(0), false
	if addressErr == nil {
		class, there = k.PCI.Class(address)
	}
	if there {
		return nil, "", reason.Detail(fmt.Errorf("gpu %s: %w: it is a device of class %04x, and GPUs are of class 03 (display) or 12 (accelerator)", ref, ErrNotFound, class)).On("gpu", ref).Do(`if it is one nevertheless, name its ids with "anyClass: true" in a file of devices.catalog`)
	}
	if len(names) == 0 {
		return nil, "", reason.Detail(fmt.Errorf("gpu %s: %w: this host has no display or accelerator card", ref, ErrNotFound)).On("gpu", ref)
	}
	slices.Sort(names)
	return nil, "", reason.Detail(fmt.Errorf("gpu %s: %w on host %s; it has %s", ref, ErrNotFound, k.Cluster.HostName(), strings.Join(names, ", "))).On("gpu", ref)
}

// addresses returns the addresses of all functions of a card, the main one first.
func addresses(c *pci.Card) []pci.Address {
	out := []pci.Address{c.Address}
	for _, f := range c.Functions {
		if f.Address != c.Address {
			out = append(out, f.Address)
		}
	}
	return out
}

// Of returns the names of the GPUs that are assigned to a VM.
func (k *Keeper) Of(uuid string) (gpus []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for a := range k.each() {
		if a.UUID == uuid {
			gpus = append(gpus, a.GPU)
		}
	}
	slices.Sort(gpus)
	return slices.Compact(gpus)
}

// ReadyFor returns the functions of cards that are prepared for a VM.
func (k *Keeper) ReadyFor(uuid string) (functions []pci.Address) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for a := range k.each() {
		if a.UUID == uuid && a.Phase == ready && !a.mediated() {
			functions = append(functions, a.Functions...)
		}
	}
	slices.SortFunc(functions, pci.Address.Compare)
	return functions
}
