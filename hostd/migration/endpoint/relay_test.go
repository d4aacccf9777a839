package endpoint

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/vm/agent"
	"github.com/gpuctl/gpuctl/guest/vm/channel"
	"github.com/gpuctl/gpuctl/guest/vm/channel/channeltest"
	"github.com/gpuctl/gpuctl/internal/relay"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/vchan"
	"github.com/gpuctl/gpuctl/internal/vchan/vchantest"
)

// offline is a VM without a network.
type offline struct {
	guestAgent

	socket   string // of its relay
	relay    agent.Relay
	protocol uint32
	reaches  string // the one address that it reaches over a network

	mu     sync.Mutex
	domain *vchantest.Domain // nil: no vchan
	mux    *http.ServeMux
	conns  []net.Conn
	opened atomic.Int64
	work   sync.WaitGroup
}

func (v *offline) Hello(context.Context, *connect.Request[gpuctlv1.HelloRequest]) (*connect.Response[gpuctlv1.HelloResponse], error) {
	return connect.NewResponse(&gpuctlv1.HelloResponse{Protocol: v.protocol}), nil
}

func (v *offline) Reach(_ context.Context, r *connect.Request[gpuctlv1.ReachRequest]) (*connect.Response[gpuctlv1.ReachResponse], error) {
	out := &gpuctlv1.ReachResponse{}
	for _, a := range r.Msg.GetAddresses() {
		one := &gpuctlv1.Reached{ThroughHost: true} // a lie
		if a != v.reaches {
			one.Error = "network is unreachable"
		}
		out.Reached = append(out.Reached, one)
	}
	return connect.NewResponse(out), nil
}

func (v *offline) Relay(ctx context.Context, r *connect.Request[gpuctlv1.RelayRequest], st *connect.ServerStream[gpuctlv1.RelayResponse]) error {
	return v.relay.Watch(ctx, r.Msg.GetInstance(), func(all []relay.Wish) error {
		out := &gpuctlv1.RelayResponse{}
		for _, w := range all {
			out.Wishes = append(out.Wishes, &gpuctlv1.RelayWish{Id: w.ID, Address: w.Address, Bulk: w.Bulk, First: w.First})
		}
		return st.Send(out)
	})
}

func (v *offline) OpenBulk(ctx context.Context, _ *connect.Request[gpuctlv1.OpenBulkRequest]) (*connect.Response[gpuctlv1.OpenBulkResponse], error) {
	path := fmt.Sprint("data/way-", v.opened.Add(1))
	l, err := vchan.Listen(ctx, v.domain.Xenstore(), path, 0, vchan.Options{Devices: v.domain})
	if err != nil {
		return nil, err
	}
	v.work.Go(func() {
		defer l.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		conn, err := l.AcceptContext(ctx)
		if err != nil {
			return
		}
		v.mu.Lock()
		v.conns = append(v.conns, conn)
		v.mu.Unlock()
		_ = channel.ServeOver(conn, v.mux)
		_ = conn.Close()
	})
	return connect.NewResponse(&gpuctlv1.OpenBulkResponse{Vchan: path}), nil
}

// hangUp ends its vchans.
func (v *offline) hangUp() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, c := range v.conns {
		_ = c.Close()
	}
	v.conns = nil
}

// newOffline starts the VM, whose way to its host is a vchan or its channel, and returns its
// host, too.
func newOffline(t *testing.T, overVchan bool) (*offline, *Local) {
	t.Helper()
	dir, err := os.MkdirTemp("", "offline")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	log := slog.New(slog.DiscardHandler)
	guest := relay.NewGuest(func(uint32) bool { return true }, log)
	v := &offline{guestAgent: guestAgent{console: channeltest.New(t)}, socket: filepath.Join(dir, "s"), relay: guest, protocol: RelayProtocol, mux: http.NewServeMux()}
	c := GuestsConfig{Channels: v, Log: log}
	if overVchan {
		h := vchantest.New(t, nil)
		v.domain = h.Domain(7)
		dom0 := h.Domain(0)
		store := dom0.Xenstore()
		c.Vchan = func(ctx context.Context, _, path string) (net.Conn, error) {
			return vchan.Dial(ctx, store, v.domain.ID(), path, vchan.Options{Devices: dom0})
		}
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: v.socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	v.console.Root(root, channel.Name)
	v.mux.Handle(gpuctlv1connect.NewAgentServiceHandler(v))
	v.mux.Handle(relay.Path, guest)
	ctx, cancel := context.WithCancel(context.Background())
	v.work.Go(func() { _ = guest.Serve(ctx, l) })
	v.work.Go(func() {
		if err := channel.Serve(ctx, channel.Port{Root: root}.Open, v.mux); err != nil {
			t.Error(err)
		}
	})
	host := &Local{Whereabouts: Whereabouts{Name: "h1", Log: log}, Guests: NewGuests(c)}
	t.Cleanup(func() {
		cancel()
		v.hangUp()
		v.work.Wait()
		if err := host.Guests.Close(); err != nil {
			t.Error(err)
		}
	})
	return v, host
}

// lendPort echoes what comes.
func lendPort(t *testing.T) string {
	t.Helper()
	return testkit.Port(t, func(conn net.Conn) { _, _ = io.Copy(conn, conn) })
}

func (v *offline) dial(t *testing.T, address string, bulk bool, first []byte) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	return relay.Dial(ctx, v.socket, address, bulk, first)
}

// passes checks that what was sent first comes back, and a megabyte more.
func passes(conn net.Conn, first []byte) error {
	const size = 1 << 20
	sent := make(chan error, 1)
	go func() {
		_, err := conn.Write(make([]byte, size))
		sent <- err
	}()
	got := make([]byte, len(first)+size)
	_, err := io.ReadFull(conn, got)
	if err == nil && !slices.Equal(got[:len(first)], first) {
		err = errors.New("something else comes back")
	}
	return errors.Join(err, <-sent)
}

// Carriers of a VM without a network reach the ports of the GPUs that are lent to it, and
// nothing else, over a vchan or over the VM's channel.
func TestCarriersOfAVMWithoutNetworkConnectThroughTheHost(t *testing.T) {
	for name, overVchan := range map[string]bool{"vchan": true, "channel": false} {
		t.Run(name, func(t *testing.T) {
			v, host := newOffline(t, overVchan)
			lent, other := lendPort(t), lendPort(t)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() {
				ended <- host.Relay(ctx, lentVM, func(address string) bool { return address == lent || address == "127.0.0.1:1" })
			}()
			preamble := remote.Preamble{Role: remote.Commands, Token: remote.Token{1}}.Append(nil)
			small, err := v.dial(t, lent, false, preamble)
			if err != nil {
				t.Fatal(err)
			}
			defer small.Close()
			bulk, err := v.dial(t, lent, true, preamble)
			if err != nil {
				t.Fatal(err)
			}
			defer bulk.Close()
			if err := errors.Join(passes(small, preamble), passes(bulk, preamble)); err != nil {
				t.Error(err)
			}
			if want := map[bool]int64{true: 2}[overVchan]; v.opened.Load() != want {
				t.Errorf("%d vchans, and %d are needed", v.opened.Load(), want)
			}
			if !host.Guests.Relayed(lentVM.UUID) {
				t.Error("nothing goes through the host")
			}
			for what, c := range map[string]struct {
				address string
				first   []byte
			}{"a port that is not the VM's": {other, preamble}, "no carrier": {lent, []byte("GET / HTTP/1.1")}, "nothing first": {lent, nil}, "nobody listens": {"127.0.0.1:1", preamble}} {
				if conn, err := v.dial(t, c.address, false, c.first); !errors.Is(err, relay.ErrRefused) {
					t.Errorf("%s: %v", what, err)
					if err == nil {
						conn.Close()
					}
				}
			}
			if overVchan { // it breaks: the next connection has another one
				v.hangUp()
				if _, err := bulk.Read(make([]byte, 1)); err == nil {
					t.Error("it goes on over a vchan that has ended")
				}
				testkit.Until(t, "connections are made again", func() error {
					conn, err := v.dial(t, lent, true, preamble)
					if err == nil {
						err = passes(conn, preamble)
						conn.Close()
					}
					return err
				})
			}
			cancel()
			if err := <-ended; err == nil {
				t.Error("it has ended by itself")
			}
			if host.Guests.Relayed(lentVM.UUID) {
				t.Error("something still goes through the host")
			}
			if conn, err := v.dial(t, lent, false, preamble); err == nil {
				conn.Close()
				t.Error("a connection after the end")
			}
		})
	}
}

// What a VM does not reach over its network is tried from its host, and carriers are given
// both ways, first the one that works. A VM that cannot do it is asked about its network only.
func TestPortsAreReachedThroughTheHost(t *testing.T) {
	v, host := newOffline(t, false)
	lent := lendPort(t)
	const closed = "127.0.0.1:1"
	ask := func(addresses ...string) []*gpuctlv1.Reached {
		t.Helper()
		all, err := host.Reach(t.Context(), lentVM.UUID, addresses)
		if err != nil || len(all) != len(addresses) {
			t.Fatal(all, err)
		}
		return all
	}
	if all := ask(lent, closed); all[0].GetError() != "" || !all[0].GetThroughHost() || all[0].GetRttNs() <= 0 || all[1].GetError() == "" || all[1].GetThroughHost() {
		t.Errorf("%v", all)
	}
	if got := host.ways(t.Context(), lentVM.UUID, []string{lent}); !slices.Equal(got, []string{relay.Prefix + lent, lent}) {
		t.Errorf("%v", got)
	}
	v.reaches = lent
	if all := ask(lent); all[0].GetError() != "" || all[0].GetThroughHost() {
		t.Errorf("over the network: %v", all)
	}
	if got := host.ways(t.Context(), lentVM.UUID, []string{lent}); !slices.Equal(got, []string{lent, relay.Prefix + lent}) {
		t.Errorf("over the network: %v", got)
	}
	v.reaches, v.protocol = "", RelayProtocol-1
	if all := ask(lent); all[0].GetError() == "" {
		t.Errorf("an earlier gpuguest: %v", all)
	}
	if got := host.ways(t.Context(), lentVM.UUID, []string{lent}); !slices.Equal(got, []string{lent}) {
		t.Errorf("an earlier gpuguest: %v", got)
	}
}
