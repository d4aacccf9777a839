package migration

import (
	"context"
	"fmt"
	"slices"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/migrate"
)

const readTimeout = 5 * time.Second // for Read

// Log is the cluster's log, as this host knows it.
type Log interface {
	HostName() string
	View() *state.View
	// CaughtUp reports whether View has what this host's log had when hostd was started.
	CaughtUp() bool
	// Read returns the state with everything that is committed, or an error if that is
	// unknown now.
	Read(ctx context.Context) (*state.View, error)
}

// Records answers from the records of migrations in the log. It drives none, so the parts of
// a host that a Manager needs can use it.
type Records struct{ log Log }

// NewRecords returns the records in a log.
func NewRecords(log Log) Records { return Records{log} }

// committed returns the state with everything that is committed, or an error if that does
// not come soon.
func (rs Records) committed(ctx context.Context) (*state.View, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	return rs.log.Read(ctx)
}

// Pending reports whether a migration has not ended, or whether that is unknown now. A
// host that was just started knows no migrations until it has received the log.
func (rs Records) Pending(ctx context.Context, id string) bool {
	if v := rs.log.View(); v != nil {
		if r := v.Migration(id); r != nil {
			return !over(r)
		}
	}
	v, err := rs.committed(ctx)
	if err != nil {
		return true
	}
	r := v.Migration(id)
	return r != nil && !over(r)
}

// Moving returns the migration of a VM that is not over, as far as this host knows, or "".
func (rs Records) Moving(ctx context.Context, uuid string) string {
	return rs.moving(ctx, rs.log.View(), uuid)
}

// moving returns the migration of a VM that is not over in a state, or "". This host may learn of the end of one later
// than the client that was told of it, so what runs in the state applied here is looked for in what is committed.
func (rs Records) moving(ctx context.Context, v *state.View, uuid string) string {
	if v == nil {
		return ""
	}
	id := runs(v, uuid)
	if id == "" {
		return ""
	}
	v, err := rs.committed(ctx)
	if err != nil {
		return id
	}
	return runs(v, uuid)
}

// runs returns the migration of a VM that is not over in a state; empty: none.
func runs(v *state.View, uuid string) string {
	for r := range v.Migrations() {
		if r.GetMachine().GetUuid() == uuid && !over(r) {
			return r.GetId()
		}
	}
	return ""
}

// Ended reports whether a migration has ended, and whether this host knows it. A host that
// was just started knows none yet, and takes none for forgotten.
func (rs Records) Ended(id string) (ended, known bool) {
	caught := rs.log.CaughtUp()
	v := rs.log.View()
	if v == nil || !caught {
		return false, true
	}
	r := v.Migration(id)
	return r != nil && over(r), r != nil
}

// Remnant is a definition of a VM that a migration has left.
type Remnant struct {
	UUID, Home string // the VM, and the host to which it belongs
	Token      uint64 // of the migration
}

// Left returns what the last migrations of VMs may have left on this host: away are the VMs, by UUID, that belong to
// another host since one that took part here has ended, and that host. This host should have nothing of them.
// defined are definitions that it could not be told to remove.
func (rs Records) Left(ctx context.Context) (away map[string]string, defined []Remnant) {
	self := rs.log.HostName()
	away = map[string]string{}
	for uuid, r := range rs.last(ctx) {
		m, home := r.GetMachine(), ""
		switch r.GetState() {
		case clusterv1.MigrationState_MIGRATION_STATE_DONE:
			home = m.GetToHost()
		case clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK:
			home = m.GetFromHost()
		default:
		}
		if home == "" || home == self {
			continue
		}
		if m.GetFromHost() == self || m.GetToHost() == self {
			away[uuid] = home
		}
		if slices.Contains(m.GetDefinedOn(), self) {
			defined = append(defined, Remnant{uuid, home, r.GetToken()})
		}
	}
	return away, defined
}

// last returns the last migration of each VM, by UUID, or one that is not over; none if what is
// committed is unknown now.
func (rs Records) last(ctx context.Context) map[string]*clusterv1.Migration {
	v, err := rs.committed(ctx)
	if err != nil {
		return nil
	}
	last := map[string]*clusterv1.Migration{}
	for r := range v.Migrations() {
		uuid := r.GetMachine().GetUuid()
		// Compare tokens, which grow with the log. The clocks of hosts may differ.
		if now := last[uuid]; uuid != "" && (now == nil || !over(r) || over(now) && r.GetToken() > now.GetToken()) {
			last[uuid] = r
		}
	}
	return last
}

// Moves reports whether a migration of a VM has not ended, or whether that is unknown now.
func (rs Records) Moves(ctx context.Context, uuid string) bool {
	v, err := rs.committed(ctx)
	if err != nil {
		return true
	}
	for r := range v.Migrations() {
		if r.GetMachine().GetUuid() == uuid && !over(r) {
			return true
		}
	}
	return false
}

// MovedTo returns where the last migration of a VM has taken it, as far as is known here;
// empty: none, or that one is not done.
func (rs Records) MovedTo(uuid string) string {
	v := rs.log.View()
	if v == nil {
		return ""
	}
	var last *clusterv1.Migration
	for r := range v.Migrations() {
		// Compare tokens, which grow with the log. The clocks of hosts may differ.
		if r.GetMachine().GetUuid() == uuid && (last == nil || r.GetToken() > last.GetToken()) {
			last = r
		}
	}
	if last.GetState() != clusterv1.MigrationState_MIGRATION_STATE_DONE {
		return ""
	}
	return last.GetMachine().GetToHost()
}

// running returns the record of a VM's migration, which has not ended.
func (rs Records) running(machine *gpuctlv1.SiteMachine) (*clusterv1.Migration, error) {
	var r *clusterv1.Migration
	if v := rs.log.View(); v != nil {
		r = v.Migration(machine.GetMigration())
	}
	switch {
	case r == nil:
		return nil, fmt.Errorf("%w: migration %q of VM %s is not known on host %s yet", migrate.ErrUnreachable, machine.GetMigration(), machine.GetName(), rs.log.HostName())
	case over(r) || r.GetMachine().GetUuid() != machine.GetUuid():
		return nil, fmt.Errorf("migration %s of VM %s: it does not run, or is another VM's", r.GetId(), machine.GetName())
	}
	return r, nil
}

// Party returns an error if another host must not exchange states of a VM with this one:
// the record of a running migration must name both hosts.
func (rs Records) Party(machine *gpuctlv1.SiteMachine, other string) error {
	r, err := rs.running(machine)
	if err != nil {
		return err
	}
	self, move := rs.log.HostName(), r.GetMachine()
	if self == move.GetFromHost() && other == move.GetToHost() || other == move.GetFromHost() && self == move.GetToHost() {
		return nil
	}
	// The driver may have changed the destination a moment ago.
	return fmt.Errorf("%w: migration %s of VM %s is not between hosts %s and %s, as far as is known on %s", migrate.ErrUnreachable, r.GetId(), machine.GetName(), self, other, self)
}

// Borrows returns an error unless the record of a running migration of the VM names this GPU
// and claim for its applications, and borrower, if it is not empty, is one of its hosts.
func (rs Records) Borrows(machine *gpuctlv1.SiteMachine, gpu, claim, borrower string) error {
	r, err := rs.running(machine)
	if err != nil {
		return err
	}
	self, move := rs.log.HostName(), r.GetMachine()
	if move.GetFarGpu() != gpu || move.GetFarClaim() != claim || borrower != "" && borrower != move.GetFromHost() && borrower != move.GetToHost() {
		// The driver may have changed the destination a moment ago.
		return fmt.Errorf("%w: migration %s of VM %s does not borrow %s by claim %s for host %s, as far as is known on %s", migrate.ErrUnreachable, r.GetId(), machine.GetName(), gpu, claim, borrower, self)
	}
	return nil
}

// Over reports whether a migration has ended, and whether the VM belongs to this host then.
// It is not over while that is unknown. Of one that nobody knows any more, what this host
// has stays here.
func (rs Records) Over(ctx context.Context, id string) (over, here bool) {
	if rs.Pending(ctx, id) {
		return false, false
	}
	v := rs.log.View()
	if v == nil {
		return false, false
	}
	r := v.Migration(id)
	if r == nil {
		if v, err := rs.committed(ctx); err != nil {
			return false, false
		} else if r = v.Migration(id); r == nil {
			return true, true
		}
	}
	self := rs.log.HostName()
	switch r.GetState() {
	case clusterv1.MigrationState_MIGRATION_STATE_DONE:
		return true, r.GetMachine().GetToHost() == self
	case clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK:
		return true, r.GetMachine().GetFromHost() == self
	default:
		return true, false
	}
}

func over(r *clusterv1.Migration) bool {
	switch r.GetState() {
	case clusterv1.MigrationState_MIGRATION_STATE_DONE, clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK, clusterv1.MigrationState_MIGRATION_STATE_FAILED:
		return true
	default:
		return false
	}
}
