package clusterapi

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/cluster/pki/throttle"
	"github.com/gpuctl/gpuctl/cluster/query"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/cluster/scheduler"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// maxRequest is the size of the largest request in bytes. The report of a host with all
// its GPUs fits.
const maxRequest = 8 << 20

// maxEnroll is the same for callers that are not authenticated: they send a certificate
// request and some names.
const maxEnroll = 32 << 10

// maxOthers is the same for calls that users make.
const maxOthers = 1 << 20

// minCompressed is the size of the smallest answer in bytes that is compressed.
const minCompressed = 64 << 10

// patience is how long a call waits for a leader. An election takes a second at most.
// Afterwards the caller gets an error that says what is wrong.
const patience = 8 * time.Second

// Log is the replicated log, with the state of its store.
type Log interface {
	scheduler.Log
	ApplyLocal(ctx context.Context, cmds []*clusterv1.Command) ([]*clusterv1.Result, error)
	ReadIndex(ctx context.Context) (uint64, error)
	HandleHeartbeat(r *clusterv1.HeartbeatRequest) (*clusterv1.HeartbeatResponse, error)
	AddServer(ctx context.Context, id, address string) error
	Leader() (name, address string)
	IsLeader() bool
	Status() *clusterv1.StatusResponse
}

var _ Log = (*replica.Store)(nil)

// Self is the identity of this host in the cluster.
type Self struct {
	Host string // name
	ID   string
}

// Member is this host's membership.
type Member interface {
	// Log returns nil if the host has not joined a cluster.
	Log() Log
	Scheduler() *scheduler.Scheduler
	// Problem returns a fault of this host's membership that the log does not contain, or
	// nil.
	Problem() error
	Self() Self
	// Authority returns the cluster's certificate authority, or an error if this host
	// does not have its key.
	Authority() (*pki.CA, error)
	// Certificate returns this host's certificate. It is nil in a cluster of one host
	// that communicates with nobody.
	Certificate() *pki.Material
	Init(ctx context.Context, r *clusterv1.InitRequest) error
	Join(ctx context.Context, r *clusterv1.JoinRequest) error
	// Peer returns a client for the host at an address.
	Peer(address string) clusterv1connect.PeerServiceClient
	Facts(ctx context.Context) (*clusterv1.HostFacts, error)
	// Lender returns nil if this host lends no GPU.
	Lender() Lender
}

// API implements both services.
type API struct {
	member Member
	log    *slog.Logger
	cache  *query.Cache
	quiet  *throttle.Throttle
	now    func() time.Time
}

var (
	_ clusterv1connect.ClusterServiceHandler = (*API)(nil)
	_ clusterv1connect.PeerServiceHandler    = (*API)(nil)
)

// New returns the services of a member.
func New(m Member, log *slog.Logger) *API {
	return &API{member: m, log: log, cache: query.NewCache(), quiet: throttle.New(time.Second, time.Now), now: time.Now}
}

// Handle adds both services to a mux.
func (a *API) Handle(mux *http.ServeMux, options ...connect.HandlerOption) {
	options = append(options, connect.WithCompressMinBytes(minCompressed), connect.WithConditionalHandlerOptions(func(spec connect.Spec) []connect.HandlerOption {
		switch {
		case spec.Procedure == clusterv1connect.PeerServiceEnrollProcedure:
			return []connect.HandlerOption{connect.WithReadMaxBytes(maxEnroll)}
		case strings.HasPrefix(spec.Procedure, "/"+clusterv1connect.PeerServiceName+"/") && spec.Procedure != clusterv1connect.PeerServiceRenewProcedure:
			return []connect.HandlerOption{connect.WithReadMaxBytes(maxRequest)}
		}
		return []connect.HandlerOption{connect.WithReadMaxBytes(maxOthers)}
	}))
	mux.Handle(clusterv1connect.NewClusterServiceHandler(a, options...))
	mux.Handle(clusterv1connect.NewPeerServiceHandler(a, options...))
}

// replicated returns the log, or ErrNotJoined.
func (a *API) replicated() (Log, error) {
	if l := a.member.Log(); l != nil {
		return l, nil
	}
	return nil, reason.Coded(ErrNotJoined)
}

// actor returns the caller's name for commands and events.
func (a *API) actor(ctx context.Context) string {
	if c, ok := access.From(ctx); ok {
		return c.Actor() + "@" + a.member.Self().Host
	}
	return "host " + a.member.Self().Host
}

// owner returns the caller's name for claims. A user's name is the same on all hosts.
func (a *API) owner(ctx context.Context) string {
	if c, ok := access.From(ctx); ok && c.Kind == access.User {
		return c.Actor()
	}
	return a.actor(ctx)
}

// apply proposes a command in the caller's name.
func (a *API) apply(ctx context.Context, c *clusterv1.Command) (*clusterv1.Result, error) {
	l, err := a.replicated()
	if err != nil {
		return nil, err
	}
	c.Actor = a.actor(ctx)
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	res, err := scheduler.Check(l.Apply(ctx, c))
	return res, reason.Coded(err)
}
