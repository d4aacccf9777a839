package borrow

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/hostd/migration/endpoint"
	"github.com/gpuctl/gpuctl/internal/busy"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/internal/wait"
	"github.com/gpuctl/gpuctl/migrate"
)

const (
	lookEvery  = 3 * time.Second
	lookFor    = 10 * time.Second // most time that libvirt has for one VM
	leastRetry = time.Second      // between two attempts to tell a VM
	mostRetry  = 10 * time.Second
	callHost   = 20 * time.Second // for a call to the host that lends
)

// Node gives access to the cluster.
type Node interface {
	HostName() string
	View() *state.View
	// Read returns the state with everything that is committed, or an error if that is
	// unknown now.
	Read(ctx context.Context) (*state.View, error)
	// Site returns a client for a host, which may be this one.
	Site(host string) (gpuctlv1connect.SiteServiceClient, error)
}

// Site knows the VMs of this host and their gpuguests. endpoint.Local implements it.
type Site interface {
	Where(ctx context.Context, uuid string) (migrate.Presence, error)
	Reach(ctx context.Context, uuid string, addresses []string) ([]*gpuctlv1.Reached, error)
	AgentProtocol(ctx context.Context, uuid string) (uint32, error)
	ServeRemote(ctx context.Context, m vm.VM, lent endpoint.Lent, ready func()) error
	Computing(ctx context.Context, uuid, gpu string) (sessions []string, err error)
	HasCard(ctx context.Context, uuid string) (bool, error)
	BringHome(ctx context.Context, m vm.VM, sessions []string, report migrate.Progress) error
	// Relay makes connections for the VM's carriers, to addresses for which may returns true,
	// until ctx ends or gpuguest does not answer.
	Relay(ctx context.Context, m vm.VM, may func(address string) bool) error
	// Left closes the channel of a VM that is not on this host any more.
	Left(uuid string)
}

// VMs finds VMs of this host by name or UUID.
type VMs interface {
	Find(ctx context.Context, ref string) (vm.Info, error)
}

// Config has what a Keeper depends on.
type Config struct {
	Node Node
	Site Site
	VMs  VMs
	Log  *slog.Logger
	// Tell is how long a VM may take to have its GPU, or to say what computes there; 0: 30 s.
	Tell time.Duration
}

// Keeper gives VMs of this host remote GPUs. It is safe for concurrent use.
type Keeper struct {
	Config
	wake chan struct{}
	work sync.WaitGroup
	busy busy.Set // VMs, by UUID, of which something is being changed

	mu     sync.Mutex
	served map[string]*served // by UUID, until nobody tells it any more
	held   map[string]bool    // VMs, by UUID, whose GPU is being detached

	relayed map[string]context.CancelFunc // by UUID, ends to make connections for the VM's carriers
}

// served is a VM that is told of its GPU.
type served struct {
	lent  lent
	stop  context.CancelFunc
	ready chan struct{} // closed when the VM has it
	ended chan struct{} // closed when it is not told any more

	mu  sync.Mutex
	err error // why the VM could not be told last
}

// lent is a lasting claim in the log.
type lent struct {
	endpoint.Lent
	vm    vm.VM
	token uint64 // of the assignment
}

func (l lent) same(other lent) bool {
	return l.GPU == other.GPU && l.Claim == other.Claim && l.token == other.token && l.vm.UUID == other.vm.UUID
}

// New returns a Keeper. It serves VMs only while Run runs.
func New(c Config) *Keeper {
	if c.Tell == 0 {
		c.Tell = tellFor
	}
	return &Keeper{Config: c, wake: make(chan struct{}, 1), served: map[string]*served{}, held: map[string]bool{}, relayed: map[string]context.CancelFunc{}}
}

// lentOf returns what a claim in the log lends to a VM. ok is false if it is no lasting
// claim of a VM, or has no GPU (any more).
func lentOf(v *state.View, c *clusterv1.Claim) (out lent, ok bool) {
	uuid := c.GetLabels()[endpoint.LabelVM]
	if uuid == "" || c.GetId() != endpoint.LastingClaim(uuid) {
		return out, false
	}
	for as := range v.AssignmentsOfClaim(c.GetId()) {
		h, g := v.Host(as.GetHost()), v.GPU(as.GetGpu())
		if as.GetResidence() == clusterv1.Residence_RESIDENCE_RELEASING || h == nil || g == nil || h.GetId() != c.GetLabels()[placement.LabelManagedBy] {
			continue
		}
		out = lent{
			Lent: endpoint.Lent{GPU: g.GetId(), Claim: c.GetId(), Model: g.GetModel(), Memory: as.GetMemory(), Limits: g.GetLimits()},
			vm:   vm.VM{UUID: uuid, Name: c.GetLabels()[endpoint.LabelName]}, token: as.GetToken(),
		}
		return out, true
	}
	return out, false
}

// Of returns the GPU that is lent to a VM, as this host knows it, or nil.
func (k *Keeper) Of(uuid string) *gpuctlv1.RemoteGPU {
	v := k.Node.View()
	if v == nil {
		return nil
	}
	l, ok := lentOf(v, v.Claim(endpoint.LastingClaim(uuid)))
	if !ok {
		return nil
	}
	return &gpuctlv1.RemoteGPU{Gpu: l.GPU, Claim: l.Claim, Memory: l.Memory}
}

// Kick makes the keeper look now.
func (k *Keeper) Kick() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// Run serves the VMs of this host until ctx ends.
func (k *Keeper) Run(ctx context.Context) {
	defer k.work.Wait()
	for ctx.Err() == nil {
		v := k.Node.View()
		var changed <-chan struct{}
		if v != nil {
			changed = v.Changed(clusterv1.Kind_KIND_ASSIGNMENT, clusterv1.Kind_KIND_MIGRATION)
		}
		k.look(ctx, v)
		k.lookRelays(ctx, v)
		t := time.NewTimer(lookEvery)
		select {
		case <-ctx.Done():
		case <-t.C:
		case <-k.wake:
		case <-changed:
		}
		t.Stop()
	}
}

// look begins to serve the VMs that run here, and ends to serve those that do not, or whose
// claim is over.
func (k *Keeper) look(ctx context.Context, v *state.View) {
	want := map[string]lent{}
	if v != nil { // otherwise this host is in no cluster
		for c := range v.Claims() {
			if l, ok := lentOf(v, c); ok {
				want[l.vm.UUID] = l
			}
		}
	}
	for uuid := range want {
		if !k.here(ctx, uuid) {
			delete(want, uuid)
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for uuid, s := range k.served {
		if k.held[uuid] {
			continue // the detach ends it
		}
		if l, ok := want[uuid]; !ok || !l.same(s.lent) {
			s.stop()
		}
	}
	for uuid, l := range want {
		if k.served[uuid] != nil || k.held[uuid] {
			continue
		}
		serving, stop := context.WithCancel(ctx)
		s := &served{lent: l, stop: stop, ready: make(chan struct{}), ended: make(chan struct{})}
		k.served[uuid] = s
		k.work.Go(func() {
			defer close(s.ended)
			k.serve(serving, s)
			if p, err := k.Site.Where(ctx, uuid); err == nil && (p == migrate.Absent || p == migrate.Stopped) {
				k.Site.Left(uuid)
			}
			k.mu.Lock()
			delete(k.served, uuid)
			k.mu.Unlock()
			k.Kick() // a new claim may wait for that
		})
	}
}

// here reports whether a VM runs on this host. One that moves, or of which libvirt does not
// tell, is where it was.
func (k *Keeper) here(ctx context.Context, uuid string) bool {
	ctx, cancel := context.WithTimeout(ctx, lookFor)
	defer cancel()
	p, err := k.Site.Where(ctx, uuid)
	if err == nil && p != migrate.Moving {
		return p == migrate.Running
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.served[uuid] != nil || k.relayed[uuid] != nil
}

// serve tells a VM of its GPU, again and again, until ctx ends.
func (k *Keeper) serve(ctx context.Context, s *served) {
	m, retry, said := s.lent.vm, leastRetry, ""
	for ctx.Err() == nil {
		// While the VM moves, nobody opens its channel here again.
		p, err := k.Site.Where(ctx, m.UUID)
		if err == nil && p != migrate.Running {
			err = fmt.Errorf("VM %s is %s", m.Name, p)
		}
		if err == nil {
			err = k.follow(ctx, s.lent)
		}
		if err == nil {
			err = k.Site.ServeRemote(ctx, m, s.lent.Lent, func() {
				retry, said = leastRetry, ""
				k.Log.Info("a VM has a remote GPU", "machine", m.Name, "gpu", s.lent.GPU, "claim", s.lent.Claim)
				select {
				case <-s.ready:
				default:
					close(s.ready)
				}
			})
		}
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			err = errors.New("it was told, and the call ended")
		}
		s.mu.Lock()
		s.err = err
		s.mu.Unlock()
		if text := err.Error(); text != said { // not at each attempt
			said = text
			k.Log.Warn("a VM does not have its remote GPU for now", "machine", m.Name, "gpu", s.lent.GPU, "err", err)
		}
		if wait.For(ctx, retry) != nil {
			return
		}
		retry = min(2*retry, mostRetry)
	}
}

// why returns why the VM could not be told last.
func (s *served) why() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// request is a call about a lasting claim to the host that lends.
func (l lent) request() *connect.Request[gpuctlv1.SiteLendRequest] {
	return connect.NewRequest(&gpuctlv1.SiteLendRequest{Machine: &gpuctlv1.SiteMachine{Uuid: l.vm.UUID, Name: l.vm.Name}, Gpu: l.GPU, Claim: l.Claim})
}

// follow tells the host that lends that the VM is here.
func (k *Keeper) follow(ctx context.Context, l lent) error {
	ctx, cancel := context.WithTimeout(ctx, callHost)
	defer cancel()
	c, err := k.Node.Site(migrate.HostOf(l.GPU))
	if err != nil {
		return err
	}
	_, err = c.Follow(ctx, l.request())
	return err
}
