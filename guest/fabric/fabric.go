package fabric

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/internal/relay"
	"github.com/gpuctl/gpuctl/internal/throttle"
	"github.com/gpuctl/gpuctl/internal/wait"
)

const (
	// again is after what time a device is looked for that was not there.
	again = 10 * time.Second
	// refusals that are logged at first; then one for each refusalsEvery
	refusalsLogged = 20
	refusalsEvery  = 5 * time.Second
)

// Config has the settings of Ways.
type Config struct {
	// Carriers is where this machine's carriers ask for connections, those of users for whom May
	// returns true.
	Carriers *net.UnixListener
	May      func(uid uint32) bool
	// At has the addresses (HOST:PORT) at which carriers of other hosts come. The port of RDMA
	// is that of TCP, to which connections are passed on.
	At []string
	// Open returns the network; nil: RDMA, by Open. It is asked again after an error.
	Open func() (Network, error)
	Log  *slog.Logger
}

// Network makes connections of some kind that is not the kernel's.
type Network interface {
	Dial(ctx context.Context, address string) (io.ReadWriteCloser, error)
	// Listen listens at an address, and returns that.
	Listen(ctx context.Context, address string) (Listener, netip.AddrPort, error)
}

// Listener returns connections as they come, and where they come from, until it is closed; then
// net.ErrClosed.
type Listener interface {
	Accept() (conn io.ReadWriteCloser, from netip.Addr, err error)
	Close() error
}

// Ways are connections over RDMA. It is safe for concurrent use.
type Ways struct {
	Config

	mu  sync.Mutex
	net Network
}

// New returns Ways. They do nothing yet.
func New(c Config) *Ways {
	if c.Open == nil {
		c.Open = Open
	}
	return &Ways{Config: c}
}

// Serve makes connections and passes them on until ctx ends.
func (w *Ways) Serve(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, at := range w.At {
		wg.Go(func() { w.listen(ctx, at, loopback(at)) })
	}
	near := relay.Near{Log: w.Log, Dial: w.dial, May: w.May, First: func(first []byte) error {
		_, err := remote.ParsePreamble(first)
		return err
	}}
	return near.Serve(ctx, w.Carriers)
}

// network returns the network, if there is a device.
func (w *Ways) network() (Network, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.net != nil {
		return w.net, nil
	}
	n, err := w.Open()
	if err == nil {
		w.net = n
	}
	return n, err
}

func (w *Ways) dial(ctx context.Context, address string) (io.ReadWriteCloser, error) {
	n, err := w.network()
	if err != nil {
		return nil, err
	}
	return n.Dial(ctx, address)
}

// listen passes on what comes for a port. It listens when there is a device.
func (w *Ways) listen(ctx context.Context, at, to string) {
	for said := false; ; said = true {
		n, err := w.network()
		var s Listener
		var where netip.AddrPort
		if err == nil {
			s, where, err = n.Listen(ctx, at)
		}
		if err == nil {
			w.Log.Info("carriers of other hosts may come over RDMA", "address", where)
			Pass(ctx, s, to, w.Log)
			return
		}
		if !said {
			w.Log.Warn("carriers of other hosts cannot come over RDMA for now", "address", at, "err", err)
		}
		if wait.For(ctx, again) != nil {
			return
		}
	}
}

// Pass passes on what comes to a listener, which it closes, to a port of TCP, until ctx ends.
// Nothing is passed on that does not begin as a carrier's connection does: the port may be
// somebody else's by now.
func Pass(ctx context.Context, s Listener, to string, log *slog.Logger) {
	end := func() { _ = s.Close() }
	defer context.AfterFunc(ctx, end)()
	defer end()
	p := relay.Pass{
		Log: throttle.Logger(log, refusalsLogged, refusalsEvery), Accept: s.Accept, // anybody can connect
		First: func(r io.Reader) ([]byte, error) {
			b := make([]byte, remote.PreambleSize)
			if _, err := io.ReadFull(r, b); err != nil {
				return nil, err
			}
			_, err := remote.ParsePreamble(b)
			return b, err
		},
		Dial: func(ctx context.Context) (net.Conn, error) { return (&net.Dialer{}).DialContext(ctx, "tcp", to) },
	}
	p.Serve(ctx)
}

// loopback returns where a port of this machine is reached that listens at an address.
func loopback(at string) string {
	host, port, err := net.SplitHostPort(at)
	if err != nil {
		return at
	}
	if ip, err := netip.ParseAddr(host); host == "" || err == nil && ip.IsUnspecified() {
		return net.JoinHostPort("localhost", port)
	}
	return at
}
