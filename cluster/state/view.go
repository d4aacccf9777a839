package state

import (
	"fmt"
	"iter"
	"slices"

	"github.com/hashicorp/go-memdb"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// View is the state after one entry. It never changes, and may be read from several
// goroutines. Keeping it costs nothing. The objects that it returns are shared and must
// not be changed.
type View struct {
	reader
	meta
	store *Store
	epoch uint64 // how often the store had published before
	past  *past
}

// meta has the values that exist once.
type meta struct {
	index       uint64
	clusterID   string
	assignments uint64 // last number used in ids of assignments
	protocol    uint32
	ca          []byte
	queue       clusterv1.QueuePolicy
	events      int // number of events that are kept
	answers     int // number of results of recent commands that are kept
	ended       int // number of ended migrations that are kept
	// over has the GPUs with assignments beyond their capacity, because their host has
	// reported less than before. The map is never changed in place.
	over map[string]bool
}

// Index returns the index of the last entry that was applied.
func (v *View) Index() uint64 { return v.meta.index }

// ClusterID returns the cluster's id. It is empty before InitCluster.
func (v *View) ClusterID() string { return v.clusterID }

// Protocol returns the lowest command version that all hosts apply. Without hosts, it is
// that of this version of gpuctl.
func (v *View) Protocol() uint32 {
	if v.meta.protocol == 0 {
		return Protocol
	}
	return v.meta.protocol
}

// CACertificate returns the cluster's CA certificate in DER. It is shared and must not be
// changed.
func (v *View) CACertificate() []byte { return v.ca }

// Changed returns a channel that is closed at the first change after this view of any
// object of these kinds, or of anything if no kind is given.
func (v *View) Changed(kinds ...clusterv1.Kind) <-chan struct{} {
	return v.store.changed(v.epoch, maskOf(kinds))
}

// reader reads one transaction. A read-only transaction may be read from several
// goroutines, because each read makes its own iterator over immutable trees.
type reader struct{ txn *memdb.Txn }

// schemaError panics if a call names a table or index that does not exist. That is a bug
// of this package, which no input can cause.
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

// Host returns the host with this name; nil if there is none. The same holds for all
// kinds.
func (r reader) Host(name string) *clusterv1.Host {
	return first[clusterv1.Host](r, tableHosts, byID, name)
}

// HostByID returns the host with that Raft server id.
func (r reader) HostByID(id string) *clusterv1.Host {
	return first[clusterv1.Host](r, tableHosts, byHostID, id)
}

// HostByAddress returns the host with this address.
func (r reader) HostByAddress(address string) *clusterv1.Host {
	return first[clusterv1.Host](r, tableHosts, byAddress, address)
}

// GPU returns the GPU with this id.
func (r reader) GPU(id string) *clusterv1.GPU { return first[clusterv1.GPU](r, tableGPUs, byID, id) }

// Model returns the model with this name.
func (r reader) Model(name string) *clusterv1.Model {
	return first[clusterv1.Model](r, tableModels, byID, name)
}

// VGPU returns the VGPU with this id.
func (r reader) VGPU(id string) *clusterv1.VGPU {
	return first[clusterv1.VGPU](r, tableVGPUs, byID, id)
}

// Claim returns the claim with this id.
func (r reader) Claim(id string) *clusterv1.Claim {
	return first[clusterv1.Claim](r, tableClaims, byID, id)
}

// Assignment returns the assignment with this id.
func (r reader) Assignment(id string) *clusterv1.Assignment {
	return first[clusterv1.Assignment](r, tableAssignments, byID, id)
}

// Session returns the session with this id.
func (r reader) Session(id string) *clusterv1.Session {
	return first[clusterv1.Session](r, tableSessions, byID, id)
}

// Migration returns the migration with this id.
func (r reader) Migration(id string) *clusterv1.Migration {
	return first[clusterv1.Migration](r, tableMigrations, byID, id)
}

// Reservation returns the reservation with this id.
func (r reader) Reservation(id string) *clusterv1.Reservation {
	return first[clusterv1.Reservation](r, tableReservations, byID, id)
}

func (r reader) recents() iter.Seq[*clusterv1.RecentCommand] {
	return scan[clusterv1.RecentCommand](r, tableRecents, byIndex+prefix, "")
}

// Identity returns the identity with this id.
func (r reader) Identity(id string) *clusterv1.Identity {
	return first[clusterv1.Identity](r, tableIdentities, byID, id)
}

// JoinToken returns the join token with this id.
func (r reader) JoinToken(id string) *clusterv1.JoinToken {
	return first[clusterv1.JoinToken](r, tableJoinTokens, byID, id)
}

// Hosts returns all hosts, sorted by name.
func (r reader) Hosts() iter.Seq[*clusterv1.Host] { return all[clusterv1.Host](r, tableHosts) }

// GPUs returns all GPUs, sorted by id.
func (r reader) GPUs() iter.Seq[*clusterv1.GPU] { return all[clusterv1.GPU](r, tableGPUs) }

// Models returns all models, sorted by name.
func (r reader) Models() iter.Seq[*clusterv1.Model] { return all[clusterv1.Model](r, tableModels) }

// VGPUs returns all VGPUs, sorted by id.
func (r reader) VGPUs() iter.Seq[*clusterv1.VGPU] { return all[clusterv1.VGPU](r, tableVGPUs) }

// Claims returns all claims, sorted by id.
func (r reader) Claims() iter.Seq[*clusterv1.Claim] { return all[clusterv1.Claim](r, tableClaims) }

// Assignments returns all assignments, sorted by id.
func (r reader) Assignments() iter.Seq[*clusterv1.Assignment] {
	return all[clusterv1.Assignment](r, tableAssignments)
}

// Sessions returns all sessions, sorted by id.
func (r reader) Sessions() iter.Seq[*clusterv1.Session] {
	return all[clusterv1.Session](r, tableSessions)
}

// Migrations returns all migrations, sorted by id.
func (r reader) Migrations() iter.Seq[*clusterv1.Migration] {
	return all[clusterv1.Migration](r, tableMigrations)
}

// Reservations returns all reservations, sorted by id.
func (r reader) Reservations() iter.Seq[*clusterv1.Reservation] {
	return all[clusterv1.Reservation](r, tableReservations)
}

// Identities returns all identities, sorted by id.
func (r reader) Identities() iter.Seq[*clusterv1.Identity] {
	return all[clusterv1.Identity](r, tableIdentities)
}

// JoinTokens returns all join tokens, sorted by id.
func (r reader) JoinTokens() iter.Seq[*clusterv1.JoinToken] {
	return all[clusterv1.JoinToken](r, tableJoinTokens)
}

// GPUsOfHost returns the GPUs of a host, sorted by id.
func (r reader) GPUsOfHost(host string) iter.Seq[*clusterv1.GPU] {
	return scan[clusterv1.GPU](r, tableGPUs, byID+prefix, host+"/")
}

// GPUsOfModel returns the GPUs of a model, sorted by id.
func (r reader) GPUsOfModel(model string) iter.Seq[*clusterv1.GPU] {
	return scan[clusterv1.GPU](r, tableGPUs, byModel, model)
}

// VGPUsOfGPU returns the VGPUs of a GPU, sorted by id.
func (r reader) VGPUsOfGPU(gpu string) iter.Seq[*clusterv1.VGPU] {
	return scan[clusterv1.VGPU](r, tableVGPUs, byID+prefix, gpu+"/")
}

// AssignmentsOfHost returns the assignments on a host, sorted by GPU and id.
func (r reader) AssignmentsOfHost(host string) iter.Seq[*clusterv1.Assignment] {
	return scan[clusterv1.Assignment](r, tableAssignments, byGPU+prefix, host+"/")
}

// AssignmentsOfGPU returns the assignments on a GPU, sorted by id.
func (r reader) AssignmentsOfGPU(gpu string) iter.Seq[*clusterv1.Assignment] {
	return scan[clusterv1.Assignment](r, tableAssignments, byGPU, gpu)
}

// AssignmentsOfClaim returns the assignments of a claim, in the order in which they were
// made.
func (r reader) AssignmentsOfClaim(claim string) iter.Seq[*clusterv1.Assignment] {
	return func(yield func(*clusterv1.Assignment) bool) {
		for _, id := range r.Claim(claim).GetAssignments() {
			if a := r.Assignment(id); a != nil && !yield(a) {
				return
			}
		}
	}
}

// ReservationsOfGPU returns the reservations on a GPU, sorted by id.
func (r reader) ReservationsOfGPU(gpu string) iter.Seq[*clusterv1.Reservation] {
	return scan[clusterv1.Reservation](r, tableReservations, byGPU, gpu)
}

// ReservationsOfOwner returns the reservations of an owner, sorted by id.
func (r reader) ReservationsOfOwner(owner string) iter.Seq[*clusterv1.Reservation] {
	return scan[clusterv1.Reservation](r, tableReservations, byOwner, owner)
}

// SessionsOfHost returns the sessions on a host, sorted by id.
func (r reader) SessionsOfHost(host string) iter.Seq[*clusterv1.Session] {
	return scan[clusterv1.Session](r, tableSessions, byID+prefix, host+"/")
}

// SessionsOfClaim returns the sessions of a claim, sorted by id.
func (r reader) SessionsOfClaim(claim string) iter.Seq[*clusterv1.Session] {
	return scan[clusterv1.Session](r, tableSessions, byClaim, claim)
}

// MigrationsOfClaim returns the migrations of a claim, sorted by id.
func (r reader) MigrationsOfClaim(claim string) iter.Seq[*clusterv1.Migration] {
	return scan[clusterv1.Migration](r, tableMigrations, byClaim, claim)
}

// ClaimsOfGroup returns the claims of a group, sorted by id.
func (r reader) ClaimsOfGroup(group string) iter.Seq[*clusterv1.Claim] {
	return scan[clusterv1.Claim](r, tableClaims, byGroup, group)
}

// PendingClaims returns the pending claims, sorted by id.
func (r reader) PendingClaims() iter.Seq[*clusterv1.Claim] {
	return scan[clusterv1.Claim](r, tableClaims, byPending, "pending")
}

// Objects returns the objects of a kind whose names are after the given one, sorted by
// name.
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

// Object returns an object of a kind by its name; nil if there is none.
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

// Events returns stored events, oldest first: of one object (its own and those that
// concern it), of a kind, or all. If last is above 0, it returns at most the last so
// many.
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

// ref returns the name by which an event refers to an object.
func ref(kind clusterv1.Kind, name string) string {
	return word(kind, "KIND_") + "/" + name
}
