package nvml

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

func ptr[T any](v T) *T { return &v }

func TestMessagesComeBack(t *testing.T) {
	want := Response{Version: 1, Number: 7, Status: OK, Driver: "550.54", GPUs: []GPU{{UUID: "GPU-1", PCIAddress: "0000:65:00.0", Memory: ptr(uint64(5)), MIG: &MIG{Enabled: true}}}}
	var b bytes.Buffer
	for range 2 {
		if err := WriteMessage(&b, want, MaxResponse); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		var got Response
		if err := ReadMessage(&b, &got, MaxResponse); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Error(d)
		}
	}
	if err := ReadMessage(&b, &Response{}, MaxResponse); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
}

func TestBadMessages(t *testing.T) {
	if err := WriteMessage(io.Discard, strings.Repeat("x", 100), 50); !errors.Is(err, ErrProtocol) {
		t.Error(err)
	}
	frame := func(size uint32, body string) io.Reader {
		return bytes.NewReader(append(binary.BigEndian.AppendUint32(nil, size), body...))
	}
	for name, c := range map[string]struct {
		r    io.Reader
		want error
	}{
		"too large": {frame(MaxRequest+1, ""), ErrProtocol}, "huge": {frame(1<<32-1, ""), ErrProtocol},
		"cut": {frame(10, "{}"), io.ErrUnexpectedEOF}, "cut in the length": {strings.NewReader("\x00\x00"), io.ErrUnexpectedEOF},
		"no JSON": {frame(3, "{]}"), ErrProtocol}, "another shape": {frame(2, "[]"), ErrProtocol}, "nothing": {frame(0, ""), ErrProtocol},
	} {
		var m Request
		if err := ReadMessage(c.r, &m, MaxRequest); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzReadMessage(f *testing.F) {
	var b bytes.Buffer
	if err := WriteMessage(&b, Response{Version: 1, Status: OK, GPUs: []GPU{{PCIAddress: "0000:65:00.0"}}}, MaxResponse); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Add([]byte{0, 0, 0, 2, '{', '}'})
	f.Add([]byte{255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, data []byte) {
		var m Response
		if err := ReadMessage(bytes.NewReader(data), &m, MaxRequest); err != nil {
			return
		}
		for i := range m.GPUs {
			h, why := m.GPUs[i].Health()
			if (h == clusterv1.Health_HEALTH_OK) != (why == "") {
				t.Fatalf("%v for %q", h, why)
			}
			m.GPUs[i].Object("x")
			m.GPUs[i].Facts("x")
		}
	})
}

func TestHealth(t *testing.T) {
	for _, c := range []struct {
		gpu    GPU
		health clusterv1.Health
		why    string
	}{
		{GPU{ECC: &ECC{Uncorrected: ptr(uint64(0))}}, clusterv1.Health_HEALTH_OK, ""},
		{GPU{Lost: true}, clusterv1.Health_HEALTH_FAILED, "it has fallen off the bus"},
		{GPU{ResetRequired: true, Errors: []string{"x: y"}}, clusterv1.Health_HEALTH_FAILED, "it must be reset; x: y"},
		{GPU{Xids: []Xid{{63, 1}}}, clusterv1.Health_HEALTH_DEGRADED, "Xid 63"},
		{GPU{Xids: []Xid{{63, 1}, {79, 2}}}, clusterv1.Health_HEALTH_FAILED, "Xid 79, 2 times; Xid 63"},
		{GPU{ECC: &ECC{RemapFailed: true}}, clusterv1.Health_HEALTH_FAILED, "rows of its memory could not be remapped"},
		{GPU{ECC: &ECC{RemapPending: true}}, clusterv1.Health_HEALTH_DEGRADED, "rows of its memory wait for a reset to be remapped"},
		{GPU{ECC: &ECC{Uncorrected: ptr(uint64(3))}}, clusterv1.Health_HEALTH_DEGRADED, "3 uncorrected memory errors"},
	} {
		if h, why := c.gpu.Health(); h != c.health || why != c.why {
			t.Errorf("%+v: %v, %q", c.gpu, h, why)
		}
	}
}

func TestConvert(t *testing.T) {
	g := GPU{
		UUID: "GPU-1", Name: "NVIDIA H200", PCIAddress: "0000:65:00.0", NUMANode: ptr(1), Memory: ptr(uint64(150 << 30)), UsedMemory: ptr(uint64(1 << 30)),
		MIG:       &MIG{Enabled: true, Profiles: []MIGProfile{{ID: 19, Name: "1g.18gb", Memory: 18 << 30, Max: 7}}},
		Processes: []Process{{PID: 42, Name: "train"}}, Utilization: ptr(uint32(0)), Temperature: ptr(int32(-3)), Power: ptr(uint32(70000)),
	}
	want := &clusterv1.GPU{
		Model: "NVIDIA H200", Vendor: "NVIDIA Corporation", Type: "gpu", Driver: "550.54", Uuid: "GPU-1", PciAddress: "0000:65:00.0", NumaNode: 1,
		Limits: &gpuctlv1.Limits{GlobalMemory: 150 << 30}, Health: clusterv1.Health_HEALTH_OK,
		Processes: []*clusterv1.Process{{Pid: 42, Name: "train"}}, Profiles: []*clusterv1.Profile{{Name: "1g.18gb", Memory: 18 << 30, MaxInstances: 7}},
	}
	if d := cmp.Diff(want, g.Object("550.54"), protocmp.Transform()); d != "" {
		t.Error(d)
	}
	facts := &clusterv1.GPUFacts{
		Gpu: "a/b", Utilization: ptr(uint32(0)), UsedMemory: ptr(uint64(1 << 30)), Temperature: ptr(int32(-3)), Power: ptr(uint32(70000)), Health: clusterv1.Health_HEALTH_OK,
	}
	if d := cmp.Diff(facts, g.Facts("a/b"), protocmp.Transform()); d != "" {
		t.Error(d)
	}
	if o := (&GPU{MIG: &MIG{Profiles: []MIGProfile{{}}}}).Object(""); o.GetNumaNode() != -1 || len(o.GetProfiles()) != 0 || o.GetLimits() == nil {
		t.Errorf("got %v", o)
	}
}
