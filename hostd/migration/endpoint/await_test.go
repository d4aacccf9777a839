package endpoint

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
)

// lateAgent is a VM's agent with a card that NVIDIA's driver shows after a while.
type lateAgent struct {
	gpuctlv1connect.UnimplementedAgentServiceHandler

	after, asked atomic.Int32 // Hellos until the driver shows it; 0: never
}

func (v *lateAgent) Hello(context.Context, *connect.Request[gpuctlv1.HelloRequest]) (*connect.Response[gpuctlv1.HelloResponse], error) {
	d := &gpuctlv1.GuestDevice{Address: "0000:00:05.0", VendorId: 0x10de, DeviceId: 0x2330, Ready: true, Target: &gpuctlv1.Target{Gpu: "vm/0000:00:05.0", Runtime: &gpuctlv1.Runtime{}}}
	if n := v.after.Load(); v.asked.Add(1) >= n && n > 0 {
		d.Target.Driver = []*gpuctlv1.DriverGPU{{Uuid: "GPU-1"}}
	}
	return connect.NewResponse(&gpuctlv1.HelloResponse{Devices: []*gpuctlv1.GuestDevice{d}}), nil
}

// A card is one for the CUDA programs that wait for it only when NVIDIA's driver shows it. Without
// such programs nobody waits for the driver.
func TestCardIsAwaitedUntilNVIDIAsDriverShowsIt(t *testing.T) {
	frozen := &gpuctlv1.Session{Id: "d-1", Command: "train", Engine: driverEngine, State: gpuctlv1.SessionState_SESSION_STATE_SUSPENDED}
	opencl := &gpuctlv1.Session{Id: "s-1", State: gpuctlv1.SessionState_SESSION_STATE_SUSPENDED}
	for _, c := range []struct {
		name     string
		sessions []*gpuctlv1.Session
		after    int32
		driver   bool
		fails    string
	}{
		{"at once", []*gpuctlv1.Session{frozen}, 1, true, ""},
		{"late", []*gpuctlv1.Session{opencl, frozen}, 3, true, ""},
		{"never", []*gpuctlv1.Session{frozen}, 0, false, "NVIDIA's driver does not show it, and session d-1 (train) waits for that"},
		{"nobody waits for the driver", []*gpuctlv1.Session{opencl}, 0, false, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := &lateAgent{}
			v.after.Store(c.after)
			l := hostOf(t, v, &cudaGuest{sessions: c.sessions})
			limit := time.Minute
			if c.fails != "" {
				if _, err := l.Guests.await(t.Context(), "u-1", 0x10de, 0x2330); err != nil { // connected, so that what ends is the wait
					t.Fatal(err)
				}
				limit = 2 * time.Second
			}
			bound, end := context.WithTimeout(t.Context(), limit)
			defer end()
			d, err := l.await(bound, "u-1", 0x10de, 0x2330)
			if c.fails != "" {
				if err == nil || !strings.Contains(err.Error(), c.fails) && !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("%v", err)
				}
				return
			}
			if err != nil || (len(d.GetTarget().GetDriver()) > 0) != c.driver {
				t.Errorf("%v, %v", d, err)
			}
		})
	}
}
