package endpoint

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/internal/excerpt"
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

// Lender lends GPUs of this host to VMs. GPUs have the names that this host uses.
type Lender interface {
	// LendVM assigns a whole GPU to a claim of the VM, until EndLendVM or the end of the
	// migration. It may be repeated. The error wraps migrate.ErrTaken if somebody else has it.
	LendVM(ctx context.Context, m vm.VM, gpu, claim, migration string) error
	// LeaseVM starts a far executor for one session of the VM.
	LeaseVM(ctx context.Context, m vm.VM, r *clusterv1.LendRequest) (*clusterv1.LendResponse, error)
	// EndLendVM ends the claim's far executors, and then the claim. It may be repeated.
	EndLendVM(ctx context.Context, m vm.VM, claim string) error
}

// vmOutage is how long a session's connection may be broken while its VM moves. It is longer
// than for hosts: a VM that is held must not lose its applications while somebody looks.
const vmOutage = 10 * time.Minute

var errLendsNothing = errors.New("it lends VMs no GPUs")

// Reach asks a VM which addresses it reaches over its network. Those that it does not are tried
// from here, if its carriers can connect through its host.
func (l *Local) Reach(ctx context.Context, uuid string, addresses []string) ([]*gpuctlv1.Reached, error) {
	all, err := l.reach(ctx, uuid, addresses)
	if err != nil || !slices.ContainsFunc(all, func(r *gpuctlv1.Reached) bool { return r.GetError() != "" }) {
		return all, err
	}
	protocol, err := l.AgentProtocol(ctx, uuid)
	if err != nil || protocol < RelayProtocol {
		return all, err
	}
	var wg sync.WaitGroup
	for i, one := range all {
		if one.GetError() != "" {
			wg.Go(func() { l.reachFromHere(ctx, uuid, addresses[i], one) })
		}
	}
	wg.Wait()
	return all, nil
}

// reach asks a VM which addresses it reaches over its network.
func (l *Local) reach(ctx context.Context, uuid string, addresses []string) ([]*gpuctlv1.Reached, error) {
	o, err := l.Guests.get(ctx, uuid)
	if err != nil {
		return nil, err
	}
	res, err := o.agent.Reach(ctx, connect.NewRequest(&gpuctlv1.ReachRequest{Addresses: addresses}))
	if err != nil {
		return nil, fmt.Errorf("its gpuguest does not say what it reaches: %w", err)
	}
	if len(res.Msg.GetReached()) != len(addresses) {
		return nil, fmt.Errorf("its gpuguest was asked about %d addresses and answers about %d", len(addresses), len(res.Msg.GetReached()))
	}
	for _, one := range res.Msg.GetReached() { // the VM writes it
		one.Error, one.ThroughHost = excerpt.Of(one.GetError(), 200), false
	}
	return res.Msg.GetReached(), nil
}

// lend does a step of this host as the one that lends a GPU.
func (l *Local) lend(r *gpuctlv1.SiteLendRequest, borrower string) error {
	switch {
	case l.Lender == nil || l.Borrows == nil:
		return fmt.Errorf("host %s: %w", l.Name, errLendsNothing)
	case migrate.HostOf(r.GetGpu()) != l.Name:
		return fmt.Errorf("gpu %.300q is not one of host %s", r.GetGpu(), l.Name)
	}
	return l.Borrows(r.GetMachine(), r.GetGpu(), r.GetClaim(), borrower)
}

// Lease starts a far executor for a session of a VM that is on the host borrower.
func (l *Local) Lease(ctx context.Context, r *gpuctlv1.SiteLeaseRequest, borrower string) (*gpuctlv1.SiteLeaseResponse, error) {
	var err error
	if isLasting(r.GetClaim()) {
		err = l.follows(ctx, r.GetMachine(), r.GetClaim(), borrower)
	} else {
		err = l.lend(&gpuctlv1.SiteLendRequest{Machine: r.GetMachine(), Gpu: r.GetGpu(), Claim: r.GetClaim()}, borrower)
	}
	if err != nil {
		return nil, err
	}
	res, err := l.Lender.LeaseVM(ctx, vmOf(r.GetMachine()), &clusterv1.LendRequest{
		Lease: r.GetLease(), Claim: r.GetClaim(), Gpus: []string{r.GetGpu()}, CertificateSha256: r.GetCertificateSha256(), OutageMs: r.GetOutageMs(), Device: r.GetDevice(),
	})
	if err != nil {
		return nil, err
	}
	return &gpuctlv1.SiteLeaseResponse{
		Addresses: res.GetAddresses(), Token: res.GetToken(), CertificateSha256: res.GetCertificateSha256(), Limits: res.GetLimits(), Model: res.GetModel(),
	}, nil
}

// farTarget makes a lease for a session, and returns how its carrier reaches the GPU. A
// lease whose swap fails ends with the claim, at the latest.
func (l *Local) farTarget(ctx context.Context, m *gpuctlv1.SiteMachine, gpu, claim, session string, device *gpuctlv1.VirtualDevice) (*gpuctlv1.Target, error) {
	host := migrate.HostOf(gpu)
	peer, err := l.Peer(host)
	if err != nil {
		return nil, peerError(host, err)
	}
	id := "l-" + random.Hex(12)
	own, err := remote.NewIdentity(id)
	if err != nil {
		return nil, err
	}
	res, err := peer.Lease(ctx, connect.NewRequest(&gpuctlv1.SiteLeaseRequest{
		Machine: m, Gpu: gpu, Claim: claim, Lease: id, CertificateSha256: own.Hash(), OutageMs: vmOutage.Milliseconds(), Device: device,
	}))
	if err != nil {
		return nil, peerError(host, err)
	}
	addresses := l.ways(ctx, m.GetUuid(), res.Msg.GetAddresses())
	l.Log.Info("gpu borrowed for a VM", "machine", m.GetName(), "session", session, "gpu", gpu, "lease", id, "addresses", addresses, "peer", hex.EncodeToString(res.Msg.GetCertificateSha256()))
	return &gpuctlv1.Target{
		Gpu: gpu, Model: res.Msg.GetModel(), Limits: res.Msg.GetLimits(),
		Runtime: &gpuctlv1.Runtime{Remote: &gpuctlv1.Remote{
			Addresses: addresses, Token: res.Msg.GetToken(), PeerCertSha256: res.Msg.GetCertificateSha256(),
			Certificate: own.Certificate, PrivateKey: own.Key, OutageMs: vmOutage.Milliseconds(), Memory: res.Msg.GetLimits().GetGlobalMemory(),
		}},
	}, nil
}

// Swap moves sessions of a VM to a GPU that a host lends to it.
func (l *Local) Swap(ctx context.Context, r *gpuctlv1.SiteSwapRequest, report migrate.Progress) (time.Duration, error) {
	return l.swap(ctx, r.GetMachine(), r.GetSessions(), r.GetFreezeTimeoutMs(), report, func(s *gpuctlv1.Session) (*gpuctlv1.Target, error) {
		if s.GetTarget().GetGpu() == r.GetGpu() {
			return nil, nil //nolint:nilnil // it is there already
		}
		return l.farTarget(ctx, r.GetMachine(), r.GetGpu(), r.GetClaim(), s.GetId(), s.GetDevice())
	})
}

// Home moves sessions of a VM to a card that it has.
func (l *Local) Home(ctx context.Context, r *gpuctlv1.SiteSessionsRequest, report migrate.Progress) (time.Duration, error) {
	vendor, device, err := l.ids(ctx, r.GetGpu())
	if err != nil {
		return 0, err
	}
	d, err := l.Guests.await(ctx, r.GetMachine().GetUuid(), vendor, device)
	if err != nil {
		return 0, err
	}
	return l.swap(ctx, r.GetMachine(), r.GetSessions(), r.GetFreezeTimeoutMs(), report, func(s *gpuctlv1.Session) (*gpuctlv1.Target, error) {
		if s.GetTarget().GetGpu() == d.GetTarget().GetGpu() {
			return nil, nil //nolint:nilnil // it is there already
		}
		return d.GetTarget(), nil
	})
}

// swap moves those of the sessions that run to the target that to returns, which is nil if
// they are there. One that has ended, is lost or was suspended by somebody is left as it is.
// It returns the longest downtime of a session.
func (l *Local) swap(ctx context.Context, m *gpuctlv1.SiteMachine, sessions []string, freeze int64, report migrate.Progress, to func(*gpuctlv1.Session) (*gpuctlv1.Target, error)) (longest time.Duration, err error) {
	times := timesOf(ctx, time.Duration(freeze)*time.Millisecond)
	var mu sync.Mutex
	together := func(*gpuctlv1.Session) bool { return false }
	err = l.each(ctx, m, sessions, together, func(o *guest, s *gpuctlv1.Session, report migrate.Progress) error {
		if err := settled(s); err != nil {
			return err
		}
		if s.GetState() != gpuctlv1.SessionState_SESSION_STATE_RUNNING {
			return nil
		}
		target, err := to(s)
		if err != nil || target == nil {
			return err
		}
		stream, err := o.work.Swap(ctx, connect.NewRequest(&gpuctlv1.SwapRequest{Session: s.GetId(), Target: target, FreezeTimeoutMs: times.freeze, TimeoutMs: times.still}))
		if err != nil {
			return err
		}
		result, err := resultOf(stream, report)
		mu.Lock()
		longest = max(longest, time.Duration(result.GetStoppedNs()))
		mu.Unlock()
		return over(err)
	}, report)
	return longest, err
}

// Reach asks a VM which addresses it reaches over its network.
func (s *Service) Reach(ctx context.Context, req *connect.Request[gpuctlv1.SiteReachRequest]) (*connect.Response[gpuctlv1.ReachResponse], error) {
	reached, err := s.local.Reach(ctx, req.Msg.GetUuid(), req.Msg.GetAddresses())
	if err != nil {
		return nil, toConnect(err)
	}
	return connect.NewResponse(&gpuctlv1.ReachResponse{Reached: reached}), nil
}

// Lend assigns a GPU of this host to a claim of a VM.
func (s *Service) Lend(ctx context.Context, req *connect.Request[gpuctlv1.SiteLendRequest]) (*connect.Response[gpuctlv1.SiteDone], error) {
	m := req.Msg
	caller, _ := access.From(ctx)
	return done(s.lasting(m.GetMachine(), m.GetClaim(), func() error {
		if err := s.local.lend(m, ""); err != nil {
			return err
		}
		return s.local.Lender.LendVM(ctx, vmOf(m.GetMachine()), local(m.GetGpu()), m.GetClaim(), m.GetMachine().GetMigration())
	}, func() error { return s.local.grant(ctx, m, caller.Host) }))
}

// EndLend ends what computes for a VM on a GPU of this host, and the VM's claim of it.
func (s *Service) EndLend(ctx context.Context, req *connect.Request[gpuctlv1.SiteLendRequest]) (*connect.Response[gpuctlv1.SiteDone], error) {
	m := req.Msg
	end := func() error {
		if s.local.Lender == nil {
			return nil // nothing of it is here
		}
		return s.local.Lender.EndLendVM(ctx, vmOf(m.GetMachine()), m.GetClaim())
	}
	return done(s.lasting(m.GetMachine(), m.GetClaim(), end, end))
}

// Lease starts a far executor for a session of a VM, which is on the calling host.
func (s *Service) Lease(ctx context.Context, req *connect.Request[gpuctlv1.SiteLeaseRequest]) (res *connect.Response[gpuctlv1.SiteLeaseResponse], err error) {
	caller, _ := access.From(ctx)
	lease := func() error {
		out, err := s.local.Lease(ctx, req.Msg, caller.Host)
		res = connect.NewResponse(out)
		return err
	}
	err = s.lasting(req.Msg.GetMachine(), req.Msg.GetClaim(), lease, lease)
	if err != nil {
		return nil, toConnect(err)
	}
	return res, nil
}

// Swap moves sessions of a VM to a GPU that is lent to it.
func (s *Service) Swap(ctx context.Context, req *connect.Request[gpuctlv1.SiteSwapRequest], out *connect.ServerStream[gpuctlv1.SiteProgress]) error {
	return toConnect(s.step(req.Msg.GetMachine(), func() error {
		stopped, err := s.local.Swap(ctx, req.Msg, telling(out))
		return swapped(out, stopped, err)
	}))
}

// Home moves sessions of a VM to a card that it has.
func (s *Service) Home(ctx context.Context, req *connect.Request[gpuctlv1.SiteSessionsRequest], out *connect.ServerStream[gpuctlv1.SiteProgress]) error {
	return toConnect(s.step(req.Msg.GetMachine(), func() error {
		stopped, err := s.local.Home(ctx, req.Msg, telling(out))
		return swapped(out, stopped, err)
	}))
}

// swapped tells the driver the downtime of a swap.
func swapped(out *connect.ServerStream[gpuctlv1.SiteProgress], stopped time.Duration, err error) error {
	_ = out.Send(&gpuctlv1.SiteProgress{StoppedNs: stopped.Nanoseconds()}) // fails if the driver has left
	return err
}

func (r *Remote) lending(m vm.VM, f migrate.Far) *connect.Request[gpuctlv1.SiteLendRequest] {
	return connect.NewRequest(&gpuctlv1.SiteLendRequest{Machine: r.request(m), Gpu: f.GPU, Claim: f.Claim})
}

// Lend assigns a GPU of the host to a claim of the VM.
func (r *Remote) Lend(ctx context.Context, m vm.VM, f migrate.Far) error {
	_, err := r.Service.Lend(ctx, r.lending(m, f))
	return r.fromConnect(err)
}

// EndLend ends what computes there for the VM, and the claim.
func (r *Remote) EndLend(ctx context.Context, m vm.VM, f migrate.Far) error {
	_, err := r.Service.EndLend(ctx, r.lending(m, f))
	return r.fromConnect(err)
}

// Swap moves sessions of the VM to a GPU that is lent to it.
func (r *Remote) Swap(ctx context.Context, m vm.VM, f migrate.Far, sessions []string, patience time.Duration, report migrate.Progress) (time.Duration, error) {
	in, err := r.Service.Swap(ctx, connect.NewRequest(&gpuctlv1.SiteSwapRequest{
		Machine: r.request(m), Gpu: f.GPU, Claim: f.Claim, Sessions: sessions, FreezeTimeoutMs: patience.Milliseconds(),
	}))
	return r.followSwap(in, err, report)
}

// Home moves sessions of the VM to a card that it has.
func (r *Remote) Home(ctx context.Context, m vm.VM, gpu string, sessions []string, patience time.Duration, report migrate.Progress) (time.Duration, error) {
	req := r.sessions(m, gpu, sessions)
	req.Msg.FreezeTimeoutMs = patience.Milliseconds()
	in, err := r.Service.Home(ctx, req)
	return r.followSwap(in, err, report)
}

// followSwap is follow, and returns the downtime.
func (r *Remote) followSwap(in *connect.ServerStreamForClient[gpuctlv1.SiteProgress], err error, report migrate.Progress) (stopped time.Duration, _ error) {
	if err != nil {
		return 0, r.fromConnect(err)
	}
	defer func() { _ = in.Close() }()
	for in.Receive() {
		if n := in.Msg().GetStoppedNs(); n > 0 {
			stopped = max(stopped, time.Duration(n))
			continue
		}
		report(in.Msg().GetDone(), in.Msg().GetTotal(), in.Msg().GetMessage())
	}
	return stopped, r.fromConnect(in.Err())
}
