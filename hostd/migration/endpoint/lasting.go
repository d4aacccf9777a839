package endpoint

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/internal/excerpt"
	"github.com/gpuctl/gpuctl/internal/throttle"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/internal/wait"
	"github.com/gpuctl/gpuctl/migrate"
)

// Labels of a lasting claim: the UUID and the name of its VM.
const (
	LabelVM   = placement.LabelVM
	LabelName = "gpuctl.vm-name"
)

// BorrowProtocol is the lowest version of gpuguest whose sessions can begin on a remote GPU.
const BorrowProtocol = 4

const (
	lastingPrefix = "vmgpu-"

	mostWishes   = 64               // of one VM's sessions that are answered at the same time
	wishTimeout  = time.Minute      // for a lease, which starts a far executor
	refusedFor   = time.Second      // how long a refused wish keeps its place, so that a VM cannot ask without end
	grantTimeout = 20 * time.Second // for a VM to take an answer
	longestWhy   = 500              // bytes of a reason that a VM is told
	wishesLogged = 10               // refusals of one VM at first; then one for each wishesEvery
	wishesEvery  = 10 * time.Second
)

// LastingClaim returns the id of the claim by which a VM has a remote GPU until that is
// detached. The id is the VM's, so the log itself sees to it that there is one at most.
func LastingClaim(uuid string) string { return lastingPrefix + uuid }

func isLasting(claim string) bool { return strings.HasPrefix(claim, lastingPrefix) }

// abroad reports whether a session computes on the remote GPU that its VM has lastingly.
// The VM may move without it.
func abroad(s *gpuctlv1.Session) bool {
	return s.GetTarget().GetRuntime().GetRemote() != nil && isLasting(s.GetClaim())
}

// Grant is what a VM gets of a GPU of this host.
type Grant struct {
	GPU        string // by its name on this host
	Claim      string
	Host       string // the VM's
	MinMemory  uint64 // bytes; 0: the whole GPU
	Persistent bool   // it outlives the VM's stops
}

// Granter lends GPUs of this host to VMs lastingly.
type Granter interface {
	// GrantVM assigns a GPU to a claim of the VM, until EndLendVM or the VM's end. It may
	// be repeated. The error wraps migrate.ErrTaken if there is no room.
	GrantVM(ctx context.Context, m vm.VM, g Grant) error
	// VMHost returns the host of a VM that has such a claim, as this host knows it.
	VMHost(m vm.VM, claim string) (host string, err error)
	// FollowVM changes it.
	FollowVM(m vm.VM, claim, host string) error
	// EndLeasesVM ends all far executors of the claim, which stays.
	EndLeasesVM(ctx context.Context, m vm.VM, claim, why string) error
}

// follows makes sure that a VM with a lasting claim is on the host that asks. The VM may
// have moved since, by gpuctl or by something else: then the former host is asked. If both
// say that it runs there, the results of its far executors cannot be trusted any more, and
// they end.
func (l *Local) follows(ctx context.Context, r *gpuctlv1.SiteMachine, claim, borrower string) error {
	m := vmOf(r)
	if l.Grants == nil {
		return fmt.Errorf("host %s: %w", l.Name, errLendsNothing)
	}
	last, err := l.Grants.VMHost(m, claim)
	if err != nil || last == borrower {
		return err
	}
	p, err := l.WhereOn(ctx, last, m)
	switch {
	case errors.Is(err, ErrNoHost), err == nil && (p == migrate.Absent || p == migrate.Stopped):
	case err != nil && l.MovedTo != nil && l.MovedTo(m.UUID) == borrower: // its last migration was there
	case err != nil:
		return fmt.Errorf("%w: VM %s was on host %s, which does not say that it has left: %w", migrate.ErrUnreachable, m.Name, last, err)
	case p == migrate.Running:
		err = fmt.Errorf("%w: VM %s on %s and %s", ErrTwice, m.Name, last, borrower)
		l.Log.Error("a VM runs on two hosts: what computes for it is ended, as both copies have used it", "machine", m.Name, "claim", claim, "err", err)
		return errors.Join(err, l.Grants.EndLeasesVM(ctx, m, claim, "the VM runs on two hosts"))
	default:
		return fmt.Errorf("%w: VM %s is still on its way from host %s", migrate.ErrUnreachable, m.Name, last)
	}
	l.Log.Info("a VM with a remote GPU is on another host now", "machine", m.Name, "claim", claim, "from", last, "to", borrower)
	return l.Grants.FollowVM(m, claim, borrower)
}

// grant assigns a GPU of this host to a lasting claim of a VM of the host borrower.
func (l *Local) grant(ctx context.Context, r *gpuctlv1.SiteLendRequest, borrower string) error {
	m := vmOf(r.GetMachine())
	switch _, err := virt.ParseUUID(m.UUID); {
	case err != nil:
		return err
	case l.Grants == nil:
		return fmt.Errorf("host %s: %w", l.Name, errLendsNothing)
	case migrate.HostOf(r.GetGpu()) != l.Name:
		return fmt.Errorf("gpu %.300q is not one of host %s", r.GetGpu(), l.Name)
	case r.GetClaim() != LastingClaim(m.UUID):
		return fmt.Errorf("claim %.300q is not that of VM %s", r.GetClaim(), m.UUID)
	}
	return l.Grants.GrantVM(ctx, m, Grant{GPU: local(r.GetGpu()), Claim: r.GetClaim(), Host: borrower, MinMemory: r.GetMinMemory(), Persistent: r.GetPersistent()})
}

// lasting does a call about a claim of a VM. One without a migration is about a lasting
// claim, and has no driver that another one could have replaced.
func (s *Service) lasting(m *gpuctlv1.SiteMachine, claim string, forMove, otherwise func() error) error {
	switch lasts := m.GetMigration() == ""; {
	case lasts != isLasting(claim):
		return fmt.Errorf("claim %.300q of VM %s is not of the kind that migration %q has", claim, m.GetName(), m.GetMigration())
	case lasts:
		return otherwise()
	}
	return s.step(m, forMove)
}

// Follow says that a VM with a lasting claim is on the calling host now.
func (s *Service) Follow(ctx context.Context, req *connect.Request[gpuctlv1.SiteLendRequest]) (*connect.Response[gpuctlv1.SiteDone], error) {
	caller, _ := access.From(ctx)
	return done(s.local.follows(ctx, req.Msg.GetMachine(), req.Msg.GetClaim(), caller.Host))
}

// Lent is a GPU that a host lends to a VM lastingly.
type Lent struct {
	GPU, Claim, Model string
	Memory            uint64 // bytes; 0: the whole GPU
	Limits            *gpuctlv1.Limits
}

// ServeRemote has a VM use a GPU that is lent to it: it tells gpuguest there, and answers
// the sessions that ask for leases, until ctx ends or gpuguest does not answer. ready is
// called when the VM has it.
func (l *Local) ServeRemote(ctx context.Context, m vm.VM, lent Lent, ready func()) error {
	o, err := l.Guests.get(ctx, m.UUID)
	if err != nil {
		return err
	}
	stream, err := o.agent.Borrow(ctx, connect.NewRequest(&gpuctlv1.BorrowRequest{
		Gpu: lent.GPU, Claim: lent.Claim, Model: lent.Model, Memory: lent.Memory, Limits: lent.Limits,
	}))
	if err != nil {
		return fmt.Errorf("%w: %w", errNoAgent, err)
	}
	w := &wishes{local: l, guest: o, machine: m, lent: lent, log: throttle.Logger(l.Log, wishesLogged, wishesEvery), busy: map[string]bool{}}
	defer w.work.Wait()
	defer func() { _ = stream.Close() }()
	for stream.Receive() {
		if ready != nil {
			ready()
			ready = nil
		}
		w.take(ctx, stream.Msg().GetWishes())
	}
	if err := stream.Err(); err != nil {
		return fmt.Errorf("gpuguest in VM %s: %w", m.Name, err)
	}
	return fmt.Errorf("gpuguest in VM %s does not borrow any more", m.Name)
}

// wishes are a VM's sessions that wait for leases. The VM may say what it likes.
type wishes struct {
	local   *Local
	guest   *guest
	machine vm.VM
	lent    Lent
	log     *slog.Logger
	work    sync.WaitGroup

	mu   sync.Mutex
	busy map[string]bool // those that are being answered, by session
}

// take begins to answer the wishes that are new.
func (w *wishes) take(ctx context.Context, all []*gpuctlv1.LeaseWish) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, one := range all {
		id := one.GetSession()
		if len(w.busy) >= mostWishes {
			return // the rest comes again with the next change
		}
		if id == "" || len(id) > longestID || w.busy[id] {
			continue
		}
		w.busy[id] = true
		w.work.Go(func() {
			w.answer(ctx, one)
			w.mu.Lock()
			defer w.mu.Unlock()
			delete(w.busy, id)
		})
	}
}

// longestID is the most bytes of a session's id.
const longestID = 48

// answer makes a lease for a session, and tells the VM.
func (w *wishes) answer(ctx context.Context, wish *gpuctlv1.LeaseWish) {
	out := &gpuctlv1.GrantRequest{Session: wish.GetSession()}
	var err error
	if wish.GetClaim() != w.lent.Claim {
		err = fmt.Errorf("VM %s has no claim %.80q", w.machine.Name, wish.GetClaim())
	} else {
		asking, cancel := context.WithTimeout(ctx, wishTimeout)
		out.Target, err = w.lease(asking, wish)
		cancel()
	}
	if err != nil {
		if ctx.Err() == nil {
			w.log.Warn("a session of a VM gets no lease", "machine", w.machine.Name, "session", excerpt.Of(wish.GetSession(), longestID), "claim", excerpt.Of(wish.GetClaim(), longestWhy), "err", err)
		}
		out.Error = excerpt.Of(err.Error(), longestWhy)
	}
	telling, cancel := context.WithTimeout(ctx, grantTimeout)
	defer cancel()
	if _, gerr := w.guest.agent.Grant(telling, connect.NewRequest(out)); gerr != nil && ctx.Err() == nil {
		w.log.Warn("a VM was not told about a lease", "machine", w.machine.Name, "err", gerr)
		err = gerr
	}
	if err != nil {
		_ = wait.For(ctx, refusedFor)
	}
}

// lease makes a lease for a session. It waits for a host that lends and does not answer now.
func (w *wishes) lease(ctx context.Context, wish *gpuctlv1.LeaseWish) (*gpuctlv1.Target, error) {
	for {
		t, err := w.local.farTarget(ctx, &gpuctlv1.SiteMachine{Uuid: w.machine.UUID, Name: w.machine.Name}, w.lent.GPU, w.lent.Claim, wish.GetSession(), wish.GetDevice())
		if !errors.Is(err, migrate.ErrUnreachable) || wait.For(ctx, refusedFor) != nil {
			return t, err
		}
	}
}

// Left closes the channel of a VM that is not on this host any more.
func (l *Local) Left(uuid string) { l.Guests.Forget(uuid) }

// Computing returns the sessions of a VM that are on a remote GPU.
func (l *Local) Computing(ctx context.Context, uuid, gpu string) (ids []string, err error) {
	all, _, err := l.sessions(ctx, uuid)
	if err != nil {
		return nil, err
	}
	for _, s := range all {
		switch s.GetState() {
		case gpuctlv1.SessionState_SESSION_STATE_ENDED, gpuctlv1.SessionState_SESSION_STATE_LOST:
		default:
			if abroad(s) && s.GetTarget().GetGpu() == gpu {
				ids = append(ids, s.GetId())
			}
		}
	}
	return ids, nil
}

// ownDevice returns a card that the VM has for itself and that is ready for OpenCL, or nil.
func (l *Local) ownDevice(ctx context.Context, uuid string) (*gpuctlv1.GuestDevice, error) {
	hello, err := l.Guests.Hello(ctx, uuid)
	if err != nil {
		return nil, err
	}
	for _, d := range hello.GetDevices() {
		if d.GetReady() && !d.GetLends() && d.GetTarget().GetRuntime().GetLibrary() != "" {
			return d, nil
		}
	}
	return nil, nil //nolint:nilnil // it has none
}

// HasCard reports whether a VM has a card that is ready for its sessions.
func (l *Local) HasCard(ctx context.Context, uuid string) (bool, error) {
	d, err := l.ownDevice(ctx, uuid)
	return d != nil, err
}

// BringHome moves sessions of a VM from a remote GPU to the card that the VM has.
func (l *Local) BringHome(ctx context.Context, m vm.VM, sessions []string, report migrate.Progress) error {
	d, err := l.ownDevice(ctx, m.UUID)
	if err == nil && d == nil {
		err = fmt.Errorf("VM %s has no card that is ready", m.Name)
	}
	if err != nil {
		return err
	}
	_, err = l.swap(ctx, &gpuctlv1.SiteMachine{Uuid: m.UUID, Name: m.Name}, sessions, 0, report, func(*gpuctlv1.Session) (*gpuctlv1.Target, error) {
		return d.GetTarget(), nil
	})
	return err
}

// AgentProtocol returns the version that a VM's gpuguest speaks.
func (l *Local) AgentProtocol(ctx context.Context, uuid string) (uint32, error) {
	hello, err := l.Guests.Hello(ctx, uuid)
	return hello.GetProtocol(), err
}
