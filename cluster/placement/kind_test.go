package placement_test

import (
	"strings"
	"testing"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/cluster/placement/placementtest"
)

// kinds is a host with a GPU of each kind.
func kinds(t *testing.T) *placementtest.Cluster {
	c := placementtest.NewCluster()
	gpu := func(name, model string, kinds ...string) *clusterv1.GPU {
		return &clusterv1.GPU{
			Name: name, Model: model, Rank: 2, NumaNode: -1, Health: clusterv1.Health_HEALTH_OK, Present: true, Kinds: kinds,
			Limits: &gpuctlv1.Limits{GlobalMemory: 4 * gib},
		}
	}
	slice := gpu("slice", "s", "slice")
	slice.Profiles = []*clusterv1.Profile{{Name: "half", Memory: 2 * gib, MaxInstances: 2}}
	soft := gpu("soft", "m", "mediated")
	soft.Rank = 0
	soft.Profiles = []*clusterv1.Profile{{Name: "1of4", Memory: gib, MaxInstances: 4}}
	remote := gpu("remote", "r", "remote")
	remote.Runtime, remote.RuntimeKey = "pocl", "pocl"
	err := c.Report(&clusterv1.Host{Name: "a", Id: "id-a", Protocol: 4}, []*clusterv1.GPU{gpu("card", "p", "passthrough"), slice, remote, soft})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestMediatedGPUIsForWhoAsksForIt(t *testing.T) {
	c := kinds(t)
	for name, x := range map[string]struct {
		claim *claim
		want  string
	}{
		"a whole GPU":         {&claim{Id: "x", Count: 4}, ""},
		"an amount":           {&claim{Id: "x", MinMemory: gib, Policy: clusterv1.Policy_POLICY_CHEAPEST}, "a/remote a/slice a/card"},
		"its profile":         {&claim{Id: "x", Profile: "1of4"}, "a/soft"},
		"its kind":            {&claim{Id: "x", MinMemory: gib, Expr: `"mediated" in kinds`}, "a/soft"},
		"its kind, whole":     {&claim{Id: "x", Expr: `"mediated" in kinds`}, ""},
		"any of the kinds":    {&claim{Id: "x", MinMemory: gib, Expr: `size(kinds) > 0`}, "a/card a/slice a/remote a/soft"},
		"the cheapest":        {&claim{Id: "x", MinMemory: gib, Policy: clusterv1.Policy_POLICY_CHEAPEST, Expr: `size(kinds) > 0`}, "a/card a/slice a/remote a/soft"},
		"all but passthrough": {&claim{Id: "x", MinMemory: gib, Expr: `!("passthrough" in kinds)`}, "a/slice a/remote a/soft"},
	} {
		d := place(c, placement.Request{Claim: x.claim})
		if got := where(d); got != x.want {
			t.Errorf("%s: %q, want %q", name, got, x.want)
		}
	}
}

func TestKindsAreWeighedWithReasons(t *testing.T) {
	c := kinds(t)
	d := place(c, placement.Request{Claim: &claim{Id: "x", MinMemory: gib, Expr: `size(kinds) > 0`}})
	for i, want := range []string{"passthrough: ", "slice: ", "remote: ", "mediated: "} {
		if i >= len(d.Candidates) || !strings.Contains(strings.Join(d.Candidates[i].Because, "; "), want) {
			t.Errorf("place %d is not because of %q: %+v", i, want, d.Candidates)
		}
	}
	choice := d.Candidates[3].Choices[0]
	if choice.GetKind() != clusterv1.VGPUKind_VGPU_KIND_MEDIATED || choice.GetProfile() != "1of4" || choice.GetMemory() != gib {
		t.Errorf("choice %v", choice)
	}
	if r := c.Put(&claim{Id: "x", MinMemory: gib}, []*clusterv1.Choice{choice}); r.GetOutcome() != okay {
		t.Fatal(r)
	}
	if v := c.Store.View().VGPU("a/soft/1of4.0"); v.GetKind() != clusterv1.VGPUKind_VGPU_KIND_MEDIATED {
		t.Errorf("VGPU %v", v)
	}
	d = place(c, placement.Request{Claim: &claim{Id: "y", MinMemory: gib, Host: "a"}})
	said := false
	for r := range d.Rejected() {
		for _, why := range r.GetReasons() {
			said = said || r.GetGpu() == "a/soft" && why.GetCode() == "kind" && strings.Contains(why.GetMessage(), "--profile 1of4")
		}
	}
	if !said {
		t.Error("nobody says why the mediated GPU was left out")
	}
}

// A GPU of a service VM is for sessions of other hosts, and for VMs.
func TestGPUOfAServiceVMIsForOthers(t *testing.T) {
	c := placementtest.NewCluster()
	of := &clusterv1.GPU{
		Name: "vm-svc", Model: "A10", NumaNode: -1, Health: clusterv1.Health_HEALTH_OK, Present: true, Kinds: []string{"remote"}, Runtime: "service-vm", RuntimeKey: "vm",
		Limits: &gpuctlv1.Limits{GlobalMemory: 4 * gib}, Server: "svc", LendAddresses: []string{"192.0.2.7:7651"},
	}
	for _, h := range []string{"a", "b"} {
		var gpus []*clusterv1.GPU
		if h == "a" {
			gpus = append(gpus, of)
		}
		if err := c.Report(&clusterv1.Host{Name: h, Id: "id-" + h, Address: h + ":1", LendAddress: h + ":2", Protocol: 6}, gpus); err != nil {
			t.Fatal(err)
		}
	}
	remote := clusterv1.Remote_REMOTE_ALLOWED
	for name, x := range map[string]struct {
		claim *claim
		want  string
	}{
		"a session of another host": {&claim{Id: "x", MinMemory: gib, Home: "b", Remote: remote}, "a/vm-svc"},
		"a session of its host":     {&claim{Id: "x", MinMemory: gib, Home: "a", Remote: remote}, ""},
		"a claim of its host":       {&claim{Id: "x", MinMemory: gib, Host: "a"}, ""},
		"a claim of nobody":         {&claim{Id: "x"}, ""},
		"a VM":                      {&claim{Id: "x", MinMemory: gib, Host: "a", Labels: map[string]string{placement.LabelVM: "u"}}, "a/vm-svc"},
		"a VM, whole":               {&claim{Id: "x", Labels: map[string]string{placement.LabelVM: "u"}}, "a/vm-svc"},
	} {
		d := place(c, placement.Request{Claim: x.claim})
		if got := where(d); got != x.want {
			t.Errorf("%s: %q, want %q", name, got, x.want)
		}
		said := false
		for r := range d.Rejected() {
			for _, why := range r.GetReasons() {
				said = said || why.GetCode() == "service"
			}
		}
		if said != (x.want == "") {
			t.Errorf("%s: it says why: %v", name, said)
		}
	}
}
