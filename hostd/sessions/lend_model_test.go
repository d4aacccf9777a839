package sessions

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"connectrpc.com/connect"
	"pgregory.net/rapid"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/member/clusterapi"
)

// lendModel is a host that lends, and what the test knows of its leases.
type lendModel struct {
	*fixture

	t      *rapid.T
	n      int
	claims map[string]bool                   // of the other host
	leases map[string]*clusterv1.LendRequest // that were granted
	ours   map[string]*gpuctlv1.CreateClaimResponse
	stuck  atomic.Bool // no far executor ends
}

func (m *lendModel) apply(c *clusterv1.Command) *clusterv1.Result {
	res, err := m.node.Log().Apply(context.Background(), c)
	if err != nil {
		m.t.Fatal(err)
	}
	return res
}

func (m *lendModel) name(prefix string) string {
	m.n++
	return fmt.Sprint(prefix, m.n)
}

func (m *lendModel) choice(memory uint64, gpu string) []*clusterv1.Choice {
	m.host.Cluster.Known(context.Background(), []string{gpu})
	return []*clusterv1.Choice{{Gpu: "here/" + gpu, Memory: memory}}
}

// token returns the token of a claim's newest assignment of a GPU of this host.
func (m *lendModel) token(claim, gpu string) (token uint64) {
	for as := range m.node.View().AssignmentsOfClaim(claim) {
		if as.GetGpu() == "here/"+gpu {
			token = max(token, as.GetToken())
		}
	}
	return token
}

// check fails where a GPU has two owners, judged by what really runs: far executors and
// sessions.
func (m *lendModel) check(capacity map[string]uint64) {
	m.t.Helper()
	type use struct {
		amount uint64 // 0: all of it
		whole  bool
	}
	users := map[string]map[string]use{}
	add := func(gpu, claim string, amount uint64) {
		if users[gpu] == nil {
			users[gpu] = map[string]use{}
		}
		users[gpu][claim] = use{max(amount, users[gpu][claim].amount), amount == 0}
	}
	for id, far := range m.guest.Leases() {
		r := m.leases[id]
		if r == nil {
			m.t.Fatalf("far executor %s has no lease", id)
		}
		for _, g := range r.GetGpus() {
			add(strings.TrimPrefix(g, "here/"), r.GetClaim(), far.GetMemory())
		}
	}
	owners := m.owners()
	for at, ids := range m.guest.Holders() {
		for _, gpu := range strings.Split(at, ",") {
			for _, o := range owners[gpu] {
				for _, id := range ids {
					if slices.Contains(o.GetSessions(), id) {
						add(gpu, o.GetClaim(), o.GetMemory())
					}
				}
			}
		}
	}
	for gpu, by := range users {
		sum := uint64(0)
		for claim, u := range by {
			if u.whole && len(by) > 1 {
				m.t.Fatalf("%s is used by %v, and %s has all of it", gpu, by, claim)
			}
			sum += u.amount
		}
		if sum > capacity[gpu] {
			m.t.Fatalf("%s: %d bytes of %d are used by %v", gpu, sum, capacity[gpu], by)
		}
	}
}

// outlives fails where a far executor runs for an assignment that there is not, although
// the host has looked.
func (m *lendModel) outlives() {
	m.t.Helper()
	for id := range m.guest.Leases() {
		r := m.leases[id]
		for _, g := range r.GetGpus() {
			if _, err := m.node.Assigned(context.Background(), r.GetClaim(), there.ID, []string{strings.TrimPrefix(g, "here/")}, r.GetToken(), true); err != nil {
				m.t.Fatalf("lease %s outlives its assignment: %v", id, err)
			}
		}
	}
}

// claimHere makes a claim of this host, and a session that uses it.
func (m *lendModel) claimHere(t *rapid.T, gpu string, memory uint64) {
	res, err := m.CreateClaim(context.Background(), connect.NewRequest(&gpuctlv1.CreateClaimRequest{Expr: "id == '" + gpu + "'", MinMemory: memory}))
	// After a restart the log may give away what a lease still has. This host knows.
	if err != nil && connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Fatal(err)
	}
	if err != nil || res.Msg.GetClaim() == nil {
		return
	}
	m.ours[res.Msg.GetClaim().GetId()] = res.Msg
	if _, err := m.guest.Begin(res.Msg.GetToken(), 1, "x", 1<<20); err != nil {
		t.Fatal(err)
	}
	if err := m.host.Resync(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// known are the ids of all leases that were asked for.
func (m *lendModel) known() map[string]bool {
	ids := map[string]bool{}
	for id := range m.leases {
		ids[id] = true
	}
	return ids
}

// Whatever is assigned, released, lent, given back, killed and restarted in whatever order: a
// GPU never has two owners, and a lease never outlives its assignment.
func TestNoOrderOfLeasesGivesAGPUTwoOwners(t *testing.T) {
	dir, n := t.TempDir(), 0
	capacity := map[string]uint64{"big": 8 << 30, "mid": 4 << 30}
	gpus, amounts := rapid.SampledFrom([]string{"big", "mid"}), rapid.SampledFrom([]uint64{0, 1 << 30, 3 << 30})
	rapid.Check(t, func(t *rapid.T) {
		n++
		f := newFixture(t, filepath.Join(dir, fmt.Sprint(n)+".json"))
		defer f.close()
		m := &lendModel{fixture: f, t: t, claims: map[string]bool{}, leases: map[string]*clusterv1.LendRequest{}, ours: map[string]*gpuctlv1.CreateClaimResponse{}}
		f.guest.Step = func(_, step string) error {
			if step == "end" && m.stuck.Load() {
				return errors.New("its driver does not let go of it")
			}
			return nil
		}
		t.Repeat(map[string]func(*rapid.T){
			"assign": func(t *rapid.T) {
				id, memory := m.name("r"), amounts.Draw(t, "memory")
				res := m.apply(&clusterv1.Command{Op: &clusterv1.Command_PutClaim{PutClaim: &clusterv1.PutClaim{
					Claim:   &clusterv1.Claim{Id: id, Count: 1, MinMemory: memory, Labels: map[string]string{"gpuctl.managed-by": there.ID}},
					Choices: m.choice(memory, gpus.Draw(t, "gpu")),
				}}})
				if len(res.GetAssignments()) > 0 {
					m.claims[id] = true
				}
			},
			"assign again": func(t *rapid.T) {
				m.apply(&clusterv1.Command{Op: &clusterv1.Command_Assign{Assign: &clusterv1.Assign{
					Claim: pick(t, m.claims, "claim"), Choices: m.choice(amounts.Draw(t, "memory"), gpus.Draw(t, "gpu")),
				}}})
			},
			"release": func(t *rapid.T) {
				m.apply(&clusterv1.Command{Op: &clusterv1.Command_ReleaseAssignments{ReleaseAssignments: &clusterv1.ReleaseAssignments{Claim: pick(t, m.claims, "claim")}}})
			},
			"delete": func(t *rapid.T) {
				m.apply(&clusterv1.Command{Op: &clusterv1.Command_DeleteClaim{DeleteClaim: &clusterv1.DeleteClaim{Claim: pick(t, m.claims, "claim")}}})
			},
			"lend": func(t *rapid.T) {
				id, claim, gpu := m.name("l"), pick(t, m.claims, "claim"), gpus.Draw(t, "gpu")
				token := m.token(claim, gpu) - rapid.SampledFrom([]uint64{0, 0, 0, 1}).Draw(t, "late")
				r := request(id, claim, token, gpu)
				m.leases[id] = r // also where it fails: then nothing may be left
				_, _ = f.host.Lend(context.Background(), there, r)
			},
			"lend again": func(t *rapid.T) {
				_, _ = f.host.Lend(context.Background(), there, m.leases[pick(t, m.known(), "lease")])
			},
			"give back": func(t *rapid.T) {
				_ = f.host.EndLease(context.Background(), clusterapi.Self{Host: there.Host, ID: there.ID}, pick(t, m.known(), "lease"))
			},
			"kill": func(t *rapid.T) {
				ids := map[string]bool{}
				for id := range m.guest.Leases() {
					ids[id] = true
				}
				m.guest.KillLease(pick(t, ids, "lease"))
			},
			"claim": func(t *rapid.T) { m.claimHere(t, gpus.Draw(t, "gpu"), amounts.Draw(t, "memory")) },
			"end": func(t *rapid.T) {
				ids := map[string]bool{}
				for _, all := range m.guest.Holders() {
					for _, id := range all {
						ids[id] = true
					}
				}
				f.guest.End(pick(t, ids, "session"))
			},
			"release ours": func(t *rapid.T) {
				ids := map[string]bool{}
				for id := range m.ours {
					ids[id] = true
				}
				id := pick(t, ids, "claim")
				if _, err := f.ReleaseClaim(context.Background(), connect.NewRequest(&gpuctlv1.ReleaseClaimRequest{Claim: id})); err != nil {
					t.Fatal(err)
				}
				delete(m.ours, id)
			},
			"stick": func(*rapid.T) { m.stuck.Store(!m.stuck.Load()) },
			"restart": func(*rapid.T) { // the log of a cluster of one is in memory: it comes back empty
				f.halt()
				f.start()
			},
			"look": func(*rapid.T) {
				f.host.checkLent(context.Background())
				if !m.stuck.Load() {
					m.outlives()
				}
			},
			"": func(*rapid.T) { m.check(capacity) },
		})
	})
}
