package endpoint

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/vm/channel"
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/relay"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// errNoAgent means that no agent in the VM answers.
var errNoAgent = errors.New("no gpuguest answers")

// Channels finds a VM's guest channel: the path of its socket on this host.
type Channels interface {
	Channel(ctx context.Context, uuid string) (path string, err error)
}

// channelName is the name by which gpuguest finds its channel in the VM.
const channelName = channel.Name

// GuestsConfig has what Guests depend on.
type GuestsConfig struct {
	Channels Channels
	// Cards returns the cards of this host.
	Cards func() ([]*pci.Card, error)
	// Vchan connects to a path of a VM over vchan; nil: the hypervisor is not Xen.
	Vchan func(ctx context.Context, uuid, path string) (net.Conn, error)
	// Vsock returns what connects to a port of a VM over vsock; nil: the VM has no vsock, or
	// the hypervisor has none.
	Vsock func(ctx context.Context, uuid string) (dial func(ctx context.Context, port uint32) (net.Conn, error), err error)
	// Console means that guest channels are Xen's PV consoles.
	Console bool
	// Locks is a folder that only hostd can write to. The folders of VMs' sockets can be
	// written by the VMs' processes. Empty: beside the sockets, for tests.
	Locks string
	// Patience limits how long a VM may take to say what a plan needs to know; 0: a minute.
	Patience time.Duration
	Log      *slog.Logger
}

// Guests connects to the agents in this host's VMs. It makes connections when they are
// needed, and keeps them. It is safe for concurrent use.
type Guests struct {
	GuestsConfig
	// Bulk returns a client of the VM's GuestService for transferring states. It works
	// until done is called.
	Bulk func(ctx context.Context, uuid string) (client *http.Client, done func(), err error)

	instance string // of this process

	mu      sync.Mutex
	open    map[string]*guest      // by UUID
	relayed map[string]*relay.Host // by UUID, what makes connections for VMs
}

// guest is a VM's agent.
type guest struct {
	path  string
	link  *channel.Client
	agent gpuctlv1connect.AgentServiceClient
	work  gpuctlv1connect.GuestServiceClient
}

// NewGuests returns Guests. It does not connect yet.
func NewGuests(c GuestsConfig) *Guests {
	if c.Patience == 0 {
		c.Patience = time.Minute
	}
	g := &Guests{GuestsConfig: c, instance: random.Hex(8), open: map[string]*guest{}, relayed: map[string]*relay.Host{}}
	g.Bulk = g.bulk
	return g
}

// Expected speeds of transferring states, in bytes per second, until a migration has
// measured them. A PV console transfers a page for each interrupt. A virtio-serial port
// is limited by the channel's acknowledgements only.
const (
	consoleSpeed = 500_000
	portSpeed    = 30_000_000
	vchanSpeed   = 12_000_000 // measured in an emulation of Xen
)

func (g *Guests) speed() uint64 {
	switch {
	case g.Vchan != nil:
		return vchanSpeed
	case g.Console:
		return consoleSpeed
	}
	return portSpeed
}

// bulk opens a vchan or vsock for the transfer. If that is not possible, it uses the guest
// channel.
func (g *Guests) bulk(ctx context.Context, uuid string) (*http.Client, func(), error) {
	o, err := g.get(ctx, uuid)
	if err != nil {
		return nil, nil, err
	}
	dial, err := g.dialer(ctx, uuid)
	if err == nil && dial != nil {
		var client *http.Client
		var end func()
		if client, end, err = g.over(ctx, o, dial); err == nil {
			return client, end, nil
		}
	}
	if err != nil {
		g.Log.Warn("streams to a VM take the slow way: its channel", "machine", uuid, "err", err)
	}
	return o.link.HTTP(), func() {}, nil
}

// dialer returns what connects to a VM faster than by its channel; nil: nothing does.
func (g *Guests) dialer(ctx context.Context, uuid string) (func(context.Context, *gpuctlv1.OpenBulkResponse) (net.Conn, error), error) {
	switch {
	case g.Vchan != nil:
		return func(ctx context.Context, to *gpuctlv1.OpenBulkResponse) (net.Conn, error) {
			path := to.GetVchan() // the VM is not trusted: the path must be in its own data folder in xenstore
			if !strings.HasPrefix(path, "data/") {
				return nil, fmt.Errorf("the VM offers a vchan at %.80q", path)
			}
			return g.Vchan(ctx, uuid, path)
		}, nil
	case g.Vsock == nil:
		return nil, nil //nolint:nilnil // there is none
	}
	dial, err := g.Vsock(ctx, uuid)
	if err != nil || dial == nil {
		return nil, err
	}
	return func(ctx context.Context, to *gpuctlv1.OpenBulkResponse) (net.Conn, error) {
		if to.GetVsockPort() == 0 {
			return nil, errors.New("the VM offers no vsock")
		}
		conn, err := dial(ctx, to.GetVsockPort())
		if err != nil {
			return nil, err
		}
		// A VM that does not read would keep this call for ever.
		stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
		_, err = conn.Write(to.GetSecret())
		if !stop() {
			return nil, context.Cause(ctx)
		}
		if err != nil {
			conn.Close()
			return nil, err
		}
		return conn, nil
	}, nil
}

// over has the VM listen, and connects.
func (g *Guests) over(ctx context.Context, o *guest, dial func(context.Context, *gpuctlv1.OpenBulkResponse) (net.Conn, error)) (*http.Client, func(), error) {
	ctx, cancel := context.WithTimeout(ctx, agentWait)
	defer cancel()
	res, err := o.agent.OpenBulk(ctx, connect.NewRequest(&gpuctlv1.OpenBulkRequest{}))
	if err != nil {
		return nil, nil, err
	}
	conn, err := dial(ctx, res.Msg)
	if err != nil {
		return nil, nil, err
	}
	client, end, err := channel.Over(conn)
	if err != nil {
		return nil, nil, errors.Join(err, conn.Close())
	}
	return client, func() { _ = end.Close() }, nil
}

// get connects to a VM's agent. Errors wrap errNoAgent.
func (g *Guests) get(ctx context.Context, uuid string) (*guest, error) {
	path, err := g.Channels.Channel(ctx, uuid)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNoAgent, err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if o := g.open[uuid]; o != nil {
		if o.path == path {
			return o, nil
		}
		o.close()
		delete(g.open, uuid)
	}
	link, err := channel.Open(path, channel.WithLogger(g.Log), channel.WithWait(agentWait), channel.WithLocks(g.Locks))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNoAgent, err)
	}
	o := &guest{
		path: path, link: link,
		agent: gpuctlv1connect.NewAgentServiceClient(link.HTTP(), "http://vm", channel.ConnectOptions()...),
		work:  gpuctlv1connect.NewGuestServiceClient(link.HTTP(), "http://vm", channel.ConnectOptions()...),
	}
	g.open[uuid] = o
	return o, nil
}

// agentWait is how long a request waits for a channel that is not connected.
const agentWait = 20 * time.Second

func (o *guest) close() {
	if err := o.link.Close(); err != nil {
		return
	}
}

// Forget closes a VM's channel, because the VM migrates or has ended.
func (g *Guests) Forget(uuid string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if o := g.open[uuid]; o != nil {
		o.close()
		delete(g.open, uuid)
	}
}

// relays notes what makes connections for a VM, until end is called.
func (g *Guests) relays(uuid string, h *relay.Host) (end func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.relayed[uuid] = h
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.relayed[uuid] == h {
			delete(g.relayed, uuid)
		}
	}
}

// Relayed reports whether connections of a VM go through this host now.
func (g *Guests) Relayed(uuid string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	h := g.relayed[uuid]
	return h != nil && h.Active() > 0
}

// roundTrip returns how long a VM's channel takes; 0: unknown.
func (g *Guests) roundTrip(uuid string) time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	if o := g.open[uuid]; o != nil {
		return o.link.State().RoundTrip
	}
	return 0
}

// Close closes all channels.
func (g *Guests) Close() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for uuid, o := range g.open {
		o.close()
		delete(g.open, uuid)
	}
	return nil
}

// Hello returns what a VM's agent says of itself. It may say what it likes. Errors wrap
// errNoAgent.
func (g *Guests) Hello(ctx context.Context, uuid string) (*gpuctlv1.HelloResponse, error) {
	o, err := g.get(ctx, uuid)
	if err != nil {
		return nil, err
	}
	res, err := o.agent.Hello(ctx, connect.NewRequest(&gpuctlv1.HelloRequest{}))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNoAgent, err)
	}
	return res.Msg, nil
}

// GuestService returns the way to the sessions and leases in a VM.
func (g *Guests) GuestService(ctx context.Context, uuid string) (gpuctlv1connect.GuestServiceClient, error) {
	o, err := g.get(ctx, uuid)
	if err != nil {
		return nil, err
	}
	return o.work, nil
}

// About describes the connection to a VM's agent.
func (g *Guests) About(uuid string) string {
	g.mu.Lock()
	o := g.open[uuid]
	g.mu.Unlock()
	if o == nil {
		return ""
	}
	s := o.link.State()
	if s.Up {
		return "gpuguest answers in " + s.RoundTrip.Round(100*time.Microsecond).String()
	}
	if s.Err != nil {
		return s.Err.Error()
	}
	return "connecting"
}

// Answers returns why a VM's agent cannot be asked, or nil if it answers.
func (g *Guests) Answers(ctx context.Context, uuid string) error {
	ctx, cancel := context.WithTimeout(ctx, agentWait)
	defer cancel()
	_, err := g.Hello(ctx, uuid)
	return err
}

// LetGo makes a VM release a function of this host, and confirm that it can be detached.
func (g *Guests) LetGo(ctx context.Context, uuid string, function pci.Address) error {
	f, err := g.function(function)
	if err != nil {
		return err
	}
	return g.release(ctx, uuid, f.VendorID, f.DeviceID)
}

// Has reports whether a VM's agent sees a function of this host. It returns an error for
// functions that agents do not report.
func (g *Guests) Has(ctx context.Context, uuid string, function pci.Address) (bool, error) {
	f, err := g.function(function)
	if err != nil {
		return false, err
	}
	hello, err := g.Hello(ctx, uuid)
	if err != nil {
		return false, err
	}
	d, err := find(hello, f.VendorID, f.DeviceID)
	if ofGPU := (&pci.Device{Class: f.Class}).Managed(); err == nil && d == nil && !ofGPU {
		return false, fmt.Errorf("the VM's gpuguest does not tell of functions like %s, whose class is %06x", function, f.Class)
	}
	return d != nil, err
}

// function returns the PCI function of this host at an address.
func (g *Guests) function(at pci.Address) (*pci.Device, error) {
	cards, err := g.Cards()
	if err != nil {
		return nil, err
	}
	for _, c := range cards {
		for _, f := range c.Functions {
			if f.Address == at {
				return f, nil
			}
		}
	}
	return nil, fmt.Errorf("function %s: it is not on the bus", at)
}

// find returns the function in the VM with these ids; nil: the VM does not have it.
func find(hello *gpuctlv1.HelloResponse, vendor, device uint16) (*gpuctlv1.GuestDevice, error) {
	var found *gpuctlv1.GuestDevice
	for _, d := range hello.GetDevices() {
		if d.GetVendorId() != uint32(vendor) || d.GetDeviceId() != uint32(device) {
			continue
		}
		if found != nil {
			return nil, fmt.Errorf("the VM has two devices %04x:%04x, and which is meant cannot be told", vendor, device)
		}
		found = d
	}
	return found, nil
}

func (g *Guests) release(ctx context.Context, uuid string, vendor, device uint16) error {
	hello, err := g.Hello(ctx, uuid)
	if err != nil {
		return err
	}
	d, err := find(hello, vendor, device)
	if err != nil {
		return err
	}
	if d == nil {
		return nil // the VM does not report it: it is not a GPU's function, or it is gone already
	}
	o, err := g.get(ctx, uuid)
	if err != nil {
		return err
	}
	if _, err := o.agent.Release(ctx, connect.NewRequest(&gpuctlv1.ReleaseRequest{Address: d.GetAddress()})); err != nil {
		return fmt.Errorf("the VM does not let go of %s: %w", d.GetAddress(), err)
	}
	return nil
}

// takeUp is the undo of release.
func (g *Guests) takeUp(ctx context.Context, uuid string, vendor, device uint16) error {
	hello, err := g.Hello(ctx, uuid)
	if err != nil {
		return err
	}
	d, err := find(hello, vendor, device)
	if err != nil || d == nil {
		return err
	}
	o, err := g.get(ctx, uuid)
	if err != nil {
		return err
	}
	_, err = o.agent.TakeUp(ctx, connect.NewRequest(&gpuctlv1.TakeUpRequest{Address: d.GetAddress()}))
	return err
}

// expect tells the VM to load the runtime for a card that is about to come.
func (g *Guests) expect(ctx context.Context, uuid string, id *gpuctlv1.PCIIdentity) error {
	o, err := g.get(ctx, uuid)
	if err != nil {
		return err
	}
	_, err = o.agent.Expect(ctx, connect.NewRequest(&gpuctlv1.ExpectRequest{Function: id}))
	return err
}

// await waits until the VM has a card and a runtime can use it. If the VM has released
// the card before, it takes the card up again, because the card was attached to be used.
func (g *Guests) await(ctx context.Context, uuid string, vendor, device uint16) (*gpuctlv1.GuestDevice, error) {
	for {
		o, err := g.get(ctx, uuid)
		if err == nil {
			var d *gpuctlv1.GuestDevice
			d, err = o.await(ctx, vendor, device)
			if err == nil && d.GetReady() {
				return d, nil
			}
			if err == nil {
				err = fmt.Errorf("device %s in the VM is not ready: %s", d.GetAddress(), d.GetMessage())
			}
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(200 * time.Millisecond):
		}
	}
}

func (o *guest) await(ctx context.Context, vendor, device uint16) (*gpuctlv1.GuestDevice, error) {
	// Short, because a card that appears in the place of a released one must be taken up
	// first, and an older gpuguest does not tell of it.
	const most = 3 * time.Second
	hello, err := o.agent.Hello(ctx, connect.NewRequest(&gpuctlv1.HelloRequest{}))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNoAgent, err)
	}
	d, err := find(hello.Msg, vendor, device)
	if err != nil {
		return nil, err
	}
	if d.GetReady() {
		return d, nil
	}
	if d.GetReleased() {
		if _, err := o.agent.TakeUp(ctx, connect.NewRequest(&gpuctlv1.TakeUpRequest{Address: d.GetAddress()})); err != nil {
			return nil, err
		}
	}
	res, err := o.agent.AwaitDevice(ctx, connect.NewRequest(&gpuctlv1.AwaitDeviceRequest{
		VendorId: uint32(vendor), DeviceId: uint32(device), TimeoutMs: uint32(most.Milliseconds()),
	}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetDevice(), nil
}
