package state

import (
	"encoding/binary"
	"errors"

	"github.com/hashicorp/go-memdb"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// Tables. tableOf returns the table of a kind.
const (
	tableHosts        = "hosts"
	tableGPUs         = "gpus"
	tableModels       = "models"
	tableVGPUs        = "vgpus"
	tableClaims       = "claims"
	tableAssignments  = "assignments"
	tableSessions     = "sessions"
	tableMigrations   = "migrations"
	tableReservations = "reservations"
	tableLinks        = "links"
	tableIdentities   = "identities"
	tableJoinTokens   = "join_tokens"
	tableEvents       = "events"
	tableRecents      = "recents"
)

// Indexes. GPUs, VGPUs and sessions of a host, and VGPUs of a GPU, need no index, because
// their ids begin with its name.
const (
	byID      = "id"
	byHostID  = "host_id"
	byAddress = "address"
	byModel   = "model"
	byGroup   = "group"
	byPending = "pending"
	byGPU     = "gpu"
	byClaim   = "claim"
	byOwner   = "owner"
	byObject  = "object"
	byEnded   = "ended"
	byIndex   = "index"
	prefix    = "_prefix"
)

var errArgs = errors.New("the index takes one string")

// kindTables returns the tables of the kinds, in the order of the kinds' numbers.
func kindTables() []string {
	return []string{
		tableHosts, tableGPUs, tableModels, tableVGPUs, tableClaims,
		tableAssignments, tableSessions, tableMigrations, tableReservations,
		tableLinks,
	}
}

func tableOf(kind clusterv1.Kind) string {
	if tables := kindTables(); kind >= 1 && int(kind) <= len(tables) {
		return tables[kind-1]
	}
	return ""
}

// text is an index on a string. It does not contain objects for which the string is
// empty.
type text func(object any) string

func (f text) FromObject(object any) (bool, []byte, error) {
	s := f(object)
	if s == "" {
		return false, nil, nil
	}
	return true, terminated(s), nil
}

func (f text) FromArgs(args ...any) ([]byte, error) {
	s, err := one(args)
	return terminated(s), err
}

func (f text) PrefixFromArgs(args ...any) ([]byte, error) {
	s, err := one(args)
	return []byte(s), err
}

func one(args []any) (string, error) {
	if len(args) == 1 {
		if s, ok := args[0].(string); ok {
			return s, nil
		}
	}
	return "", errArgs
}

// terminated adds a zero byte, so that no key is the beginning of another one. Names
// contain no zero byte.
func terminated(s string) []byte {
	b := make([]byte, len(s)+1)
	copy(b, s)
	return b
}

// refs is the index of events by the objects that they concern.
type refs struct{}

func (refs) FromObject(object any) (bool, [][]byte, error) {
	e := object.(*clusterv1.Event)
	out := make([][]byte, 0, 1+len(e.GetAbout()))
	if e.GetObject() != "" {
		out = append(out, terminated(ref(e.GetKind(), e.GetObject())))
	}
	for _, about := range e.GetAbout() {
		out = append(out, terminated(about))
	}
	return len(out) > 0, out, nil
}

func (refs) FromArgs(args ...any) ([]byte, error) {
	s, err := one(args)
	return terminated(s), err
}

// eventKey returns a key that sorts events by entry and by their order in it.
func eventKey(index uint64, part uint32) string {
	var b [12]byte
	binary.BigEndian.PutUint64(b[:], index)
	binary.BigEndian.PutUint32(b[8:], part)
	return string(b[:])
}

func indexKey(index uint64) string {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], index)
	return string(b[:])
}

func schema() *memdb.DBSchema {
	unique := func(name string, f text) *memdb.IndexSchema {
		return &memdb.IndexSchema{Name: name, Unique: true, AllowMissing: name != byID, Indexer: f}
	}
	many := func(name string, f text) *memdb.IndexSchema {
		return &memdb.IndexSchema{Name: name, AllowMissing: true, Indexer: f}
	}
	s := &memdb.DBSchema{Tables: map[string]*memdb.TableSchema{}}
	table := func(name string, indexes ...*memdb.IndexSchema) {
		t := &memdb.TableSchema{Name: name, Indexes: map[string]*memdb.IndexSchema{}}
		for _, i := range indexes {
			t.Indexes[i.Name] = i
		}
		s.Tables[name] = t
	}
	table(
		tableHosts,
		unique(byID, func(o any) string { return o.(*clusterv1.Host).GetName() }),
		unique(byHostID, func(o any) string { return o.(*clusterv1.Host).GetId() }),
		unique(byAddress, func(o any) string { return o.(*clusterv1.Host).GetAddress() }),
	)
	table(
		tableGPUs,
		unique(byID, func(o any) string { return o.(*clusterv1.GPU).GetId() }),
		many(byModel, func(o any) string { return o.(*clusterv1.GPU).GetModel() }),
	)
	table(tableModels, unique(byID, func(o any) string { return o.(*clusterv1.Model).GetName() }))
	table(tableVGPUs, unique(byID, func(o any) string { return o.(*clusterv1.VGPU).GetId() }))
	table(
		tableClaims,
		unique(byID, func(o any) string { return o.(*clusterv1.Claim).GetId() }),
		many(byGroup, func(o any) string { return o.(*clusterv1.Claim).GetGroup() }),
		many(byPending, func(o any) string {
			if o.(*clusterv1.Claim).GetState() == clusterv1.ClaimState_CLAIM_STATE_PENDING {
				return "pending"
			}
			return ""
		}),
	)
	table(
		tableAssignments,
		unique(byID, func(o any) string { return o.(*clusterv1.Assignment).GetId() }),
		many(byGPU, func(o any) string { return o.(*clusterv1.Assignment).GetGpu() }),
	)
	table(
		tableSessions,
		unique(byID, func(o any) string { return o.(*clusterv1.Session).GetId() }),
		many(byClaim, func(o any) string { return o.(*clusterv1.Session).GetClaim() }),
	)
	table(
		tableMigrations,
		unique(byID, func(o any) string { return o.(*clusterv1.Migration).GetId() }),
		many(byClaim, func(o any) string { return o.(*clusterv1.Migration).GetClaim() }),
		many(byEnded, func(o any) string {
			if m := o.(*clusterv1.Migration); over(m) {
				return indexKey(m.GetRevision())
			}
			return ""
		}),
	)
	table(
		tableReservations,
		unique(byID, func(o any) string { return o.(*clusterv1.Reservation).GetId() }),
		many(byGPU, func(o any) string { return o.(*clusterv1.Reservation).GetGpu() }),
		many(byOwner, func(o any) string { return o.(*clusterv1.Reservation).GetOwner() }),
	)
	table(tableLinks, unique(byID, func(o any) string { return o.(*clusterv1.Link).GetId() }))
	table(
		tableIdentities,
		unique(byID, func(o any) string { return o.(*clusterv1.Identity).GetId() }),
		many(byObject, func(o any) string { return o.(*clusterv1.Identity).GetHost() }),
	)
	table(tableJoinTokens, unique(byID, func(o any) string { return o.(*clusterv1.JoinToken).GetId() }))
	table(
		tableEvents,
		unique(byID, func(o any) string {
			e := o.(*clusterv1.Event)
			return eventKey(e.GetIndex(), e.GetPart())
		}),
		&memdb.IndexSchema{Name: byObject, AllowMissing: true, Indexer: refs{}},
	)
	table(
		tableRecents,
		unique(byID, func(o any) string { return o.(*clusterv1.RecentCommand).GetId() }),
		unique(byIndex, func(o any) string { return indexKey(o.(*clusterv1.RecentCommand).GetIndex()) }),
	)
	return s
}
