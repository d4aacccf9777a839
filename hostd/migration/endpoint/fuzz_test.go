package endpoint

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/statestream"
)

// FuzzGuest takes what a VM's agent says of its devices and its sessions. A
// device that is found is the only one that was asked for; a state that is
// said to be away has a mark that holds.
func FuzzGuest(f *testing.F) {
	add := func(h *gpuctlv1.HelloResponse, l *gpuctlv1.ListSessionsResponse) {
		a, err := proto.Marshal(h)
		if err != nil {
			f.Fatal(err)
		}
		b, err := proto.Marshal(l)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(a, b)
	}
	add(&gpuctlv1.HelloResponse{Version: "1", Devices: []*gpuctlv1.GuestDevice{{Address: "0000:00:05.0", VendorId: 0x10de, DeviceId: 0x2330, Ready: true}}},
		&gpuctlv1.ListSessionsResponse{Sessions: []*gpuctlv1.Session{{Id: "s1", State: gpuctlv1.SessionState_SESSION_STATE_SUSPENDED, Usage: &gpuctlv1.Usage{Memory: 9}}}})
	add(&gpuctlv1.HelloResponse{Devices: []*gpuctlv1.GuestDevice{{VendorId: 0x10de, DeviceId: 0x2330}, {VendorId: 0x10de, DeviceId: 0x2330}}}, &gpuctlv1.ListSessionsResponse{})
	l := &Local{Guests: &Guests{}}
	f.Fuzz(func(t *testing.T, a, b []byte) {
		var hello gpuctlv1.HelloResponse
		if proto.Unmarshal(a, &hello) == nil {
			const vendor, device = 0x10de, 0x2330
			same := 0
			for _, d := range hello.GetDevices() {
				if d.GetVendorId() == vendor && d.GetDeviceId() == device {
					same++
				}
			}
			d, err := find(&hello, vendor, device)
			if (err != nil) != (same > 1) || (d != nil) != (same == 1) {
				t.Fatalf("%d of them: %v, %v", same, d, err)
			}
			if s := l.summary(&hello); s == nil || s.GetFreeMemory() != hello.GetFreeMemory() {
				t.Fatal(s)
			}
		}
		var list gpuctlv1.ListSessionsResponse
		if proto.Unmarshal(b, &list) != nil {
			return
		}
		for _, s := range list.GetSessions() {
			if x := siteSession(s); x.GetId() != s.GetId() {
				t.Fatal(x)
			}
			if isAway(s) {
				_, _ = statestream.MarkOf(s.GetAway())
			}
		}
	})
}

// grants takes what a VM is told about its wishes.
type grants struct {
	gpuctlv1connect.AgentServiceClient
	mu  sync.Mutex
	got []*gpuctlv1.GrantRequest
}

func (g *grants) Grant(_ context.Context, r *connect.Request[gpuctlv1.GrantRequest]) (*connect.Response[gpuctlv1.GrantResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.got = append(g.got, r.Msg)
	return connect.NewResponse(&gpuctlv1.GrantResponse{}), nil
}

// FuzzWishes takes what a VM says of its sessions that wait for leases. The host that lends is
// asked for the VM's own claim alone, and answers are few and short.
func FuzzWishes(f *testing.F) {
	add := func(all ...*gpuctlv1.LeaseWish) {
		data, err := proto.Marshal(&gpuctlv1.BorrowResponse{Wishes: all})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	own := LastingClaim(lentVM.UUID)
	add()
	add(&gpuctlv1.LeaseWish{Session: "s-1", Claim: own, Device: &gpuctlv1.VirtualDevice{Name: "d"}}, &gpuctlv1.LeaseWish{Session: "s-2", Claim: "other"}, &gpuctlv1.LeaseWish{})
	f.Fuzz(func(t *testing.T, data []byte) {
		var m gpuctlv1.BorrowResponse
		if proto.Unmarshal(data, &m) != nil {
			return
		}
		asked := 0
		var mu sync.Mutex
		told := &grants{}
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // refusals keep their places until the end
		w := &wishes{
			local: &Local{Whereabouts: Whereabouts{Log: slog.New(slog.DiscardHandler), Peer: func(string) (gpuctlv1connect.SiteServiceClient, error) {
				mu.Lock()
				defer mu.Unlock()
				asked++
				return nil, errors.New("no")
			}}},
			guest: &guest{agent: told}, machine: lentVM, lent: Lent{GPU: farHere, Claim: own}, log: slog.New(slog.DiscardHandler), busy: map[string]bool{},
		}
		w.take(ctx, m.GetWishes())
		w.work.Wait()
		mine := 0
		for _, one := range m.GetWishes() {
			if one.GetClaim() == own {
				mine++
			}
		}
		if asked > mine || len(told.got) > len(m.GetWishes()) || len(w.busy) > 0 {
			t.Fatalf("%d of %d wishes are for its claim, %d leases, %d answers", mine, len(m.GetWishes()), asked, len(told.got))
		}
		for _, g := range told.got {
			if g.GetTarget() != nil || g.GetError() == "" || len(g.GetError()) > longestWhy+4 || len(g.GetSession()) > longestID {
				t.Fatal(g)
			}
		}
	})
}
