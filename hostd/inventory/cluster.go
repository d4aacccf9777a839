package inventory

import (
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// OfCluster converts a GPU of the cluster's inventory. Its id is that in the cluster.
func OfCluster(g *clusterv1.GPU) *gpuctlv1.GPU {
	if g == nil {
		return nil
	}
	limits := &gpuctlv1.Limits{}
	if g.GetLimits() != nil {
		limits = proto.CloneOf(g.GetLimits())
	}
	return &gpuctlv1.GPU{
		Id: g.GetId(), Model: g.GetModel(), Vendor: g.GetVendor(), Type: g.GetType(), RuntimeName: g.GetRuntime(), Platform: g.GetPlatform(),
		Driver: g.GetDriver(), Uuid: g.GetUuid(), PciAddress: g.GetPciAddress(), Limits: limits, Rank: g.GetRank(),
		Free: g.GetFree(), FreeMemory: g.GetFreeMemory(),
	}
}
