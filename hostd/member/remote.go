package member

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/cluster/remote"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/cluster/scheduler"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/hostd/member/clusterapi"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// ErrNotAssigned means that the cluster has not assigned a GPU to the claim of a lease, or
// has released or replaced that assignment.
var ErrNotAssigned = reason.New(reason.Stale, "not assigned to it")

const (
	releasing = clusterv1.Residence_RESIDENCE_RELEASING

	calibration  = 64 << 20               // most bytes that a calibration sends
	calibrateFor = 200 * time.Millisecond // and after so long it sends no more
	echoes       = 8                      // small messages
)

// elsewhere reports whether a claim may get GPUs of other hosts.
func elsewhere(c *clusterv1.Claim) bool {
	return c.GetRemote() == clusterv1.Remote_REMOTE_ALLOWED || c.GetRemote() == clusterv1.Remote_REMOTE_ONLY
}

// Queue returns how waiting claims are served. On a host that is in no cluster, they are
// served at home.
func (n *Node) Queue() clusterv1.QueuePolicy {
	if v := n.View(); v != nil {
		return v.Queue()
	}
	return clusterv1.QueuePolicy_QUEUE_POLICY_FCFS
}

// OtherGPUs returns the GPUs of other hosts that sessions of this host could use: those
// that have a runtime and whose host lends them.
func (n *Node) OtherGPUs() []*clusterv1.GPU {
	m := n.member()
	if m == nil {
		return nil
	}
	v := m.store.State().View()
	if v.Protocol() < state.ProtocolRemote {
		return nil
	}
	var out []*clusterv1.GPU
	for h := range v.Hosts() {
		if h.GetName() == m.Host || h.GetLendAddress() == "" {
			continue
		}
		for g := range v.GPUsOfHost(h.GetName()) {
			if g.GetPresent() && g.GetRuntimeKey() != "" {
				out = append(out, g)
			}
		}
	}
	return out
}

// GPU returns a GPU of any host by its id; nil if there is none.
func (n *Node) GPU(id string) *clusterv1.GPU {
	v := n.View()
	if v == nil {
		return nil
	}
	return v.GPU(id)
}

// Room returns how many bytes of a GPU a claim can have, including what it has already,
// and whether no other claim has any of it.
func (n *Node) Room(claim, gpu string) (bytes uint64, free bool) {
	v := n.View()
	g := n.GPU(gpu)
	if v == nil || g == nil {
		return 0, false
	}
	bytes, free = g.GetFreeMemory(), g.GetFree()
	others := false
	for as := range v.AssignmentsOfGPU(gpu) {
		switch {
		case as.GetClaim() != claim:
			others = true
		case as.GetMemory() == 0:
			return g.GetLimits().GetGlobalMemory(), true
		default:
			bytes += as.GetMemory()
		}
	}
	return bytes, free || !others && bytes > 0
}

// Waits reports whether a claim waits that could have a GPU of this host. Sessions that
// come home let it go first.
func (n *Node) Waits() bool {
	m := n.member()
	if m == nil {
		return false
	}
	for c := range m.store.State().View().PendingClaims() {
		if scheduler.Waits(c) && (c.GetHost() == "" || c.GetHost() == m.Host) && (c.GetHome() == "" || c.GetHome() == m.Host) {
			return true
		}
	}
	return false
}

// AwaitBound waits until a claim that was made is bound, and returns its assignments. The
// error wraps clusterapi.ErrNotJoined, or ctx has ended, or the claim is gone or has lost
// what it was given while this host was down for the others: nobody binds it again.
func (n *Node) AwaitBound(ctx context.Context, claim string) ([]*clusterv1.Assignment, error) {
	m, err := n.membership()
	if err != nil {
		return nil, err
	}
	if _, err := m.store.Read(ctx, false); err != nil { // so that this host knows the claim
		return nil, err
	}
	for {
		v := m.store.State().View()
		changed := v.Changed(clusterv1.Kind_KIND_CLAIM)
		switch c := v.Claim(claim); {
		case c == nil, c.GetState() == clusterv1.ClaimState_CLAIM_STATE_RELEASING:
			return nil, reason.Errorf(reason.NotFound, "claim %s was deleted while it waited", claim).On("claim", claim)
		case c.GetState() == clusterv1.ClaimState_CLAIM_STATE_BOUND:
			return slices.Collect(v.AssignmentsOfClaim(claim)), nil
		case state.WasBound(c):
			return nil, reason.Errorf(reason.Contended, "claim %s was given a GPU and has lost it before this host knew of it: try again", claim).On("claim", claim)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("claim %s: it waited for a GPU: %w", claim, ctx.Err())
		case <-changed:
		}
	}
}

func (n *Node) peerOf(host string) (*membership, string, error) {
	m, err := n.membership()
	if err != nil {
		return nil, "", err
	}
	address, err := n.address(host)
	return m, address, err
}

// Borrow asks another host for a lease. It sets the request's fencing token.
func (n *Node) Borrow(ctx context.Context, host string, r *clusterv1.LendRequest) (*clusterv1.LendResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, lendFor)
	defer cancel()
	m, address, err := n.peerOf(host)
	if err != nil {
		return nil, err
	}
	v, err := m.store.Read(ctx, false)
	if err != nil {
		return nil, err
	}
	r.Token = 0
	for as := range v.AssignmentsOfClaim(r.GetClaim()) {
		if slices.Contains(r.GetGpus(), as.GetGpu()) {
			r.Token = max(r.Token, as.GetToken())
		}
	}
	res, err := n.Peer(address).Lend(ctx, connect.NewRequest(r))
	if err != nil {
		return nil, fmt.Errorf("host %s does not lend %s: %w", host, strings.Join(r.GetGpus(), ","), clusterapi.Uncoded(err))
	}
	return res.Msg, nil
}

// lendFor limits a call for a lease: an executor is started, which loads a runtime.
const lendFor = 30 * time.Second

// GiveBack ends a lease at the host that lends.
func (n *Node) GiveBack(ctx context.Context, host, lease string) error {
	ctx, cancel := context.WithTimeout(ctx, attempt)
	defer cancel()
	_, address, err := n.peerOf(host)
	if err != nil {
		return err
	}
	if _, err := n.Peer(address).EndLease(ctx, connect.NewRequest(&clusterv1.EndLeaseRequest{Lease: lease})); err != nil {
		return fmt.Errorf("end lease %s of host %s: %w", lease, host, clusterapi.Uncoded(err))
	}
	return nil
}

// AllowFetch lets the far executor of another lease fetch from that of a lease of a host.
func (n *Node) AllowFetch(ctx context.Context, host string, r *clusterv1.AllowFetchRequest) (*clusterv1.AllowFetchResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, attempt)
	defer cancel()
	_, address, err := n.peerOf(host)
	if err != nil {
		return nil, err
	}
	res, err := n.Peer(address).AllowFetch(ctx, connect.NewRequest(r))
	if err != nil {
		return nil, fmt.Errorf("host %s lets nobody fetch contents: %w", host, clusterapi.Uncoded(err))
	}
	return res.Msg, nil
}

// EndFetch is the undo of AllowFetch.
func (n *Node) EndFetch(ctx context.Context, host, lease string) error {
	ctx, cancel := context.WithTimeout(ctx, attempt)
	defer cancel()
	_, address, err := n.peerOf(host)
	if err != nil {
		return err
	}
	if _, err := n.Peer(address).EndFetch(ctx, connect.NewRequest(&clusterv1.EndFetchRequest{Lease: lease})); err != nil {
		return fmt.Errorf("end the fetch from lease %s of host %s: %w", lease, host, clusterapi.Uncoded(err))
	}
	return nil
}

// Fetch makes the far executor of a lease of a host connect to that of another host.
func (n *Node) Fetch(ctx context.Context, host string, r *clusterv1.FetchRequest) error {
	ctx, cancel := context.WithTimeout(ctx, lendFor) // its far executor may still load its runtime
	defer cancel()
	_, address, err := n.peerOf(host)
	if err != nil {
		return err
	}
	if _, err := n.Peer(address).Fetch(ctx, connect.NewRequest(r)); err != nil {
		return fmt.Errorf("host %s does not fetch contents from host %s: %w", host, r.GetHost(), clusterapi.Uncoded(err))
	}
	return nil
}

// LendsAt returns the address at which carriers reach a host's GPUs. It is an error if that
// host lends none.
func (n *Node) LendsAt(host string) (string, error) {
	v := n.View()
	if v == nil {
		return "", clusterapi.ErrNotJoined
	}
	a := v.Host(host).GetLendAddress()
	if a == "" {
		return "", reason.Errorf(reason.NotFound, "host %.64s lends no GPU, or there is no such host", host).On("host", host)
	}
	return a, nil
}

// Assigned returns how much of each of this host's GPUs the log has assigned to a claim of
// another host (bytes; 0: whole GPUs). With now it reads everything that is committed,
// otherwise what this host has applied. The error wraps ErrNotAssigned if any of them is
// not assigned to the claim, is being released, or if token is not the highest of their
// tokens. It wraps replica.ErrNoLeader if that is not known: a host that was just started
// has an old state, or none, until a leader tells it what is committed.
func (n *Node) Assigned(ctx context.Context, claim, borrower string, gpus []string, token uint64, now bool) (uint64, error) {
	m, err := n.membership()
	if err != nil {
		return 0, err
	}
	if !now && !m.store.CaughtUp() {
		return 0, fmt.Errorf("claim %s: what is assigned to it is not known yet: %w", claim, replica.ErrNoLeader)
	}
	v := m.store.State().View()
	if now {
		ctx, cancel := context.WithTimeout(ctx, attempt)
		defer cancel()
		if v, err = m.store.Read(ctx, false); err != nil {
			return 0, err
		}
	}
	c := v.Claim(claim)
	if c == nil || c.GetLabels()[placement.LabelManagedBy] != borrower {
		return 0, reason.Detail(fmt.Errorf("claim %s: %w: it is none of that host", claim, ErrNotAssigned)).On("claim", claim)
	}
	highest, amount := uint64(0), ^uint64(0)
	have := map[string]bool{}
	for as := range v.AssignmentsOfClaim(claim) {
		if name := m.name(as.GetGpu()); as.GetHost() == m.Host && as.GetResidence() != releasing && slices.Contains(gpus, name) {
			have[name] = true
			highest, amount = max(highest, as.GetToken()), min(amount, as.GetMemory())
		}
	}
	for _, g := range gpus {
		if !have[g] {
			return 0, reason.Detail(fmt.Errorf("gpu %s: %w, claim %s", m.id(g), ErrNotAssigned, claim)).On("gpu", m.id(g))
		}
	}
	if highest != token {
		return 0, reason.Detail(fmt.Errorf("claim %s: %w: its token is %d, not %d", claim, ErrNotAssigned, highest, token)).On("claim", claim)
	}
	return amount, nil
}

// TokenOf returns the highest fencing token of a claim's assignments, of everything that is
// committed. The error wraps ErrNotAssigned if it has none.
func (n *Node) TokenOf(ctx context.Context, claim string) (token uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, attempt)
	defer cancel()
	m, err := n.membership()
	if err != nil {
		return 0, err
	}
	v, err := m.store.Read(ctx, false)
	if err != nil {
		return 0, err
	}
	for as := range v.AssignmentsOfClaim(claim) {
		if as.GetResidence() != releasing {
			token = max(token, as.GetToken())
		}
	}
	if token == 0 {
		return 0, reason.Detail(fmt.Errorf("claim %s: %w", claim, ErrNotAssigned)).On("claim", claim)
	}
	return token, nil
}

// Link returns what is known of the network from this host to another one; nil: nothing.
func (n *Node) Link(to string) *clusterv1.Link {
	m := n.member()
	if m == nil {
		return nil
	}
	return m.store.State().View().Link(m.Host + "/" + to)
}

// ReportLink stores what is known of the network to another host.
func (n *Node) ReportLink(ctx context.Context, l *clusterv1.Link) error {
	m, err := n.membership()
	if err != nil {
		return err
	}
	if m.store.State().View().Protocol() < state.ProtocolRemote {
		return nil // some host would not know the command
	}
	l = proto.CloneOf(l)
	l.Id, l.From = "", m.Host
	_, err = m.propose(ctx, &clusterv1.Command{Op: &clusterv1.Command_ReportLinks{ReportLinks: &clusterv1.ReportLinks{Host: m.Host, Links: []*clusterv1.Link{l}}}})
	return err
}

// Measure measures the network to another host: the round trip that the kernel has seen,
// and how many bytes per second it takes. It takes half a second at most, or as long as
// two messages do.
func (n *Node) Measure(ctx context.Context, host string) (rtt time.Duration, rate float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, attempt)
	defer cancel()
	_, address, err := n.peerOf(host)
	if err != nil {
		return 0, 0, err
	}
	client, conns := remote.Watched(n.trust().ClientConfig(n.expect(address)))
	defer client.CloseIdleConnections()
	peer := remote.Peer(client, address)
	least := time.Duration(0)
	for range echoes {
		began := time.Now()
		if _, err := peer.Echo(ctx, connect.NewRequest(&clusterv1.EchoRequest{})); err != nil {
			return 0, 0, fmt.Errorf("measure the link to host %s: %w", host, clusterapi.Uncoded(err))
		}
		if took := time.Since(began); least == 0 || took < least {
			least = took
		}
	}
	sent := 0
	began := time.Now()
	for size := 256 << 10; sent < calibration && time.Since(began) < calibrateFor; size = min(2*size, clusterapi.MaxEcho) {
		one := time.Now()
		if _, err := peer.Echo(ctx, connect.NewRequest(&clusterv1.EchoRequest{Data: make([]byte, size)})); err != nil {
			return 0, 0, fmt.Errorf("measure the link to host %s: %w", host, clusterapi.Uncoded(err))
		}
		sent += size
		rate = max(rate, float64(size)/time.Since(one).Seconds()) // others may have had the processor or the link meanwhile
	}
	return cmp.Or(smallest(conns()), least), rate, nil
}

// smallest returns the smallest round trip that the kernel has seen on the connections
// (tcpi_min_rtt, in microseconds, of TCP_INFO in tcp(7)); 0: it does not say.
func smallest(conns []net.Conn) (out time.Duration) {
	for _, c := range conns {
		t, ok := c.(*net.TCPConn)
		if !ok {
			continue
		}
		raw, err := t.SyscallConn()
		if err != nil {
			continue
		}
		_ = raw.Control(func(fd uintptr) {
			info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
			if err == nil && info.Min_rtt > 0 && info.Min_rtt < 1<<31 {
				if d := time.Duration(info.Min_rtt) * time.Microsecond; out == 0 || d < out {
					out = d
				}
			}
		})
	}
	return out
}

// abroad finds the assignments on other hosts that nothing on this host uses any more.
// They are released: the host that lends confirms that they are gone. Claims that this
// host does not know any more are added to over.
func (n *Node) abroad(m *membership, v *state.View, over map[string]bool) []string {
	var out []string
	for c := range v.Claims() {
		if !n.manages(m, c) || !elsewhere(c) {
			continue
		}
		for as := range v.AssignmentsOfClaim(c.GetId()) {
			if as.GetHost() == m.Host || as.GetResidence() == releasing || n.served.Host.Uses(c.GetId(), as.GetGpu()) {
				continue
			}
			if n.served.Host.Knows(c.GetId()) {
				out = append(out, as.GetId())
			} else {
				over[c.GetId()] = true
			}
		}
	}
	return out
}

// orphaned reports whether the host of a claim's application is down or gone, so that it
// cannot give back what it has here. Nothing here may serve the claim.
func (n *Node) orphaned(m *membership, v *state.View, c *clusterv1.Claim) bool {
	home := c.GetHome()
	return home != "" && home != m.Host && (v.Host(home) == nil || v.Host(home).GetDown())
}

// errUnmeasured is returned by Calibrate if the link is being measured.
var errUnmeasured = errors.New("the link is being measured")

// Fresh is how long a measurement of a link is used without repeating it.
const Fresh = time.Hour

// Calibrate measures the link to a host, unless that was done in the last hour. refresh
// combines the measurement with what was known.
func (n *Node) Calibrate(ctx context.Context, host string, refresh func(*clusterv1.Link, time.Duration, float64) *clusterv1.Link) error {
	old := n.Link(host)
	if old.GetSamples() > 0 && time.Since(time.UnixMilli(old.GetMeasuredUnixMs())) < Fresh {
		return nil
	}
	end, ok := n.measuring.Begin(host)
	if !ok {
		return errUnmeasured
	}
	defer end()
	rtt, rate, err := n.Measure(ctx, host)
	if err != nil {
		return err
	}
	l := refresh(proto.CloneOf(old), rtt, rate)
	l.To, l.MeasuredUnixMs = host, time.Now().UnixMilli()
	return n.ReportLink(ctx, l)
}
