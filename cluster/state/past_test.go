package state

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// checkPast compares what a view says has changed with a look at every object.
func checkPast(t *rapid.T, old, v *View) {
	for _, kind := range persistOrder() {
		named, ok := v.ChangedSince(old, kind)
		if !ok || !slices.IsSorted(named) {
			t.Fatalf("%s: %v, %v", kind, named, ok)
		}
		differ := map[string]bool{}
		for o := range old.Objects(kind, "") {
			if n := Name(o); Stored(v.Object(kind, n)) != Stored(o) {
				differ[n] = true
			}
		}
		for o := range v.Objects(kind, "") {
			if n := Name(o); Stored(old.Object(kind, n)) != Stored(o) {
				differ[n] = true
			}
		}
		for _, n := range named {
			if !differ[n] && (v.Object(kind, n) != nil || old.Object(kind, n) != nil) {
				t.Fatalf("%s %s has not changed between %d and %d", kind, n, old.Index(), v.Index())
			}
			delete(differ, n)
		}
		if len(differ) > 0 {
			t.Fatalf("%s: changes between %d and %d that are not named: %v", kind, old.Index(), v.Index(), differ)
		}
	}
}

// Pasts of all ages and a bound that is reached often, against a list of all.
func TestPastForgetsFromItsBeginning(t *testing.T) {
	forgot, knew := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		keep := rapid.IntRange(1, 6).Draw(t, "keep")
		type seen struct {
			past  *past
			index uint64
			all   int
		}
		var all []change
		views := []seen{{past: &past{}}}
		index := uint64(0)
		for range rapid.IntRange(1, 30).Draw(t, "entries") {
			index += rapid.Uint64Range(1, 3).Draw(t, "gap")
			var touched []touch
			for range rapid.IntRange(0, 4).Draw(t, "objects") {
				n := fmt.Sprint(rapid.IntRange(0, 5).Draw(t, "name"))
				touched = append(touched, touch{kindGPU, n})
				all = append(all, change{index, n})
			}
			views = append(views, seen{views[len(views)-1].past.with(index, touched, keep), index, len(all)})
		}
		for _, v := range views {
			for _, old := range views {
				if old.index > v.index {
					break
				}
				want := map[string]bool{}
				for _, c := range all[old.all:v.all] {
					want[c.name] = true
				}
				got, ok := v.past.trails[kindGPU].after(old.index)
				switch {
				case !ok && v.all-old.all < keep:
					t.Fatalf("%d changes are forgotten, %d are kept", v.all-old.all, keep)
				case !ok:
					forgot++
				case !slices.Equal(got, slices.Sorted(maps.Keys(want))):
					t.Fatalf("from %d to %d: %v, want %v", old.index, v.index, got, want)
				default:
					knew++
				}
			}
			if n := len(v.past.trails[kindGPU].changes); n > 2*keep {
				t.Fatalf("%d are kept", n)
			}
		}
	})
	if forgot < 100 || knew < 100 {
		t.Errorf("%d forgotten, %d known: the test shows too little", forgot, knew)
	}
}

func TestNothingIsKnownAcrossARestore(t *testing.T) {
	s := New()
	report := func(index uint64, host string) *View {
		if r := s.Apply(index, &clusterv1.Command{Op: &clusterv1.Command_ReportHost{ReportHost: testHost(host, 4)}}); r.GetOutcome() != ok {
			t.Fatal(r)
		}
		return s.View()
	}
	one, two := report(1, "h1"), report(2, "h2")
	if names, ok := two.ChangedSince(one, kindHost); !ok || !slices.Equal(names, []string{"h2"}) {
		t.Error(names, ok)
	}
	if names, ok := two.ChangedSince(two, kindHost); !ok || len(names) > 0 {
		t.Error(names, ok)
	}
	for what, wrong := range map[string]func() ([]string, bool){
		"a later view":   func() ([]string, bool) { return one.ChangedSince(two, kindHost) },
		"another store":  func() ([]string, bool) { return two.ChangedSince(New().View(), kindHost) },
		"no view":        func() ([]string, bool) { return two.ChangedSince(nil, kindHost) },
		"no kind":        func() ([]string, bool) { return two.ChangedSince(one, 0) },
		"a negative one": func() ([]string, bool) { return two.ChangedSince(one, -1) },
		"a new kind":     func() ([]string, bool) { return two.ChangedSince(one, 11) },
	} {
		if names, ok := wrong(); ok {
			t.Errorf("%s: %v", what, names)
		}
	}
	var b bytes.Buffer
	if err := one.Persist(&b); err != nil {
		t.Fatal(err)
	}
	if err := s.Restore(&b); err != nil {
		t.Fatal(err)
	}
	restored, three := s.View(), report(3, "h3")
	for _, old := range []*View{one, two} {
		if names, ok := three.ChangedSince(old, kindHost); ok {
			t.Errorf("since %d, before the restore: %v", old.Index(), names)
		}
	}
	if names, ok := three.ChangedSince(restored, kindHost); !ok || !slices.Equal(names, []string{"h3"}) {
		t.Error(names, ok)
	}
}

func TestShallowCopiesAreEqualAndTheirOwn(t *testing.T) {
	r := testHost("h1", 4)
	g := r.GetGpus()[0]
	g.ProtoReflect().SetUnknown([]byte{0xf8, 0x3f, 0x01})
	c := shallow(g)
	if !proto.Equal(c, g) || c == g || c.GetLimits() != g.GetLimits() {
		t.Errorf("%v is not a copy of %v", c, g)
	}
	c.Model, c.Limits = "other", nil
	if g.GetModel() == "other" || g.GetLimits() == nil {
		t.Error("the original was changed")
	}
	if h := shallow(r.GetHost()); !proto.Equal(h, r.GetHost()) {
		t.Error(h)
	}
	if x := shallow(&clusterv1.Event{}); !proto.Equal(x, &clusterv1.Event{}) {
		t.Error(x)
	}
}
