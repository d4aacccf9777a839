package placement

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
)

// TestIndexIsTheView has hosts come, change and go, and compares an index that
// follows with one that is made anew, to the last number.
func TestIndexIsTheView(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := state.New()
		at := uint64(0)
		apply := func(c *clusterv1.Command) {
			at++
			c.Version = 1
			s.Apply(at, c)
		}
		report := func(name string, gpus int) {
			r := &clusterv1.ReportHost{Host: &clusterv1.Host{Name: name, Id: "id-" + name, Protocol: 1}}
			for i := range gpus {
				r.Gpus = append(r.Gpus, &clusterv1.GPU{
					Name: fmt.Sprint("g", i), Model: fmt.Sprint("m", i/2), Rank: uint32(i / 2), IsolationGroup: fmt.Sprint(i / 2),
					Limits: &gpuctlv1.Limits{GlobalMemory: 100}, Health: clusterv1.Health_HEALTH_OK,
					Profiles: []*clusterv1.Profile{{Name: "p", Memory: 10, MaxInstances: 2}},
				})
			}
			apply(&clusterv1.Command{Op: &clusterv1.Command_ReportHost{ReportHost: r}})
		}
		// Names of which one begins another: the order of GPUs is not theirs.
		names := []string{"a", "a-b", "a.b", "a0", "b", "zz"}
		for h := range rapid.SampledFrom([]int{0, 3, 300}).Draw(t, "size") {
			names = append(names, fmt.Sprintf("n%03d", h))
			report(names[len(names)-1], 1+h%3)
		}
		ix := NewIndex(s.View())
		for range rapid.IntRange(1, 6).Draw(t, "rounds") {
			for range rapid.SampledFrom([]int{0, 1, 2, 150}).Draw(t, "changes") {
				name := rapid.SampledFrom(names).Draw(t, "host")
				switch rapid.IntRange(0, 4).Draw(t, "change") {
				case 0:
					report(name, rapid.IntRange(0, 4).Draw(t, "gpus"))
				case 1, 2:
					apply(&clusterv1.Command{Op: &clusterv1.Command_RemoveHost{RemoveHost: &clusterv1.RemoveHost{Host: name, Force: true}}})
				case 3:
					apply(&clusterv1.Command{Op: &clusterv1.Command_DrainHost{DrainHost: &clusterv1.DrainHost{Host: name, Draining: rapid.Bool().Draw(t, "drain")}}})
				default:
					c := &clusterv1.Choice{Gpu: name + "/g0", Kind: clusterv1.VGPUKind_VGPU_KIND_VENDOR, Profile: "p", Memory: 10}
					if rapid.Bool().Draw(t, "whole") {
						c = &clusterv1.Choice{Gpu: name + "/g0"}
					}
					apply(&clusterv1.Command{Op: &clusterv1.Command_PutClaim{PutClaim: &clusterv1.PutClaim{
						Claim: &clusterv1.Claim{Id: fmt.Sprint("c", at)}, Choices: []*clusterv1.Choice{c},
					}}})
				}
			}
			v := s.View()
			was := ix.current.Load()
			before := strings.Join(was.lines(), "\n")
			ix.Update(v)
			got, want := ix.current.Load(), NewIndex(v).current.Load()
			if a, b := got.lines(), want.lines(); !slices.Equal(a, b) {
				t.Fatalf("followed:\n%s\nmade anew:\n%s", strings.Join(a, "\n"), strings.Join(b, "\n"))
			}
			if got.hosts != want.hosts || got.gpus != want.gpus || ix.At() != v.Index() {
				t.Fatalf("%d hosts and %d GPUs at %d, want %d and %d at %d", got.hosts, got.gpus, ix.At(), want.hosts, want.gpus, v.Index())
			}
			if strings.Join(was.lines(), "\n") != before {
				t.Fatal("an older snapshot was changed")
			}
			for _, b := range got.blocks {
				sealed := newBlock(b.hosts)
				if len(b.hosts) == 0 || len(b.hosts) > 2*blockHosts || sealed.free != b.free || sealed.room != b.room || sealed.gpus != b.gpus {
					t.Fatalf("a block of %d hosts: %+v, want %+v", len(b.hosts), *b, *sealed)
				}
			}
			if n := len(got.blocks); n > 4+4*got.hosts/blockHosts {
				t.Fatalf("%d blocks for %d hosts", n, got.hosts)
			}
			for _, name := range names {
				h := got.host(name)
				if there := v.Host(name) != nil || len(slices.Collect(v.GPUsOfHost(name))) > 0; there != (h != nil) || there && h.name != name {
					t.Fatalf("host %s: %v", name, h)
				}
			}
		}
	})
}

// lines describe a snapshot.
func (s *snapshot) lines() []string {
	var out []string
	for h := range s.all() {
		class := ""
		if h.class != nil {
			class = h.class.like.GetModel()
		}
		line := fmt.Sprint(h.name, h.object.GetRevision(), class, h.causes, h.free, h.whole, h.room, h.used, h.total, h.speed, h.nicNUMA, h.held, h.unheld, h.taken)
		for i := range h.gpus {
			g := &h.gpus[i]
			line += fmt.Sprint(" ", g.object.GetId(), g.object.GetRevision(), g.total, g.room, g.class.rank, g.numa, g.flags)
		}
		out = append(out, line)
	}
	return out
}

func TestHostsAreInTheOrderOfTheirGPUs(t *testing.T) {
	name := rapid.StringMatching(`[ab.0-]{1,3}`)
	rapid.Check(t, func(t *rapid.T) {
		a, b := name.Draw(t, "a"), name.Draw(t, "b")
		if got, want := compareHosts(a, b), cmp.Compare(a+"/", b+"/"); got != want {
			t.Fatalf("%s, %s: %d, want %d", a, b, got, want)
		}
	})
}
