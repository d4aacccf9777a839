package cards

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
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

// Binder binds functions to drivers: all of them or none.
type Binder interface {
	Take(ctx context.Context, functions []pci.Address, driver string) error
	// Return binds them to their former drivers. Repeating it changes nothing.
	Return(ctx context.Context, functions []pci.Address) error
}

// Resetter resets a card and reads it back. An error means that no method worked.
type Resetter interface {
	Reset(ctx context.Context, card *pci.Card) (method string, err error)
}

// Hypervisor knows which VM has which function. Its answer decides.
type Hypervisor interface {
	// Driver is the driver of the kernel that a card is bound to while a VM has it.
	Driver() string
	// Owners are the functions that running VMs have, each with its VM.
	Owners(ctx context.Context) (map[pci.Address]vm.VM, error)
	// Dom0Access is the state of a card as seen from dom0; empty: not known.
	Dom0Access(card *pci.Card) string
	// HotplugBlocker says what keeps a card from being attached to a running
	// VM, one function after the other; empty: nothing does.
	HotplugBlocker(card *pci.Card) string
	// ForceDetach removes a function from the hypervisor's list of a VM that
	// does not have it any more. ForceAttach gives a VM a function without
	// libvirt's knowledge. Both repair what a libvirtd has left that died
	// during a detach.
	ForceDetach(ctx context.Context, uuid string, function pci.Address) error
	ForceAttach(ctx context.Context, uuid string, function pci.Address) error
}

// VMs are those of the host. Errors wrap ErrNotFound where there is no
// such VM.
type VMs interface {
	List(ctx context.Context) ([]vm.Info, error)
	Find(ctx context.Context, ref string) (vm.Info, error)
	// Check returns what keeps a VM from getting a device while it runs.
	Check(ctx context.Context, uuid string) ([]*gpuctlv1.Reason, error)
	// Attach and Detach ask libvirt to change the running VM. Without an error
	// it is still not certain that the VM has changed: ask the hypervisor.
	Attach(ctx context.Context, uuid string, function pci.Address) error
	Detach(ctx context.Context, uuid string, function pci.Address) error
	// Listed reports whether libvirt believes that the running VM has a function.
	// It must not be asked to detach one that the VM has not got.
	Listed(ctx context.Context, uuid string, function pci.Address) (bool, error)
	// Store and Unstore change the stored definition. Repeating them changes nothing.
	Store(ctx context.Context, uuid string, functions []pci.Address) error
	Unstore(ctx context.Context, uuid string, functions []pci.Address) error
}

// Guests are the agents in VMs.
type Guests interface {
	// LetGo returns once the VM has released a function and can unplug it.
	LetGo(ctx context.Context, uuid string, function pci.Address) error
	// Has reports whether the VM's agent sees a function. It returns an error for
	// functions that agents do not report, such as a card's sound.
	Has(ctx context.Context, uuid string, function pci.Address) (bool, error)
	// Answers returns why a VM's agent can't be asked; nil: it can.
	Answers(ctx context.Context, uuid string) error
	// About is what is known of a VM's agent, in words.
	About(uuid string) string
}

// Cluster binds claims to cards.
type Cluster interface {
	HostName() string
	Claim(ctx context.Context, c *clusterv1.Claim) (*clusterv1.CreateClaimResponse, error)
	Settle(ctx context.Context)
	Kick()
}

// Isolation judges whether a card may be given away.
type Isolation interface {
	Report(ctx context.Context, card *pci.Card) (*gpuctlv1.IsolationResponse, error)
}

// Config is what a Keeper needs.
type Config struct {
	PCI        *pci.Scanner // of the machine
	File       string       // the record
	Binder     Binder
	Resetter   Resetter
	Hypervisor Hypervisor
	VMs        VMs
	Isolation  Isolation
	Slicer     Slicer   // nil: cards are given away whole
	Mediated   Mediated // nil: VMs get PCI functions only
	Guests     Guests   // nil: no VM has an agent
	Cluster    Cluster
	// GPUs are the host's, as the inventory names them.
	GPUs func(ctx context.Context) ([]*clusterv1.GPU, error)
	// Pending reports whether a migration has not ended, or that is not known now;
	// nil: none has.
	Pending func(ctx context.Context, migration string) bool
	// Event tells the operator what happened to a card.
	Event func(gpu, kind, message string)
	Now   func() time.Time
	Log   *slog.Logger
	// Park leaves cards bound for the next VM instead of returning them.
	Park bool
	Timing
}

// Timing has the time limits of a Keeper; zeros are the defaults.
type Timing struct {
	Verify time.Duration // for the hypervisor to confirm a change: 15 s
	Step   time.Duration // for one step: 90 s
	Grace  time.Duration // for a VM that is being started to have its cards: 90 s
	Every  time.Duration // between looks without a cause: 30 s
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

// Keeper is safe for concurrent use.
type Keeper struct {
	Config
	wake chan struct{}
	work sync.WaitGroup

	mu          sync.Mutex
	ctx         context.Context                 // ends with the daemon: changes outlive their callers, not it
	assignments map[pci.Address]*cardAssignment // of cards
	slices      map[string]*cardAssignment      // of slices, by their ids
	busy        map[pci.Address]string          // what is being done to a card
	claiming    map[string]bool
	missing     map[string]time.Time   // since when nobody has had what a VM had, by the assignment's key
	rev         uint64                 // of the change made last
	resets      map[pci.Address]string // how each card was reset last
	ready       bool                   // the record has been compared with what is
}

// New reads the record. A damaged one is an error: what it said cannot be
// guessed from elsewhere.
func New(c Config) (*Keeper, error) {
	c.defaults()
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Event == nil {
		c.Event = func(string, string, string) {}
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
		k.set(a, a)
	}
	return k, nil
}

// Run reconciles at once, when something changes, and every Config.Every. It
// returns when ctx has ended and all changes that have begun have ended.
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

// Kick makes the keeper look now.
func (k *Keeper) Kick() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// Settled reports whether Uses, Knows and Held can be believed.
func (k *Keeper) Settled() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.ready
}

// Knows reports whether a claim is of a card that is assigned.
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

// Uses reports whether a claim has a card.
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

// Held are the claims of cards, each with its GPU's name.
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

// Annotate puts into a host's GPUs what the keeper knows of them: the name
// that a card had when it was taken, and its health.
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
		if h.Phase == quarantined {
			g.Health, g.HealthReason = clusterv1.Health_HEALTH_FAILED, "quarantined: "+h.Message
		} else if h.Message != "" && g.GetHealth() < clusterv1.Health_HEALTH_FAILED {
			g.Health, g.HealthReason = clusterv1.Health_HEALTH_DEGRADED, h.Message
		}
	}
}

// lockCard makes a card the caller's alone until end is called.
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

// assignmentOf is a copy of a card's assignment; nil: the card is free.
func (k *Keeper) assignmentOf(card pci.Address) *cardAssignment {
	k.mu.Lock()
	defer k.mu.Unlock()
	if a := k.assignments[card]; a != nil {
		c := *a
		return &c
	}
	return nil
}

// put records an assignment before the work that it announces begins. The previous record stays
// true if that fails.
func (k *Keeper) put(a cardAssignment) error {
	a.Since = k.Now().UnixMilli()
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

// drop removes a card's assignment: the card is free.
func (k *Keeper) drop(card pci.Address) error { return k.remove(&cardAssignment{Card: card}) }

// remove is drop of a card or a slice.
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

// save writes the record. k.mu is held.
func (k *Keeper) save() error {
	holds := make([]*cardAssignment, 0, len(k.assignments))
	for a := range k.each() {
		holds = append(holds, a)
	}
	return writeRecord(k.File, record{Assignments: holds, Resets: k.resets})
}

// scan lists the cards as they are.
func (k *Keeper) scan() ([]*pci.Card, error) {
	cards, err := k.PCI.Cards()
	if err != nil {
		return nil, fmt.Errorf("pci devices: %w", err)
	}
	return cards, nil
}

// find resolves what a user calls a card.
func (k *Keeper) find(ctx context.Context, ref string) (*pci.Card, string, error) {
	cards, err := k.scan()
	if err != nil {
		return nil, "", err
	}
	gpus, err := k.GPUs(ctx)
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

// addresses of all functions of a card, the main one first.
func addresses(c *pci.Card) []pci.Address {
	out := []pci.Address{c.Address}
	for _, f := range c.Functions {
		if f.Address != c.Address {
			out = append(out, f.Address)
		}
	}
	return out
}

// Of names the GPUs that are assigned to a VM.
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

// ReadyFor are the functions of cards that wait for a VM.
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
