package state

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// seeds are encoded commands of every kind.
func seeds(t testing.TB) [][]byte {
	var out [][]byte
	for _, op := range []any{
		testHost("h", 1), testHost("z", 2), &clusterv1.InitCluster{ClusterId: "c"}, &clusterv1.SetHostDown{Host: "h", Down: true}, &clusterv1.DrainHost{Host: "k", Draining: true},
		&clusterv1.LabelHost{Host: "h", Set: map[string]string{"a": "b"}}, &clusterv1.RemoveHost{Host: "h", Force: true}, &clusterv1.CordonGPU{Gpu: "h/g1", Cordoned: true}, &clusterv1.RankModel{Model: "M", Rank: 2},
		put("x", whole("h/g2")), put("y", share("h/g1", 20)), put("z", slice("k/g0")), &clusterv1.DeleteClaim{Claim: "a"}, &clusterv1.Assign{Claim: "b", Choices: []*clusterv1.Choice{share("h/g1", 5), {Gpu: "k/g1", Reservation: "r"}}},
		&clusterv1.ReleaseAssignments{Claim: "c"}, &clusterv1.ReleaseAssignments{Assignments: []string{"a.1"}}, &clusterv1.ConfirmAssignments{Host: "h", Confirmations: []*clusterv1.Confirmation{{Assignment: "a.1", Token: 4}, {Assignment: "b.2", Token: 5, Gone: true}}},
		&clusterv1.CancelAssignments{Assignments: []string{"a.1"}}, &clusterv1.PutReservation{Reservation: &clusterv1.Reservation{Id: "s", Owner: "b", Gpu: "h/g1", Memory: 4, TtlMs: 5}}, &clusterv1.DeleteReservation{Id: "r"},
		&clusterv1.ReportSessions{Host: "h", Sessions: []*clusterv1.Session{{Id: "h/1", State: 3}}, All: true}, &clusterv1.PutMigration{Migration: &clusterv1.Migration{Id: "n", Driver: "h"}},
		&clusterv1.PutJoinToken{Token: &clusterv1.JoinToken{Id: "u", SecretHash: make([]byte, 32), Role: 4}}, &clusterv1.UseJoinToken{Id: "t", Identity: &clusterv1.Identity{Id: "id-h", Host: "h", Role: 4}}, &clusterv1.DeleteJoinToken{Id: "t"},
		&clusterv1.PutIdentity{Identity: &clusterv1.Identity{Id: "bob", Role: 1}}, &clusterv1.DeleteIdentity{Id: "ann"}, &clusterv1.Note{Event: &clusterv1.Event{Object: "h", Kind: 1}},
	} {
		c := command(t, op)
		c.Id = "id"
		data, err := Encode(c)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, data)
	}
	return out
}

// Decoding never panics, and what it takes is encoded and decoded to the same.
func FuzzDecode(f *testing.F) {
	for _, s := range seeds(f) {
		f.Add(s)
	}
	f.Add([]byte{1, 2, 0xfa, 0x1f, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Decode(data)
		if err != nil {
			var unknown *ErrUnknownCommand
			if !errors.Is(err, ErrFormat) && !errors.As(err, &unknown) {
				t.Fatalf("neither: %v", err)
			}
			return
		}
		again, err := Encode(c)
		if err != nil {
			t.Fatal(err)
		}
		back, err := Decode(again)
		if err != nil || !proto.Equal(c, back) {
			t.Fatalf("%v became %v: %v", c, back, err)
		}
	})
}

// No command breaks what must always hold, and a snapshot of what it leaves
// can be read.
func FuzzApply(f *testing.F) {
	all := seeds(f)
	for n, s := range all {
		f.Add(s, all[(n*7+3)%len(all)])
	}
	base := persisted(f, filled(f).Store)
	f.Fuzz(func(t *testing.T, first, second []byte) {
		s := New()
		if err := s.Restore(bytes.NewReader(base)); err != nil {
			t.Fatal(err)
		}
		for _, data := range [][]byte{first, second} {
			c := &clusterv1.Command{}
			if len(data) < 2 || proto.Unmarshal(data[2:], c) != nil {
				return
			}
			asked := proto.Clone(c)
			r := s.Apply(s.View().Index()+1, c)
			if r.GetOutcome() == 0 || !proto.Equal(asked, c) {
				t.Fatalf("%v: %v", asked, r)
			}
			if err := s.View().Check(); err != nil {
				t.Fatalf("after %v: %v", c, err)
			}
		}
		data := persisted(t, s)
		again := New()
		if err := again.Restore(bytes.NewReader(data)); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(data, persisted(t, again)) {
			t.Fatal("the snapshot is not the state")
		}
	})
}

// No snapshot makes Restore or what comes after it panic, not even one with a
// right checksum.
func FuzzRestore(f *testing.F) {
	data := persisted(f, filled(f).Store)
	f.Add(data, false)
	f.Add(data[:len(data)/2], true)
	body := data
	for n := 0; n < 12; n++ { // single records
		size, k := binary.Uvarint(body)
		f.Add(append(bytes.Clone(data[:64]), body[:k+int(size)]...), true)
		body = body[k+int(size):]
	}
	commands := seeds(f)
	f.Fuzz(func(t *testing.T, data []byte, repair bool) {
		if repair {
			data = repaired(t, data)
		}
		s := New()
		if err := s.Restore(bytes.NewReader(data)); err != nil {
			if !errors.Is(err, ErrSnapshot) || s.View().Index() != 0 {
				t.Fatalf("%v at index %d", err, s.View().Index())
			}
			return
		}
		_ = s.View().Check() // anything may be wrong with it
		for _, e := range commands {
			c, err := Decode(e)
			if err != nil {
				t.Fatal(err)
			}
			c.Id = ""
			s.Apply(s.View().Index()+1, c)
		}
		_ = s.View().Check()
		persisted(t, s)
	})
}

// repaired keeps the records that can be read, and adds header and trailer.
func repaired(t testing.TB, data []byte) []byte {
	records := []*clusterv1.SnapshotRecord{{Record: &clusterv1.SnapshotRecord_Header{Header: &clusterv1.SnapshotHeader{Version: 1, Index: 40, Assignments: 9}}}}
	for len(data) > 0 {
		size, n := binary.Uvarint(data)
		if n <= 0 || size > uint64(len(data)-n) {
			break
		}
		x := &clusterv1.SnapshotRecord{}
		if err := proto.Unmarshal(data[n:n+int(size)], x); err == nil && x.GetHeader() == nil && x.GetTrailer() == nil && x.GetRecord() != nil {
			records = append(records, x)
		}
		data = data[n+int(size):]
	}
	return framed(t, records...)
}
