package state

import (
	"fmt"
	"iter"
	"slices"

	"github.com/hashicorp/go-memdb"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// View is the state as of one entry. It never changes, costs nothing to keep,
// and may be read from several goroutines. The objects that it returns are
// shared: nobody may change them.
type View struct {
	reader
	meta
	store *Store
	epoch uint64 // how often the store has published
	past  *past
}

// meta is what there is one of.
type meta struct {
	index       uint64
	clusterID   string
	assignments uint64 // counter of assignment ids
	protocol    uint32
	ca          []byte
	events      int // kept
	answers     int // kept, of recent commands
	ended       int // migrations kept
	// over are GPUs of which more is held than there is, because their host
	// reported less than before. Never changed in place.
	over map[string]bool
}

// Index of the last entry applied.
func (v *View) Index() uint64 { return v.meta.index }

// ClusterID is empty until InitCluster.
func (v *View) ClusterID() string { return v.clusterID }

// Protocol is the lowest command version that all hosts apply; that of this
// build while there are none.
func (v *View) Protocol() uint32 {
	if v.meta.protocol == 0 {
		return Protocol
	}
	return v.meta.protocol
}

// CACertificate of the cluster, DER. Shared: read only.
func (v *View) CACertificate() []byte { return v.ca }

// Changed returns a channel that is closed at the first change after this
// view of any object of the kinds, or of anything if there are none.
func (v *View) Changed(kinds ...clusterv1.Kind) <-chan struct{} {
	return v.store.changed(v.epoch, maskOf(kinds))
}

// reader reads one transaction. Reading one that does not write is safe from
// several goroutines: every read makes its own iterator over immutable trees.
type reader struct{ txn *memdb.Txn }

// schemaError is for calls that name a table or index which does not exist: a
// mistake of this package that no input can cause.
func schemaError(err error) {
	panic(fmt.Sprintf("state: %v", err))
}

func first[T any](r reader, table, index, key string) *T {
	if key == "" {
		return nil
	}
	raw, err := r.txn.First(table, index, key)
	if err != nil {
		schemaError(err)
	}
	x, _ := raw.(*T)
	return x
}

func scan[T any](r reader, table, index, key string) iter.Seq[*T] {
	return func(yield func(*T) bool) {
		it, err := r.txn.Get(table, index, key)
		if err != nil {
			schemaError(err)
		}
		for raw := it.Next(); raw != nil; raw = it.Next() {
			if x, ok := raw.(*T); ok && !yield(x) {
				return
			}
		}
	}
}

func all[T any](r reader, table string) iter.Seq[*T] { return scan[T](r, table, byID+prefix, "") }

// Host of that name; nil if there is none, as for all kinds.
func (r reader) Host(name string) *clusterv1.Host {
	return first[clusterv1.Host](r, tableHosts, byID, name)
}

// HostByID returns the host with that Raft server id.
func (r reader) HostByID(id string) *clusterv1.Host {
	return first[clusterv1.Host](r, tableHosts, byHostID, id)
}

// HostByAddress returns the host that is reached at an address.
func (r reader) HostByAddress(address string) *clusterv1.Host {
	return first[clusterv1.Host](r, tableHosts, byAddress, address)
}

// GPU with that id.
func (r reader) GPU(id string) *clusterv1.GPU { return first[clusterv1.GPU](r, tableGPUs, byID, id) }

// Model of that name.
func (r reader) Model(name string) *clusterv1.Model {
	return first[clusterv1.Model](r, tableModels, byID, name)
}

// VGPU with that id.
func (r reader) VGPU(id string) *clusterv1.VGPU {
	return first[clusterv1.VGPU](r, tableVGPUs, byID, id)
}

// Claim with that id.
func (r reader) Claim(id string) *clusterv1.Claim {
	return first[clusterv1.Claim](r, tableClaims, byID, id)
}

// Assignment with that id.
func (r reader) Assignment(id string) *clusterv1.Assignment {
	return first[clusterv1.Assignment](r, tableAssignments, byID, id)
}

// Session with that id.
func (r reader) Session(id string) *clusterv1.Session {
	return first[clusterv1.Session](r, tableSessions, byID, id)
}

// Migration with that id.
func (r reader) Migration(id string) *clusterv1.Migration {
	return first[clusterv1.Migration](r, tableMigrations, byID, id)
}

// Reservation with that id.
func (r reader) Reservation(id string) *clusterv1.Reservation {
	return first[clusterv1.Reservation](r, tableReservations, byID, id)
}

func (r reader) recents() iter.Seq[*clusterv1.RecentCommand] {
	return scan[clusterv1.RecentCommand](r, tableRecents, byIndex+prefix, "")
}

// Identity with that id.
func (r reader) Identity(id string) *clusterv1.Identity {
	return first[clusterv1.Identity](r, tableIdentities, byID, id)
}

// JoinToken with that id.
func (r reader) JoinToken(id string) *clusterv1.JoinToken {
	return first[clusterv1.JoinToken](r, tableJoinTokens, byID, id)
}

// Hosts by name.
func (r reader) Hosts() iter.Seq[*clusterv1.Host] { return all[clusterv1.Host](r, tableHosts) }

// GPUs by id.
func (r reader) GPUs() iter.Seq[*clusterv1.GPU] { return all[clusterv1.GPU](r, tableGPUs) }

// Models by name.
func (r reader) Models() iter.Seq[*clusterv1.Model] { return all[clusterv1.Model](r, tableModels) }

// VGPUs by id.
func (r reader) VGPUs() iter.Seq[*clusterv1.VGPU] { return all[clusterv1.VGPU](r, tableVGPUs) }

// Claims by id.
func (r reader) Claims() iter.Seq[*clusterv1.Claim] { return all[clusterv1.Claim](r, tableClaims) }

// Assignments by id.
func (r reader) Assignments() iter.Seq[*clusterv1.Assignment] {
	return all[clusterv1.Assignment](r, tableAssignments)
}

// Sessions by id.
func (r reader) Sessions() iter.Seq[*clusterv1.Session] {
	return all[clusterv1.Session](r, tableSessions)
}

// Migrations by id.
func (r reader) Migrations() iter.Seq[*clusterv1.Migration] {
	return all[clusterv1.Migration](r, tableMigrations)
}

// Reservations by id.
func (r reader) Reservations() iter.Seq[*clusterv1.Reservation] {
	return all[clusterv1.Reservation](r, tableReservations)
}

// Identities by id.
func (r reader) Identities() iter.Seq[*clusterv1.Identity] {
	return all[clusterv1.Identity](r, tableIdentities)
}

// JoinTokens by id.
func (r reader) JoinTokens() iter.Seq[*clusterv1.JoinToken] {
	return all[clusterv1.JoinToken](r, tableJoinTokens)
}

// GPUsOfHost by id.
func (r reader) GPUsOfHost(host string) iter.Seq[*clusterv1.GPU] {
	return scan[clusterv1.GPU](r, tableGPUs, byID+prefix, host+"/")
}

// GPUsOfModel by id.
func (r reader) GPUsOfModel(model string) iter.Seq[*clusterv1.GPU] {
	return scan[clusterv1.GPU](r, tableGPUs, byModel, model)
}

// VGPUsOfGPU by id.
func (r reader) VGPUsOfGPU(gpu string) iter.Seq[*clusterv1.VGPU] {
	return scan[clusterv1.VGPU](r, tableVGPUs, byID+prefix, gpu+"/")
}

// AssignmentsOfHost by GPU and id.
func (r reader) AssignmentsOfHost(host string) iter.Seq[*clusterv1.Assignment] {
	return scan[clusterv1.Assignment](r, tableAssignments, byGPU+prefix, host+"/")
}

// AssignmentsOfGPU by id.
func (r reader) AssignmentsOfGPU(gpu string) iter.Seq[*clusterv1.Assignment] {
	return scan[clusterv1.Assignment](r, tableAssignments, byGPU, gpu)
}

// AssignmentsOfClaim in the order in which they were made.
func (r reader) AssignmentsOfClaim(claim string) iter.Seq[*clusterv1.Assignment] {
	return func(yield func(*clusterv1.Assignment) bool) {
		for _, id := range r.Claim(claim).GetAssignments() {
			if a := r.Assignment(id); a != nil && !yield(a) {
				return
			}
		}
	}
}

// ReservationsOfGPU by id.
func (r reader) ReservationsOfGPU(gpu string) iter.Seq[*clusterv1.Reservation] {
	return scan[clusterv1.Reservation](r, tableReservations, byGPU, gpu)
}

// ReservationsOfOwner by id.
func (r reader) ReservationsOfOwner(owner string) iter.Seq[*clusterv1.Reservation] {
	return scan[clusterv1.Reservation](r, tableReservations, byOwner, owner)
}

// SessionsOfHost by id.
func (r reader) SessionsOfHost(host string) iter.Seq[*clusterv1.Session] {
	return scan[clusterv1.Session](r, tableSessions, byID+prefix, host+"/")
}

// SessionsOfClaim by id.
func (r reader) SessionsOfClaim(claim string) iter.Seq[*clusterv1.Session] {
	return scan[clusterv1.Session](r, tableSessions, byClaim, claim)
}

// MigrationsOfClaim by id.
func (r reader) MigrationsOfClaim(claim string) iter.Seq[*clusterv1.Migration] {
	return scan[clusterv1.Migration](r, tableMigrations, byClaim, claim)
}

// ClaimsOfGroup by id.
func (r reader) ClaimsOfGroup(group string) iter.Seq[*clusterv1.Claim] {
	return scan[clusterv1.Claim](r, tableClaims, byGroup, group)
}

// PendingClaims by id.
func (r reader) PendingClaims() iter.Seq[*clusterv1.Claim] {
	return scan[clusterv1.Claim](r, tableClaims, byPending, "pending")
}

// Objects of a kind by name, those after a name.
func (r reader) Objects(kind clusterv1.Kind, after string) iter.Seq[*clusterv1.Object] {
	return func(yield func(*clusterv1.Object) bool) {
		table := tableOf(kind)
		if table == "" {
			return
		}
		it, err := r.txn.LowerBound(table, byID, after)
		if err != nil {
			schemaError(err)
		}
		for raw := it.Next(); raw != nil; raw = it.Next() {
			if o := wrap(raw); Name(o) != after && !yield(o) {
				return
			}
		}
	}
}

// Object of a kind; nil if there is none.
func (r reader) Object(kind clusterv1.Kind, name string) *clusterv1.Object {
	table := tableOf(kind)
	if table == "" || name == "" {
		return nil
	}
	raw, err := r.txn.First(table, byID, name)
	if err != nil {
		schemaError(err)
	}
	return wrap(raw)
}

// Events that are kept, oldest first: of one object (its own and those that
// concern it), of a kind, or all. Not more than last, if that is above 0.
func (r reader) Events(kind clusterv1.Kind, object string, last int) []*clusterv1.Event {
	index, key := byID+prefix, ""
	if object != "" {
		index, key = byObject, ref(kind, object)
	}
	it, err := r.txn.GetReverse(tableEvents, index, key)
	if err != nil {
		schemaError(err)
	}
	var out []*clusterv1.Event
	for raw := it.Next(); raw != nil && (last <= 0 || len(out) < last); raw = it.Next() {
		e, ok := raw.(*clusterv1.Event)
		if ok && (object != "" || kind == clusterv1.Kind_KIND_UNSPECIFIED || e.GetKind() == kind) {
			out = append(out, e)
		}
	}
	slices.Reverse(out)
	return out
}

// ref is how an event names an object.
func ref(kind clusterv1.Kind, name string) string {
	return word(kind, "KIND_") + "/" + name
}
