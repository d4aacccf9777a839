package endpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/migration/stash"
	"github.com/gpuctl/gpuctl/internal/busy"
	"github.com/gpuctl/gpuctl/internal/excerpt"
	"github.com/gpuctl/gpuctl/internal/size"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/internal/wait"
	"github.com/gpuctl/gpuctl/migrate"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Keeper manages this host's cards.
type Keeper interface {
	Reserve(ctx context.Context, m vm.VM, gpu, claim, migration string) error
	Prepare(ctx context.Context, m vm.VM, gpu, claim, migration string) error
	AttachPrepared(ctx context.Context, m vm.VM, gpu string, stored bool, at *pci.Address) error
	Keep(ctx context.Context, m vm.VM, gpu, migration string) error
	ResetStopped(ctx context.Context, m vm.VM, gpu string) error
	Functions(ctx context.Context, gpu string) ([]pci.Address, error)
	DetachReleased(ctx context.Context, m vm.VM, gpu, migration string) (at *pci.Address, err error)
	GiveBack(ctx context.Context, m vm.VM, gpu string) error
	Lost(ctx context.Context, uuid, gpu string) bool
	Identity(ctx context.Context, gpu string) (*gpuctlv1.PCIIdentity, error)
	Cards(ctx context.Context) ([]*gpuctlv1.Card, error)
	Isolated(ctx context.Context, gpu string) (*gpuctlv1.IsolationResponse, error)
	HotplugBlocker(card string) (why string, err error)
}

// Local does this host's part of migrations.
type Local struct {
	Whereabouts
	Keeper Keeper
	// VMs are the VMs of the keeper of cards.
	VMs interface {
		Find(ctx context.Context, ref string) (vm.Info, error)
		Store(ctx context.Context, uuid string, functions []pci.Address) error
		Unstore(ctx context.Context, uuid string, functions []pci.Address) error
	}
	Parts   Parts   // nil: no mediated GPUs
	Domains Domains // nil: libvirt knows all domains
	// Serves returns why a VM must stay on this host, as a service VM; nil or empty: it may go.
	Serves func(uuid string) string
	Guests *Guests
	Stash  *stash.Stash // nil: this host keeps no GPU states
	Lender Lender       // nil: this host lends VMs no GPUs
	Grants Granter      // nil: nor does it lastingly
	Fence  *Fence       // nil: steps of all drivers are accepted
	// Locks returns what prevents libvirt from running a VM on two hosts. nil: nothing.
	Locks func() virt.Locks
	// Others returns the other hosts of the cluster. nil: there are none.
	Others func() []string
	// Party returns an error if another host must not get or send states of a VM: it does
	// not take part in the VM's migration. The error wraps migrate.ErrUnreachable if that
	// is unknown yet.
	Party func(m *gpuctlv1.SiteMachine, other string) error
	// Borrows returns an error unless a running migration of the VM names this GPU and
	// claim, and borrower is one of its hosts, or empty. The error wraps
	// migrate.ErrUnreachable if that is unknown yet.
	Borrows func(m *gpuctlv1.SiteMachine, gpu, claim, borrower string) error
	// MovedTo returns where the last migration of a VM that is done has taken it; empty:
	// none is known. nil: the same.
	MovedTo func(uuid string) (host string)
	// URI returns the URI at which this host's libvirtd reaches another host's
	// (libvirtd), and the URI to which a VM's memory is sent (data).
	URI func(host string) (libvirtd, data string, err error)
	// Unsafe migrates VMs although libvirt cannot tell that their disks are safe.
	Unsafe bool
	// TLS encrypts the memory of VMs that are sent; qemu only.
	TLS bool
	// Files returns an error unless the file of a VM's disk exists on this host.
	Files func(path string) error
	// Link returns the speed to another host in bytes per second; 0: unknown.
	Link func(ctx context.Context, host string) uint64
	// Rate is the limit for sending VMs in bytes per second; 0: not limited.
	Rate uint64
	// Follow counts what is sent to a host, and limits VMs to Rate. It is used if libvirt
	// can do neither.
	Follow func(ctx context.Context, host string) (Flow, error)

	sending busy.Set // VMs, by UUID, that Move is about to send, or sends
	// switching has the VMs, by UUID, that are being started, stopped or undefined.
	switching busy.Set
}

// Domains are the hypervisor's, whether libvirt knows them or not.
type Domains interface {
	// Unstarted returns the domain of a VM that has never run.
	Unstarted(ctx context.Context, uuid string) (id uint16, ok bool, err error)
	// End ends a domain at once, without libvirt.
	End(ctx context.Context, id uint16) error
}

// Flow counts what is sent to a host.
type Flow interface {
	Sent(ctx context.Context) (bytes uint64, err error)
	End(ctx context.Context) error
}

// vmOf returns the VM of a request.
func vmOf(m *gpuctlv1.SiteMachine) vm.VM {
	return vm.VM{UUID: m.GetUuid(), Name: m.GetName()}
}

// Pause pauses a VM that runs on another host, too. It loses no state. A full disk is no reason
// to let both copies write to the VM's disks.
func (l *Local) Pause(ctx context.Context, uuid string) error {
	d, err := l.domain(ctx, uuid)
	if err != nil {
		return err
	}
	state, err := l.Client.State(ctx, d)
	if err != nil {
		return err
	}
	if err := l.Fence.Halt(uuid, true); err != nil { // also if somebody else has paused it
		l.Log.Error("a copy of a VM is taken for one that never ran if hostd is restarted", "machine", d.Name, "err", err)
	}
	if state == virt.Paused {
		return nil
	}
	l.Log.Error("a VM runs on two hosts: this copy is paused", "machine", d.Name)
	return l.Client.Suspend(ctx, d)
}

// Unpause continues a VM that Pause has paused.
func (l *Local) Unpause(ctx context.Context, uuid string) error {
	d, err := l.domain(ctx, uuid)
	if err != nil {
		return err
	}
	state, err := l.Client.State(ctx, d)
	if err == nil && state == virt.Paused {
		err = l.barred(ctx, vm.VM{UUID: uuid, Name: d.Name}, l.Name, l.Client.Resume(ctx, d))
	}
	if err != nil {
		return err
	}
	return l.Fence.Halt(uuid, false)
}

// Move migrates the VM to another host with libvirt. Before it begins, it looks again whether its
// driver was replaced: libvirt may have taken its time, and the next driver decides by where the
// VM is.
func (l *Local) Move(ctx context.Context, machine *gpuctlv1.SiteMachine, to string, report migrate.Progress) error {
	uuid := machine.GetUuid()
	sent, ok := l.sending.Begin(uuid)
	if !ok {
		return fmt.Errorf("%w: VM %s is just being sent", migrate.ErrUnreachable, machine.GetName())
	}
	defer sent()
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
	if err := l.Fence.Admit(machine); err != nil {
		return err
	}
	// Its channel ends; a new one is opened afterwards. If its applications compute over the
	// channel, it ends as late as possible.
	if l.Guests.Relayed(uuid) {
		defer l.Guests.Forget(uuid)
	} else {
		l.Guests.Forget(uuid)
	}
	return l.barred(ctx, vm.VM{UUID: uuid, Name: d.Name}, to, l.Client.Migrate(ctx, d, m))
}

// follow limits what is sent to a host to the configured rate, and reports how much was
// sent, until end is called. libxl can do neither.
func (l *Local) follow(ctx context.Context, uuid, to string, report migrate.Progress) (end func(), err error) {
	m, err := l.VMs.Find(ctx, uuid)
	if err != nil {
		return nil, err
	}
	flow, err := l.Follow(ctx, to)
	if err != nil && l.Rate > 0 {
		return nil, fmt.Errorf("the VM cannot be held to %s per second: %w", size.Format(l.Rate), err)
	}
	if err != nil { // the migration goes on without progress
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

// sessions returns the VM's sessions, from its agent.
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

// driverEngine is the engine of sessions of CUDA processes.
const driverEngine = "driver"

// adopted returns the VM's sessions after every CUDA program in it has become one, which
// does not touch it, and the programs that can't. A gpuguest without that engine, or without
// NVIDIA's driver, has none.
func (l *Local) adopted(ctx context.Context, uuid string) ([]*gpuctlv1.Session, []*gpuctlv1.AdoptRefusal, error) {
	o, err := l.Guests.get(ctx, uuid)
	if err != nil {
		return nil, nil, err
	}
	var refused []*gpuctlv1.AdoptRefusal
	res, err := o.work.Adopt(ctx, connect.NewRequest(&gpuctlv1.AdoptRequest{All: true}))
	switch {
	case err == nil:
		const most = 100 // the VM says how many there are
		refused = res.Msg.GetRefused()[:min(len(res.Msg.GetRefused()), most)]
	case connect.CodeOf(err) == connect.CodeUnimplemented || connect.CodeOf(err) == connect.CodeFailedPrecondition:
	default:
		return nil, nil, fmt.Errorf("%w: %w", errNoAgent, err)
	}
	all, _, err := l.sessions(ctx, uuid)
	return all, refused, err
}

// Sessions returns the running sessions, and how much room the VM has for states.
func (l *Local) Sessions(ctx context.Context, uuid string) (*gpuctlv1.SiteSessionsResponse, error) {
	hello, err := l.Guests.Hello(ctx, uuid)
	if err != nil {
		return nil, err
	}
	all, refused, err := l.adopted(ctx, uuid)
	if err != nil {
		return nil, err
	}
	out := &gpuctlv1.SiteSessionsResponse{Hello: l.summary(hello), Refused: refused}
	for _, s := range all {
		if abroad(s) {
			continue // it goes on where it is
		}
		switch s.GetState() {
		case gpuctlv1.SessionState_SESSION_STATE_RUNNING, gpuctlv1.SessionState_SESSION_STATE_SWAPPING, gpuctlv1.SessionState_SESSION_STATE_HELD:
			out.Sessions = append(out.Sessions, s.GetId())
			out.Running = append(out.Running, siteSession(s))
		default:
		}
	}
	return out, nil
}

// each calls do for each of the given sessions that exist, several at a time. Sessions
// for which alone is true are done one after the other, because they share one
// connection. None is begun any more for a driver that was replaced meanwhile: the next one may have
// taken the step back.
func (l *Local) each(ctx context.Context, m *gpuctlv1.SiteMachine, ids []string, alone func(*gpuctlv1.Session) bool, do func(o *guest, s *gpuctlv1.Session, report migrate.Progress) error, report migrate.Progress) error {
	all, o, err := l.sessions(ctx, m.GetUuid())
	if err != nil {
		return err
	}
	var done, total atomic.Uint64
	var mu sync.Mutex
	var errs []error
	var wg sync.WaitGroup
	var way sync.Mutex
	places := make(chan struct{}, mostAtOnce)
	asked := map[string]bool{}
	for _, id := range ids {
		asked[id] = true
	}
	for _, s := range all {
		if !asked[s.GetId()] {
			continue
		}
		delete(asked, s.GetId()) // once: the VM writes the list
		if s.GetState() == gpuctlv1.SessionState_SESSION_STATE_ENDED {
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
			err := l.Fence.Admit(m)
			if err == nil {
				err = do(o, s, func(d, _ uint64, waits string) {
					done.Add(d - last)
					last = d
					if waits != "" {
						waits = "session " + s.GetId() + ": " + waits
					}
					mu.Lock()
					report(done.Load(), total.Load(), waits)
					mu.Unlock()
				})
			}
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

// mostAtOnce is the number of sessions that are processed at a time. A channel has a
// limited number of streams. The sessions that are processed alone need some, too.
const mostAtOnce = 16

// freezeTime is how long an application's running kernels may take to end before its VM
// is migrated. With a shorter time, VMs with long kernels could not be migrated.
const freezeTime = 2 * time.Minute

// settled returns an error that wraps migrate.ErrUnreachable if an operation on the
// session has not ended. An earlier driver that died may have begun it.
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

// Freeze suspends sessions: to the VM's memory, or with their state kept on hosts.
func (l *Local) Freeze(ctx context.Context, r *gpuctlv1.SiteSessionsRequest, report migrate.Progress) error {
	times := timesOf(ctx, time.Duration(r.GetFreezeTimeoutMs())*time.Millisecond)
	leaves := func(s *gpuctlv1.Session) bool { return slices.Contains(r.GetAway(), s.GetId()) }
	return l.each(ctx, r.GetMachine(), r.GetSessions(), leaves, func(o *guest, s *gpuctlv1.Session, report migrate.Progress) error {
		if err := settled(s); err != nil {
			return err
		}
		if isLost(s) {
			return nil // there is nothing to be frozen
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

// freezeTimes are the time limits of a session's suspend or resume, in milliseconds.
type freezeTimes struct{ freeze, still int64 }

// timesOf returns the time limits of a call. A running executor may use all the time that
// the driver allows for the whole step, except the time for the answer.
func timesOf(ctx context.Context, freeze time.Duration) freezeTimes {
	t := freezeTimes{freeze: cmp.Or(freeze, freezeTime).Milliseconds()}
	if end, ok := ctx.Deadline(); ok {
		t.still = max(time.Until(end)-answerTime, time.Second).Milliseconds()
	}
	return t
}

// answerTime is the part of a step's time that a host reserves for an undo and its
// answer.
const answerTime = 30 * time.Second

// over ignores the error if the application has ended: nothing is left to be done.
func over(err error) error {
	if errors.Is(err, errEnded) {
		return nil
	}
	return err
}

// errEnded means that the application has ended.
var errEnded = errors.New("the application has ended")

// Thaw resumes sessions on a card.
func (l *Local) Thaw(ctx context.Context, m *gpuctlv1.SiteMachine, gpu string, ids []string, report migrate.Progress) error {
	uuid := m.GetUuid()
	vendor, device, err := l.ids(ctx, gpu)
	if err != nil {
		return err
	}
	d, err := l.await(ctx, uuid, vendor, device)
	if err != nil {
		return err
	}
	times := timesOf(ctx, 0)
	return l.each(ctx, m, ids, isAway, func(o *guest, s *gpuctlv1.Session, report migrate.Progress) error {
		if err := settled(s); err != nil {
			return err
		}
		if s.GetState() != gpuctlv1.SessionState_SESSION_STATE_SUSPENDED {
			return nil // it is running already
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

// isLost reports whether what the session's application had on a GPU exists no longer. A step
// is done without it: Lost tells the driver.
func isLost(s *gpuctlv1.Session) bool {
	return s.GetState() == gpuctlv1.SessionState_SESSION_STATE_LOST
}

// Lost returns those of the given sessions that are lost. The VM writes the texts.
func (l *Local) Lost(ctx context.Context, uuid string, ids []string) ([]*gpuctlv1.LostSession, error) {
	o, err := l.Guests.get(ctx, uuid)
	if err != nil {
		return nil, err
	}
	res, err := o.work.ListSessions(ctx, connect.NewRequest(&gpuctlv1.ListSessionsRequest{}))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNoAgent, err)
	}
	all := res.Msg.GetLost()
	for _, s := range res.Msg.GetSessions() { // an older gpuguest tells of those alone whose applications live
		if isLost(s) {
			all = append(all, &gpuctlv1.LostSession{Id: s.GetId(), Command: s.GetCommand(), Reason: s.GetMessage()})
		}
	}
	asked := map[string]bool{}
	for _, id := range ids {
		asked[id] = true
	}
	var out []*gpuctlv1.LostSession
	for _, one := range all {
		if !asked[one.GetId()] {
			continue
		}
		delete(asked, one.GetId()) // once
		out = append(out, &gpuctlv1.LostSession{
			Id: one.GetId(), Command: excerpt.Line(one.GetCommand(), 100), Reason: excerpt.Line(one.GetReason(), 200), LostUnixMs: one.GetLostUnixMs(),
		})
	}
	return out, nil
}

// watch waits for the end of an operation on a session, and reports its progress.
func watch(stream *connect.ServerStreamForClient[gpuctlv1.Progress], report migrate.Progress) error {
	_, err := resultOf(stream, report)
	return err
}

// resultOf is watch, and returns the operation's result.
func resultOf(stream *connect.ServerStreamForClient[gpuctlv1.Progress], report migrate.Progress) (*gpuctlv1.SwapResult, error) {
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
		return nil, stream.Err()
	case result == nil:
		return nil, errors.New("its gpuguest went away")
	case result.GetEnded():
		return result, errEnded
	case result.GetHeld():
		return result, fmt.Errorf("it is held: %s", result.GetError())
	case result.GetRefused():
		var why []string
		for _, r := range result.GetReasons() {
			why = append(why, r.GetMessage())
		}
		return result, fmt.Errorf("refused: %s", strings.Join(why, "; "))
	case result.GetRolledBack() || result.GetError() != "":
		return result, errors.New(result.GetError())
	}
	return result, nil
}

// Release makes the VM release a card.
func (l *Local) Release(ctx context.Context, uuid, gpu string) error {
	vendor, device, err := l.ids(ctx, gpu)
	if err != nil && l.Keeper.Lost(ctx, uuid, local(gpu)) {
		return nil // the VM does not have it any more
	}
	if err != nil {
		return err
	}
	return l.Guests.release(ctx, uuid, vendor, device)
}

// TakeUp makes the VM use a released card again.
func (l *Local) TakeUp(ctx context.Context, uuid, gpu string) error {
	vendor, device, err := l.ids(ctx, gpu)
	if err != nil {
		return err
	}
	return l.Guests.takeUp(ctx, uuid, vendor, device)
}

// Await waits until the VM has found a card and a runtime can use it.
func (l *Local) Await(ctx context.Context, uuid, gpu string) error {
	vendor, device, err := l.ids(ctx, gpu)
	if err != nil {
		return err
	}
	_, err = l.await(ctx, uuid, vendor, device)
	return err
}

// await waits until the VM can use a card: a runtime serves it and, if a session of CUDA
// processes waits for it, NVIDIA's driver shows it.
func (l *Local) await(ctx context.Context, uuid string, vendor, device uint16) (*gpuctlv1.GuestDevice, error) {
	for {
		d, err := l.Guests.await(ctx, uuid, vendor, device)
		if err != nil || len(d.GetTarget().GetDriver()) > 0 {
			return d, err
		}
		all, _, err := l.sessions(ctx, uuid)
		if err != nil {
			return nil, err
		}
		i := slices.IndexFunc(all, func(s *gpuctlv1.Session) bool {
			return s.GetEngine() == driverEngine && s.GetState() == gpuctlv1.SessionState_SESSION_STATE_SUSPENDED
		})
		if i < 0 {
			return d, nil
		}
		if wait.For(ctx, driverEvery) != nil {
			return nil, fmt.Errorf("device %s in the VM: NVIDIA's driver does not show it, and session %s (%s) waits for that", d.GetAddress(), all[i].GetId(), all[i].GetCommand())
		}
	}
}

// driverEvery is how often a VM is asked whether NVIDIA's driver shows a card.
const driverEvery = 500 * time.Millisecond

// local returns a GPU's name without its host's.
func local(gpu string) string {
	if _, name, ok := strings.Cut(gpu, "/"); ok {
		return name
	}
	return gpu
}

// ids returns the PCI vendor and device id by which a VM finds a card of this host.
func (l *Local) ids(ctx context.Context, gpu string) (vendor, device uint16, err error) {
	id, err := l.Keeper.Identity(ctx, local(gpu))
	return uint16(id.GetVendorId()), uint16(id.GetDeviceId()), err
}
