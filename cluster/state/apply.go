package state

import (
	"fmt"
	"iter"
	"maps"
	"reflect"
	"slices"

	"github.com/hashicorp/go-memdb"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// How many old objects are kept.
const (
	maxRecents = 4096
	maxEvents  = 10_000
	maxEnded   = 1000 // migrations that have ended
	maxAnswer  = 64 << 10
)

// Short names of outcomes.
const (
	ok         = clusterv1.Outcome_OUTCOME_OK
	invalid    = clusterv1.Outcome_OUTCOME_INVALID
	notFound   = clusterv1.Outcome_OUTCOME_NOT_FOUND
	exists     = clusterv1.Outcome_OUTCOME_ALREADY_EXISTS
	noCapacity = clusterv1.Outcome_OUTCOME_NO_CAPACITY
	stale      = clusterv1.Outcome_OUTCOME_STALE
	refused    = clusterv1.Outcome_OUTCOME_REFUSED
)

// Apply applies the log entry with an index. It is deterministic and total: equal states
// and commands give equal states and results on every host, and every command gets a
// result. It never changes c. The result is shared and must not be changed.
//
// If the result is not OK, nothing has changed, except for the parts that
// ConfirmAssignments, ReleaseAssignments and CancelAssignments could do. If the index was
// applied before, nothing changes and the result is STALE.
func (s *Store) Apply(index uint64, c *clusterv1.Command) *clusterv1.Result {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := s.View()
	if index <= v.Index() {
		return &clusterv1.Result{Outcome: stale, Index: index, Message: fmt.Sprintf("entry %d was applied before: the state is of %d", index, v.Index())}
	}
	t := &tx{was: v.reader, base: v.meta, db: s.db, index: index}
	t.begin()
	defer func() { t.txn.Abort() }() // takes effect only after a panic; otherwise the transaction has ended
	var r *clusterv1.Result
	err := admissible(c, v)
	if err != nil {
		r = result(invalid, "%v", err)
	} else {
		if known := t.recent(c.GetId()); known != nil {
			t.meta.index = index
			t.txn.Commit()
			s.publish(t.meta, 0, v.past)
			return known
		}
		t.now, t.actor, t.version = c.GetUnixMs(), c.GetActor(), c.GetVersion()
		r = t.apply(c)
		if r.GetOutcome() != ok && !t.keep {
			t.rollback()
		}
	}
	r.Index = index
	t.meta.index = index
	t.flush()
	t.record()
	if err == nil && c.GetId() != "" {
		t.remember(c.GetId(), r)
	}
	t.txn.Commit()
	p := v.past
	if len(t.touched) > 0 {
		p = p.with(index, t.touched, keepChanges)
	}
	s.publish(t.meta, t.changed, p)
	return r
}

// admissible returns an error for a command that must not be processed, because it is too
// large or malformed.
func admissible(c *clusterv1.Command, v *View) error {
	if c == nil || c.Op == nil || reflect.ValueOf(c.Op).IsNil() {
		return fmt.Errorf("command without an operation")
	}
	if len(c.GetId()) > maxName || len(c.GetActor()) > maxName {
		return fmt.Errorf("command: id or actor of more than %d bytes", maxName)
	}
	if err := bounded(c); err != nil {
		return fmt.Errorf("command: %w", err)
	}
	if c.GetVersion() > v.Protocol() {
		return fmt.Errorf("command of protocol %d: not every host applies more than %d", c.GetVersion(), v.Protocol())
	}
	return nil
}

func (t *tx) apply(c *clusterv1.Command) *clusterv1.Result {
	switch op := c.GetOp().(type) {
	case *clusterv1.Command_InitCluster:
		return t.initCluster(op.InitCluster)
	case *clusterv1.Command_ReportHost:
		return t.reportHost(op.ReportHost)
	case *clusterv1.Command_SetHostDown:
		return t.setHostDown(op.SetHostDown)
	case *clusterv1.Command_DrainHost:
		return t.drainHost(op.DrainHost)
	case *clusterv1.Command_LabelHost:
		return t.labelHost(op.LabelHost)
	case *clusterv1.Command_RemoveHost:
		return t.removeHost(op.RemoveHost)
	case *clusterv1.Command_CordonGpu:
		return t.cordonGPU(op.CordonGpu)
	case *clusterv1.Command_RankModel:
		return t.rankModel(op.RankModel)
	case *clusterv1.Command_PutClaim:
		return t.putClaim(op.PutClaim)
	case *clusterv1.Command_DeleteClaim:
		return t.deleteClaim(op.DeleteClaim)
	case *clusterv1.Command_Assign:
		return t.assignClaim(op.Assign)
	case *clusterv1.Command_ReleaseAssignments:
		return t.releaseAssignments(op.ReleaseAssignments)
	case *clusterv1.Command_ConfirmAssignments:
		return t.confirmAssignments(op.ConfirmAssignments)
	case *clusterv1.Command_CancelAssignments:
		return t.cancelAssignments(op.CancelAssignments)
	case *clusterv1.Command_PutReservation:
		return t.putReservation(op.PutReservation)
	case *clusterv1.Command_DeleteReservation:
		return t.deleteReservation(op.DeleteReservation)
	case *clusterv1.Command_ReportSessions:
		return t.reportSessions(op.ReportSessions)
	case *clusterv1.Command_PutMigration:
		return t.putMigration(op.PutMigration)
	case *clusterv1.Command_PutJoinToken:
		return t.putJoinToken(op.PutJoinToken)
	case *clusterv1.Command_UseJoinToken:
		return t.useJoinToken(op.UseJoinToken)
	case *clusterv1.Command_DeleteJoinToken:
		return t.deleteJoinToken(op.DeleteJoinToken)
	case *clusterv1.Command_PutIdentity:
		return t.putIdentity(op.PutIdentity)
	case *clusterv1.Command_DeleteIdentity:
		return t.deleteIdentity(op.DeleteIdentity)
	case *clusterv1.Command_Note:
		return t.note(op.Note)
	case *clusterv1.Command_SetQueue:
		return t.setQueue(op.SetQueue)
	case *clusterv1.Command_ReportLinks:
		return t.reportLinks(op.ReportLinks)
	}
	return result(invalid, "command: %T is not known", c.GetOp())
}

// tx is the transaction of one entry.
type tx struct {
	reader
	meta
	was     reader // state before the entry
	base    meta   // meta of the state before the entry
	db      *memdb.MemDB
	index   uint64
	now     int64
	actor   string
	version uint32 // of the entry's command
	changed mask
	touched []touch
	gpus    map[string]*gpuEdit
	notes   []*clusterv1.Event
	keep    bool // keep the changes although the outcome is not OK
}

func (t *tx) begin() {
	t.reader = reader{t.db.Txn(true)}
	t.meta = t.base
	t.changed, t.touched, t.gpus, t.notes, t.keep = 0, nil, map[string]*gpuEdit{}, nil, false
}

// rollback discards what the entry has changed so far.
func (t *tx) rollback() {
	t.txn.Abort()
	t.begin()
}

func result(o clusterv1.Outcome, format string, args ...any) *clusterv1.Result {
	return &clusterv1.Result{Outcome: o, Message: fmt.Sprintf(format, args...)}
}

func done() *clusterv1.Result { return &clusterv1.Result{Outcome: ok} }

func reason(code, format string, args ...any) *gpuctlv1.Reason {
	return &gpuctlv1.Reason{Code: code, Message: fmt.Sprintf(format, args...)}
}

// put stores a new object. Nobody else may have a reference to it yet.
func (t *tx) put(object any) {
	var table string
	var kind clusterv1.Kind
	switch x := object.(type) {
	case *clusterv1.Identity:
		table, x.Revision = tableIdentities, t.index
	case *clusterv1.JoinToken:
		table, x.Revision = tableJoinTokens, t.index
	case *clusterv1.Event:
		table = tableEvents
	case *clusterv1.RecentCommand:
		table = tableRecents
	default:
		kind = setRevision(object, t.index)
		table = tableOf(kind)
	}
	if err := t.txn.Insert(table, object); err != nil {
		schemaError(err)
	}
	t.touch(kind, object)
}

func (t *tx) del(object any) {
	var table string
	kind := KindOf(wrap(object))
	switch object.(type) {
	case *clusterv1.Identity:
		table = tableIdentities
	case *clusterv1.JoinToken:
		table = tableJoinTokens
	case *clusterv1.Event:
		table = tableEvents
	case *clusterv1.RecentCommand:
		table = tableRecents
	default:
		table = tableOf(kind)
	}
	if err := t.txn.Delete(table, object); err != nil {
		schemaError(err)
	}
	t.touch(kind, object)
}

func (t *tx) touch(kind clusterv1.Kind, object any) {
	t.changed |= 1 << kind
	if kind != clusterv1.Kind_KIND_UNSPECIFIED {
		t.touched = append(t.touched, touch{kind, Name(wrap(object))})
	}
}

func setRevision(object any, index uint64) clusterv1.Kind {
	switch x := object.(type) {
	case *clusterv1.Host:
		x.Revision = index
		return clusterv1.Kind_KIND_HOST
	case *clusterv1.GPU:
		x.Revision = index
		return clusterv1.Kind_KIND_GPU
	case *clusterv1.Model:
		x.Revision = index
		return clusterv1.Kind_KIND_MODEL
	case *clusterv1.VGPU:
		x.Revision = index
		return clusterv1.Kind_KIND_VGPU
	case *clusterv1.Claim:
		x.Revision = index
		return clusterv1.Kind_KIND_CLAIM
	case *clusterv1.Assignment:
		x.Revision = index
		return clusterv1.Kind_KIND_ASSIGNMENT
	case *clusterv1.Session:
		x.Revision = index
		return clusterv1.Kind_KIND_SESSION
	case *clusterv1.Migration:
		x.Revision = index
		return clusterv1.Kind_KIND_MIGRATION
	case *clusterv1.Reservation:
		x.Revision = index
		return clusterv1.Kind_KIND_RESERVATION
	case *clusterv1.Link:
		x.Revision = index
		return kindLink
	}
	return clusterv1.Kind_KIND_UNSPECIFIED
}

// recent returns the answer to a command that was applied recently; nil if it is new.
func (t *tx) recent(id string) *clusterv1.Result {
	known := first[clusterv1.RecentCommand](t.reader, tableRecents, byID, id)
	if known == nil {
		return nil
	}
	r := &clusterv1.Result{}
	if err := proto.Unmarshal(known.GetResult(), r); err != nil {
		return result(invalid, "command %s: was applied as entry %d, with an answer that cannot be read", id, known.GetIndex())
	}
	return r
}

func (t *tx) remember(id string, r *clusterv1.Result) {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(r)
	if err != nil { // all strings in it were checked, so it can be encoded
		schemaError(err)
	}
	if len(b) > maxAnswer { // keep only the outcome and message; the objects can be read from the state
		b, _ = proto.Marshal(&clusterv1.Result{Outcome: r.GetOutcome(), Message: r.GetMessage(), Index: r.GetIndex()})
	}
	t.put(&clusterv1.RecentCommand{Id: id, Index: t.index, Result: b})
	t.changed &^= 1 // nobody watches these tables
	if t.answers++; t.answers > maxRecents {
		t.drop(tableRecents, byIndex)
		t.answers--
	}
}

// drop deletes the first object of an index.
func (t *tx) drop(table, index string) {
	raw, err := t.txn.First(table, index+prefix, "")
	if err != nil {
		schemaError(err)
	}
	if raw != nil {
		t.del(raw)
	}
}

// event adds an event of the entry.
func (t *tx) event(kind clusterv1.Kind, object, typ, message string, about ...string) {
	t.notes = append(t.notes, &clusterv1.Event{
		Index: t.index, Part: uint32(len(t.notes)), UnixMs: t.now, Actor: t.actor,
		Kind: kind, Object: object, Type: typ, Message: message, About: about,
	})
}

// record stores the entry's events and deletes the oldest ones.
func (t *tx) record() {
	for _, e := range t.notes {
		t.put(e)
		if t.events++; t.events > maxEvents {
			t.drop(tableEvents, byID)
			t.events--
		}
	}
}

// shallow copies a message. The copy shares everything that it points to, so lists must
// be replaced, not appended to.
func shallow[M proto.Message](m M) M {
	from := reflect.ValueOf(m).Elem()
	to := reflect.New(from.Type())
	for i := range from.NumField() {
		if f := to.Elem().Field(i); f.CanSet() { // unexported fields belong to the message's own state
			f.Set(from.Field(i))
		}
	}
	out := to.Interface().(M)
	if unknown := m.ProtoReflect().GetUnknown(); len(unknown) > 0 {
		out.ProtoReflect().SetUnknown(unknown)
	}
	return out
}

// differences returns the names of the fields in which two messages differ.
func differences(a, b proto.Message) []string {
	x, y := a.ProtoReflect(), b.ProtoReflect()
	fields := x.Descriptor().Fields()
	var out []string
	for i := range fields.Len() {
		fd := fields.Get(i)
		if x.Has(fd) != y.Has(fd) || x.Has(fd) && !x.Get(fd).Equal(y.Get(fd)) {
			out = append(out, string(fd.Name()))
		}
	}
	return out
}

// sorted iterates over a map, sorted by key.
func sorted[V any](m map[string]V) iter.Seq2[string, V] {
	return func(yield func(string, V) bool) {
		for _, k := range slices.Sorted(maps.Keys(m)) {
			if !yield(k, m[k]) {
				return
			}
		}
	}
}
