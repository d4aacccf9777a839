package state

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"testing"
	"testing/iotest"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// filled has something of every kind.
func filled(t testing.TB) *rig {
	r := newRig(t)
	for _, op := range []any{
		&clusterv1.InitCluster{ClusterId: "c", CaCertificate: []byte("der")},
		testHost("h", 3), testHost("k", 2),
		put("a", whole("h/g0")), put("b", share("h/g1", 30)), put("c", slice("k/g0"), slice("k/g0")),
		&clusterv1.PutClaim{Claim: &clusterv1.Claim{Id: "w", Unmet: clusterv1.Unmet_UNMET_WAIT, Labels: map[string]string{"x": "1", "y": "2"}}},
		&clusterv1.ReportSessions{Host: "h", Sessions: []*clusterv1.Session{{Id: "h/1", Claim: "a", State: gpuctlv1.SessionState_SESSION_STATE_RUNNING}}},
		&clusterv1.PutMigration{Migration: &clusterv1.Migration{Id: "m", Claim: "a", Driver: "h", State: clusterv1.MigrationState_MIGRATION_STATE_DONE}},
		&clusterv1.PutReservation{Reservation: &clusterv1.Reservation{Id: "r", Owner: "m", Gpu: "k/g1", TtlMs: 9}},
		&clusterv1.ReportLinks{Host: "h", Links: []*clusterv1.Link{{To: "k", RttNs: 1000, Rate: 1 << 30, Samples: 1}}},
		&clusterv1.SetQueue{Policy: clusterv1.QueuePolicy_QUEUE_POLICY_RQ},
		&clusterv1.PutJoinToken{Token: &clusterv1.JoinToken{Id: "t", SecretHash: make([]byte, 32), Role: clusterv1.Role_ROLE_HOST}},
		&clusterv1.PutIdentity{Identity: &clusterv1.Identity{Id: "ann", Role: clusterv1.Role_ROLE_ADMIN}},
	} {
		c := command(t, op)
		c.Id = fmt.Sprint("command-", r.at)
		if res := r.send(c); res.GetOutcome() != ok {
			t.Fatal(res)
		}
	}
	odd := testHost("odd", 2) // not like their model
	odd.Gpus[0].Limits.GlobalMemory, odd.Gpus[1].Limits = 50, nil
	r.want(ok, "", odd)
	return r
}

func TestSnapshotRestoresEverything(t *testing.T) {
	r := filled(t)
	data := persisted(t, r.Store)
	s := New()
	if err := s.Restore(iotest.OneByteReader(bytes.NewReader(data))); err != nil {
		t.Fatal(err)
	}
	if err := s.View().Check(); err != nil {
		t.Error(err)
	}
	if !bytes.Equal(data, persisted(t, s)) {
		t.Error("what was restored is not what was written")
	}
	for _, kind := range persistOrder() {
		n := 0
		for o := range r.View().Objects(kind, "") {
			n++
			if !proto.Equal(o, s.View().Object(kind, Name(o))) {
				t.Errorf("%v is %v", o, s.View().Object(kind, Name(o)))
			}
		}
		if n == 0 {
			t.Errorf("no %s in the test", kind)
		}
	}
	v, w := r.View(), s.View()
	if v.Index() != w.Index() || v.ClusterID() != w.ClusterID() || v.Protocol() != w.Protocol() || v.Queue() != w.Queue() || len(v.Events(0, "", 0)) != len(w.Events(0, "", 0)) || v.answers != w.answers || v.ended != w.ended {
		t.Error("what there is one of differs")
	}
	if w.GPU("h/g0").GetLimits() != w.GPU("k/g1").GetLimits() {
		t.Error("equal limits are kept twice")
	}
}

func TestSnapshotThatCannotBeReadChangesNothing(t *testing.T) {
	data := persisted(t, filled(t).Store)
	kept := newRig(t)
	kept.do(testHost("mine", 1))
	want := persisted(t, kept.Store)
	refuse := func(name string, data []byte, as error) {
		t.Helper()
		err := kept.Restore(bytes.NewReader(data))
		if !errors.Is(err, as) || !errors.Is(err, ErrSnapshot) {
			t.Errorf("%s: %v, want %v", name, err, as)
		}
		if !bytes.Equal(persisted(t, kept.Store), want) {
			t.Fatalf("%s: the state has changed", name)
		}
	}
	for n := 0; n < len(data); n += 1 + n%3 {
		refuse(fmt.Sprintf("cut at %d", n), data[:n], ErrSnapshotCut)
	}
	for n := len(data) - 1; n >= 0; n -= 5 {
		bad := bytes.Clone(data)
		bad[n] ^= 0x10
		if err := kept.Restore(bytes.NewReader(bad)); !errors.Is(err, ErrSnapshot) {
			t.Errorf("byte %d of %d changed: %v", n, len(data), err)
		}
	}
	refuse("longer", append(bytes.Clone(data), 0), ErrSnapshotDamaged)
	refuse("a huge record", binary.AppendUvarint(nil, 1<<40), ErrSnapshotDamaged)

	header := func(version uint32) *clusterv1.SnapshotRecord {
		return &clusterv1.SnapshotRecord{Record: &clusterv1.SnapshotRecord_Header{Header: &clusterv1.SnapshotHeader{Version: version}}}
	}
	object := func(o any) *clusterv1.SnapshotRecord {
		return &clusterv1.SnapshotRecord{Record: &clusterv1.SnapshotRecord_Object{Object: wrap(o)}}
	}
	h := object(&clusterv1.Host{Name: "h", Id: "i"})
	future := &clusterv1.SnapshotRecord{}
	if err := proto.Unmarshal([]byte{0xfa, 0x1f, 0}, future); err != nil {
		t.Fatal(err)
	}
	refuse("newer", framed(t, header(2)), ErrSnapshotNewer)
	refuse("newer record", framed(t, header(1), future), ErrSnapshotNewer)
	refuse("newer object", framed(t, header(1), object(nil)), ErrSnapshotNewer)
	refuse("no version", framed(t, header(0)), ErrSnapshotDamaged)
	refuse("no header", framed(t, h), ErrSnapshotDamaged)
	refuse("two headers", framed(t, header(1), header(1)), ErrSnapshotDamaged)
	refuse("a host twice", framed(t, header(1), h, h), ErrSnapshotDamaged)
	refuse("an id twice", framed(t, header(1), h, object(&clusterv1.Host{Name: "k", Id: "i"})), ErrSnapshotDamaged)
	refuse("no name", framed(t, header(1), object(&clusterv1.Claim{})), ErrSnapshotDamaged)
	refuse("no limits", framed(t, header(1), object(&clusterv1.GPU{Id: "h/g"})), ErrSnapshotDamaged)
	if err := kept.Restore(iotest.ErrReader(errors.New("disk"))); err == nil || !bytes.Equal(persisted(t, kept.Store), want) {
		t.Errorf("disk: %v", err)
	}
	if err := kept.Restore(bytes.NewReader(framed(t, header(1), h))); err != nil || kept.View().Host("h") == nil {
		t.Errorf("a good one: %v", err)
	}
}

// framed makes a snapshot with a right trailer of any records.
func framed(t testing.TB, records ...*clusterv1.SnapshotRecord) []byte {
	var out []byte
	add := func(r *clusterv1.SnapshotRecord) {
		b, err := proto.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		out = append(binary.AppendUvarint(out, uint64(len(b))), b...)
	}
	for _, r := range records {
		add(r)
	}
	add(&clusterv1.SnapshotRecord{Record: &clusterv1.SnapshotRecord_Trailer{Trailer: &clusterv1.SnapshotTrailer{
		Records: uint64(len(records)), Crc32C: crc32.Checksum(out, crc32.MakeTable(crc32.Castagnoli)),
	}}})
	return out
}

type fullDisk struct{ left int }

func (f *fullDisk) Write(p []byte) (int, error) {
	if f.left -= len(p); f.left < 0 {
		return 0, errors.New("no space left")
	}
	return len(p), nil
}

func TestPersistReportsAFullDisk(t *testing.T) {
	s := inventory(t, 300)
	for _, left := range []int{0, 300_000} {
		if err := s.View().Persist(&fullDisk{left}); err == nil {
			t.Errorf("after %d bytes: no error", left)
		}
	}
}
