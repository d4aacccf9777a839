package migration

import (
	"context"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// Over reports whether a migration has ended, and whether the VM belongs to this host then.
// It is not over while that is unknown. Of one that nobody knows any more, what this host
// has stays here.
func (m *Manager) Over(ctx context.Context, id string) (over, here bool) {
	if m.Pending(ctx, id) {
		return false, false
	}
	v := m.Node.View()
	if v == nil {
		return false, false
	}
	r := v.Migration(id)
	if r == nil {
		ctx, cancel := context.WithTimeout(ctx, readTimeout)
		defer cancel()
		if v, err := m.Node.Read(ctx); err != nil {
			return false, false
		} else if r = v.Migration(id); r == nil {
			return true, true
		}
	}
	self := m.Node.HostName()
	switch r.GetState() {
	case clusterv1.MigrationState_MIGRATION_STATE_DONE:
		return true, r.GetMachine().GetToHost() == self
	case clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK:
		return true, r.GetMachine().GetFromHost() == self
	default:
		return true, false
	}
}
