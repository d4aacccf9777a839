package migration

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/migrate"
)

// A GPU is lent to a VM only by the record of a migration that runs, and a far executor is
// started only for one of its two hosts.
func TestBorrows(t *testing.T) {
	s := state.New()
	put := putter(t, s)
	move := func(id string) *clusterv1.Migration {
		return &clusterv1.Migration{
			Id: id, Verb: "migrate", Object: "web", Driver: "h1",
			Machine: &clusterv1.MachineMove{Uuid: "u1", Name: "web", FromHost: "h1", ToHost: "h2", FarGpu: "h3/r", FarClaim: "vm-1"},
		}
	}
	over := put(move("m-over"))
	over.State = clusterv1.MigrationState_MIGRATION_STATE_DONE
	put(over)
	put(move("m-runs"))
	m := New(Config{Node: records{host: "h3", store: s}})
	for _, c := range []struct {
		uuid, migration, gpu, claim, borrower string
		ok, later                             bool // later: it may be so in a moment
	}{
		{"u1", "m-runs", "h3/r", "vm-1", "", true, false},
		{"u1", "m-runs", "h3/r", "vm-1", "h1", true, false},
		{"u1", "m-runs", "h3/r", "vm-1", "h2", true, false},
		{"u1", "m-runs", "h3/r", "vm-1", "h4", false, true},
		{"u1", "m-runs", "h3/other", "vm-1", "h1", false, true},
		{"u1", "m-runs", "h3/r", "vm-2", "h1", false, true},
		{"u2", "m-runs", "h3/r", "vm-1", "h1", false, false},
		{"u1", "m-over", "h3/r", "vm-1", "h1", false, false},
		{"u1", "m-none", "h3/r", "vm-1", "h1", false, true},
		{"u1", "", "h3/r", "vm-1", "h1", false, true},
	} {
		err := m.Borrows(&gpuctlv1.SiteMachine{Uuid: c.uuid, Name: "web", Migration: c.migration}, c.gpu, c.claim, c.borrower)
		if (err == nil) != c.ok || errors.Is(err, migrate.ErrUnreachable) != c.later {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// reacher is a VM's host, whose VM reaches some addresses.
type reacher struct {
	gpuctlv1connect.SiteServiceClient
	answers func([]string) ([]*gpuctlv1.Reached, error)
}

func (r reacher) Reach(_ context.Context, req *connect.Request[gpuctlv1.SiteReachRequest]) (*connect.Response[gpuctlv1.ReachResponse], error) {
	out, err := r.answers(req.Msg.GetAddresses())
	return connect.NewResponse(&gpuctlv1.ReachResponse{Reached: out}), err
}

type reaching struct {
	records
	reacher
}

func (r reaching) Site(string) (gpuctlv1connect.SiteServiceClient, error) { return r.reacher, nil }

// cluster is one of three hosts: h1 has the VM, h2 lends a GPU that is free and one that is
// not, h3 lends none.
func cluster(t *testing.T, protocol uint32) *state.Store {
	t.Helper()
	s := state.New()
	index := uint64(0)
	apply := func(c *clusterv1.Command) {
		t.Helper()
		index++
		c.Version = state.VersionOf(c)
		if res := s.Apply(index, c); res.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
			t.Fatal(res)
		}
	}
	for _, name := range []string{"h1", "h2", "h3"} {
		h := &clusterv1.Host{Name: name, Id: "id-" + name, Address: name + ":7650", LendAddress: name + ":7651", Protocol: protocol}
		var gpus []*clusterv1.GPU
		for _, g := range map[string][]string{"h1": {"own"}, "h2": {"free", "held", "bare"}, "h3": {"r"}}[name] {
			one := &clusterv1.GPU{Id: name + "/" + g, Name: g, Host: name, Present: true, Runtime: "libpocl.so.2", RuntimeKey: "pocl", Model: "L4", Health: clusterv1.Health_HEALTH_OK, Limits: &gpuctlv1.Limits{GlobalMemory: 1 << 30}}
			if g == "bare" {
				one.Runtime, one.RuntimeKey = "", ""
			}
			gpus = append(gpus, one)
		}
		if name == "h3" {
			h.LendAddress = ""
		}
		apply(&clusterv1.Command{Op: &clusterv1.Command_PutIdentity{PutIdentity: &clusterv1.PutIdentity{Identity: &clusterv1.Identity{Id: h.GetId(), Host: name, Role: clusterv1.Role_ROLE_HOST}}}})
		apply(&clusterv1.Command{Op: &clusterv1.Command_ReportHost{ReportHost: &clusterv1.ReportHost{Host: h, Gpus: gpus}}})
	}
	apply(&clusterv1.Command{Op: &clusterv1.Command_PutClaim{PutClaim: &clusterv1.PutClaim{
		Claim: &clusterv1.Claim{Id: "c", Count: 1}, Choices: []*clusterv1.Choice{{Gpu: "h2/held", Kind: clusterv1.VGPUKind_VGPU_KIND_WHOLE}},
	}}})
	return s
}

// The plan knows the GPUs that could be lent to the VM, and whether it reaches them.
func TestGPUsThatCouldBeLentToAVM(t *testing.T) {
	store := cluster(t, state.ProtocolLive)
	answers := func(addresses []string) (out []*gpuctlv1.Reached, err error) {
		for _, a := range addresses {
			one := &gpuctlv1.Reached{RttNs: 5}
			if strings.HasPrefix(a, "h1") {
				one = &gpuctlv1.Reached{Error: "no route"}
			}
			out = append(out, one)
		}
		return out, nil
	}
	say := func(f []migrate.FarFacts) string {
		var out []string
		for _, one := range f {
			out = append(out, strings.TrimSpace(fmt.Sprintf("%s %s %s", one.ID, one.Holder, one.Error)))
		}
		return strings.Join(out, "; ")
	}
	for _, c := range []struct {
		name    string
		store   *state.Store
		change  func(*migrate.VMFacts)
		answers func([]string) ([]*gpuctlv1.Reached, error)
		want    string
	}{
		{"all", store, nil, answers, "h1/own  no route; h2/free; h2/held a claim: gpuctl describe gpu h2/held"},
		{"its own", store, func(m *migrate.VMFacts) { m.GPUs = []string{"h1/own"} }, answers, "h2/free; h2/held a claim: gpuctl describe gpu h2/held"},
		{"an old gpuguest", store, func(m *migrate.VMFacts) { m.Agent.Protocol = 2 }, answers, ""},
		{"nothing computes", store, func(m *migrate.VMFacts) { m.Agent.Sessions = nil }, answers, ""},
		{"an old host", cluster(t, state.ProtocolLive-1), nil, answers, ""},
		{"no answer", store, func(m *migrate.VMFacts) { m.GPUs = []string{"h1/own", "h2/held"} }, func([]string) ([]*gpuctlv1.Reached, error) { return nil, errors.New("it hangs") }, "h2/free  it hangs"},
		{"half an answer", store, func(m *migrate.VMFacts) { m.GPUs = []string{"h1/own", "h2/held"} }, func([]string) ([]*gpuctlv1.Reached, error) { return nil, nil }, "h2/free  it does not say"},
	} {
		m := New(Config{Node: reaching{records{host: "h1", store: c.store}, reacher{answers: c.answers}}})
		facts := migrate.VMFacts{GPUs: []string{"h1/card"}, Agent: &migrate.AgentFacts{Protocol: migrate.LiveProtocol, Sessions: []migrate.SessionFacts{{ID: "s"}}}}
		if c.change != nil {
			c.change(&facts)
		}
		m.far(t.Context(), c.store.View(), &facts, migrate.LiveAuto)
		if got := say(facts.Far); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// Hosts that would not know the remote GPU get no record with one.
func TestARecordWithARemoteGPUNeedsItsProtocol(t *testing.T) {
	put := func(m *clusterv1.MachineMove) *clusterv1.Command {
		return &clusterv1.Command{Op: &clusterv1.Command_PutMigration{PutMigration: &clusterv1.PutMigration{Migration: &clusterv1.Migration{Id: "m", Machine: m}}}}
	}
	if v := state.VersionOf(put(&clusterv1.MachineMove{FarGpu: "h3/r"})); v != state.ProtocolLive {
		t.Errorf("protocol %d", v)
	}
	if v := state.VersionOf(put(&clusterv1.MachineMove{})); v != 1 {
		t.Errorf("protocol %d without one", v)
	}
}
