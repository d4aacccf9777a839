package member

import (
	"context"
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
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/wait"
)

// Host has what the cluster needs to know of this machine.
type Host interface {
	// Report describes the host and its GPUs. Ids of GPUs are without the host's
	// name.
	Report(ctx context.Context) (*clusterv1.Host, []*clusterv1.GPU, error)
	Facts(ctx context.Context) (*clusterv1.HostFacts, error)
	// Knows reports whether a claim that this host made still exists.
	Knows(claim string) bool
	// Uses reports whether anything uses a GPU by a claim.
	Uses(claim, gpu string) bool
	// Holdings are the GPUs that this host's own claims have.
	Holdings() []Holding
	// Sessions as they are now.
	Sessions() []*clusterv1.Session
	// Ready reports whether Knows, Uses, Holdings and Sessions can be believed.
	Ready() bool
}

// Config of a Node.
type Config struct {
	Dir       string // empty: a cluster of one in memory
	Name      string // of the host, unless Init or Join say another
	Listen    string // host:port
	Advertise string // host:port at which others reach it; empty: from Listen
	Version   string // of the program
	Host      Host
	Local     func() access.LocalPolicy
	Audit     *access.AuditLog
	Timing    replica.Timing
	Members   replica.Members
	Refused   func(procedure string, code connect.Code)
	// Interceptors see calls before anybody is refused.
	Interceptors []connect.Interceptor
	// Services adds services to those of the cluster. Start calls it, so that
	// the services may be made after the node, and use it.
	Services func(mux *http.ServeMux, options ...connect.HandlerOption)
	Logger   *slog.Logger
}

// Node is safe for concurrent use.
type Node struct {
	Config
	ctx    context.Context
	cancel context.CancelFunc
	gate   *access.Gate
	api    *clusterapi.API
	http   *http.Client
	mux    *http.ServeMux
	kick   chan struct{}
	// records of operations wait here while there is no leader.
	records chan *clusterv1.Migration
	notes   chan *clusterv1.Event

	joining sync.Mutex // one at a time
	mu      sync.Mutex
	live    *membership
}

// membership has the running parts of a member.
type membership struct {
	identity
	store     *replica.Store
	scheduler *scheduler.Scheduler
	ready     chan struct{} // closed when scheduler is there
	renewer   *pki.Renewer  // nil: in memory
	port      *pki.Mux
	servers   []*http.Server
	stop      context.CancelFunc
	work      sync.WaitGroup
	removed   atomic.Bool // others say so
}

var _ clusterapi.Member = (*Node)(nil)

const (
	shutdown   = 3 * time.Second
	maxRecords = 1024
)

// Open returns a node that has started: New and Start in one.
func Open(ctx context.Context, c Config) (*Node, error) {
	n := New(ctx, c)
	if err := n.Start(ctx); err != nil {
		return nil, err
	}
	return n, nil
}

// New returns a node that is in no cluster yet. All its methods may be called: it
// answers like a host that has not joined. Close frees it. The values of ctx, but
// not its end, are the node's.
func New(ctx context.Context, c Config) *Node {
	n := &Node{Config: c, kick: make(chan struct{}, 1), records: make(chan *clusterv1.Migration, maxRecords), notes: make(chan *clusterv1.Event, maxRecords)}
	n.ctx, n.cancel = context.WithCancel(context.WithoutCancel(ctx))
	trust := n.trust()
	trust.Revoked = n.revoked
	n.gate = access.NewGate(access.Config{
		Trust: trust, Lookup: n.lookup, Local: c.Local, Audit: c.Audit, Log: c.Logger, Refused: c.Refused,
	})
	n.http = remote.Client(trust.ClientConfig(""))
	n.api = clusterapi.New(n, c.Logger)
	n.mux = http.NewServeMux()
	return n
}

// Start serves the cluster's services and Config.Services, and makes the host the
// member that it was. Without a folder the host is a cluster of its own. It is
// called once, before Handler serves anybody.
func (n *Node) Start(ctx context.Context) error {
	chain := connect.WithInterceptors(append(slices.Clone(n.Interceptors), n.gate)...)
	n.api.Handle(n.mux, chain)
	if n.Services != nil {
		n.Services(n.mux, chain)
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

// trust is made before there is anything to trust: it asks again each time.
func (n *Node) trust() pki.Trust {
	return pki.Trust{Provider: n, Revoked: func(p pki.Peer) bool {
		v := n.known()
		return v != nil && !holds(v, p)
	}}
}

// holds reports whether a certificate is of an identity that there is, and of the
// same enrolment.
func holds(v *state.View, p pki.Peer) bool {
	i := v.Identity(p.ID)
	return i != nil && i.GetEnrolment() == p.Enrolment
}

// revoked reports whether a certificate's identity was removed. One that is not
// known here may have been let in a moment ago: before its owner is told to
// ask for a new token, this host asks the leader.
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

// Current is the certificate in force.
func (n *Node) Current() *pki.Material {
	if m := n.member(); m != nil && m.renewer != nil {
		return m.renewer.Current()
	}
	return nil
}

// Certificate is the same.
func (n *Node) Certificate() *pki.Material { return n.Current() }

// known is the state, once it says who this host is: until then it has not
// been told who anybody is. One that was just started has forgotten who joined
// since its last snapshot, and learns it again from just those.
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

// Log is nil while the host is in no cluster.
func (n *Node) Log() clusterapi.Log {
	if m := n.member(); m != nil {
		return m.store
	}
	return nil
}

// Scheduler is nil while the host is in no cluster.
func (n *Node) Scheduler() *scheduler.Scheduler {
	if m := n.member(); m != nil {
		return m.scheduler
	}
	return nil
}

// View is the state as it is applied here; nil while the host is in no cluster.
func (n *Node) View() *state.View {
	if m := n.member(); m != nil {
		return m.store.State().View()
	}
	return nil
}

// Read is View with everything that is committed. An error says that this
// cannot be known now.
func (n *Node) Read(ctx context.Context) (*state.View, error) {
	m, err := n.membership()
	if err != nil {
		return nil, err
	}
	return m.store.Read(ctx, false)
}

// Status is how the cluster is, as this host sees it.
func (n *Node) Status() *clusterv1.StatusResponse { return n.api.Report() }

// Health is nil, or why this host does not work as a member.
func (n *Node) Health() error {
	if m := n.member(); m != nil {
		return m.store.Health()
	}
	return nil
}

// Skipped counts entries of the log that this build left out.
func (n *Node) Skipped() uint64 {
	if m := n.member(); m != nil {
		return m.store.Skipped()
	}
	return 0
}

// Reload reads the certificate from disk anew.
func (n *Node) Reload() error {
	if m := n.member(); m != nil && m.renewer != nil {
		return m.renewer.Reload()
	}
	return nil
}

// Self is who this host is.
func (n *Node) Self() clusterapi.Self {
	if m := n.member(); m != nil {
		return clusterapi.Self{Host: m.Host, ID: m.ID}
	}
	return clusterapi.Self{Host: n.Name}
}

// Authority signs for the cluster.
func (n *Node) Authority() (*pki.CA, error) {
	if n.Dir == "" {
		return nil, errors.New("a cluster of one in memory has no authority")
	}
	return n.pki().LoadCA()
}

// Peer reaches another host.
func (n *Node) Peer(address string) clusterv1connect.PeerServiceClient {
	return remote.Peer(n.http, address)
}

// Facts are this host's.
func (n *Node) Facts(ctx context.Context) (*clusterv1.HostFacts, error) {
	f, err := n.Host.Facts(ctx)
	if err != nil {
		return nil, err
	}
	f.Host = n.Self().Host
	for _, g := range f.GetGpus() {
		g.Gpu = f.GetHost() + "/" + g.GetGpu()
	}
	return f, nil
}

// Handler serves the API behind the gate; ConnContext must be the server's.
func (n *Node) Handler() http.Handler { return n.gate.Middleware(n.mux) }

// ConnContext tells requests who called.
func (n *Node) ConnContext(ctx context.Context, c net.Conn) context.Context {
	return n.gate.ConnContext(ctx, c)
}

// start makes the host a member. A listener that is not nil is the port's.
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
		}}},
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

// newStrangers serves who has no certificate yet, and so may be anybody: little
// at a time, and not for long. With the connections that the port lets in, that
// bounds what all of them can have of this host's memory.
func (n *Node) newStrangers() *http.Server {
	s := n.newServer()
	s.MaxHeaderBytes, s.IdleTimeout, s.WriteTimeout = 8<<10, 15*time.Second, time.Minute
	s.HTTP2 = &http.HTTP2Config{
		MaxConcurrentStreams: 4, MaxReadFrameSize: 16 << 10, MaxDecoderHeaderTableSize: 4 << 10, MaxEncoderHeaderTableSize: 4 << 10,
		MaxReceiveBufferPerConnection: 64 << 10, MaxReceiveBufferPerStream: 64 << 10,
	}
	return s
}

// connect opens the port and says how the store reaches others.
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
	m.port = pki.NewMux(pki.MuxConfig{Listener: listener, Trust: trust, Log: n.Logger})
	cfg.Dir = filepath.Join(n.Dir, "raft")
	cfg.Stream = stream{m.port.Raft()}
	cfg.Peers = forwarder{remote.Client(trust.ClientConfig(""))}
	return nil
}

// found writes a new cluster's first entries. It may be repeated.
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

// renew signs here: this host has the authority's key, and whether it is
// still a member everybody sees in the log.
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

// recheck ends Raft's connections to who was removed, at once.
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

// Problem is that this host was removed from its cluster, if it was. Its own
// state does not say so: with the entry that removes it, others cease to speak
// to it.
func (n *Node) Problem() error {
	if m := n.member(); m != nil && m.removed.Load() {
		return fmt.Errorf("this host was removed from the cluster: to come back, stop hostd, delete %s, start hostd and join with a new token", n.Dir)
	}
	return nil
}

// listen asks others why nobody leads.
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

// halt stops what a membership has running.
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

// Close leaves everything as a later Open finds it.
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

// missing reports whether a file or folder is not there.
func missing(err error) bool { return errors.Is(err, fs.ErrNotExist) }
