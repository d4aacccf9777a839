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
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
)

// Protocol is the version of AgentService that this package serves, and of
// GuestService beside it: since 2 a session's state can leave the VM.
const Protocol = 2

// Token is that of the offer which the agent makes to the VM's applications:
// they have none.
const Token = ""

const (
	gpuPrefix    = "vm/"
	defaultPoll  = 2 * time.Second
	eventPoll    = 20 * time.Second // with events: for what they are lost of
	probeTimeout = 2 * time.Minute
	leastRetry   = time.Second
	mostRetry    = 30 * time.Second
	callTimeout  = 20 * time.Second
	maxMessage   = 1000 // bytes of why a device is not ready
)

// gpuID is how sessions on a function are known. It names no device of the
// host's.
func gpuID(a pci.Address) string { return gpuPrefix + a.String() }

// Prober reports what devices a runtime has; session.Launcher does.
type Prober interface {
	Probe(ctx context.Context, rt *gpuctlv1.Runtime) (*gpuctlv1.ProbeResponse, error)
}

// Sessions is what the agent needs of the VM's sessions.
type Sessions interface {
	List(ctx context.Context) ([]*gpuctlv1.Session, error)
	Offer(ctx context.Context, o *gpuctlv1.OfferRequest) error
	Withdraw(ctx context.Context, token string) error
	// Warm loads a runtime ahead, for the running sessions and for a probe.
	Warm(ctx context.Context, rt *gpuctlv1.Runtime) error
}

// Event is news of a PCI function.
type Event struct {
	Address pci.Address
	Gone    bool // it was unplugged, though there may be another by now
}

// Config is what an Agent needs. Users, Events, Ready and Logger may be left
// out.
type Config struct {
	Root     sysfs.Root
	Dir      string // for what is released; to be lost when the VM boots
	Profiles *profile.Set
	Prober   Prober
	Sessions Sessions
	Version  string
	// Users says in words who has functions open beside sessions.
	Users func(ctx context.Context, functions []pci.Address) ([]string, error)
	// Events are the kernel's. Without them, and beside them, the agent looks
	// every Poll; zero: 20 s with events, else 2 s.
	Events <-chan Event
	Poll   time.Duration
	// Bulk opens a way for one connection of the host and returns its vchan's
	// path; nil: there is none.
	Bulk func(ctx context.Context) (vchan string, err error)
	// Ready is told whether there is a GPU for applications.
	Ready  func(bool)
	Logger *slog.Logger
}

// Agent looks after a VM's PCI devices. Run has to run for it to do so.
type Agent struct {
	cfg      Config
	kernel   kernel
	sessions Sessions
	users    func(ctx context.Context, functions []pci.Address) ([]string, error)
	log      *slog.Logger
	instance string
	wake     chan struct{}

	// turn is held by who changes what the kernel does with a device.
	turn          sync.Mutex
	journal       *journal
	offeredDriver map[pci.Address]bool // the kernel was asked to find one

	offering sync.Mutex // by who changes the offer
	offered  *gpuctlv1.Target
	made     bool // that offer, or its withdrawal, was taken

	mu      sync.Mutex
	devices map[pci.Address]*device
	changed chan struct{}
	probes  sync.WaitGroup
}

// device is a function that the agent looks after; fields are under Agent.mu.
type device struct {
	function
	profile  *profile.Profile
	target   *gpuctlv1.Target // that works; nil: none
	message  string
	held     bool // is being released, or was
	released bool // was
	probing  context.CancelFunc
	probed   chan struct{} // closed when the probe is over
	notUntil time.Time
	retry    time.Duration
}

func (d *device) ready() bool { return d.target != nil && !d.held }

// New returns an agent that knows what was released before.
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
	_, _ = rand.Read(id[:]) // never fails
	return &Agent{
		cfg: cfg, kernel: k, sessions: cfg.Sessions, users: cfg.Users, log: cfg.Logger, instance: hex.EncodeToString(id[:]),
		wake: make(chan struct{}, 1), journal: j, offeredDriver: map[pci.Address]bool{},
		devices: map[pci.Address]*device{}, changed: make(chan struct{}),
	}, nil
}

// Run looks after the devices until ctx ends.
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

// forget makes a function that was unplugged a new one if it is there again.
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

// drop is called with mu held.
func (a *Agent) drop(d *device) {
	if d.probing != nil {
		d.probing()
	}
	delete(a.devices, d.address)
	a.news()
}

// news wakes who watches; mu is held.
func (a *Agent) news() {
	close(a.changed)
	a.changed = make(chan struct{})
}

// look takes in what the kernel shows.
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
		if f, ok := a.kernel.function(functions[i].address); ok { // as enforce left it
			a.see(ctx, &f)
		}
	}
}

// see takes in one function. Without ctx it has no runtime tried. turn is held.
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

// judge says why a device is not ready, or has its runtime tried; mu is held.
func (a *Agent) judge(ctx context.Context, d *device) {
	say := func(message string, args ...any) {
		if message = clip(fmt.Sprintf(message, args...)); message != d.message {
			d.message = message
			a.news()
		}
	}
	lose := func() {
		if d.target != nil {
			d.target = nil
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
	case d.target != nil || d.probing != nil || ctx == nil || time.Now().Before(d.notUntil):
	default:
		if d.message == "" {
			say("its runtime is being tried")
		}
		a.probe(ctx, d)
	}
}

// probe tries the runtimes of a device in the background; mu is held.
func (a *Agent) probe(ctx context.Context, d *device) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	over := make(chan struct{})
	d.probing, d.probed = cancel, over
	order := a.order(d)
	a.probes.Go(func() {
		defer close(over)
		defer cancel()
		target, err := a.try(ctx, d.function, d.profile, order)
		a.mu.Lock()
		defer a.mu.Unlock()
		d.probing = nil
		if a.devices[d.address] != d || d.held || errors.Is(err, context.Canceled) {
			return
		}
		if err != nil {
			d.message = clip(err.Error())
			d.notUntil = time.Now().Add(d.retry)
			time.AfterFunc(d.retry, a.poke)
			d.retry = min(2*d.retry, mostRetry)
			a.log.Info("device is not ready", "device", d.address, "err", err)
		} else {
			d.target, d.message, d.retry = target, "", leastRetry
			a.log.Info("device is ready", "device", d.address, "model", target.Model, "library", target.Runtime.Library)
		}
		a.news()
		a.poke()
	})
}

// order is a device's place among those of its profile; mu is held.
func (a *Agent) order(d *device) int {
	n := 0
	for at, other := range a.devices {
		if other.profile == d.profile && at.Compare(d.address) < 0 {
			n++
		}
	}
	return n
}

// try returns the first target that works.
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
				return &gpuctlv1.Target{Gpu: gpuID(f.address), Model: model, Runtime: rt, Limits: found.Limits}, nil
			}
		}
		errs = append(errs, fmt.Errorf("%s: %w", rt.Library, err))
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

// hold keeps a device from being used, or lets it again. A probe of it is over
// when hold returns, and applications are not offered it.
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
		// What served it before is tried again: it may be another device.
		d.target, d.message, d.notUntil, d.retry = nil, "", time.Time{}, leastRetry
	}
	a.news()
	a.mu.Unlock()
	if over != nil {
		<-over
	}
	a.offer(ctx)
	a.poke()
}

// targetOf is what sessions on a function have, also while it is held.
func (a *Agent) targetOf(at pci.Address) *gpuctlv1.Target {
	a.mu.Lock()
	defer a.mu.Unlock()
	if d := a.devices[at]; d != nil && d.target != nil {
		return proto.CloneOf(d.target)
	}
	return nil
}

// releasable reports whether a function is one that the host may take out.
func (a *Agent) releasable(f *function) bool {
	if _, ok := a.cfg.Profiles.Lookup(f.id); ok || f.display() || f.companion() {
		return true
	}
	return a.journal.has(f.address)
}

// offer gives applications the ready device with the lowest address.
func (a *Agent) offer(ctx context.Context) {
	a.offering.Lock()
	defer a.offering.Unlock()
	var want *gpuctlv1.Target
	for _, d := range a.list() {
		if d.ready() {
			want = proto.CloneOf(d.target)
			break
		}
	}
	if a.made && proto.Equal(want, a.offered) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var err error
	if want == nil {
		a.cfg.Ready(false) // nobody may come between
		err = a.sessions.Withdraw(ctx, Token)
	} else {
		err = a.sessions.Offer(ctx, &gpuctlv1.OfferRequest{
			Token: Token, Claim: "vm", Target: want,
			// What applications see stays as it is when the model becomes another.
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
	a.cfg.Ready(want != nil)
}

// list returns the devices as they are, by address.
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

func clip(s string) string {
	if len(s) > maxMessage {
		s = s[:maxMessage] + "…"
	}
	return s
}

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
