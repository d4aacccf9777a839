package sessions

import (
	"context"
	"slices"
	"sync"
	"testing"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	place "github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// homeCluster finds a place at home for one claim only.
type homeCluster struct {
	Cluster
	fits string

	mu   sync.Mutex
	came []string
}

func (c *homeCluster) Place(_ context.Context, r place.Request) (d place.Decision, err error) {
	if r.Claim.GetId() == c.fits {
		d.Candidates = []place.Candidate{{Choices: []*clusterv1.Choice{{Gpu: "here/mid"}}}}
	}
	return d, nil
}

func (c *homeCluster) Acquire(_ context.Context, k *clusterv1.Claim, gpus []string, _ uint64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.came = append(c.came, k.GetId()+" "+gpus[0])
	return nil
}

// The oldest of the claims that could come home needs more than this host ever has. The others
// would have stayed on other hosts' GPUs for as long as it lives.
func TestAClaimThatFitsNoGPUOfItsHostKeepsNoYoungerOneFromComingHome(t *testing.T) {
	l := newLender(t)
	l.halt()
	c := &homeCluster{fits: "younger"}
	l.wrap = func(is Cluster) Cluster {
		c.Cluster = is
		return c
	}
	l.start()
	l.host.mu.Lock()
	for at, id := range []string{"oldest", "older", "younger"} {
		l.host.claims[id] = &claim{ID: id, Count: 1, Remote: remoteAllowed, GPUs: []string{"there/huge"}, Created: int64(1 + at), Token: id}
	}
	l.host.mu.Unlock()
	testkit.Until(t, "the younger one is home", func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		return testkit.Want(slices.Contains(c.came, "younger mid"), c.came)
	})
}
