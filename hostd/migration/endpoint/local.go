package endpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/hostd/migration/stash"
	"github.com/gpuctl/gpuctl/internal/size"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Keeper has this host's cards.
type Keeper interface {
	Reserve(ctx context.Context, m vm.VM, gpu, claim, migration string) error
	Prepare(ctx context.Context, m vm.VM, gpu, claim, migration string) error
	AttachPrepared(ctx context.Context, m vm.VM, gpu string, stored bool) error
	Keep(ctx context.Context, m vm.VM, gpu, migration string) error
	ResetStopped(ctx context.Context, m vm.VM, gpu string) error
	Functions(ctx context.Context, gpu string) ([]pci.Address, error)
	DetachReleased(ctx context.Context, m vm.VM, gpu, migration string) error
	GiveBack(ctx context.Context, m vm.VM, gpu string) error
	Lost(ctx context.Context, uuid, gpu string) bool
	Identity(ctx context.Context, gpu string) (*gpuctlv1.PCIIdentity, error)
	Cards(ctx context.Context) ([]*gpuctlv1.Card, error)
	Isolated(ctx context.Context, gpu string) (*gpuctlv1.IsolationResponse, error)
	HotplugBlocker(card string) (why string, err error)
}

// Local is this host.
type Local struct {
	Name   string
	Keeper Keeper
	Client *virt.Client
	// Machines are the VMs as the keeper knows them.
	VMs interface {
		Find(ctx context.Context, ref string) (vm.Info, error)
		Store(ctx context.Context, uuid string, functions []pci.Address) error
		Unstore(ctx context.Context, uuid string, functions []pci.Address) error
	}
	Guests *Guests
	Stash  *stash.Stash // nil: no GPU states are kept
	Fence  *Fence       // nil: every driver may do everything
	// LockManager is what keeps libvirt from running a VM that runs elsewhere;
	// empty: nothing.
	LockManager func() string
	// Peer reaches another host.
	Peer func(host string) (gpuctlv1connect.SiteServiceClient, error)
	// Party says why another host may not have states of a VM from this one, or
	// bring them: it has no part in the VM's migration. An error that wraps
	// migrate.ErrUnreachable says that this is not known yet.
	Party func(m *gpuctlv1.SiteMachine, other string) error
	// URI is where this host's libvirtd finds another host's, and data where a
	// VM's memory goes.
	URI func(host string) (libvirtd, data string, err error)
	// Unsafe moves VMs although libvirt cannot tell that their disks are safe.
	Unsafe bool
	// TLS encrypts the memory of VMs that are sent; qemu only.
	TLS bool
	// Files reports whether a file is here, for disks of VMs.
	Files func(path string) error
	// Link is how fast another host is reached, in bytes per second; 0: not known.
	Link func(ctx context.Context, host string) uint64
	// Rate is how fast VMs may be sent to a host, in bytes per second; 0: any.
	Rate uint64
	// Follow counts what goes to a host, and holds VMs to Rate where libvirt
	// does neither.
	Follow func(ctx context.Context, host string) (Flow, error)
	Log    *slog.Logger
}

// Flow is what goes to a host.
type Flow interface {
	Sent(ctx context.Context) (bytes uint64, err error)
	End(ctx context.Context) error
}

// vmOf is the VM that a request is about.
func vmOf(m *gpuctlv1.SiteMachine) vm.VM {
	return vm.VM{UUID: m.GetUuid(), Name: m.GetName()}
}

// domain finds the VM in libvirt.
func (l *Local) domain(ctx context.Context, uuid string) (virt.Domain, error) {
	if l.Client == nil {
		return virt.Domain{}, fmt.Errorf("host %s has no libvirt", l.Name)
	}
	u, err := virt.ParseUUID(uuid)
	if err != nil {
		return virt.Domain{}, err
	}
	return l.Client.LookupUUID(ctx, u)
}

// Where says what this host knows of the VM.
func (l *Local) Where(ctx context.Context, uuid string) (migrate.Presence, error) {
	d, err := l.domain(ctx, uuid)
	if errors.Is(err, virt.ErrNotFound) {
		return migrate.Absent, nil
	}
	if err != nil {
		return 0, err
	}
	state, err := l.Client.State(ctx, d)
	switch {
	case errors.Is(err, virt.ErrNotFound):
		return migrate.Absent, nil
	case err != nil:
		return 0, err
	case !state.Active():
		return migrate.Stopped, nil
	case state == virt.Paused: // a VM on its way is paused at one end
		return migrate.Moving, nil
	}
	switch job, err := l.Client.Job(ctx, d); {
	case errors.Is(err, virt.ErrUnsupported):
	case err != nil:
		return 0, err // it may be on its way
	case job.State == virt.JobBounded || job.State == virt.JobUnbounded:
		return migrate.Moving, nil
	}
	return migrate.Running, nil
}

// Pause stops a VM that runs elsewhere, too. Nothing of it is lost.
func (l *Local) Pause(ctx context.Context, uuid string) error {
	d, err := l.domain(ctx, uuid)
	if err != nil {
		return err
	}
	state, err := l.Client.State(ctx, d)
	if err == nil {
		err = l.Fence.Halt(uuid, true) // also of one that somebody else has paused
	}
	if err != nil || state == virt.Paused {
		return err
	}
	l.Log.Error("a VM runs on two hosts: this copy is paused", "machine", d.Name)
	return l.Client.Suspend(ctx, d)
}

// Unpause lets it go on.
func (l *Local) Unpause(ctx context.Context, uuid string) error {
	d, err := l.domain(ctx, uuid)
	if err != nil {
		return err
	}
	state, err := l.Client.State(ctx, d)
	if err == nil && state == virt.Paused {
		err = l.Client.Resume(ctx, d)
	}
	if err != nil {
		return err
	}
	return l.Fence.Halt(uuid, false)
}

// Move sends the VM to another host.
func (l *Local) Move(ctx context.Context, uuid, to string, report migrate.Progress) error {
	d, err := l.domain(ctx, uuid)
	if err != nil {
		return err
	}
	uri, data, err := l.URI(to)
	if err != nil {
		return err
	}
	persistent, err := l.Client.Persistent(ctx, d)
	if err != nil {
		return err
	}
	m := virt.Migration{Destination: uri, Data: data, Persist: persistent, UndefineSource: persistent}
	if l.Client.Driver() == virt.QEMU {
		m.Unsafe, m.TLS, m.Bandwidth = l.Unsafe, l.TLS, (l.Rate+1<<20-1)>>20
		m.Progress = func(j virt.Job) { report(j.Processed, j.Total, "") }
	} else {
		end, err := l.follow(ctx, uuid, to, report)
		if err != nil {
			return err
		}
		defer end()
	}
	l.Guests.Forget(uuid) // its channel hangs up there and is made anew
	return l.Client.Migrate(ctx, d, m)
}

// follow holds what goes to a host to the rate that it may have, and reports it
// until end is called. libxl does neither.
func (l *Local) follow(ctx context.Context, uuid, to string, report migrate.Progress) (end func(), err error) {
	m, err := l.VMs.Find(ctx, uuid)
	if err != nil {
		return nil, err
	}
	flow, err := l.Follow(ctx, to)
	if err != nil && l.Rate > 0 {
		return nil, fmt.Errorf("the VM cannot be held to %s per second: %w", size.Format(l.Rate), err)
	}
	if err != nil { // then nobody sees how far it is
		l.Log.Warn("what a migration sends is not counted", "host", to, "err", err)
		return func() {}, nil
	}
	counting, stop := context.WithCancel(ctx)
	var counter sync.WaitGroup
	counter.Go(func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			select {
			case <-counting.Done():
				return
			case <-tick.C:
			}
			if n, err := flow.Sent(counting); err == nil {
				report(n, max(n, m.Memory), "")
			}
		}
	})
	return func() {
		stop()
		counter.Wait()
		if err := flow.End(context.WithoutCancel(ctx)); err != nil {
			l.Log.Warn("what a migration may send is still held", "host", to, "err", err)
		}
	}, nil
}

// sessions of the VM, as its agent has them.
func (l *Local) sessions(ctx context.Context, uuid string) ([]*gpuctlv1.Session, *guest, error) {
	o, err := l.Guests.get(ctx, uuid)
	if err != nil {
		return nil, nil, err
	}
	res, err := o.work.ListSessions(ctx, connect.NewRequest(&gpuctlv1.ListSessionsRequest{}))
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", errNoAgent, err)
	}
	return res.Msg.GetSessions(), o, nil
}

// Sessions are those that run, and what the VM has room for.
func (l *Local) Sessions(ctx context.Context, uuid string) (*gpuctlv1.SiteSessionsResponse, error) {
	hello, err := l.Guests.hello(ctx, uuid)
	if err != nil {
		return nil, err
	}
	all, _, err := l.sessions(ctx, uuid)
	if err != nil {
		return nil, err
	}
	out := &gpuctlv1.SiteSessionsResponse{Hello: l.summary(hello)}
	for _, s := range all {
		switch s.GetState() {
		case gpuctlv1.SessionState_SESSION_STATE_RUNNING, gpuctlv1.SessionState_SESSION_STATE_SWAPPING, gpuctlv1.SessionState_SESSION_STATE_HELD:
			out.Sessions = append(out.Sessions, s.GetId())
			out.Running = append(out.Running, siteSession(s))
		default:
		}
	}
	return out, nil
}

// each does something with each of the sessions that are still there, at once;
// with those that are to be alone one after the other, as they share one way.
func (l *Local) each(ctx context.Context, uuid string, ids []string, alone func(*gpuctlv1.Session) bool, do func(o *guest, s *gpuctlv1.Session, report migrate.Progress) error, report migrate.Progress) error {
	all, o, err := l.sessions(ctx, uuid)
	if err != nil {
		return err
	}
	var done, total atomic.Uint64
	var mu sync.Mutex
	var errs []error
	var wg sync.WaitGroup
	var way sync.Mutex
	places := make(chan struct{}, mostAtOnce)
	for _, s := range all {
		if !slices.Contains(ids, s.GetId()) || s.GetState() == gpuctlv1.SessionState_SESSION_STATE_ENDED {
			continue
		}
		total.Add(s.GetUsage().GetMemory())
		wg.Go(func() {
			if alone(s) {
				way.Lock()
				defer way.Unlock()
			} else {
				places <- struct{}{}
				defer func() { <-places }()
			}
			var last uint64
			err := do(o, s, func(d, _ uint64, waits string) {
				done.Add(d - last)
				last = d
				if waits != "" {
					waits = "session " + s.GetId() + ": " + waits
				}
				mu.Lock()
				report(done.Load(), total.Load(), waits)
				mu.Unlock()
			})
			if err != nil {
				mu.Lock()
				errs = append(errs, fmt.Errorf("session %s (%s): %w", s.GetId(), s.GetCommand(), err))
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// mostAtOnce are the sessions that something is done with at once: a channel has
// a bounded number of streams, of which those that are alone need some, too.
const mostAtOnce = 16

// freezeTime is how long what an application has launched may take to end
// before its VM is moved: less, and long kernels would keep VMs where they are.
const freezeTime = 2 * time.Minute

// settled says why nothing can be said of a session yet: what a driver that has
// died had begun may still be on its way, to its end or back.
func settled(s *gpuctlv1.Session) error {
	switch s.GetState() {
	case gpuctlv1.SessionState_SESSION_STATE_SWAPPING:
		return fmt.Errorf("%w: a %s of it has not ended", migrate.ErrUnreachable, cmp.Or(s.GetMessage(), "change"))
	case gpuctlv1.SessionState_SESSION_STATE_HELD:
		return fmt.Errorf("%w: it is held: %s", migrate.ErrUnreachable, s.GetMessage())
	default:
		return nil
	}
}

// Freeze suspends sessions to the VM's memory, or has their state leave it.
func (l *Local) Freeze(ctx context.Context, r *gpuctlv1.SiteSessionsRequest, report migrate.Progress) error {
	times := timesOf(ctx, time.Duration(r.GetFreezeTimeoutMs())*time.Millisecond)
	leaves := func(s *gpuctlv1.Session) bool { return slices.Contains(r.GetAway(), s.GetId()) }
	return l.each(ctx, r.GetMachine().GetUuid(), r.GetSessions(), leaves, func(o *guest, s *gpuctlv1.Session, report migrate.Progress) error {
		if err := settled(s); err != nil {
			return err
		}
		if leaves(s) {
			return over(l.suspendAway(ctx, r.GetMachine(), o, s, r.GetTo(), times, report))
		}
		if s.GetState() == gpuctlv1.SessionState_SESSION_STATE_SUSPENDED {
			return nil
		}
		stream, err := o.work.Suspend(ctx, connect.NewRequest(&gpuctlv1.SuspendRequest{Session: s.GetId(), FreezeTimeoutMs: times.freeze, TimeoutMs: times.still}))
		if err != nil {
			return err
		}
		return over(watch(stream, report))
	}, report)
}

// freezeTimes are the times that a session gets, in milliseconds.
type freezeTimes struct{ freeze, still int64 }

// timesOf are those of a call: what its driver grants for the whole step, an
// executor that lives may use, but for what the answer takes.
func timesOf(ctx context.Context, freeze time.Duration) freezeTimes {
	t := freezeTimes{freeze: cmp.Or(freeze, freezeTime).Milliseconds()}
	if end, ok := ctx.Deadline(); ok {
		t.still = max(time.Until(end)-answerTime, time.Second).Milliseconds()
	}
	return t
}

// answerTime is what a host keeps of a step's time for taking back and saying so.
const answerTime = 30 * time.Second

// over takes the end of an application for none: there is nothing to do any more.
func over(err error) error {
	if errors.Is(err, errEnded) {
		return nil
	}
	return err
}

// errEnded says that an application has ended.
var errEnded = errors.New("the application has ended")

// Thaw resumes sessions on a card.
func (l *Local) Thaw(ctx context.Context, uuid, gpu string, ids []string, report migrate.Progress) error {
	vendor, device, err := l.ids(ctx, gpu)
	if err != nil {
		return err
	}
	d, err := l.Guests.await(ctx, uuid, vendor, device)
	if err != nil {
		return err
	}
	times := timesOf(ctx, 0)
	return l.each(ctx, uuid, ids, isAway, func(o *guest, s *gpuctlv1.Session, report migrate.Progress) error {
		if err := settled(s); err != nil {
			return err
		}
		if s.GetState() != gpuctlv1.SessionState_SESSION_STATE_SUSPENDED {
			return nil // it runs
		}
		if isAway(s) {
			return over(l.resumeAway(ctx, uuid, o, s, d.GetTarget(), report))
		}
		stream, err := o.work.Resume(ctx, connect.NewRequest(&gpuctlv1.ResumeRequest{Session: s.GetId(), Target: d.GetTarget(), TimeoutMs: times.still}))
		if err != nil {
			return err
		}
		return over(watch(stream, report))
	}, report)
}

// watch follows an operation on a session to its end.
func watch(stream *connect.ServerStreamForClient[gpuctlv1.Progress], report migrate.Progress) error {
	defer stream.Close()
	var result *gpuctlv1.SwapResult
	for stream.Receive() {
		m := stream.Msg()
		report(m.GetBytesDone(), m.GetBytesTotal(), m.GetMessage())
		if r := m.GetResult(); r != nil {
			result = r
		}
	}
	switch {
	case stream.Err() != nil:
		return stream.Err()
	case result == nil:
		return errors.New("its gpuguest went away")
	case result.GetEnded():
		return errEnded
	case result.GetHeld():
		return fmt.Errorf("it is held: %s", result.GetError())
	case result.GetRefused():
		var why []string
		for _, r := range result.GetReasons() {
			why = append(why, r.GetMessage())
		}
		return fmt.Errorf("refused: %s", strings.Join(why, "; "))
	case result.GetRolledBack() || result.GetError() != "":
		return errors.New(result.GetError())
	}
	return nil
}

// Release has the VM let go of a card.
func (l *Local) Release(ctx context.Context, uuid, gpu string) error {
	vendor, device, err := l.ids(ctx, gpu)
	if err != nil && l.Keeper.Lost(ctx, uuid, local(gpu)) {
		return nil // it has not got it
	}
	if err != nil {
		return err
	}
	return l.Guests.release(ctx, uuid, vendor, device)
}

// TakeUp lets the VM have it again.
func (l *Local) TakeUp(ctx context.Context, uuid, gpu string) error {
	vendor, device, err := l.ids(ctx, gpu)
	if err != nil {
		return err
	}
	return l.Guests.takeUp(ctx, uuid, vendor, device)
}

// Await returns when the VM has found a card and a runtime serves it.
func (l *Local) Await(ctx context.Context, uuid, gpu string) error {
	vendor, device, err := l.ids(ctx, gpu)
	if err != nil {
		return err
	}
	_, err = l.Guests.await(ctx, uuid, vendor, device)
	return err
}

// local is a GPU's name on its host.
func local(gpu string) string {
	if _, name, ok := strings.Cut(gpu, "/"); ok {
		return name
	}
	return gpu
}

// ids are what a VM finds a card of this host by.
func (l *Local) ids(ctx context.Context, gpu string) (vendor, device uint16, err error) {
	id, err := l.Keeper.Identity(ctx, local(gpu))
	return uint16(id.GetVendorId()), uint16(id.GetDeviceId()), err
}
