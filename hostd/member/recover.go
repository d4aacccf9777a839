package member

import (
	"fmt"
	"path/filepath"

	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/hostd/member/clusterapi"
)

// Recover makes the host of a data folder the only voter of its cluster. It is for a
// cluster that has lost its majority for ever. No hostd may run on the folder. Entries
// that only the lost hosts had are lost. The remaining hosts join again automatically as
// soon as they can reach this one, unless one of them was recovered, too. Then there are
// two clusters, and one must be removed.
func Recover(dir string) (host string, err error) {
	id, err := readIdentity(dir)
	if err != nil {
		return "", err
	}
	if id == nil {
		return "", fmt.Errorf("data folder %s: %w", dir, clusterapi.ErrNotJoined)
	}
	err = replica.Recover(replica.Config{
		ID: id.ID, Name: id.Host, Address: id.Address, Dir: filepath.Join(dir, "raft"),
	}, []replica.Server{{ID: id.ID, Address: id.Address, Voter: true}})
	if err != nil {
		return "", fmt.Errorf("cluster %s: %w", id.Cluster, err)
	}
	return id.Host, nil
}
