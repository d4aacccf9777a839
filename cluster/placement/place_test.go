package placement_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/cluster/placement/placementtest"
)

const okay = clusterv1.Outcome_OUTCOME_OK

type claim = clusterv1.Claim

func runtimeGPU(name, model string, rank uint32, gigabytes uint64) *clusterv1.GPU {
	return &clusterv1.GPU{
		Name: name, Model: model, Rank: rank, Runtime: "pocl", RuntimeKey: "pocl", NumaNode: -1, Health: clusterv1.Health_HEALTH_OK,
		Limits: &gpuctlv1.Limits{GlobalMemory: gigabytes * gib, MaxAlloc: gigabytes * gib / 4, Version: "OpenCL 3.0 PoCL"}, Present: true,
	}
}

func report(t interface{ Fatal(...any) }, c *placementtest.Cluster, name string, gpus ...*clusterv1.GPU) {
	err := c.Report(&clusterv1.Host{
		Name: name, Id: "id-" + name, Protocol: 1, Nics: []*clusterv1.NIC{{Name: "eth0", Speed: 10e9, NumaNode: 1}},
	}, gpus)
	if err != nil {
		t.Fatal(err)
	}
}

// house is the inventory of the table tests.
func house(t *testing.T) *placementtest.Cluster {
	c := placementtest.NewCluster()
	report(t, c, "a", runtimeGPU("g0", "small", 1, 4), runtimeGPU("g1", "small", 1, 4))
	report(t, c, "b", runtimeGPU("g0", "middle", 2, 8), runtimeGPU("g1", "large", 3, 16))
	report(t, c, "c", runtimeGPU("g0", "large", 3, 16), runtimeGPU("g1", "large", 3, 16))
	put(t, c, &claim{Id: "half", MinMemory: 2 * gib, Group: "web"}, "a/g1", 2*gib)
	put(t, c, &claim{Id: "whole"}, "c/g1", 0)
	return c
}

func put(t *testing.T, c *placementtest.Cluster, cl *claim, gpu string, memory uint64) {
	t.Helper()
	if r := c.Put(cl, []*clusterv1.Choice{{Gpu: gpu, Memory: memory}}); r.GetOutcome() != okay {
		t.Fatal(r)
	}
}

func place(c *placementtest.Cluster, req placement.Request) placement.Decision {
	return placement.Place(placement.NewIndex(c.Store.View()), req)
}

func where(d placement.Decision) string {
	var out []string
	for _, c := range d.Candidates {
		out = append(out, strings.Join(c.GPUs(), ","))
	}
	return strings.Join(out, " ")
}

func TestOrder(t *testing.T) {
	pack, spread := clusterv1.Policy_POLICY_PACK, clusterv1.Policy_POLICY_SPREAD
	from := func(verb placement.Verb, gpu string) placement.Request {
		return placement.Request{Claim: &claim{Id: "x"}, Verb: verb, From: []string{gpu}}
	}
	with := func(r placement.Request, to string) placement.Request {
		r.To = to
		return r
	}
	c := house(t)
	for name, x := range map[string]struct {
		req  placement.Request
		want string
	}{
		"without a need the best":   {placement.Request{Claim: &claim{Id: "x"}}, "c/g0 b/g1 b/g0 a/g0"},
		"with a need the cheapest":  {placement.Request{Claim: &claim{Id: "x", MinMemory: 2 * gib}}, "a/g1 a/g0 b/g0 c/g0 b/g1"},
		"what is preferred, first":  {placement.Request{Claim: &claim{Id: "x", MinMemory: 2 * gib, PreferMemory: 10 * gib}}, "c/g0 b/g1 b/g0 a/g0 a/g1"},
		"pack":                      {placement.Request{Claim: &claim{Id: "x", Policy: pack}}, "c/g0 a/g0 b/g0 b/g1"},
		"spread":                    {placement.Request{Claim: &claim{Id: "x", Policy: spread}}, "b/g0 b/g1 a/g0 c/g0"},
		"upgrade":                   {from(placement.Upgrade, "a/g0"), "c/g0 b/g1 b/g0"},
		"downgrade":                 {from(placement.Downgrade, "c/g0"), "a/g0 b/g0"},
		"upgrade to a model":        {with(from(placement.Upgrade, "a/g0"), "Middle"), "b/g0"},
		"upgrade to a lower one":    {with(from(placement.Upgrade, "b/g0"), "small"), ""},
		"migrate goes there":        {with(from(placement.Migrate, "b/g0"), "small"), "a/g0"},
		"migrate: nearest, upwards": {from(placement.Migrate, "b/g0"), "b/g0 b/g1 c/g0 a/g0"},
		"to a host":                 {with(from(placement.Migrate, "b/g0"), "c"), "c/g0"},
		"to a GPU":                  {with(placement.Request{Claim: &claim{Id: "x"}}, "b/g1"), "b/g1"},
		"to a GPU of the own host":  {placement.Request{Claim: &claim{Id: "x"}, To: "g1", Host: "b"}, "b/g1"},
		"the host that asks":        {placement.Request{Claim: &claim{Id: "x"}, Host: "b"}, "b/g1 c/g0 b/g0 a/g0"},
		"only a host":               {placement.Request{Claim: &claim{Id: "x", Host: "a"}}, "a/g0"},
		"not hosts":                 {placement.Request{Claim: &claim{Id: "x", HostsNot: []string{"a", "b"}}}, "c/g0"},
		"not beside its group":      {placement.Request{Claim: &claim{Id: "x", MinMemory: gib, Group: "web"}}, "b/g0 c/g0 b/g1"},
		"two of a host":             {placement.Request{Claim: &claim{Id: "x", Count: 2}}, "b/g1,b/g0"},
		"two of hosts":              {placement.Request{Claim: &claim{Id: "x", Count: 2, HostsNot: []string{"b"}}, Span: true}, "c/g0,a/g0"},
		"two that are named":        {with(placement.Request{Claim: &claim{Id: "x", Count: 2}}, "b/g1,b/g0"), "b/g1,b/g0"},
		"an expression":             {placement.Request{Claim: &claim{Id: "x", Expr: `memory >= 8*GiB && host != "c"`}}, "b/g1 b/g0"},
		"limits":                    {placement.Request{Claim: &claim{Id: "x", MinLimits: &gpuctlv1.Limits{MaxAlloc: 4 * gib}}}, "c/g0 b/g1"},
		"limits count for a part":   {placement.Request{Claim: &claim{Id: "x", MinMemory: gib, MinLimits: &gpuctlv1.Limits{GlobalMemory: 3 * gib}}}, "a/g0 b/g0 c/g0 b/g1"},
	} {
		d := place(c, x.req)
		if d.Err != nil || where(d) != x.want {
			t.Errorf("%s: %s (%v), want %s", name, where(d), d.Err, x.want)
		}
		for i, cand := range d.Candidates {
			if cand.Score <= 0 || cand.Score > 1 || i > 0 && cand.Score > d.Candidates[i-1].Score || len(cand.Because) == 0 {
				t.Errorf("%s: %s has score %g and says %q", name, cand.GPUs(), cand.Score, cand.Because)
			}
		}
	}
}

func TestReasons(t *testing.T) {
	c := house(t)
	apply := func(cmd *clusterv1.Command) {
		if r := c.Apply(cmd); r.GetOutcome() != okay {
			t.Fatal(r)
		}
	}
	report(t, c, "d", &clusterv1.GPU{Name: "g0", Model: "bare", Rank: 9, Present: true, NumaNode: -1, Limits: &gpuctlv1.Limits{GlobalMemory: gib}})
	sick := runtimeGPU("g0", "sick", 5, 4)
	sick.Health, sick.HealthReason = clusterv1.Health_HEALTH_FAILED, "Xid 79"
	report(t, c, "e", sick)
	report(t, c, "f", runtimeGPU("g0", "far", 5, 4))
	report(t, c, "g", runtimeGPU("g0", "off", 5, 4))
	report(t, c, "h")
	apply(&clusterv1.Command{Op: &clusterv1.Command_DrainHost{DrainHost: &clusterv1.DrainHost{Host: "f", Draining: true, Message: "new disks"}}})
	apply(&clusterv1.Command{Op: &clusterv1.Command_SetHostDown{SetHostDown: &clusterv1.SetHostDown{Host: "g", Down: true}}})
	apply(&clusterv1.Command{Op: &clusterv1.Command_CordonGpu{CordonGpu: &clusterv1.CordonGPU{Gpu: "b/g0", Cordoned: true, Message: "noisy fan"}}})
	d := place(c, placement.Request{
		Claim: &claim{
			Id: "x", MinMemory: 3 * gib, Expr: `model != "large"`, HostsNot: []string{"h"}, OneRuntime: true,
			MinLimits: &gpuctlv1.Limits{MaxAlloc: 2 * gib, Extensions: []string{"cl_x"}},
		},
		Verb: placement.Upgrade, From: []string{"a/g0"},
	})
	if d.Err != nil || d.OK() {
		t.Fatal(d.Err, where(d))
	}
	got := map[string]string{}
	for x := range d.Rejected() {
		name := x.GetGpu()
		if name == "" {
			name = x.GetHost()
		}
		var all []string
		for _, why := range x.GetReasons() {
			all = append(all, why.GetCode()+": "+why.GetMessage())
		}
		got[name] = strings.Join(all, "; ")
	}
	for name, parts := range map[string][]string{
		"a/g0": {"rank: not a higher model than a/g0", "max_alloc: memory of one object: 2 GiB needed, it has 1 GiB", "extension: extension: cl_x needed"},
		"a/g1": {"busy: 3 GiB needed, 2 GiB left beside claim half"},
		"b/g0": {"cordoned: cordoned: noisy fan"},
		"b/g1": {`expr: model != "large" is not true of it`},
		"c/g1": {"busy: 3 GiB needed, 0 B left beside claim whole"},
		"d/g0": {"runtime: no OpenCL runtime", "memory: 3 GiB needed, it has 1 GiB"},
		"e/g0": {"health: failed: Xid 79"},
		"f":    {"draining: host f is draining: new disks"},
		"g":    {"down: host g is down"},
		"h":    {"host: the claim must not be on host h"},
	} {
		for _, part := range parts {
			if !strings.Contains(got[name], part) {
				t.Errorf("%s: %q; want %q in it", name, got[name], part)
			}
		}
	}
	if s := d.Summary(); !strings.Contains(s, "more)") {
		t.Errorf("summary %q", s)
	}
	// One for a host where all GPUs fail for the same.
	all := slices.Collect(place(c, placement.Request{Claim: &claim{Id: "x", Count: 3, Host: "b"}}).Rejected())
	for _, x := range all {
		if x.GetHost() == "c" && (x.GetGpu() != "" || x.GetReasons()[0].GetCode() != "host") {
			t.Errorf("%v", x)
		}
	}
	all = slices.Collect(place(house(t), placement.Request{Claim: &claim{Id: "x", MinMemory: 99 * gib}}).Rejected())
	if len(all) != 3 || all[0].GetGpu() != "" || !strings.Contains(all[0].GetReasons()[0].GetMessage(), "each of 2 GPUs: 99 GiB needed, it has 4 GiB") {
		t.Errorf("%v", all)
	}
	d = place(house(t), placement.Request{Claim: &claim{Id: "x"}, Verb: placement.Migrate, From: []string{"a/g0"}, Bytes: 100 * gib, Deadline: time.Second})
	if where(d) != "a/g0" || !strings.Contains(d.Candidates[0].Because[0], "where the claim was") {
		t.Errorf("%s", where(d))
	}
	for x := range d.Rejected() {
		if x.GetHost() == "b" && x.GetReasons()[0].GetMessage() != "100 GiB over 10 Gb/s take 1m25.9s, more than 1s" {
			t.Errorf("%v", x)
		}
	}
}

func TestWrongRequests(t *testing.T) {
	c := house(t)
	for name, x := range map[string]struct {
		req  placement.Request
		want error
		part string
	}{
		"no claim":   {placement.Request{}, placement.ErrInvalid, "no claim"},
		"expression": {placement.Request{Claim: &claim{Expr: "memry > 1"}}, placement.ErrInvalid, "did you mean memory"},
		"verb":       {placement.Request{Claim: &claim{}, Verb: "fly"}, placement.ErrInvalid, "fly"},
		"model":      {placement.Request{Claim: &claim{}, To: "larg"}, placement.ErrNotFound, "did you mean large"},
		"GPU":        {placement.Request{Claim: &claim{}, To: "a/g7"}, placement.ErrNotFound, "did you mean a/g0"},
		"number":     {placement.Request{Claim: &claim{Count: 2}, To: "a/g0"}, placement.ErrInvalid, "has 2 GPUs"},
		"twice":      {placement.Request{Claim: &claim{Count: 2}, To: "a/g0,a/g0"}, placement.ErrInvalid, "not different"},
		"hosts":      {placement.Request{Claim: &claim{Count: 2}, To: "a/g0,b/g0"}, placement.ErrInvalid, "one host"},
		"too many":   {placement.Request{Claim: &claim{Count: 1 << 31}}, placement.ErrInvalid, "more than 64"},
	} {
		d := place(c, x.req)
		if !errors.Is(d.Err, x.want) || !strings.Contains(d.Err.Error(), x.part) || d.OK() || d.Summary() != d.Err.Error() {
			t.Errorf("%s: %v, want %q", name, d.Err, x.part)
		}
	}
}

func TestASwapCanStay(t *testing.T) {
	c := house(t)
	d := place(c, placement.Request{Claim: &claim{Id: "whole"}, Verb: placement.Resume, From: []string{"c/g1"}})
	if first := d.Candidates[0]; first.Choices[0].GetGpu() != "c/g1" || len(first.Kept) != 1 || len(first.New()) != 0 {
		t.Errorf("%+v", first)
	}
	if d := place(c, placement.Request{Claim: &claim{Id: "whole"}, To: "c/g1"}); d.OK() {
		t.Error("a new claim got what it holds")
	}
}

func TestAReservationIsItsOwners(t *testing.T) {
	c := house(t)
	r := c.Apply(&clusterv1.Command{Op: &clusterv1.Command_PutReservation{PutReservation: &clusterv1.PutReservation{
		Reservation: &clusterv1.Reservation{Id: "r", Owner: "x", Gpu: "c/g0", TtlMs: 1000},
	}}})
	if r.GetOutcome() != okay {
		t.Fatal(r)
	}
	if d := place(c, placement.Request{Claim: &claim{Id: "y"}}); where(d) != "b/g1 b/g0 a/g0" {
		t.Error(where(d))
	}
	d := place(c, placement.Request{Claim: &claim{Id: "x"}})
	if where(d) != "c/g0 b/g1 b/g0 a/g0" || d.Candidates[0].Choices[0].GetReservation() != "r" {
		t.Error(where(d))
	}
	if r := c.Put(&claim{Id: "x"}, d.Candidates[0].Choices); r.GetOutcome() != okay {
		t.Error(r)
	}
}

// Slices of two sizes do not go together where the card cannot have both.
func TestSlicesApart(t *testing.T) {
	c := placementtest.NewCluster()
	profiles := []*clusterv1.Profile{
		{Name: "4Q", Memory: 4 * gib, MaxInstances: 6, Apart: "time 4GiB"},
		{Name: "8Q", Memory: 8 * gib, MaxInstances: 3, Apart: "time 8GiB"},
		{Name: "8C", Memory: 8 * gib, MaxInstances: 3, Apart: "time 8GiB"},
		{Name: "vf", Memory: gib, MaxInstances: 9},
	}
	card := func(name string) *clusterv1.GPU {
		return &clusterv1.GPU{Name: name, Model: "card", Present: true, Profiles: profiles, IsolationGroup: name, Limits: &gpuctlv1.Limits{GlobalMemory: 24 * gib}}
	}
	report(t, c, "a", card("g0"), card("g1"))
	for i, x := range []struct{ profile, want string }{
		{"8Q", "a/g0 8Q"},
		{"4Q", "a/g1 4Q"},
		{"8C", "a/g0 8C"},
		{"vf", "a/g0 vf"},
		{"4Q", "a/g1 4Q"},
		{"8Q", ""}, // 7 GiB are left of the first
	} {
		k := &claim{Id: fmt.Sprint("c", i), Profile: x.profile}
		d := place(c, placement.Request{Claim: k})
		got := ""
		if d.OK() {
			got = d.Candidates[0].Choices[0].GetGpu() + " " + x.profile
			if r := c.Put(k, d.Candidates[0].Choices); r.GetOutcome() != okay {
				t.Errorf("%d: %v", i, r)
			}
		}
		if got != x.want {
			t.Errorf("%d: %q, want %q (%s)", i, got, x.want, d.Summary())
		}
	}
}

func TestSlices(t *testing.T) {
	c := placementtest.NewCluster()
	profiles := []*clusterv1.Profile{{Name: "1g", Memory: 5 * gib, MaxInstances: 2}, {Name: "3g", Memory: 20 * gib, MaxInstances: 2}, {Name: "odd"}}
	card := func(name string) *clusterv1.GPU {
		return &clusterv1.GPU{
			Name: name, Model: "card", Rank: 5, Present: true, Profiles: profiles, IsolationGroup: "7",
			Limits: &gpuctlv1.Limits{GlobalMemory: 40 * gib},
		}
	}
	report(t, c, "a", card("g0"), card("g1"))
	for i, x := range []struct {
		claim *claim
		want  string
	}{
		{&claim{Profile: "1g"}, "a/g0 1g"},
		{&claim{Profile: "1g"}, "a/g0 1g"},
		{&claim{Profile: "1g"}, "a/g1 1g"}, // two at most
		{&claim{}, ""},                     // nothing is whole any more
		{&claim{MinMemory: 3 * gib}, "a/g1 1g"},
		{&claim{MinMemory: 3 * gib}, "a/g0 3g"}, // the small ones are taken
		{&claim{MinMemory: 30 * gib}, ""},
		{&claim{Profile: "odd"}, ""},
		{&claim{Profile: "9g"}, ""},
		{&claim{Profile: "1g", MinMemory: 6 * gib}, ""},
	} {
		x.claim.Id = fmt.Sprint("c", i)
		d := place(c, placement.Request{Claim: x.claim})
		got := ""
		if d.OK() {
			choice := d.Candidates[0].Choices[0]
			got = choice.GetGpu() + " " + choice.GetProfile()
			if r := c.Put(x.claim, d.Candidates[0].Choices); r.GetOutcome() != okay {
				t.Errorf("%d: %v", i, r)
			}
		} else if d.Err != nil || d.Summary() == "" {
			t.Errorf("%d: %v %q", i, d.Err, d.Summary())
		}
		if got != x.want {
			t.Errorf("%d: %q, want %q", i, got, x.want)
		}
	}
	c = placementtest.NewCluster()
	report(t, c, "a", card("g0"), card("g1"))
	put(t, c, &claim{Id: "w"}, "a/g0", 0)
	d := place(c, placement.Request{Claim: &claim{Id: "x"}})
	if d.OK() || !strings.Contains(d.Summary(), "isolation group 7 is held") {
		t.Errorf("%s %q", where(d), d.Summary())
	}
}

func TestNUMA(t *testing.T) {
	c := placementtest.NewCluster()
	var gpus []*clusterv1.GPU
	for i, node := range []int32{0, 1, 0, 1} {
		g := runtimeGPU(fmt.Sprint("g", i), "m", 1, 8)
		g.NumaNode = node
		gpus = append(gpus, g)
	}
	report(t, c, "a", gpus...)
	if d := place(c, placement.Request{Claim: &claim{Id: "x", Count: 2, OneRuntime: true}}); where(d) != "a/g0,a/g2 a/g1,a/g3" {
		t.Error(where(d))
	}
	if d := place(c, placement.Request{Claim: &claim{Id: "x", Count: 3}}); where(d) != "a/g0,a/g2,a/g1" || !strings.Contains(fmt.Sprint(d.Candidates[0].Because), "2 NUMA nodes") {
		t.Error(where(d))
	}
	// The network card is on node 1.
	if d := place(c, placement.Request{Claim: &claim{Id: "x"}, Bytes: gib, Limit: 2}); where(d) != "a/g1 a/g3" || d.Fits != 4 {
		t.Error(where(d))
	}
}

// world draws an inventory in which something is going on.
func world(t *rapid.T) *placementtest.Cluster {
	c := placementtest.NewCluster()
	for h := range rapid.IntRange(1, 5).Draw(t, "hosts") {
		name := []string{"a", "a-b", "a.c", "b", "c0"}[h]
		var gpus []*clusterv1.GPU
		for i := range rapid.IntRange(0, 4).Draw(t, "gpus") {
			kind := rapid.IntRange(1, 3).Draw(t, "model")
			g := runtimeGPU(fmt.Sprint("g", i), fmt.Sprint("m", kind), uint32(kind), uint64(4*kind))
			g.NumaNode = int32(rapid.IntRange(-1, 1).Draw(t, "numa"))
			if rapid.IntRange(0, 9).Draw(t, "sick") == 0 {
				g.Health = clusterv1.Health_HEALTH_FAILED
			}
			if rapid.IntRange(0, 2).Draw(t, "bare") == 0 {
				g.Runtime, g.RuntimeKey = "", ""
				g.Profiles = []*clusterv1.Profile{{Name: "p", Memory: 2 * gib, MaxInstances: 2}}
				g.IsolationGroup = fmt.Sprint(i / 2)
			}
			gpus = append(gpus, g)
		}
		report(t, c, name, gpus...)
		if rapid.IntRange(0, 9).Draw(t, "drain") == 0 {
			c.Apply(&clusterv1.Command{Op: &clusterv1.Command_DrainHost{DrainHost: &clusterv1.DrainHost{Host: name, Draining: true}}})
		}
	}
	return c
}

func anyClaim(t *rapid.T, id string) *claim {
	c := &claim{
		Id: id, Count: rapid.SampledFrom([]uint32{0, 1, 1, 2, 3}).Draw(t, "count"),
		MinMemory:  rapid.SampledFrom([]uint64{0, 0, 1, 2 * gib, 5 * gib}).Draw(t, "min"),
		Group:      rapid.SampledFrom([]string{"", "", "g"}).Draw(t, "group"),
		Host:       rapid.SampledFrom([]string{"", "", "", "a", "zz"}).Draw(t, "host"),
		OneRuntime: rapid.Bool().Draw(t, "one"),
		Policy:     clusterv1.Policy(rapid.IntRange(0, 4).Draw(t, "policy")),
		Profile:    rapid.SampledFrom([]string{"", "", "", "p"}).Draw(t, "profile"),
		Expr:       rapid.SampledFrom([]string{"", "", "memory > 4*GiB", "free", `host != "b"`}).Draw(t, "expr"),
	}
	if rapid.Bool().Draw(t, "prefers") {
		c.PreferMemory = c.MinMemory + rapid.SampledFrom([]uint64{0, gib, 8 * gib}).Draw(t, "prefer")
	}
	return c
}

// TestWhatIsChosenIsAccepted also compares an index that is brought up to date
// with a new one.
func TestWhatIsChosenIsAccepted(t *testing.T) {
	placed := 0
	rapid.Check(t, func(t *rapid.T) {
		c := world(t)
		ix := placement.NewIndex(c.Store.View())
		for i := range rapid.IntRange(1, 12).Draw(t, "steps") {
			v := c.Store.View()
			ix.Update(v)
			req := placement.Request{Claim: anyClaim(t, fmt.Sprint("c", i)), Span: rapid.Bool().Draw(t, "span"), Limit: rapid.IntRange(0, 3).Draw(t, "limit")}
			d := placement.Place(ix, req)
			if d.Err != nil {
				t.Fatal(d.Err)
			}
			fresh := placement.Place(placement.NewIndex(v), req)
			if where(d) != where(fresh) || d.Fits != fresh.Fits {
				t.Fatalf("%v: %s of %d; with a new index %s of %d", req.Claim, where(d), d.Fits, where(fresh), fresh.Fits)
			}
			// What is not looked at would not have been among the best.
			wide := req
			wide.Limit = 1000
			if all := placement.Place(ix, wide); !strings.HasPrefix(where(all)+" ", where(d)+" ") && d.OK() {
				t.Fatalf("%v: %s; the best of all are %s", req.Claim, where(d), where(all))
			} else if req.Claim.GetExpr() == "" && d.Fits != all.Fits || d.OK() != all.OK() {
				t.Fatalf("%v: %d fit; of all %d", req.Claim, d.Fits, all.Fits)
			}
			rejected := map[string]bool{}
			for x := range d.Rejected() {
				if len(x.GetReasons()) == 0 || x.GetReasons()[0].GetCode() == "" || x.GetReasons()[0].GetMessage() == "" {
					t.Fatalf("rejected without a reason: %v", x)
				}
				rejected[x.GetGpu()] = true
			}
			for _, cand := range d.Candidates {
				for _, g := range cand.GPUs() {
					if rejected[g] {
						t.Fatalf("%s is chosen and rejected", g)
					}
				}
			}
			if !d.OK() {
				if d.Summary() == "" {
					t.Fatal("nothing fits and there is no reason")
				}
				continue
			}
			n := rapid.IntRange(0, len(d.Candidates)-1).Draw(t, "candidate")
			if r := c.Put(req.Claim, d.Candidates[n].Choices); r.GetOutcome() != okay {
				t.Fatalf("%v\nat %s: %v", req.Claim, where(d), r)
			}
			placed++
			if rapid.IntRange(0, 3).Draw(t, "go") == 0 {
				c.Delete(fmt.Sprint("c", rapid.IntRange(0, i).Draw(t, "which")))
			}
			if err := c.Store.View().Check(); err != nil {
				t.Fatal(err)
			}
		}
	})
	if placed < 50 {
		t.Errorf("only %d were placed: the test shows too little", placed)
	}
}

// TestRejectedDoesNotFit tries what was rejected for want of room.
func TestRejectedDoesNotFit(t *testing.T) {
	tried := 0
	rapid.Check(t, func(t *rapid.T) {
		c := world(t)
		for i := range 6 {
			cl := anyClaim(t, fmt.Sprint("f", i))
			if d := place(c, placement.Request{Claim: cl}); d.OK() {
				c.Put(cl, d.Candidates[0].Choices)
			}
		}
		req := placement.Request{Claim: &claim{Id: "x", MinMemory: rapid.SampledFrom([]uint64{0, gib, 5 * gib}).Draw(t, "min")}}
		for x := range place(c, req).Rejected() {
			for _, why := range x.GetReasons() {
				switch why.GetCode() {
				case "busy", "memory", "draining", "health":
				default:
					continue
				}
				for g := range c.Store.View().GPUsOfHost(x.GetHost()) {
					if x.GetGpu() != "" && x.GetGpu() != g.GetId() || g.GetRuntime() == "" {
						continue
					}
					tried++
					r := c.Put(req.Claim, []*clusterv1.Choice{{Gpu: g.GetId(), Memory: req.Claim.GetMinMemory()}})
					if r.GetOutcome() == okay {
						t.Fatalf("%s was rejected (%v) and takes the claim", g.GetId(), x.GetReasons())
					}
				}
			}
		}
	})
	if tried < 50 {
		t.Errorf("only %d were tried: the test shows too little", tried)
	}
}

// TestWhatIsPassedIsNotBetter compares decisions that may pass hosts over with
// ones that keep all candidates.
func TestWhatIsPassedIsNotBetter(t *testing.T) {
	c, err := placementtest.Synthetic(100, 8, 0.6, 7)
	if err != nil {
		t.Fatal(err)
	}
	ix := placement.NewIndex(c.Store.View())
	from := []string{placementtest.HostName(42) + "/0000:10:00.0"}
	checked := 0
	for _, verb := range []placement.Verb{placement.New, placement.Upgrade, placement.Downgrade, placement.Migrate} {
		for policy := range clusterv1.Policy(5) {
			for _, cl := range []*claim{{}, {Count: 2}, {Count: 3, OneRuntime: true}, {MinMemory: 8 * gib}, {MinMemory: 4 * gib, PreferMemory: 30 * gib}, {MinMemory: 20 * gib, Count: 2}} {
				for _, expr := range []string{"", `model != "T4"`, `health == "ok" && host.endsWith("7")`} {
					cl := &claim{Id: "x", Count: cl.GetCount(), OneRuntime: cl.GetOneRuntime(), MinMemory: cl.GetMinMemory(), PreferMemory: cl.GetPreferMemory(), Policy: policy, Expr: expr}
					req := placement.Request{Claim: cl, Verb: verb, Bytes: 20 * gib, Host: placementtest.HostName(3)}
					if verb != placement.New {
						req.From, req.Host = from, ""
					}
					req.Limit = 1000 // more than there are GPUs
					all := placement.Place(ix, req)
					for _, limit := range []int{1, 4, 20} {
						req.Limit = limit
						d := placement.Place(ix, req)
						if want := strings.Fields(where(all)); where(d) != strings.Join(want[:min(limit, len(want))], " ") {
							t.Errorf("%s %v, limit %d:\n%s\nwant\n%s", verb, cl, limit, where(d), strings.Join(want[:min(limit, len(want))], " "))
						}
						if d.Fits != all.Fits && !strings.Contains(expr, "host") {
							t.Errorf("%s %v, limit %d: %d fit, want %d", verb, cl, limit, d.Fits, all.Fits)
						}
						checked += len(d.Candidates)
					}
				}
			}
		}
	}
	if checked < 5000 {
		t.Errorf("only %d candidates were compared: the test shows too little", checked)
	}
}

func TestMoreCapacityHurtsNobody(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := world(t)
		for i := range 4 {
			cl := anyClaim(t, fmt.Sprint("f", i))
			if d := place(c, placement.Request{Claim: cl}); d.OK() {
				c.Put(cl, d.Candidates[0].Choices)
			}
		}
		req := placement.Request{Claim: anyClaim(t, "x"), Span: rapid.Bool().Draw(t, "span"), Limit: 1000}
		before := place(c, req)
		if again := place(c, req); where(before) != where(again) {
			t.Fatalf("%s, then %s", where(before), where(again))
		}
		report(t, c, "zz-new", runtimeGPU("g0", "new", 2, 8), runtimeGPU("g1", "new", 2, 8), runtimeGPU("g2", "new", 2, 8))
		after := place(c, req)
		if before.OK() && !after.OK() {
			t.Fatalf("%v: %s before, then nothing: %s", req.Claim, where(before), after.Summary())
		}
		seen := map[string]bool{}
		for _, cand := range after.Candidates {
			if key := strings.Join(cand.GPUs(), ","); seen[key] {
				t.Fatalf("%s twice", key)
			} else {
				seen[key] = true
			}
		}
	})
}
