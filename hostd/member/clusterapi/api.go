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

// maxRequest is the largest message that is read, in bytes: a host with all
// its GPUs fits.
const maxRequest = 8 << 20

// maxEnroll is the same for who may be anybody: a request for a certificate and
// some names.
const maxEnroll = 32 << 10

// maxOthers is the same for calls that users make.
const maxOthers = 1 << 20

// minCompressed is the smallest answer that is worth its compression, in bytes.
const minCompressed = 64 << 10

// patience is how long a caller waits for a leader: an election takes a second
// at most, and who waits in vain is to hear why.
const patience = 8 * time.Second

// Log is the replicated log with what only its store knows.
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

// Self is what this host is to the cluster.
type Self struct {
	Host string // name
	ID   string
}

// Member is this host's membership.
type Member interface {
	// Log is nil while the host is in no cluster.
	Log() Log
	Scheduler() *scheduler.Scheduler
	// Problem is what the log cannot know is wrong with this host.
	Problem() error
	Self() Self
	// Authority signs certificates; an error says why this host cannot.
	Authority() (*pki.CA, error)
	// Certificate is nil for a cluster of one that talks to nobody.
	Certificate() *pki.Material
	Init(ctx context.Context, r *clusterv1.InitRequest) error
	Join(ctx context.Context, r *clusterv1.JoinRequest) error
	// Peer reaches the host at an address.
	Peer(address string) clusterv1connect.PeerServiceClient
	Facts(ctx context.Context) (*clusterv1.HostFacts, error)
}

// API serves both services.
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

// replicated returns the log, or that there is none.
func (a *API) replicated() (Log, error) {
	if l := a.member.Log(); l != nil {
		return l, nil
	}
	return nil, reason.Coded(ErrNotJoined)
}

// actor is who asked, as commands and events name them.
func (a *API) actor(ctx context.Context) string {
	if c, ok := access.From(ctx); ok {
		return c.Actor() + "@" + a.member.Self().Host
	}
	return "host " + a.member.Self().Host
}

// owner is who asked, as claims name them: a user is the same on whichever
// host the request comes in.
func (a *API) owner(ctx context.Context) string {
	if c, ok := access.From(ctx); ok && c.Kind == access.User {
		return c.Actor()
	}
	return a.actor(ctx)
}

// apply proposes a command for the caller.
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
