package servicevm

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
)

const gib = 1 << 30

// hello is what an honest service VM says.
func hello() *gpuctlv1.HelloResponse {
	return &gpuctlv1.HelloResponse{Protocol: Protocol, LendAddresses: []string{"192.0.2.7:7651"}, Devices: []*gpuctlv1.GuestDevice{card("0000:00:05.0")}}
}

func card(address string) *gpuctlv1.GuestDevice {
	return &gpuctlv1.GuestDevice{Address: address, Ready: true, Lends: true, Target: &gpuctlv1.Target{
		Model: "A10", Runtime: &gpuctlv1.Runtime{Library: "libnvidia-opencl.so.1", Env: map[string]string{"A": "b"}, Devices: []uint32{0}},
		Limits: &gpuctlv1.Limits{GlobalMemory: 24 * gib, MaxAlloc: 6 * gib, MaxWorkItemSizes: []uint64{1024, 1024, 64}, Extensions: []string{"cl_khr_fp64"}},
	}}
}

func TestWhatAnHonestServiceVMSaysIsTaken(t *testing.T) {
	h := hello()
	h.Devices = append(h.Devices, &gpuctlv1.GuestDevice{Address: "0000:00:06.0", Message: "its runtime\n is being tried"})
	o, err := check(h, false)
	if err != nil || len(o.devices) != 1 || o.at("0000:00:05.0") == nil || o.at("0000:00:06.0") != nil || o.withheld["0000:00:06.0"] != "its runtime  is being tried" {
		t.Errorf("%v: %+v", err, o)
	}
	h = hello()
	h.LendAddresses = []string{"127.0.0.1:7651"}
	if _, err := check(h, true); err != nil {
		t.Errorf("several hosts on one machine: %v", err)
	}
}

// What a VM says is believed of its own cards only, and within bounds.
func TestHostileServiceVMs(t *testing.T) {
	target := func(change func(*gpuctlv1.Target)) func(*gpuctlv1.HelloResponse) {
		return func(h *gpuctlv1.HelloResponse) { change(h.GetDevices()[0].GetTarget()) }
	}
	for what, change := range map[string]func(*gpuctlv1.HelloResponse){
		"an old gpuguest":    func(h *gpuctlv1.HelloResponse) { h.Protocol = 4 },
		"no address":         func(h *gpuctlv1.HelloResponse) { h.LendAddresses = nil },
		"many addresses":     func(h *gpuctlv1.HelloResponse) { h.LendAddresses = make([]string, mostAddresses+1) },
		"a name":             func(h *gpuctlv1.HelloResponse) { h.LendAddresses = []string{"evil.example:22"} },
		"no port":            func(h *gpuctlv1.HelloResponse) { h.LendAddresses = []string{"192.0.2.7:0"} },
		"carriers' own host": func(h *gpuctlv1.HelloResponse) { h.LendAddresses = []string{"127.0.0.1:22"} },
		"their own host 6":   func(h *gpuctlv1.HelloResponse) { h.LendAddresses = []string{"[::1]:22"} },
		"mapped":             func(h *gpuctlv1.HelloResponse) { h.LendAddresses = []string{"[::ffff:127.0.0.1]:22"} },
		"all addresses":      func(h *gpuctlv1.HelloResponse) { h.LendAddresses = []string{"0.0.0.0:22"} },
		"link-local":         func(h *gpuctlv1.HelloResponse) { h.LendAddresses = []string{"169.254.169.254:80"} },
		"multicast":          func(h *gpuctlv1.HelloResponse) { h.LendAddresses = []string{"224.0.0.1:80"} },
		"many devices": func(h *gpuctlv1.HelloResponse) {
			for i := range mostDevices {
				h.Devices = append(h.Devices, &gpuctlv1.GuestDevice{Address: fmt.Sprintf("0000:01:%02x.%d", i/8, i%8)})
			}
		},
		"many that it lends": func(h *gpuctlv1.HelloResponse) {
			for i := range mostLent {
				h.Devices = append(h.Devices, card(fmt.Sprintf("0000:01:%02x.0", i)))
			}
		},
		"one twice":       func(h *gpuctlv1.HelloResponse) { h.Devices = append(h.Devices, card("0000:00:05.0")) },
		"no address of a": func(h *gpuctlv1.HelloResponse) { h.Devices[0].Address = "../../etc" },
		"no target":       func(h *gpuctlv1.HelloResponse) { h.Devices[0].Target = nil },
		"no memory":       target(func(t *gpuctlv1.Target) { t.Limits.GlobalMemory, t.Limits.MaxAlloc = 0, 0 }),
		"absurd memory":   target(func(t *gpuctlv1.Target) { t.Limits.GlobalMemory = 1 << 60 }),
		"all of 64 bits":  target(func(t *gpuctlv1.Target) { t.Limits.GlobalMemory = ^uint64(0) }),
		"absurd buffers":  target(func(t *gpuctlv1.Target) { t.Limits.MaxAlloc = ^uint64(0) }),
		"no model":        target(func(t *gpuctlv1.Target) { t.Model = "" }),
		"a long model":    target(func(t *gpuctlv1.Target) { t.Model = strings.Repeat("x", mostModel+1) }),
		"a terminal's":    target(func(t *gpuctlv1.Target) { t.Model = "A10\x1b[2J" }),
		"a NUL":           target(func(t *gpuctlv1.Target) { t.Limits.Version = "a\x00" }),
		"a long text":     target(func(t *gpuctlv1.Target) { t.Limits.Extensions = []string{strings.Repeat("x", mostText+1)} }),
		"much of it":      target(func(t *gpuctlv1.Target) { t.Limits.Extensions = make([]string, mostTarget) }),
		"many texts":      target(func(t *gpuctlv1.Target) { t.Limits.Extensions = make([]string, mostTexts+1) }),
		"many sizes":      target(func(t *gpuctlv1.Target) { t.Limits.MaxWorkItemSizes = make([]uint64, mostNumbers+1) }),
		"no runtime":      target(func(t *gpuctlv1.Target) { t.Runtime = nil }),
		"a remote one":    target(func(t *gpuctlv1.Target) { t.Runtime.Remote = &gpuctlv1.Remote{} }),
	} {
		h := hello()
		change(h)
		if o, err := check(h, false); err == nil {
			t.Errorf("%s: %+v is taken", what, o)
		}
	}
}

// Whatever a VM says and is taken, the cluster's log takes, too: a report that it refused
// would hide all GPUs of the host.
func FuzzHello(f *testing.F) {
	for _, h := range []*gpuctlv1.HelloResponse{hello(), {}, {Protocol: 9, LendAddresses: []string{"[2001:db8::1%eth0]:1"}}} {
		b, err := proto.Marshal(h)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		h := &gpuctlv1.HelloResponse{}
		if proto.Unmarshal(data, h) != nil {
			return
		}
		o, err := check(h, false)
		if err != nil {
			return
		}
		report := &clusterv1.ReportHost{Host: &clusterv1.Host{Name: "h", Id: "id-h", Protocol: state.Protocol}}
		taken := map[string]bool{}
		for _, d := range o.devices {
			name := nameOf("vm", taken)
			taken[name] = true
			report.Gpus = append(report.Gpus, &clusterv1.GPU{
				Name: name, Model: d.target.GetModel(), Limits: d.target.GetLimits(), Runtime: "service-vm", RuntimeKey: "k", Server: "vm", LendAddresses: o.addresses,
			})
		}
		c := &clusterv1.Command{Op: &clusterv1.Command_ReportHost{ReportHost: report}}
		c.Version = state.VersionOf(c)
		s := state.New()
		if res := s.Apply(1, c); res.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
			t.Errorf("%v", res)
		}
	})
}

func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"version":1,"vms":[{"uuid":"u","name":"n","gpus":[{"name":"vm-n","address":"0000:00:05.0","model":"m","memory":1}]}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := decodeRecord(data)
		if err != nil {
			return
		}
		for _, d := range r.VMs {
			if d == nil || d.UUID == "" {
				t.Error("a VM without a UUID is taken")
			}
		}
	})
}

func TestNamesOfGPUs(t *testing.T) {
	taken := map[string]bool{}
	for _, want := range []string{"vm-gpu-vm", "vm-gpu-vm-2", "vm-gpu-vm-3"} {
		got := nameOf("gpu vm", taken)
		if taken[got] = true; got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	if n := len(nameOf(strings.Repeat("ä/", 300), nil)); n > mostBase {
		t.Errorf("%d bytes", n)
	}
}
