package endpoint

import (
	"testing"

	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
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
