package member

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/cluster/remote"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/cluster/scheduler"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/hostd/member/clusterapi"
	"github.com/gpuctl/gpuctl/internal/busy"
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/wait"
)

// Host is what the cluster needs to know about this host.
type Host interface {
	// Report returns the host and its GPUs. The GPUs' ids do not contain the host's name.
	Report(ctx context.Context) (*clusterv1.Host, []*clusterv1.GPU, error)
	Facts(ctx context.Context) (*clusterv1.HostFacts, error)
	// Knows reports whether a claim that this host made still exists.
	Knows(claim string) bool
	// Uses reports whether anything uses a GPU for a claim.
	Uses(claim, gpu string) bool
	// Holdings returns the GPUs that this host's own claims have.
	Holdings() []Holding
	// Sessions returns the sessions in their present state.
	Sessions() []*clusterv1.Session
	// Ready reports whether the answers of Knows, Uses, Holdings and Sessions are
	// complete.
	Ready() bool
}

// Config has what a Node depends on, and its settings.
type Config struct {
	Dir       string // data folder; empty: a cluster of this host alone, in memory
	Name      string // of the host, unless Init or Join name another one
	Listen    string // host:port
	Advertise string // host:port at which other hosts reach it; empty: from Listen
	Version   string // version of the program
	Local     func() access.LocalPolicy
	Audit     *access.AuditLog
	Timing    replica.Timing
	Members   replica.Members
	Refused   func(procedure string, code connect.Code)
	// Interceptors see all calls, including those that are refused.
	Interceptors []connect.Interceptor
	Logger       *slog.Logger
}

// Served is what a node tells the cluster about, and what it serves. All of it may use the
// node, so it can only be made after the node: see Start.
type Served struct {
	Host Host
	// Lender lends GPUs of this host to others; nil: it lends none. LendAddress returns
	// the address at which carriers of other hosts reach this one, whose own address is
	// given; it is not nil if Lender is not.
	Lender      clusterapi.Lender
	LendAddress func(address string) string
	// Services adds more services to the server; nil: there are none.
	Services func(mux *http.ServeMux, options ...connect.HandlerOption)
}

// Node is the membership of a host. It is safe for concurrent use.
type Node struct {
	Config
	served Served // of Start; only what Start begins uses it
	ctx    context.Context
	cancel context.CancelFunc
	gate   *access.Gate
	api    *clusterapi.API
	http   *http.Client
	mux    *http.ServeMux
	kick   chan struct{}
	// settling is full while this host compares the log with what its claims use.
	settling chan struct{}
	// records and events are kept here while there is no leader.
	records chan *clusterv1.Migration
	notes   chan *clusterv1.Event

	measuring busy.Set // links, by host

	joining sync.Mutex // held during Init, Join and Close
	mu      sync.Mutex
	live    *membership
}

// membership has the running parts of a member.
type membership struct {
	identity
	store     *replica.Store
	scheduler *scheduler.Scheduler
	ready     chan struct{} // closed when scheduler is set
	renewer   *pki.Renewer  // nil: the cluster is in memory
	port      *pki.Mux
	servers   []*http.Server
	stop      context.CancelFunc
	work      sync.WaitGroup
	removed   atomic.Bool // other hosts report that this host was removed
}

var _ clusterapi.Member = (*Node)(nil)

const (
	shutdown   = 3 * time.Second
	maxRecords = 1024
)

// New returns a node that is in no cluster yet. All its methods but Facts may be called
// before Start: they answer as on a host that has not joined. Close frees it. The node uses
// the values of ctx, but goes on after the end of ctx.
func New(ctx context.Context, c Config) *Node {
	n := &Node{Config: c, kick: make(chan struct{}, 1), settling: make(chan struct{}, 1), records: make(chan *clusterv1.Migration, maxRecords), notes: make(chan *clusterv1.Event, maxRecords)}
	n.ctx, n.cancel = context.WithCancel(context.WithoutCancel(ctx))
	trust := n.trust()
	trust.Revoked = n.revoked
	n.gate = access.NewGate(access.Config{
		Trust: trust, Lookup: n.lookup, Local: c.Local, Audit: c.Audit, Log: c.Logger, Refused: c.Refused,
	})
	n.http = n.client(trust)
	n.api = clusterapi.New(n, c.Logger)
	n.mux = http.NewServeMux()
	return n
}

// Start serves the cluster's services and those of s, and resumes the host's membership.
// Without a data folder, the host is a cluster of its own. It must be called once, before
// Handler serves requests.
//
// This is the one place where parts of the daemon that call each other are joined: the parts
// of s ask the cluster through the node, and the node compares the log with what they use.
// The node asks less, so it is made first, and gets s with the call that begins to ask.
func (n *Node) Start(ctx context.Context, s Served) error {
	n.served = s
	chain := connect.WithInterceptors(append(slices.Clone(n.Interceptors), n.gate)...)
	n.api.Handle(n.mux, chain)
	if s.Services != nil {
		s.Services(n.mux, chain)
	}
	if err := n.open(ctx); err != nil {
		n.cancel()
		return err
	}
	return nil
}

func (n *Node) open(ctx context.Context) error {
	if n.Dir == "" {
		id := identity{Host: n.Name, ID: "h-" + random.Hex(8), Address: "localhost:7650", Cluster: random.Hex(8), Found: true}
		return n.start(ctx, id, nil)
	}
	if err := os.MkdirAll(n.Dir, 0o700); err != nil {
		return fmt.Errorf("data folder: %w", err)
	}
	id, err := readIdentity(n.Dir)
	if err != nil || id == nil {
		return err
	}
	if err := n.begun(); err != nil {
		return err
	}
	return n.start(ctx, *id, nil)
}

func (n *Node) pki() pki.Dir { return pki.NewDir(filepath.Join(n.Dir, "pki")) }

// trust decides which certificates are valid. It reads the state at each check.
func (n *Node) trust() pki.Trust {
	return pki.Trust{Provider: n, Revoked: func(p pki.Peer) bool {
		v := n.known()
		return v != nil && !holds(v, p)
	}}
}

// client returns a client for other hosts.
func (n *Node) client(trust pki.Trust) *http.Client {
	return remote.HostClient(func(address string) *tls.Config { return trust.ClientConfig(n.expect(address)) }, n.Timing.Ping)
}

// expect returns the id of the host that is reached at an address. Another host of the
// cluster that answers there, by a mistake or on purpose, is not believed: it would say
// where the VMs of the first are. Empty: any host is accepted, because this host does not
// know who has the address.
func (n *Node) expect(address string) string {
	v := n.known()
	if v == nil {
		return ""
	}
	return v.HostByAddress(address).GetId()
}

// holds reports whether the identity of a certificate exists, with the same enrolment.
func holds(v *state.View, p pki.Peer) bool {
	i := v.Identity(p.ID)
	return i != nil && i.GetEnrolment() == p.Enrolment
}

// revoked reports whether a certificate's identity was removed. If the identity is
// unknown to this host, it may have been admitted a moment ago. So this host first asks
// the leader, before the owner is told to get a new token.
func (n *Node) revoked(p pki.Peer) bool {
	v := n.known()
	if v == nil || holds(v, p) {
		return false
	}
	ctx, cancel := context.WithTimeout(n.ctx, time.Second)
	defer cancel()
	now, err := n.Read(ctx)
	return err != nil || !holds(now, p)
}

// Current returns the certificate in use.
func (n *Node) Current() *pki.Material {
	if m := n.member(); m != nil && m.renewer != nil {
		return m.renewer.Current()
	}
	return nil
}

// Certificate returns the certificate in use; see Current.
func (n *Node) Certificate() *pki.Material { return n.Current() }

// known returns the state, but only after it contains this host's own identity. Until
// then, the state may lack the identities of other hosts, too. A host that was just
// started does not know who joined after its last snapshot. It learns it from the other
// hosts.
func (n *Node) known() *state.View {
	m := n.member()
	if m == nil || !m.store.CaughtUp() {
		return nil
	}
	v := m.store.State().View()
	if m.renewer == nil && v.Identity(m.ID) == nil || m.renewer != nil && !holds(v, m.renewer.Current().Peer) {
		return nil
	}
	return v
}

func (n *Node) lookup(id string) (*clusterv1.Identity, error) {
	v := n.known()
	if v == nil {
		return nil, access.ErrNotReady
	}
	return v.Identity(id), nil
}

func (n *Node) member() *membership {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.live
}

// Log returns the replicated log, or nil if the host has not joined a cluster.
func (n *Node) Log() clusterapi.Log {
	if m := n.member(); m != nil {
		return m.store
	}
	return nil
}

// Scheduler returns the scheduler, or nil if the host has not joined a cluster.
func (n *Node) Scheduler() *scheduler.Scheduler {
	if m := n.member(); m != nil {
		return m.scheduler
	}
	return nil
}

// View returns the state that is applied on this host, or nil if it has not joined a
// cluster.
func (n *Node) View() *state.View {
	if m := n.member(); m != nil {
		return m.store.State().View()
	}
	return nil
}

// CaughtUp reports whether View has what this host's log had when hostd was started. Before
// that, what is missing in it may be there all the same, so that nothing may be ended
// because of it.
func (n *Node) CaughtUp() bool {
	m := n.member()
	return m != nil && m.store.CaughtUp()
}

// Read returns the state with everything that is committed. It returns an error if that
// is unknown now.
func (n *Node) Read(ctx context.Context) (*state.View, error) {
	m, err := n.membership()
	if err != nil {
		return nil, err
	}
	return m.store.Read(ctx, false)
}

// Status returns the state of the cluster as this host sees it.
func (n *Node) Status() *clusterv1.StatusResponse { return n.api.Report() }

// Health returns why this host does not work as a member, or nil if it does.
func (n *Node) Health() error {
	if m := n.member(); m != nil {
		return m.store.Health()
	}
	return nil
}

// Skipped returns how many log entries this version of gpuctl has not applied.
func (n *Node) Skipped() uint64 {
	if m := n.member(); m != nil {
		return m.store.Skipped()
	}
	return 0
}

// Reload reads the certificate from disk again.
func (n *Node) Reload() error {
	if m := n.member(); m != nil && m.renewer != nil {
		return m.renewer.Reload()
	}
	return nil
}

// Lender returns who lends GPUs of this host; nil: nobody.
func (n *Node) Lender() clusterapi.Lender { return n.served.Lender }

// Self returns this host's identity in the cluster.
func (n *Node) Self() clusterapi.Self {
	if m := n.member(); m != nil {
		return clusterapi.Self{Host: m.Host, ID: m.ID}
	}
	return clusterapi.Self{Host: n.Name}
}

// Authority returns the cluster's certificate authority.
func (n *Node) Authority() (*pki.CA, error) {
	if n.Dir == "" {
		return nil, errors.New("a cluster of one in memory has no authority")
	}
	return n.pki().LoadCA()
}

// Peer returns a client for another host.
func (n *Node) Peer(address string) clusterv1connect.PeerServiceClient {
	return remote.Peer(n.http, address)
}

// Facts returns this host's properties that change often.
func (n *Node) Facts(ctx context.Context) (*clusterv1.HostFacts, error) {
	f, err := n.served.Host.Facts(ctx)
	if err != nil {
		return nil, err
	}
	f.Host = n.Self().Host
	for _, g := range f.GetGpus() {
		g.Gpu = f.GetHost() + "/" + g.GetGpu()
	}
	return f, nil
}

// Handler serves the API, and checks who may call what. The server must use ConnContext.
func (n *Node) Handler() http.Handler { return n.gate.Middleware(n.mux) }

// ConnContext adds the caller's identity to the context of a connection.
func (n *Node) ConnContext(ctx context.Context, c net.Conn) context.Context {
	return n.gate.ConnContext(ctx, c)
}

// start makes the host a member. listener is the open port; nil: start opens it.
func (n *Node) start(ctx context.Context, id identity, listener net.Listener) (err error) {
	m := &membership{identity: id, ready: make(chan struct{})}
	work, stop := context.WithCancel(n.ctx)
	m.stop = stop
	defer func() {
		if err != nil {
			n.halt(m)
		}
	}()
	cfg := replica.Config{
		ID: id.ID, Name: id.Host, Address: id.Address, Version: n.Version, Timing: n.Timing, Members: n.Members, Log: n.Logger,
		Unknown: n.Kick,
		Tasks: []replica.LeaderTask{{Name: "pending claims", Run: func(ctx context.Context, l *replica.Lead) error {
			select {
			case <-m.ready:
				m.scheduler.Run(ctx, l)
			case <-ctx.Done():
			}
			return nil
		}}, {Name: "removed hosts", Run: func(ctx context.Context, l *replica.Lead) error { return scheduler.GiveUp(ctx, l) }}},
	}
	if n.Dir == "" {
		cfg.Timing = replica.Solo()
	} else if err := n.connect(work, m, listener, &cfg); err != nil {
		return err
	}
	if m.store, err = replica.Open(ctx, cfg); err != nil {
		return fmt.Errorf("cluster %s: %w", id.Cluster, err)
	}
	m.scheduler = scheduler.New(m.store, n.Logger)
	close(m.ready)
	n.mu.Lock()
	n.live = m
	n.mu.Unlock()
	if id.Found {
		if err := n.found(ctx, m); err != nil {
			return err
		}
	}
	if m.port != nil {
		for server, listener := range map[*http.Server]net.Listener{n.newServer(): m.port.HTTP(), n.newStrangers(): m.port.Strangers()} {
			m.servers = append(m.servers, server)
			m.work.Go(func() {
				if err := server.Serve(listener); err != nil && !errors.Is(err, http.ErrServerClosed) {
					n.Logger.Error("the API is not served any more", "err", err)
				}
			})
		}
		m.work.Go(func() { m.renewer.Run(work) })
		m.work.Go(func() { n.recheck(work, m) })
		m.work.Go(func() { n.listen(work, m) })
	}
	m.work.Go(func() { n.report(work, m) })
	m.work.Go(func() { n.reconcile(work, m) })
	m.work.Go(func() { n.keepRecords(work, m) })
	m.work.Go(func() { n.keepNotes(work, m) })
	n.Logger.Info("member of a cluster", "cluster", id.Cluster, "host", id.Host, "address", id.Address)
	return nil
}

func (n *Node) newServer() *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	return &http.Server{
		Handler: n.Handler(), Protocols: protocols, ConnContext: n.ConnContext,
		ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(n.Logger.Handler(), slog.LevelDebug),
	}
}

// newStrangers returns the server for callers without a certificate, which may be
// anybody. Its limits on sizes and times, and the port's limit on connections, bound the
// memory that they can use on this host.
func (n *Node) newStrangers() *http.Server {
	s := n.newServer()
	s.MaxHeaderBytes, s.IdleTimeout, s.WriteTimeout = 8<<10, 15*time.Second, time.Minute
	s.HTTP2 = &http.HTTP2Config{
		MaxConcurrentStreams: 4, MaxReadFrameSize: 16 << 10, MaxDecoderHeaderTableSize: 4 << 10, MaxEncoderHeaderTableSize: 4 << 10,
		MaxReceiveBufferPerConnection: 64 << 10, MaxReceiveBufferPerStream: 64 << 10,
	}
	return s
}

// connect opens the port, and configures how the store reaches other hosts.
func (n *Node) connect(ctx context.Context, m *membership, listener net.Listener, cfg *replica.Config) error {
	var err error
	m.renewer, err = pki.NewRenewer(pki.RenewerConfig{Dir: n.pki(), Renew: n.renew, Log: n.Logger})
	if err != nil {
		return fmt.Errorf("certificate: %w", err)
	}
	if listener == nil {
		var lc net.ListenConfig
		if listener, err = lc.Listen(ctx, "tcp", n.Listen); err != nil {
			return fmt.Errorf("port: %w", err)
		}
	}
	trust := n.trust()
	trust.Provider = m.renewer
	m.port = pki.NewMux(pki.MuxConfig{Listener: listener, Trust: trust, Log: n.Logger, Expect: n.expect})
	cfg.Dir = filepath.Join(n.Dir, "raft")
	cfg.Stream = stream{m.port.Raft()}
	cfg.Peers = forwarder{n.client(trust)}
	return nil
}

// found writes the first entries of a new cluster. It may be repeated.
func (n *Node) found(ctx context.Context, m *membership) error {
	first := &clusterv1.InitCluster{ClusterId: m.Cluster}
	if n.Dir != "" {
		first.CaCertificate = m.renewer.Current().CA.Raw
	}
	if err := m.store.Bootstrap(ctx, first); err != nil && !errors.Is(err, replica.ErrExists) {
		return fmt.Errorf("cluster %s: %w", m.Cluster, err)
	}
	identity := &clusterv1.Identity{Id: m.ID, Host: m.Host, Role: clusterv1.Role_ROLE_HOST, CreatedUnixMs: time.Now().UnixMilli()}
	if n.Dir != "" {
		identity.Enrolment = m.renewer.Current().Peer.Enrolment
	}
	_, err := scheduler.Check(m.store.Apply(ctx, &clusterv1.Command{Actor: "host " + m.Host, Op: &clusterv1.Command_PutIdentity{
		PutIdentity: &clusterv1.PutIdentity{Identity: identity},
	}}))
	if err != nil {
		return fmt.Errorf("cluster %s: %w", m.Cluster, err)
	}
	m.Found = false
	if n.Dir != "" {
		return m.write(n.Dir)
	}
	return nil
}

// renew signs this host's next certificate on this host, which has the authority's key.
// The identities in the log decide whether it is still a member.
func (n *Node) renew(_ context.Context, csr []byte) (cert, ca []byte, err error) {
	m := n.member()
	if m == nil {
		return nil, nil, clusterapi.ErrNotJoined
	}
	authority, err := n.Authority()
	if err != nil {
		return nil, nil, err
	}
	cert, err = authority.Sign(csr, pki.HostIdentity(m.ID, m.Host, m.Address, m.renewer.Current().Peer.Enrolment), time.Now())
	return cert, authority.Certificate().Raw, err
}

// recheck closes Raft's connections to removed hosts at once.
func (n *Node) recheck(ctx context.Context, m *membership) {
	for ctx.Err() == nil {
		changed := m.store.State().View().Changed()
		select {
		case <-ctx.Done():
			return
		case <-changed:
			m.port.Recheck()
		}
		_ = wait.For(ctx, time.Second)
	}
}

// Problem returns an error if this host was removed from its cluster. Its own state does
// not contain that: other hosts stop sending to it with the log entry that removes it.
func (n *Node) Problem() error {
	if m := n.member(); m != nil && m.removed.Load() {
		return fmt.Errorf("this host was removed from the cluster: to come back, stop hostd, delete %s, start hostd and join with a new token", n.Dir)
	}
	return nil
}

// listen asks other hosts, while there is no leader, whether this host was removed.
func (n *Node) listen(ctx context.Context, m *membership) {
	for ctx.Err() == nil {
		_ = wait.For(ctx, retryAfter)
		if _, address := m.store.Leader(); address != "" {
			m.removed.Store(false)
			continue
		}
		for h := range m.store.State().View().Hosts() {
			if h.GetId() == m.ID || ctx.Err() != nil {
				continue
			}
			call, cancel := context.WithTimeout(ctx, retryAfter)
			_, err := n.Peer(h.GetAddress()).Heartbeat(call, connect.NewRequest(&clusterv1.HeartbeatRequest{Host: m.Host, HostId: m.ID}))
			cancel()
			if reason.Is(err, reason.Revoked) {
				if !m.removed.Swap(true) {
					n.Logger.Error("not a member any more", "err", n.Problem(), "said_by", h.GetName())
				}
				break
			}
		}
	}
}

// halt stops all parts of a membership.
func (n *Node) halt(m *membership) {
	n.mu.Lock()
	if n.live == m {
		n.live = nil
	}
	n.mu.Unlock()
	m.stop()
	ctx, cancel := context.WithTimeout(context.Background(), shutdown)
	for _, server := range m.servers {
		if server.Shutdown(ctx) != nil {
			_ = server.Close()
		}
	}
	cancel()
	if m.store != nil {
		if err := m.store.Close(); err != nil {
			n.Logger.Warn("cluster state not closed", "err", err)
		}
	}
	if m.port != nil {
		_ = m.port.Close()
	}
	m.work.Wait()
}

// Close stops the node. Its files stay, so that a later Open resumes the membership.
func (n *Node) Close() error {
	n.joining.Lock()
	defer n.joining.Unlock()
	if m := n.member(); m != nil {
		n.halt(m)
	}
	n.cancel()
	n.http.CloseIdleConnections()
	return nil
}

// missing reports whether the error means that a file or folder does not exist.
func missing(err error) bool { return errors.Is(err, fs.ErrNotExist) }
