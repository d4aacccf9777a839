package query

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
)

// applier applies commands one after the other.
type applier struct {
	store *state.Store
	index uint64
}

func (a *applier) apply(c *clusterv1.Command) clusterv1.Outcome {
	a.index++
	c.Version = 1
	return a.store.Apply(a.index, c).GetOutcome()
}

func (a *applier) report(name string, gpus int, model string) clusterv1.Outcome {
	var of []*clusterv1.GPU
	for i := range gpus {
		of = append(of, &clusterv1.GPU{
			Name: fmt.Sprint("g", i), Model: model, Runtime: "pocl", Present: true, Health: clusterv1.Health_HEALTH_OK,
			Limits: &gpuctlv1.Limits{GlobalMemory: 8 << 30},
		})
	}
	return a.apply(&clusterv1.Command{Op: &clusterv1.Command_ReportHost{ReportHost: &clusterv1.ReportHost{
		Host: &clusterv1.Host{Name: name, Id: "id-" + name, Address: name + ":1", Protocol: 1}, Gpus: of,
	}}})
}

// step changes something.
func (a *applier) step(t *rapid.T, hosts int) {
	name := fmt.Sprintf("n%03d", rapid.IntRange(0, hosts).Draw(t, "host"))
	switch rapid.IntRange(0, 5).Draw(t, "step") {
	case 0:
		a.report(name, rapid.IntRange(0, 6).Draw(t, "gpus"), rapid.SampledFrom([]string{"A", "B"}).Draw(t, "model"))
	case 1:
		a.apply(&clusterv1.Command{Op: &clusterv1.Command_RemoveHost{RemoveHost: &clusterv1.RemoveHost{Host: name, Force: true}}})
	case 2:
		a.apply(&clusterv1.Command{Op: &clusterv1.Command_DrainHost{DrainHost: &clusterv1.DrainHost{Host: name, Draining: rapid.Bool().Draw(t, "drain")}}})
	case 3:
		a.apply(&clusterv1.Command{Op: &clusterv1.Command_LabelHost{LabelHost: &clusterv1.LabelHost{Host: name, Set: map[string]string{"zone": "a"}}}})
	default:
		a.apply(&clusterv1.Command{Op: &clusterv1.Command_PutClaim{PutClaim: &clusterv1.PutClaim{
			Claim:   &clusterv1.Claim{Id: fmt.Sprint("c", a.index), Group: "g", MinMemory: 1 << 30, Unmet: clusterv1.Unmet_UNMET_WAIT},
			Choices: []*clusterv1.Choice{{Gpu: name + "/g0", Memory: 1 << 30}},
		}}})
	}
}

// TestCacheIsTheView compares what a cache, a view and its indexes answer with
// what a look at every object finds.
func TestCacheIsTheView(t *testing.T) {
	wheres := map[clusterv1.Kind][]string{
		gpuKind: {
			"", "free", `model == "A"`, `host == "n001" && free`, `id == "n001/g0"`, `host.startsWith("n00") && free_memory < 8*GiB`,
			`name in ["g0", "g5"] || !free`, `host in ["n002", "n001", "n002", "none"] && free`, `id in ["n001/g0", ""]`, `host in []`,
			`model in ["B", "A"] && id in ["n002/g1"]`, `profiles.exists(p, true)`, `host == ""`,
		},
		hostKind:                    {"", `name == "n002"`, `id == "id-n003"`, `address == "n004:1"`, `"zone" in labels && labels.zone == "a"`, "draining"},
		clusterv1.Kind_KIND_MODEL:   {"", "free > 3", `name == "A"`},
		clusterv1.Kind_KIND_VGPU:    {"", `gpu == "n001/g0"`, `kind == "share"`},
		clusterv1.Kind_KIND_CLAIM:   {"", `state == "pending"`, `group == "g" && state == "bound"`, `id == "c7"`, `state == "releasing"`, `state in ["pending", "bound"]`},
		clusterv1.Kind_KIND_SESSION: {"", `host == "n001"`, `claim == "c1"`},
		clusterv1.Kind_KIND_ASSIGNMENT: {
			"", `host == "n001"`, `gpu == "n001/g0"`, `claim == "c9" && memory > 0`, `id == "c9.1"`, `residence == "scheduled"`,
		},
		clusterv1.Kind_KIND_MIGRATION:   {"", `claim == "c1"`, `id == "m"`},
		clusterv1.Kind_KIND_RESERVATION: {"", `gpu == "n001/g0"`, `owner == "c1"`, `id == "r"`},
	}
	rapid.Check(t, func(t *rapid.T) {
		a := &applier{store: state.New()}
		hosts := rapid.SampledFrom([]int{3, 3, 300}).Draw(t, "size")
		for h := range hosts {
			a.report(fmt.Sprintf("n%03d", h), h%7, "A")
		}
		cache := NewCache()
		first := a.store.View()
		for range rapid.IntRange(1, 8).Draw(t, "rounds") {
			for range rapid.IntRange(0, 6).Draw(t, "changes") {
				a.step(t, hosts)
			}
			v := a.store.View()
			for kind, all := range wheres {
				before := cache.newest(kind)
				where := rapid.SampledFrom(all).Draw(t, "where")
				q, err := cache.Compile(kind, where)
				if err != nil {
					t.Fatal(err)
				}
				after := rapid.SampledFrom([]string{"", "", "n001", "n002/g1", "zzz"}).Draw(t, "after")
				limit := rapid.SampledFrom([]int{0, 0, 1, 5}).Draw(t, "limit")
				var want []string
				for o := range v.Objects(kind, "") {
					ok, err := q.Match(o)
					if err != nil {
						t.Fatal(err)
					}
					if ok && state.Name(o) > after {
						want = append(want, state.Name(o))
					}
				}
				wantMore := limit > 0 && len(want) > limit
				if wantMore {
					want = want[:limit]
				}
				for path, list := range map[string]func() ([]object, bool, error){
					"view":  func() ([]object, bool, error) { return q.List(v, after, limit) },
					"cache": func() ([]object, bool, error) { return cache.List(q, v, after, limit) },
				} {
					got, more, err := list()
					if err != nil || more != wantMore || !slices.Equal(names(got), want) {
						t.Fatalf("%s of %s %q after %q, limit %d:\n%v, %v, %v\nwant\n%v, %v", path, KindName(kind), where, after, limit, names(got), more, err, want, wantMore)
					}
					for _, o := range got {
						if same := v.Object(kind, state.Name(o)); fmt.Sprint(same) != fmt.Sprint(o) {
							t.Fatalf("%s: %v is not %v", path, o, same)
						}
					}
				}
				if tb := cache.table(kind, v); tb == nil {
					t.Fatal("the cache has no table")
				} else if wrong := tb.check(); wrong != "" {
					t.Fatalf("%s: %s", KindName(kind), wrong)
				} else if before != nil {
					// What was followed is what a look at all objects finds.
					blocks, _ := readIn(kind, v, before)
					whole := &table{blocks: blocks}
					if wrong := whole.check(); wrong != "" || !slices.Equal(whole.all(), tb.all()) {
						t.Fatalf("%s: %s: %d objects, %d", KindName(kind), wrong, len(whole.all()), len(tb.all()))
					}
				}
			}
		}
		// An older view is not answered with what came later.
		q, err := Compile(gpuKind, "true")
		if err != nil {
			t.Fatal(err)
		}
		got, _, err := cache.List(q, first, "", 0)
		want := 0
		for range first.GPUs() {
			want++
		}
		if err != nil || len(got) != want {
			t.Fatalf("%d GPUs in the first view, want %d: %v", len(got), want, err)
		}
	})
}

func (c *Cache) newest(kind clusterv1.Kind) *table {
	if ct := c.tables[kind]; ct != nil {
		return ct.current.Load()
	}
	return nil
}

// all that is stored, in order.
func (t *table) all() []any {
	var out []any
	for _, b := range t.blocks {
		out = append(out, b.stored...)
	}
	return out
}

// TestBlocksStayOfBearableSize has many claims come and go: blocks are neither
// many nor large.
func TestBlocksStayOfBearableSize(t *testing.T) {
	a := &applier{store: state.New()}
	cache := NewCache()
	kind := clusterv1.Kind_KIND_CLAIM
	put := func(id string) {
		a.apply(&clusterv1.Command{Op: &clusterv1.Command_PutClaim{PutClaim: &clusterv1.PutClaim{
			Claim: &clusterv1.Claim{Id: id, Unmet: clusterv1.Unmet_UNMET_WAIT},
		}}})
	}
	check := func(what string, count, most int) {
		t.Helper()
		tb := cache.table(kind, a.store.View())
		if wrong := tb.check(); wrong != "" || len(tb.all()) != count || len(tb.blocks) > most {
			t.Errorf("%s: %d objects in %d blocks, %s", what, len(tb.all()), len(tb.blocks), wrong)
		}
	}
	check("nothing", 0, 0)
	const n = 4000
	for i := range n {
		put(fmt.Sprintf("c%04d", i*7%n)) // 7 does not divide it
		if i%10 == 0 {
			cache.Refresh(kind, a.store.View())
		}
	}
	check("all", n, 4*n/blockSize)
	for i := range n {
		if i%100 != 0 {
			a.apply(&clusterv1.Command{Op: &clusterv1.Command_DeleteClaim{DeleteClaim: &clusterv1.DeleteClaim{Claim: fmt.Sprintf("c%04d", i*11%n)}}})
		}
		if i%10 == 0 {
			cache.Refresh(kind, a.store.View())
		}
	}
	check("few", n/100, 1)
}

func TestLatestIsWhatWasReadIn(t *testing.T) {
	a := &applier{store: state.New()}
	a.report("n1", 1, "A")
	cache := NewCache()
	if cache.Latest(gpuKind) != nil {
		t.Error("a view before the first was read in")
	}
	v := a.store.View()
	cache.Refresh(gpuKind, v)
	a.report("n2", 1, "A")
	if cache.Latest(gpuKind) != v {
		t.Error("not the view that was read in")
	}
	got, _, err := cache.List(must(t, gpuKind, ""), cache.Latest(gpuKind), "", 0)
	if err != nil || !slices.Equal(names(got), []string{"n1/g0"}) {
		t.Error(names(got), err)
	}
}

func TestListReturnsErrors(t *testing.T) {
	a := &applier{store: state.New()}
	a.report("n1", 1, "A")
	q := must(t, hostKind, `labels.zone == "a"`)
	if _, _, err := q.List(a.store.View(), "", 0); err == nil {
		t.Error("no error of a view")
	}
	if _, _, err := NewCache().List(q, a.store.View(), "", 0); err == nil {
		t.Error("no error of a cache")
	}
}

func TestReadersShareACache(t *testing.T) {
	a := &applier{store: state.New()}
	for h := range 50 {
		a.report(fmt.Sprintf("n%03d", h), 4, "A")
	}
	cache := NewCache()
	q := must(t, gpuKind, `free && host.startsWith("n0")`)
	done := make(chan error)
	for range 4 {
		go func() {
			for range 200 {
				if _, _, err := cache.List(q, a.store.View(), "", 10); err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	for i := range 200 {
		a.apply(&clusterv1.Command{Op: &clusterv1.Command_CordonGpu{CordonGpu: &clusterv1.CordonGPU{Gpu: fmt.Sprintf("n%03d/g0", i%50), Cordoned: i%2 == 0}}})
	}
	for range 4 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}
