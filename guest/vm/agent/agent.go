package agent

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/vm/profile"
	"github.com/gpuctl/gpuctl/internal/excerpt"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
)

// Protocol is the version of AgentService and GuestService that this package serves.
// Since 2, a session's state can leave the VM. Since 3, sessions can compute on GPUs that
// hosts lend to the VM. Since 4, they can begin there. Since 5, the VM can lend its cards.
// Since 6, its carriers can connect through the host.
const Protocol = 6

// Token is the token of the offer that the agent makes to the VM's applications. They
// send no token.
const Token = ""

const (
	gpuPrefix    = "vm/"
	ownClaim     = "vm" // of sessions on the VM's own cards
	defaultPoll  = 2 * time.Second
	eventPoll    = 20 * time.Second // if there are events; finds changes whose events were lost
	probeTimeout = 2 * time.Minute
	leastRetry   = time.Second
	mostRetry    = 30 * time.Second
	callTimeout  = 20 * time.Second
	maxMessage   = 1000 // most bytes of a reason why a device is not ready
)

// gpuID returns the name of a GPU for sessions on a function. It is not a name in the
// host's inventory.
func gpuID(a pci.Address) string { return gpuPrefix + a.String() }

// Prober reports which devices a runtime has. session.Launcher implements it.
type Prober interface {
	Probe(ctx context.Context, rt *gpuctlv1.Runtime) (*gpuctlv1.ProbeResponse, error)
}

// Sessions gives access to the VM's sessions.
type Sessions interface {
	List(ctx context.Context) ([]*gpuctlv1.Session, error)
	Offer(ctx context.Context, o *gpuctlv1.OfferRequest) error
	Withdraw(ctx context.Context, token string) error
	// Warm loads a runtime in advance, before a session or a probe needs it.
	Warm(ctx context.Context, rt *gpuctlv1.Runtime) error
}

// Event reports a change of a PCI function.
type Event struct {
	Address pci.Address
	Gone    bool // it was unplugged; another one may be in its place by now
}

// Config has what an Agent depends on. Users, Events, Ready and Logger are optional.
type Config struct {
	Root     sysfs.Root
	Dir      string // folder of the journal; its content must not survive a boot of the VM
	Profiles *profile.Set
	Prober   Prober
	Sessions Sessions
	Version  string
	// Users returns in words which processes have functions open, in addition to
	// sessions.
	Users func(ctx context.Context, functions []pci.Address) ([]string, error)
	// Events are events of the kernel. The agent also looks at the devices in each
	// interval Poll; zero: 20 s with events, otherwise 2 s.
	Events <-chan Event
	Poll   time.Duration
	// Bulk opens a vchan or vsock for one connection of the host; nil: there is none.
	Bulk func(ctx context.Context) (*gpuctlv1.OpenBulkResponse, error)
	// Driver is the engine of CUDA processes, Services what watches GPUs; nil: there is none.
	Driver   Driver
	Services Services
	// Lender has the leases of the VM's cards, which then are for sessions of other VMs and
	// hosts alone; nil: they are for the VM's own.
	Lender Lender
	// Relay has the connections of carriers that the host is to make; nil: there are none.
	Relay Relay
	// Ready is called with whether there is a GPU for OpenCL applications.
	Ready  func(bool)
	Logger *slog.Logger
}

// Agent manages a VM's PCI devices while Run runs.
type Agent struct {
	cfg      Config
	kernel   kernel
	sessions Sessions
	users    func(ctx context.Context, functions []pci.Address) ([]string, error)
	log      *slog.Logger
	instance string
	wake     chan struct{}

	// turn is held while a device's driver is changed.
	turn          sync.Mutex
	journal       *journal
	offeredDriver map[pci.Address]bool // functions for which the kernel was asked to find a driver

	offering sync.Mutex // held while the offer is changed
	offered  *gpuctlv1.Target
	made     bool // the last offer or withdrawal has succeeded

	mu      sync.Mutex
	devices map[pci.Address]*device
	remote  *gpuctlv1.BorrowRequest // the GPU that a host lends to the VM; nil: none
	lending map[pci.Address]int     // leases that are being made
	wishes  map[string]*wish        // sessions that wait for a lease, by id
	changed chan struct{}
	probes  sync.WaitGroup
}

// device is a function that the agent manages. Its fields are guarded by Agent.mu.
type device struct {
	function
	profile  *profile.Profile
	target   *gpuctlv1.Target // target that works; nil: none
	partial  bool             // NVIDIA's driver does not show it yet: target is for OpenCL programs alone
	message  string
	held     bool // it is being released, or is released
	released bool // it is released
	probing  context.CancelFunc
	probed   chan struct{} // closed when the probe has ended
	notUntil time.Time
	retry    time.Duration
}

func (d *device) ready() bool { return d.target != nil && !d.held }

// New returns an agent. It reads from the journal what was released before.
func New(cfg Config) (*Agent, error) {
	if cfg.Poll == 0 {
		if cfg.Poll = defaultPoll; cfg.Events != nil {
			cfg.Poll = eventPoll
		}
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Ready == nil {
		cfg.Ready = func(bool) {}
	}
	k := kernel{cfg.Root}
	j, err := openJournal(cfg.Dir, k.bootID())
	if err != nil {
		return nil, err
	}
	var id [8]byte
	_, _ = rand.Read(id[:]) // crypto/rand never fails
	return &Agent{
		cfg: cfg, kernel: k, sessions: cfg.Sessions, users: cfg.Users, log: cfg.Logger, instance: hex.EncodeToString(id[:]),
		wake: make(chan struct{}, 1), journal: j, offeredDriver: map[pci.Address]bool{},
		devices: map[pci.Address]*device{}, wishes: map[string]*wish{}, lending: map[pci.Address]int{}, changed: make(chan struct{}),
	}, nil
}

// Run manages the devices until ctx ends.
func (a *Agent) Run(ctx context.Context) error {
	defer a.probes.Wait()
	t := time.NewTicker(a.cfg.Poll)
	defer t.Stop()
	events := a.cfg.Events
	for {
		a.look(ctx)
		a.offer(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		case <-a.wake:
		case e, ok := <-events:
			if !ok {
				events = nil
				continue
			}
			if e.Gone {
				a.forget(e.Address)
			}
		}
	}
}

func (a *Agent) poke() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// forget removes a function that was unplugged. If it appears again, it is a new one.
func (a *Agent) forget(at pci.Address) {
	a.turn.Lock()
	delete(a.offeredDriver, at)
	a.turn.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if d := a.devices[at]; d != nil {
		a.drop(d)
	}
}

// drop removes a device. The caller holds mu.
func (a *Agent) drop(d *device) {
	if d.probing != nil {
		d.probing()
	}
	delete(a.devices, d.address)
	a.news()
}

// news wakes all who wait for changes. The caller holds mu.
func (a *Agent) news() {
	close(a.changed)
	a.changed = make(chan struct{})
}

// look reads the devices from the kernel.
func (a *Agent) look(ctx context.Context) {
	a.turn.Lock()
	defer a.turn.Unlock()
	functions, err := a.kernel.functions()
	if err != nil {
		a.log.Warn("look for devices", "err", err)
		return
	}
	there := map[pci.Address]bool{}
	for _, f := range functions {
		there[f.address] = true
	}
	for at := range a.offeredDriver {
		if !there[at] {
			delete(a.offeredDriver, at)
		}
	}
	a.mu.Lock()
	for at, d := range a.devices {
		if !there[at] {
			a.log.Info("unplugged", "device", at)
			a.drop(d)
		}
	}
	a.mu.Unlock()
	a.enforce(ctx, functions)
	for i := range functions {
		if f, ok := a.kernel.function(functions[i].address); ok { // read again, as enforce may have changed it
			a.see(ctx, &f)
		}
	}
	if len(a.journal.data.Stopped) > 0 && a.cfg.Services != nil && a.watchable() {
		a.wakeServices(ctx)
	}
}

// see updates the device of a function. If ctx is nil, no runtime is probed. The caller
// holds turn.
func (a *Agent) see(ctx context.Context, f *function) {
	p, _ := a.cfg.Profiles.Lookup(f.id)
	released := a.journal.has(f.address)
	a.mu.Lock()
	defer a.mu.Unlock()
	d := a.devices[f.address]
	if p == nil && !f.display() && !released {
		if d != nil {
			a.drop(d)
		}
		return
	}
	if d != nil && d.id != f.id {
		a.drop(d)
		d = nil
	}
	if d == nil {
		f.serial = a.kernel.serial(f.address)
		d = &device{function: *f, profile: p, retry: leastRetry, held: released}
		a.devices[f.address] = d
		a.log.Info("device", "address", f.address, "id", fmt.Sprintf("%04x:%04x", f.id.Vendor, f.id.Device), "driver", f.driver, "released", released)
		a.news()
	}
	if d.released != released {
		d.released = released
		a.news()
	}
	if d.driver != f.driver {
		d.driver, d.notUntil, d.retry = f.driver, time.Time{}, leastRetry
		a.news()
	}
	a.judge(ctx, d)
}

// judge sets why a device is not ready, or starts a probe of its runtimes. The caller
// holds mu.
func (a *Agent) judge(ctx context.Context, d *device) {
	say := func(message string, args ...any) {
		if message = excerpt.Of(fmt.Sprintf(message, args...), maxMessage); message != d.message {
			d.message = message
			a.news()
		}
	}
	lose := func() {
		if d.target != nil {
			d.target, d.partial = nil, false
			a.news()
		}
	}
	switch {
	case d.released:
		say("released: nothing uses it until it is taken up")
	case d.held:
		say("being released")
	case d.profile == nil:
		say("%s", noProfile(d.id))
	case !d.profile.Binds(d.driver):
		lose()
		has := "no driver"
		if d.driver != "" {
			has = "the driver " + d.driver
		}
		say("it has %s; profile %s needs %s: install it in the VM", has, d.profile.Name, list(d.profile.Drivers))
	case d.target != nil && !d.partial || d.probing != nil || ctx == nil || time.Now().Before(d.notUntil):
	default:
		if d.message == "" && d.target == nil {
			say("its runtime is being tried")
		}
		a.probe(ctx, d)
	}
}

// probe tries the runtimes of a device in the background. The caller holds mu.
func (a *Agent) probe(ctx context.Context, d *device) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	over := make(chan struct{})
	d.probing, d.probed = cancel, over
	order, before := a.order(d), d.target
	a.probes.Go(func() {
		defer close(over)
		defer cancel()
		var target *gpuctlv1.Target
		var err error
		if before == nil {
			target, err = a.try(ctx, d.function, d.profile, order)
		} else { // OpenCL programs use it already
			target = a.withDriver(ctx, d.function, d.profile, proto.CloneOf(before))
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		d.probing = nil
		if a.devices[d.address] != d || d.held || errors.Is(err, context.Canceled) {
			return
		}
		again := func() {
			d.notUntil = time.Now().Add(d.retry)
			time.AfterFunc(d.retry, a.poke)
			d.retry = min(2*d.retry, mostRetry)
		}
		switch {
		case err != nil:
			d.message = excerpt.Of(err.Error(), maxMessage)
			again()
			a.log.Info("device is not ready", "device", d.address, "err", err)
		case before != nil && a.awaitsDriver(d.profile, target):
			again()
			return // nothing has changed
		default:
			d.target, d.message = target, ""
			if d.partial = a.awaitsDriver(d.profile, target); d.partial {
				again()
			} else {
				d.retry = leastRetry
			}
			a.log.Info("device is ready", "device", d.address, "model", target.Model, "library", target.GetRuntime().GetLibrary(), "cuda", len(target.Driver) > 0)
		}
		a.news()
		a.poke()
	})
}

// order returns a device's index among the devices of its profile. The caller holds mu.
func (a *Agent) order(d *device) int {
	n := 0
	for at, other := range a.devices {
		if other.profile == d.profile && at.Compare(d.address) < 0 {
			n++
		}
	}
	return n
}

// try returns the target of the first runtime that works.
func (a *Agent) try(ctx context.Context, f function, p *profile.Profile, order int) (*gpuctlv1.Target, error) {
	var errs []error
	for _, rt := range p.Runtimes() {
		resp, err := a.cfg.Prober.Probe(ctx, rt)
		if ctx.Err() != nil {
			return nil, fmt.Errorf("profile %s: %w", p.Name, context.Cause(ctx))
		}
		if err == nil {
			var i int
			if i, err = pick(f, p, order, resp.Devices); err == nil {
				found := resp.Devices[i]
				rt.Devices = []uint32{found.Index}
				model := p.Model
				if model == "" {
					model = found.Name
				}
				return a.withDriver(ctx, f, p, &gpuctlv1.Target{Gpu: gpuID(f.address), Model: model, Runtime: rt, Limits: found.Limits}), nil
			}
		}
		errs = append(errs, fmt.Errorf("%s: %w", rt.Library, err))
	}
	if t := a.withDriver(ctx, f, p, nil); t != nil {
		a.log.Info("CUDA programs alone can use it", "device", f.address, "err", errors.Join(errs...))
		return t, nil
	}
	return nil, fmt.Errorf("no runtime of profile %s works: %w", p.Name, errors.Join(errs...))
}

// pick finds a function among the devices of its runtime.
func pick(f function, p *profile.Profile, order int, devices []*gpuctlv1.ProbedDevice) (int, error) {
	n := order
	switch p.How {
	case profile.ByNumber:
		n = int(p.Number)
	case profile.ByAddress:
		named := false
		for i, d := range devices {
			at, err := pci.ParseAddress(d.PciAddress)
			if err == nil && at == f.address {
				return i, nil
			}
			named = named || err == nil
		}
		if named {
			return 0, fmt.Errorf("none of its %d devices is at %s", len(devices), f.address)
		}
	}
	if n < 0 || n >= len(devices) {
		return 0, fmt.Errorf("it has %d devices, none of them number %d", len(devices), n)
	}
	return n, nil
}

// hold sets whether a device must not be used. When hold has returned, a probe of the
// device has ended, and applications are not offered it.
func (a *Agent) hold(ctx context.Context, at pci.Address, on bool) {
	a.mu.Lock()
	d := a.devices[at]
	if d == nil {
		a.mu.Unlock()
		a.poke()
		return
	}
	d.held = on
	var over chan struct{}
	if on && d.probing != nil {
		d.probing()
		over = d.probed
	}
	if !on {
		// Probe it again, because it may be another device now.
		d.target, d.partial, d.message, d.notUntil, d.retry = nil, false, "", time.Time{}, leastRetry
	}
	a.news()
	a.mu.Unlock()
	if over != nil {
		<-over
	}
	a.offer(ctx)
	a.poke()
}

// targetOf returns the target of sessions on a function, also while the function is held.
func (a *Agent) targetOf(at pci.Address) *gpuctlv1.Target {
	a.mu.Lock()
	defer a.mu.Unlock()
	if d := a.devices[at]; d != nil && d.target != nil {
		return proto.CloneOf(d.target)
	}
	return nil
}

// releasable reports whether the host may ask to release the function.
func (a *Agent) releasable(f *function) bool {
	if _, ok := a.cfg.Profiles.Lookup(f.id); ok || f.display() || f.companion() {
		return true
	}
	return a.journal.has(f.address)
}

// offer offers applications the ready device with the lowest address. If there is none, or
// the VM lends its devices, it offers the GPU that a host lends to the VM.
func (a *Agent) offer(ctx context.Context) {
	a.offering.Lock()
	defer a.offering.Unlock()
	var want *gpuctlv1.Target
	for _, d := range a.list() {
		if d.ready() && a.cfg.Lender == nil {
			want = proto.CloneOf(d.target)
			break
		}
	}
	claim := ownClaim
	if lent := a.lent(); want == nil && lent != nil {
		want, claim = remoteTarget(lent), lent.GetClaim()
	}
	if a.made && proto.Equal(want, a.offered) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var err error
	if want == nil {
		a.cfg.Ready(false) // before the withdrawal, so that no application is accepted after it
		err = a.sessions.Withdraw(ctx, Token)
	} else {
		err = a.sessions.Offer(ctx, &gpuctlv1.OfferRequest{
			Token: Token, Claim: claim, Target: want,
			// The name that applications see stays the same if the model changes.
			Device: &gpuctlv1.VirtualDevice{Name: "gpuctl virtual GPU", Type: "gpu"},
		})
	}
	if a.made = err == nil; err != nil {
		if ctx.Err() == nil {
			a.log.Warn("offer a GPU to applications", "err", err)
		}
		return
	}
	a.offered = want
	a.cfg.Ready(want.GetRuntime() != nil)
}

// list returns the devices, sorted by address.
func (a *Agent) list() []device {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]device, 0, len(a.devices))
	for _, d := range a.devices {
		out = append(out, *d)
	}
	slices.SortFunc(out, func(x, y device) int { return x.address.Compare(y.address) })
	return out
}

func sameRuntime(a, b *gpuctlv1.Runtime) bool { return a != nil && proto.Equal(a, b) }

func list(words []string) string {
	switch n := len(words); n {
	case 0:
		return ""
	case 1:
		return words[0]
	default:
		out := words[0]
		for _, w := range words[1 : n-1] {
			out += ", " + w
		}
		return out + " or " + words[n-1]
	}
}
