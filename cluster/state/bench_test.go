package state

import (
	"bytes"
	"fmt"
	"runtime"
	"testing"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// fleet is a host with GPUs as OpenCL describes them.
func fleet(n int) *clusterv1.ReportHost {
	name := fmt.Sprintf("host-%05d", n)
	r := &clusterv1.ReportHost{Host: &clusterv1.Host{
		Name: name, Id: fmt.Sprintf("%032x", n), Address: fmt.Sprintf("10.%d.%d.1:7070", n>>8, n&255), Version: "1.0", Protocol: 1,
		Nics: []*clusterv1.NIC{{Name: "eth0", Address: "02:00:00:00:00:01", Speed: 25e9, Ips: []string{"10.0.0.1/8"}}},
	}}
	model := n % 6
	for g := range 8 {
		l := &gpuctlv1.Limits{
			GlobalMemory: uint64(16+16*model) << 30, MaxAlloc: 4 << 30, LocalMemory: 48 << 10, MaxWorkGroupSize: 1024,
			MaxWorkItemSizes: []uint64{1024, 1024, 64}, Images: true, Image2DMaxWidth: 32768, ComputeUnits: 80, Version: "OpenCL 3.0 CUDA",
			CVersion: "OpenCL C 1.2", Fp64: true,
		}
		for e := range 24 {
			l.Extensions = append(l.Extensions, fmt.Sprintf("cl_khr_extension_number_%d", e))
		}
		r.Gpus = append(r.Gpus, &clusterv1.GPU{
			Name: fmt.Sprintf("0000:%02x:00.0", 16+g), Model: fmt.Sprintf("Model %d", model), Vendor: "NVIDIA Corporation", Type: "gpu", Rank: uint32(model),
			Limits: l, Runtime: "nvidia", Platform: "NVIDIA CUDA", Driver: "550.54.15", Uuid: fmt.Sprintf("GPU-%032x", n*8+g),
			PciAddress: fmt.Sprintf("0000:%02x:00.0", 16+g), IsolationGroup: fmt.Sprint(g), Health: clusterv1.Health_HEALTH_OK, RuntimeKey: "nvidia",
		})
	}
	return r
}

func inventory(b testing.TB, hosts int) *Store {
	s := New()
	for n := range hosts {
		c := &clusterv1.Command{Version: 1, Op: &clusterv1.Command_ReportHost{ReportHost: fleet(n)}}
		if r := s.Apply(uint64(n)+1, c); r.GetOutcome() != ok {
			b.Fatal(r)
		}
	}
	return s
}

// The inventory that the requirements speak of: 10 000 hosts of 8 GPUs.
func BenchmarkSnapshotAndRestore(b *testing.B) {
	s := inventory(b, 10_000)
	b.Run("persist", func(b *testing.B) {
		for b.Loop() {
			b.SetBytes(int64(len(persisted(b, s))))
		}
	})
	data := persisted(b, s)
	b.Run("restore", func(b *testing.B) {
		b.SetBytes(int64(len(data)))
		for b.Loop() {
			if err := New().Restore(bytes.NewReader(data)); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("both", func(b *testing.B) {
		var buf bytes.Buffer
		for b.Loop() {
			buf.Reset()
			if err := s.View().Persist(&buf); err != nil {
				b.Fatal(err)
			}
			if err := New().Restore(&buf); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkReadsOfALargeInventory(b *testing.B) {
	s := inventory(b, 10_000)
	v := s.View()
	b.Run("all GPUs", func(b *testing.B) {
		for b.Loop() {
			n := 0
			for range v.GPUs() {
				n++
			}
			if n != 80_000 {
				b.Fatal(n)
			}
		}
	})
	b.Run("a hundred objects", func(b *testing.B) {
		for b.Loop() {
			n := 0
			for range v.Objects(clusterv1.Kind_KIND_GPU, "host-05000/0000:10:00.0") {
				if n++; n == 100 {
					break
				}
			}
		}
	})
	b.Run("one GPU", func(b *testing.B) {
		for b.Loop() {
			if v.GPU("host-05000/0000:10:00.0") == nil {
				b.Fatal("not there")
			}
		}
	})
	b.Run("GPUs of a host", func(b *testing.B) {
		for b.Loop() {
			for range v.GPUsOfHost("host-07777") {
				continue
			}
		}
	})
}

// What the inventory takes in memory after a restore, and after its hosts
// reported it.
func BenchmarkMemoryOfALargeInventory(b *testing.B) {
	heap := func() float64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc) / (1 << 20)
	}
	for b.Loop() {
		empty := heap()
		s := inventory(b, 10_000)
		b.ReportMetric(heap()-empty, "MiB/reported")
		data := persisted(b, s)
		s = nil //nolint:ineffassign,wastedassign // so that it can be collected
		empty = heap()
		restored := New()
		if err := restored.Restore(bytes.NewReader(data)); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(heap()-empty, "MiB/restored")
		runtime.KeepAlive(restored)
	}
}

func BenchmarkApplyInALargeInventory(b *testing.B) {
	s := inventory(b, 10_000)
	index := s.View().Index()
	apply := func(c *clusterv1.Command) {
		index++
		if r := s.Apply(index, c); r.GetOutcome() != ok {
			b.Fatal(r)
		}
	}
	b.Run("claim and release", func(b *testing.B) {
		b.ReportAllocs()
		for n := 0; b.Loop(); n++ {
			id := fmt.Sprintf("c%d", n)
			host := fmt.Sprintf("host-%05d", n%10_000)
			apply(&clusterv1.Command{Version: 1, Id: fmt.Sprint(index), Op: &clusterv1.Command_PutClaim{PutClaim: &clusterv1.PutClaim{
				Claim: &clusterv1.Claim{Id: id}, Choices: []*clusterv1.Choice{{Gpu: host + "/0000:10:00.0"}},
			}}})
			apply(&clusterv1.Command{Version: 1, Op: &clusterv1.Command_DeleteClaim{DeleteClaim: &clusterv1.DeleteClaim{Claim: id}}})
			a := s.View().Events(clusterv1.Kind_KIND_CLAIM, id, 0)
			if len(a) == 0 {
				b.Fatal("no events")
			}
			for x := range s.View().AssignmentsOfHost(host) {
				apply(&clusterv1.Command{Version: 1, Op: &clusterv1.Command_ConfirmAssignments{ConfirmAssignments: &clusterv1.ConfirmAssignments{
					Host: host, Confirmations: []*clusterv1.Confirmation{{Assignment: x.GetId(), Token: x.GetToken(), Gone: true}},
				}}})
			}
		}
	})
	b.Run("unchanged report", func(b *testing.B) {
		b.ReportAllocs()
		c := &clusterv1.Command{Version: 1, Op: &clusterv1.Command_ReportHost{ReportHost: fleet(77)}}
		for b.Loop() {
			apply(c)
		}
	})
}
