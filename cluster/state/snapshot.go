package state

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"iter"

	"github.com/hashicorp/go-memdb"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// Errors of Restore. After an error, the state has not changed.
var (
	// ErrSnapshot means that a snapshot cannot be read.
	ErrSnapshot = errors.New("snapshot cannot be read")
	// ErrSnapshotCut means that a snapshot ends before its trailer.
	ErrSnapshotCut = fmt.Errorf("%w: it is cut short", ErrSnapshot)
	// ErrSnapshotDamaged means that bytes of a snapshot have changed.
	ErrSnapshotDamaged = fmt.Errorf("%w: it is damaged", ErrSnapshot)
	// ErrSnapshotNewer means that a newer version has written the snapshot.
	ErrSnapshotNewer = fmt.Errorf("%w: a newer version wrote it", ErrSnapshot)
)

const (
	snapshotVersion = 1
	maxRecord       = 8 << 20 // bytes; no object can be that large
	streamBuffer    = 256 << 10
)

func castagnoli() *crc32.Table { return crc32.MakeTable(crc32.Castagnoli) }

// Persist writes a snapshot of the view. Equal states give equal bytes.
func (v *View) Persist(w io.Writer) error {
	out := &recordWriter{w: bufio.NewWriterSize(w, streamBuffer), table: castagnoli()}
	out.write(&clusterv1.SnapshotRecord{Record: &clusterv1.SnapshotRecord_Header{Header: &clusterv1.SnapshotHeader{
		Version: snapshotVersion, Index: v.Index(), ClusterId: v.clusterID, Assignments: v.assignments,
		Protocol: v.protocol, CaCertificate: v.ca, Queue: v.queue,
	}}})
	for _, kind := range persistOrder() {
		for o := range v.Objects(kind, "") {
			if g := o.GetGpu(); g != nil && sameLimits(g.GetLimits(), v.Model(g.GetModel()).GetLimits()) {
				g = shallow(g)
				g.Limits = nil
				o = wrap(g)
			}
			out.write(&clusterv1.SnapshotRecord{Record: &clusterv1.SnapshotRecord_Object{Object: o}})
			if out.err != nil {
				return fmt.Errorf("write snapshot: %w", out.err)
			}
		}
	}
	writeAll(out, v.Identities(), func(x *clusterv1.Identity) *clusterv1.SnapshotRecord {
		return &clusterv1.SnapshotRecord{Record: &clusterv1.SnapshotRecord_Identity{Identity: x}}
	})
	writeAll(out, v.JoinTokens(), func(x *clusterv1.JoinToken) *clusterv1.SnapshotRecord {
		return &clusterv1.SnapshotRecord{Record: &clusterv1.SnapshotRecord_JoinToken{JoinToken: x}}
	})
	writeAll(out, all[clusterv1.Event](v.reader, tableEvents), func(x *clusterv1.Event) *clusterv1.SnapshotRecord {
		return &clusterv1.SnapshotRecord{Record: &clusterv1.SnapshotRecord_Event{Event: x}}
	})
	writeAll(out, v.recents(), func(x *clusterv1.RecentCommand) *clusterv1.SnapshotRecord {
		return &clusterv1.SnapshotRecord{Record: &clusterv1.SnapshotRecord_Recent{Recent: x}}
	})
	out.write(trailer(out.records, out.crc))
	if out.err == nil {
		out.err = out.w.Flush()
	}
	if out.err != nil {
		return fmt.Errorf("write snapshot: %w", out.err)
	}
	return nil
}

func trailer(records uint64, crc uint32) *clusterv1.SnapshotRecord {
	return &clusterv1.SnapshotRecord{Record: &clusterv1.SnapshotRecord_Trailer{Trailer: &clusterv1.SnapshotTrailer{
		Records: records, Crc32C: crc,
	}}}
}

// persistOrder returns the kinds with models before GPUs, because a GPU may refer to its
// model's limits.
func persistOrder() []clusterv1.Kind {
	return []clusterv1.Kind{
		kindHost, kindModel, kindGPU, clusterv1.Kind_KIND_VGPU, kindClaim,
		kindAssignment, kindSession, kindMigration, kindReservation, kindLink,
	}
}

// sameLimits reports whether a GPU's limits are equal to its model's. A snapshot then
// omits them, which saves most of its bytes. A GPU that reports none is stored with empty
// limits, which are written. Equal states must have equal snapshots, so values are
// compared, not pointers.
func sameLimits(a, b *gpuctlv1.Limits) bool {
	return a != nil && b != nil && (a == b || proto.Equal(a, b))
}

func writeAll[T any](out *recordWriter, seq iter.Seq[*T], record func(*T) *clusterv1.SnapshotRecord) {
	for x := range seq {
		if out.write(record(x)); out.err != nil {
			return
		}
	}
}

type recordWriter struct {
	w       *bufio.Writer
	table   *crc32.Table
	buf     []byte
	crc     uint32
	records uint64
	err     error
}

func (o *recordWriter) write(r *clusterv1.SnapshotRecord) {
	if o.err != nil {
		return
	}
	body, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(o.buf[:0], r)
	o.buf = body
	if err == nil && len(body) > maxRecord {
		err = fmt.Errorf("record %d has %d bytes: at most %d", o.records, len(body), maxRecord)
	}
	if err != nil {
		o.err = err
		return
	}
	var length [binary.MaxVarintLen64]byte
	head := length[:binary.PutUvarint(length[:], uint64(len(body)))]
	o.crc = crc32.Update(crc32.Update(o.crc, o.table, head), o.table, body)
	o.records++
	if _, err := o.w.Write(head); err != nil {
		o.err = err
		return
	}
	_, o.err = o.w.Write(body)
}

// Restore replaces the state by a snapshot. If the snapshot cannot be read to its end,
// the error is one of the above or the reader's, and the state has not changed.
func (s *Store) Restore(r io.Reader) error {
	db := newDB()
	l := &loader{db: db, txn: db.Txn(true), like: map[string]*clusterv1.GPU{}, limits: map[string]*gpuctlv1.Limits{}, last: map[string]string{}}
	defer l.txn.Abort()
	if err := l.load(r); err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	l.txn.Commit()
	l.findOver()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.db = db
	s.publish(l.meta, anything, &past{restored: s.View().past.restored + 1})
	return nil
}

type recordReader struct {
	r       *bufio.Reader
	table   *crc32.Table
	buf     []byte
	crc     uint32 // checksum of all records before the last one read
	next    uint32 // checksum with it
	records uint64 // number of records before the last one read
	read    uint64
}

// record reads one record into x. x does not refer to the buffer.
func (in *recordReader) record(x *clusterv1.SnapshotRecord) error {
	in.crc, in.records = in.next, in.read
	n, err := binary.ReadUvarint(in.r)
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%w after %d records", ErrSnapshotCut, in.read)
	case err != nil:
		return fmt.Errorf("%w: length of record %d: %w", ErrSnapshotDamaged, in.read, err)
	case n > maxRecord:
		return fmt.Errorf("%w: record %d has %d bytes: at most %d", ErrSnapshotDamaged, in.read, n, maxRecord)
	}
	if uint64(cap(in.buf)) < n {
		in.buf = make([]byte, n, max(n, 2*uint64(cap(in.buf))))
	}
	in.buf = in.buf[:n]
	if _, err := io.ReadFull(in.r, in.buf); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return fmt.Errorf("%w in record %d", ErrSnapshotCut, in.read)
		}
		return fmt.Errorf("record %d: %w", in.read, err)
	}
	var length [binary.MaxVarintLen64]byte
	head := length[:binary.PutUvarint(length[:], n)]
	in.next = crc32.Update(crc32.Update(in.next, in.table, head), in.table, in.buf)
	in.read++
	if err := proto.Unmarshal(in.buf, x); err != nil {
		return fmt.Errorf("%w: record %d: %w", ErrSnapshotDamaged, in.records, err)
	}
	return nil
}

type loader struct {
	meta
	db     *memdb.MemDB
	txn    *memdb.Txn
	like   map[string]*clusterv1.GPU   // one GPU of each model
	limits map[string]*gpuctlv1.Limits // limits by model
	last   map[string]string           // the last name, by table
}

func (l *loader) load(r io.Reader) error {
	in := &recordReader{r: bufio.NewReaderSize(r, streamBuffer), table: castagnoli()}
	x := &clusterv1.SnapshotRecord{}
	if err := in.record(x); err != nil {
		return err
	}
	h := x.GetHeader()
	switch {
	case h == nil:
		return fmt.Errorf("%w: it does not begin with a header", ErrSnapshotDamaged)
	case h.GetVersion() > snapshotVersion:
		return fmt.Errorf("%w: its version is %d, the highest known here %d", ErrSnapshotNewer, h.GetVersion(), snapshotVersion)
	case h.GetVersion() == 0:
		return fmt.Errorf("%w: it has no version", ErrSnapshotDamaged)
	}
	l.meta = meta{index: h.GetIndex(), clusterID: h.GetClusterId(), assignments: h.GetAssignments(), protocol: h.GetProtocol(), ca: h.GetCaCertificate(), queue: h.GetQueue()}
	for {
		x := &clusterv1.SnapshotRecord{}
		if err := in.record(x); err != nil {
			return err
		}
		if t := x.GetTrailer(); t != nil {
			switch {
			case t.GetRecords() != in.records:
				return fmt.Errorf("%w: it has %d records of %d", ErrSnapshotDamaged, in.records, t.GetRecords())
			case t.GetCrc32C() != in.crc:
				return fmt.Errorf("%w: its checksum is %08x, not %08x", ErrSnapshotDamaged, in.crc, t.GetCrc32C())
			}
			// The trailer is not covered by the checksum, so it must be exactly what
			// Persist writes.
			if exact, err := proto.Marshal(trailer(in.records, in.crc)); err != nil || !bytes.Equal(exact, in.buf) {
				return fmt.Errorf("%w: its trailer", ErrSnapshotDamaged)
			}
			if _, err := in.r.ReadByte(); !errors.Is(err, io.EOF) {
				return fmt.Errorf("%w: it goes on after its trailer", ErrSnapshotDamaged)
			}
			return nil
		}
		if err := l.add(x); errors.Is(err, ErrSnapshotNewer) {
			return fmt.Errorf("record %d: %w", in.records, err)
		} else if err != nil {
			return fmt.Errorf("%w: record %d: %w", ErrSnapshotDamaged, in.records, err)
		}
	}
}

func (l *loader) add(x *clusterv1.SnapshotRecord) error {
	switch r := x.GetRecord().(type) {
	case *clusterv1.SnapshotRecord_Object:
		return l.addObject(r.Object)
	case *clusterv1.SnapshotRecord_Identity:
		return l.insert(tableIdentities, r.Identity.GetId(), r.Identity)
	case *clusterv1.SnapshotRecord_JoinToken:
		return l.insert(tableJoinTokens, r.JoinToken.GetId(), r.JoinToken)
	case *clusterv1.SnapshotRecord_Event:
		l.events++
		return l.insert(tableEvents, eventKey(r.Event.GetIndex(), r.Event.GetPart()), r.Event)
	case *clusterv1.SnapshotRecord_Recent:
		l.answers++
		if err := l.unique(tableRecents, byIndex, indexKey(r.Recent.GetIndex())); err != nil {
			return err
		}
		return l.insert(tableRecents, r.Recent.GetId(), r.Recent)
	case *clusterv1.SnapshotRecord_Header:
		return errors.New("a second header")
	}
	return fmt.Errorf("%w: a record of a kind that is not known here", ErrSnapshotNewer)
}

func (l *loader) addObject(o *clusterv1.Object) error {
	table := tableOf(KindOf(o))
	if table == "" {
		return fmt.Errorf("%w: an object of a kind that is not known here", ErrSnapshotNewer)
	}
	switch x := Stored(o).(type) {
	case *clusterv1.Host:
		for index, key := range map[string]string{byHostID: x.GetId(), byAddress: x.GetAddress()} {
			if err := l.unique(table, index, key); err != nil {
				return err
			}
		}
	case *clusterv1.Model:
		l.like[x.GetName()] = &clusterv1.GPU{Model: x.GetName(), Vendor: x.GetVendor(), Limits: x.GetLimits()}
		l.limits[x.GetName()] = x.GetLimits()
	case *clusterv1.GPU:
		economize(x, l.like[x.GetModel()])
		if x.GetLimits() == nil {
			x.Limits = l.limits[x.GetModel()]
		}
		if x.GetLimits() == nil {
			return fmt.Errorf("GPU %s: no limits, and none of model %q", x.GetId(), x.GetModel())
		}
		l.like[x.GetModel()] = x
	case *clusterv1.Migration:
		if over(x) {
			l.ended++
		}
	}
	return l.insert(table, Name(o), Stored(o))
}

func (l *loader) unique(table, index, key string) error {
	if key == "" {
		return nil
	}
	raw, err := l.txn.First(table, index, key)
	if err != nil {
		schemaError(err)
	}
	if raw != nil {
		return fmt.Errorf("%s: a second one with %s %q", table, index, key)
	}
	return nil
}

func (l *loader) insert(table, name string, object any) error {
	if name == "" {
		return fmt.Errorf("%s: one without a name", table)
	}
	if last, ok := l.last[table]; ok && name <= last {
		if err := l.unique(table, byID, name); err != nil {
			return err
		}
	} else {
		l.last[table] = name // names are sorted in a snapshot
	}
	if err := l.txn.Insert(table, object); err != nil {
		return fmt.Errorf("%s: %q: %w", table, name, err)
	}
	return nil
}

// findOver finds the GPUs with assignments beyond their capacity. Whether a report has
// caused that cannot be checked.
func (l *loader) findOver() {
	r := reader{l.db.Txn(false)}
	seen := ""
	for v := range r.VGPUs() {
		if v.GetGpu() != seen {
			seen = v.GetGpu()
			l.checkOver(r, seen)
		}
	}
	for x := range r.Reservations() {
		l.checkOver(r, x.GetGpu())
	}
}

func (l *loader) checkOver(r reader, gpu string) {
	if g := r.GPU(gpu); g != nil && r.excess(g) != "" {
		if l.over == nil {
			l.over = map[string]bool{}
		}
		l.over[gpu] = true
	}
}
