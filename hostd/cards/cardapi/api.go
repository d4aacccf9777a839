package cardapi

import (
	"context"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// others limits the time for another host to list its VMs.
const others = 3 * time.Second

// Keeper manages the cards of this host.
type Keeper interface {
	Cards(ctx context.Context) ([]*gpuctlv1.Card, error)
	List(ctx context.Context) ([]*gpuctlv1.Machine, error)
	Isolated(ctx context.Context, gpu string) (*gpuctlv1.IsolationResponse, error)
	Attach(ctx context.Context, r *gpuctlv1.AttachRequest, report cards.Report) error
	Detach(ctx context.Context, r *gpuctlv1.DetachRequest, report cards.Report) error
	Reset(ctx context.Context, r *gpuctlv1.ResetRequest, report cards.Report) error
	Resize(ctx context.Context, r *gpuctlv1.ResizeRequest, report cards.Report) error
}

// Remote lends GPUs of hosts to the VMs of this host.
type Remote interface {
	Attach(ctx context.Context, r *gpuctlv1.AttachRemoteRequest, report cards.Report) error
	Detach(ctx context.Context, r *gpuctlv1.DetachRemoteRequest, report cards.Report) error
	// Of returns the GPU that is lent to a VM, or nil.
	Of(uuid string) *gpuctlv1.RemoteGPU
}

// Service has VMs of this host serve others.
type Service interface {
	Serve(ctx context.Context, r *gpuctlv1.ServeRequest, report cards.Report) error
	EndServe(ctx context.Context, r *gpuctlv1.EndServeRequest, report cards.Report) error
	// Of returns what a VM serves others with, or nil.
	Of(uuid string) *gpuctlv1.Service
}

// Cluster connects to other hosts.
type Cluster interface {
	HostName() string
	// OtherHosts returns the names of the other hosts that are up.
	OtherHosts() []string
	Devices(host string) (gpuctlv1connect.DeviceServiceClient, error)
}

// Config is what the API calls.
type Config struct {
	Keeper  Keeper
	Remote  Remote
	Service Service
	NICs    *NICs
	Cluster Cluster
	Log     *slog.Logger
}

// API implements DeviceService.
type API struct{ Config }

var _ gpuctlv1connect.DeviceServiceHandler = (*API)(nil)

// New returns the API of this host's cards and network interfaces.
func New(c Config) *API { return &API{c} }

// Handle adds the service to a mux.
func (a *API) Handle(mux *http.ServeMux, options ...connect.HandlerOption) {
	options = append(options, connect.WithReadMaxBytes(64<<10))
	mux.Handle(gpuctlv1connect.NewDeviceServiceHandler(a, options...))
}

// Everywhere lists the VMs of all hosts, and names the hosts that did not answer.
func (a *API) Everywhere(ctx context.Context) (machines []*gpuctlv1.Machine, missing []string) {
	res := a.everywhere(ctx)
	return res.GetMachines(), res.GetMissing()
}

// hostOf returns the host that a request is for: the given one, or the one in the GPU's
// id.
func (a *API) hostOf(host, gpu string) string {
	if name, _, ok := strings.Cut(gpu, "/"); ok && host == "" {
		host = name
	}
	if host == a.Cluster.HostName() {
		return ""
	}
	return host
}

// there returns a client for the other host's service, or nil if the request is for this
// host.
func (a *API) there(host, gpu string) (gpuctlv1connect.DeviceServiceClient, error) {
	if host = a.hostOf(host, gpu); host == "" {
		return nil, nil
	}
	c, err := a.Cluster.Devices(host)
	if err != nil {
		return nil, reason.Coded(err)
	}
	return c, nil
}

// ListCards lists the cards of a host.
func (a *API) ListCards(ctx context.Context, req *connect.Request[gpuctlv1.ListCardsRequest]) (*connect.Response[gpuctlv1.ListCardsResponse], error) {
	there, err := a.there(req.Msg.GetHost(), "")
	if err != nil {
		return nil, err
	}
	if there != nil {
		return forward(ctx, req.Msg, there.ListCards)
	}
	cards, err := a.Keeper.Cards(ctx)
	if err != nil {
		return nil, reason.Coded(err)
	}
	return connect.NewResponse(&gpuctlv1.ListCardsResponse{Host: a.Cluster.HostName(), Cards: cards}), nil
}

func forward[Req, Res any](ctx context.Context, m *Req, call func(context.Context, *connect.Request[Req]) (*connect.Response[Res], error)) (*connect.Response[Res], error) {
	res, err := call(ctx, connect.NewRequest(m))
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(res.Msg), nil
}

// ListMachines lists the VMs of this host, of another one, or of all.
func (a *API) ListMachines(ctx context.Context, req *connect.Request[gpuctlv1.ListMachinesRequest]) (*connect.Response[gpuctlv1.ListMachinesResponse], error) {
	if req.Msg.GetHost() == "*" {
		return connect.NewResponse(a.everywhere(ctx)), nil
	}
	there, err := a.there(req.Msg.GetHost(), "")
	if err != nil {
		return nil, err
	}
	if there != nil {
		return forward(ctx, req.Msg, there.ListMachines)
	}
	all, err := a.list(ctx)
	if err != nil {
		return nil, reason.Coded(err)
	}
	return connect.NewResponse(&gpuctlv1.ListMachinesResponse{Machines: all}), nil
}

// list lists the VMs of this host with all that they have.
func (a *API) list(ctx context.Context) ([]*gpuctlv1.Machine, error) {
	all, err := a.Keeper.List(ctx)
	for _, m := range all {
		m.Remote, m.Service = a.Remote.Of(m.GetUuid()), a.Service.Of(m.GetUuid())
	}
	return all, err
}

// everywhere asks all hosts at once. The answer names those that did not answer.
func (a *API) everywhere(ctx context.Context) *gpuctlv1.ListMachinesResponse {
	ctx, cancel := context.WithTimeout(ctx, others)
	defer cancel()
	out := &gpuctlv1.ListMachinesResponse{}
	var mu sync.Mutex
	add := func(host string, machines []*gpuctlv1.Machine, err error) {
		mu.Lock()
		defer mu.Unlock()
		out.Machines = append(out.Machines, machines...)
		if err != nil {
			out.Missing = append(out.Missing, host+": "+err.Error())
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		all, err := a.list(ctx)
		add(a.Cluster.HostName(), all, err)
	})
	for _, host := range a.Cluster.OtherHosts() {
		wg.Go(func() {
			c, err := a.Cluster.Devices(host)
			if err != nil {
				add(host, nil, err)
				return
			}
			res, err := c.ListMachines(ctx, connect.NewRequest(&gpuctlv1.ListMachinesRequest{Host: host}))
			if err != nil {
				add(host, nil, err)
				return
			}
			add(host, res.Msg.GetMachines(), nil)
		})
	}
	wg.Wait()
	slices.SortFunc(out.Machines, func(x, y *gpuctlv1.Machine) int {
		return strings.Compare(x.GetName()+"\x00"+x.GetHost(), y.GetName()+"\x00"+y.GetHost())
	})
	slices.Sort(out.Missing)
	return out
}

// Isolation judges a card.
func (a *API) Isolation(ctx context.Context, req *connect.Request[gpuctlv1.IsolationRequest]) (*connect.Response[gpuctlv1.IsolationResponse], error) {
	there, err := a.there(req.Msg.GetHost(), req.Msg.GetGpu())
	if err != nil {
		return nil, err
	}
	if there != nil {
		return forward(ctx, req.Msg, there.Isolation)
	}
	res, err := a.Keeper.Isolated(ctx, req.Msg.GetGpu())
	if err != nil {
		return nil, reason.CodedOn(err, "gpu", req.Msg.GetGpu())
	}
	return connect.NewResponse(res), nil
}

// machineHost finds the host of a VM for a request that names no host.
func (a *API) machineHost(ctx context.Context, host, gpu, machine string) (string, error) {
	if host = a.hostOf(host, gpu); host != "" || gpu != "" && strings.Contains(gpu, "/") {
		return host, nil
	}
	var at []string
	for _, m := range a.everywhere(ctx).GetMachines() {
		if m.GetName() == machine || m.GetUuid() == machine {
			at = append(at, m.GetHost())
		}
	}
	switch {
	case len(at) == 0 || slices.Contains(at, a.Cluster.HostName()):
		return "", nil // the keeper of this host reports that there is no such VM
	case len(at) > 1:
		return "", reason.Coded(reason.Errorf(reason.Ambiguous, "vm %s is on %s", machine, strings.Join(at, " and ")).On("vm", machine).Do("say which with --on"))
	}
	return at[0], nil
}

// stream does what Attach, Detach, Reset and Resize have in common.
func stream[Req any](ctx context.Context, a *API, host string, m *Req, out *connect.ServerStream[gpuctlv1.DeviceUpdate],
	do func(context.Context, *Req, cards.Report) error,
	there func(gpuctlv1connect.DeviceServiceClient) func(context.Context, *connect.Request[Req]) (*connect.ServerStreamForClient[gpuctlv1.DeviceUpdate], error),
) error {
	if host != "" {
		c, err := a.Cluster.Devices(host)
		if err != nil {
			return reason.Coded(err)
		}
		in, err := there(c)(ctx, connect.NewRequest(m))
		if err != nil {
			return err
		}
		defer func() { _ = in.Close() }()
		for in.Receive() {
			if err := out.Send(in.Msg()); err != nil {
				return err
			}
		}
		return in.Err()
	}
	// The change goes on if the caller leaves. From then on, nothing is sent.
	var mu sync.Mutex
	over := false
	defer func() {
		mu.Lock()
		over = true
		mu.Unlock()
	}()
	err := do(ctx, m, func(u *gpuctlv1.DeviceUpdate) {
		mu.Lock()
		defer mu.Unlock()
		if over {
			return
		}
		if err := out.Send(u); err != nil {
			over = true
			a.Log.Debug("nobody watches a change any more", "gpu", u.GetGpu(), "err", err)
		}
	})
	kind, object := about(m)
	return reason.CodedOn(err, kind, object)
}

// about returns the object of errors that name none: the card of a request, or its
// VM if it names no card.
func about(request any) (kind, object string) {
	if r, ok := request.(interface{ GetGpu() string }); ok && r.GetGpu() != "" {
		return "gpu", r.GetGpu()
	}
	if r, ok := request.(interface{ GetMachine() string }); ok {
		return "vm", r.GetMachine()
	}
	return "", ""
}

// Attach gives a card to a VM.
func (a *API) Attach(ctx context.Context, req *connect.Request[gpuctlv1.AttachRequest], out *connect.ServerStream[gpuctlv1.DeviceUpdate]) error {
	host, err := a.machineHost(ctx, req.Msg.GetHost(), req.Msg.GetGpu(), req.Msg.GetMachine())
	if err != nil {
		return err
	}
	return stream(ctx, a, host, req.Msg, out, a.Keeper.Attach, func(c gpuctlv1connect.DeviceServiceClient) func(context.Context, *connect.Request[gpuctlv1.AttachRequest]) (*connect.ServerStreamForClient[gpuctlv1.DeviceUpdate], error) {
		req.Msg.Host = host
		return c.Attach
	})
}

// Detach takes a card back.
func (a *API) Detach(ctx context.Context, req *connect.Request[gpuctlv1.DetachRequest], out *connect.ServerStream[gpuctlv1.DeviceUpdate]) error {
	host, err := a.machineHost(ctx, req.Msg.GetHost(), req.Msg.GetGpu(), req.Msg.GetMachine())
	if err != nil {
		return err
	}
	return stream(ctx, a, host, req.Msg, out, a.Keeper.Detach, func(c gpuctlv1connect.DeviceServiceClient) func(context.Context, *connect.Request[gpuctlv1.DetachRequest]) (*connect.ServerStreamForClient[gpuctlv1.DeviceUpdate], error) {
		req.Msg.Host = host
		return c.Detach
	})
}

// AttachRemote lends a GPU of a host to a VM.
func (a *API) AttachRemote(ctx context.Context, req *connect.Request[gpuctlv1.AttachRemoteRequest], out *connect.ServerStream[gpuctlv1.DeviceUpdate]) error {
	host, err := a.machineHost(ctx, req.Msg.GetHost(), "", req.Msg.GetMachine())
	if err != nil {
		return err
	}
	return stream(ctx, a, host, req.Msg, out, a.Remote.Attach, func(c gpuctlv1connect.DeviceServiceClient) func(context.Context, *connect.Request[gpuctlv1.AttachRemoteRequest]) (*connect.ServerStreamForClient[gpuctlv1.DeviceUpdate], error) {
		req.Msg.Host = host
		return c.AttachRemote
	})
}

// DetachRemote takes it back.
func (a *API) DetachRemote(ctx context.Context, req *connect.Request[gpuctlv1.DetachRemoteRequest], out *connect.ServerStream[gpuctlv1.DeviceUpdate]) error {
	host, err := a.machineHost(ctx, req.Msg.GetHost(), "", req.Msg.GetMachine())
	if err != nil {
		return err
	}
	return stream(ctx, a, host, req.Msg, out, a.Remote.Detach, func(c gpuctlv1connect.DeviceServiceClient) func(context.Context, *connect.Request[gpuctlv1.DetachRemoteRequest]) (*connect.ServerStreamForClient[gpuctlv1.DeviceUpdate], error) {
		req.Msg.Host = host
		return c.DetachRemote
	})
}

// Serve has a VM serve others.
func (a *API) Serve(ctx context.Context, req *connect.Request[gpuctlv1.ServeRequest], out *connect.ServerStream[gpuctlv1.DeviceUpdate]) error {
	host, err := a.machineHost(ctx, req.Msg.GetHost(), req.Msg.GetGpu(), req.Msg.GetMachine())
	if err != nil {
		return err
	}
	return stream(ctx, a, host, req.Msg, out, a.Service.Serve, func(c gpuctlv1connect.DeviceServiceClient) func(context.Context, *connect.Request[gpuctlv1.ServeRequest]) (*connect.ServerStreamForClient[gpuctlv1.DeviceUpdate], error) {
		req.Msg.Host = host
		return c.Serve
	})
}

// EndServe ends that.
func (a *API) EndServe(ctx context.Context, req *connect.Request[gpuctlv1.EndServeRequest], out *connect.ServerStream[gpuctlv1.DeviceUpdate]) error {
	host, err := a.machineHost(ctx, req.Msg.GetHost(), "", req.Msg.GetMachine())
	if err != nil {
		return err
	}
	return stream(ctx, a, host, req.Msg, out, a.Service.EndServe, func(c gpuctlv1connect.DeviceServiceClient) func(context.Context, *connect.Request[gpuctlv1.EndServeRequest]) (*connect.ServerStreamForClient[gpuctlv1.DeviceUpdate], error) {
		req.Msg.Host = host
		return c.EndServe
	})
}

// Reset brings a card to a known state.
func (a *API) Reset(ctx context.Context, req *connect.Request[gpuctlv1.ResetRequest], out *connect.ServerStream[gpuctlv1.DeviceUpdate]) error {
	return stream(ctx, a, a.hostOf(req.Msg.GetHost(), req.Msg.GetGpu()), req.Msg, out, a.Keeper.Reset, func(c gpuctlv1connect.DeviceServiceClient) func(context.Context, *connect.Request[gpuctlv1.ResetRequest]) (*connect.ServerStreamForClient[gpuctlv1.DeviceUpdate], error) {
		return c.Reset
	})
}

// Resize sets the number of a card's virtual functions.
func (a *API) Resize(ctx context.Context, req *connect.Request[gpuctlv1.ResizeRequest], out *connect.ServerStream[gpuctlv1.DeviceUpdate]) error {
	return stream(ctx, a, a.hostOf(req.Msg.GetHost(), req.Msg.GetGpu()), req.Msg, out, a.Keeper.Resize, func(c gpuctlv1connect.DeviceServiceClient) func(context.Context, *connect.Request[gpuctlv1.ResizeRequest]) (*connect.ServerStreamForClient[gpuctlv1.DeviceUpdate], error) {
		return c.Resize
	})
}

// ListNICs lists the network interfaces of a host.
func (a *API) ListNICs(ctx context.Context, req *connect.Request[gpuctlv1.ListNICsRequest]) (*connect.Response[gpuctlv1.ListNICsResponse], error) {
	there, err := a.there(req.Msg.GetHost(), "")
	if err != nil {
		return nil, err
	}
	if there != nil {
		return forward(ctx, req.Msg, there.ListNICs)
	}
	all, err := a.NICs.List(ctx)
	if err != nil {
		return nil, reason.Coded(err)
	}
	return connect.NewResponse(&gpuctlv1.ListNICsResponse{Host: a.Cluster.HostName(), Nics: all}), nil
}
