package placementtest

import (
	"fmt"
	"math/rand/v2"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
)

// Model is a model of GPUs in a synthetic inventory.
type Model struct {
	Name   string
	Rank   uint32
	Memory uint64 // bytes
	Units  uint32
}

// Models returns the models of a synthetic inventory, sorted by rank.
func Models() []Model {
	const gib = 1 << 30
	return []Model{
		{"T4", 10, 16 * gib, 40},
		{"V100", 20, 32 * gib, 80},
		{"A10", 30, 24 * gib, 72},
		{"A100", 40, 80 * gib, 108},
		{"L40S", 50, 48 * gib, 142},
		{"H100", 60, 80 * gib, 132},
	}
}

// Cluster is a state, with the index of its last log entry.
type Cluster struct {
	Store *state.Store
	index uint64
}

// Apply applies a command as the next entry.
func (c *Cluster) Apply(cmd *clusterv1.Command) *clusterv1.Result {
	c.index++
	cmd.Version = 1
	return c.Store.Apply(c.index, cmd)
}

// NewCluster makes an empty state.
func NewCluster() *Cluster { return &Cluster{Store: state.New()} }

// Report reports a host with its GPUs.
func (c *Cluster) Report(h *clusterv1.Host, gpus []*clusterv1.GPU) error {
	r := c.Apply(&clusterv1.Command{Op: &clusterv1.Command_ReportHost{ReportHost: &clusterv1.ReportHost{Host: h, Gpus: gpus}}})
	if r.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
		return fmt.Errorf("host %s: %s: %s", h.GetName(), r.GetOutcome(), r.GetMessage())
	}
	return nil
}

// Put makes a claim and binds it.
func (c *Cluster) Put(claim *clusterv1.Claim, choices []*clusterv1.Choice) *clusterv1.Result {
	return c.Apply(&clusterv1.Command{Op: &clusterv1.Command_PutClaim{PutClaim: &clusterv1.PutClaim{Claim: claim, Choices: choices}}})
}

// Delete deletes a claim, and confirms in its hosts' names that its assignments are gone.
func (c *Cluster) Delete(claim string) {
	v := c.Store.View()
	gone := map[string][]*clusterv1.Confirmation{}
	var hosts []string
	for a := range v.AssignmentsOfClaim(claim) {
		if gone[a.GetHost()] == nil {
			hosts = append(hosts, a.GetHost())
		}
		gone[a.GetHost()] = append(gone[a.GetHost()], &clusterv1.Confirmation{Assignment: a.GetId(), Token: a.GetToken(), Gone: true})
	}
	c.Apply(&clusterv1.Command{Op: &clusterv1.Command_DeleteClaim{DeleteClaim: &clusterv1.DeleteClaim{Claim: claim}}})
	for _, h := range hosts {
		c.Apply(&clusterv1.Command{Op: &clusterv1.Command_ConfirmAssignments{
			ConfirmAssignments: &clusterv1.ConfirmAssignments{Host: h, Confirmations: gone[h]},
		}})
	}
}

// HostName returns the name of a host in a synthetic inventory.
func HostName(n int) string { return fmt.Sprintf("n%05d", n) }

// Synthetic makes a cluster of hosts with the same number of GPUs each. Their models are
// mixed over the hosts. busy is the part of the GPUs in use, half of them as a whole. The
// same seed makes the same cluster.
func Synthetic(hosts, gpus int, busy float64, seed uint64) (*Cluster, error) {
	rng := rand.New(rand.NewPCG(seed, 1)) //nolint:gosec // repeatable
	c := NewCluster()
	models := Models()
	limits := make([]*gpuctlv1.Limits, len(models))
	for i, m := range models {
		limits[i] = &gpuctlv1.Limits{
			GlobalMemory: m.Memory, MaxAlloc: m.Memory / 4, LocalMemory: 48 << 10, MaxWorkGroupSize: 1024,
			ComputeUnits: m.Units, ClockMhz: 1500, Version: "OpenCL 3.0", Fp64: true, Images: true, Extensions: []string{"cl_khr_fp64"},
		}
	}
	for n := range hosts {
		name := HostName(n)
		kind := rng.IntN(len(models))
		h := &clusterv1.Host{
			Name: name, Id: "id-" + name, Address: fmt.Sprintf("10.%d.%d.%d:7400", n>>16, n>>8&255, n&255), Version: "1.0", Protocol: 1,
			Nics: []*clusterv1.NIC{{Name: "eth0", Speed: []uint64{1e9, 10e9, 25e9, 100e9}[rng.IntN(4)], NumaNode: int32(rng.IntN(2))}},
			Cpus: 64, Memory: 512 << 30, NumaNodes: 2,
		}
		var of []*clusterv1.GPU
		for i := range gpus {
			m := models[kind]
			g := &clusterv1.GPU{
				Name: fmt.Sprintf("0000:%02x:00.0", 0x10+i), Model: m.Name, Vendor: "NVIDIA", Type: "gpu",
				Limits: limits[kind], Runtime: "nvidia", RuntimeKey: "nvidia", Driver: "580.65", Rank: m.Rank, Present: true,
				PciAddress: fmt.Sprintf("0000:%02x:00.0", 0x10+i), NumaNode: int32(i * 2 / gpus), Health: clusterv1.Health_HEALTH_OK,
				IsolationGroup: fmt.Sprint(i),
			}
			switch rng.IntN(100) {
			case 0:
				g.Health, g.HealthReason = clusterv1.Health_HEALTH_FAILED, "uncorrectable memory errors"
			case 1:
				g.Health, g.HealthReason = clusterv1.Health_HEALTH_DEGRADED, "throttled"
			}
			of = append(of, g)
		}
		if err := c.Report(h, of); err != nil {
			return nil, err
		}
	}
	held := 0
	for g := range c.Store.View().GPUs() {
		if g.GetHealth() == clusterv1.Health_HEALTH_FAILED || rng.Float64() >= busy {
			continue
		}
		claim := &clusterv1.Claim{Id: fmt.Sprintf("c%d", held), Holder: "somebody"}
		choice := &clusterv1.Choice{Gpu: g.GetId()}
		if rng.IntN(2) == 0 {
			choice.Memory = g.GetLimits().GetGlobalMemory() / uint64(2+rng.IntN(3))
			claim.MinMemory = choice.Memory
		}
		if r := c.Put(claim, []*clusterv1.Choice{choice}); r.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
			return nil, fmt.Errorf("claim %s: %s: %s", claim.GetId(), r.GetOutcome(), r.GetMessage())
		}
		held++
	}
	return c, nil
}
