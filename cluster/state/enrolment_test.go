package state

import (
	"bytes"
	"testing"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// Snapshots keep enrolments, and those of before, which know none, are read.
func TestSnapshotsKeepEnrolments(t *testing.T) {
	r := newRig(t)
	r.want(ok, "", &clusterv1.PutIdentity{Identity: &clusterv1.Identity{Id: "old", Role: clusterv1.Role_ROLE_VIEWER}})
	if before := persisted(t, r.Store); bytes.Contains(before, []byte("e-")) {
		t.Fatalf("a snapshot of before: %q", before)
	} else if err := r.Restore(bytes.NewReader(before)); err != nil {
		t.Fatal(err)
	}
	r.want(ok, "", &clusterv1.PutIdentity{Identity: &clusterv1.Identity{Id: "ann", Role: clusterv1.Role_ROLE_VIEWER, Enrolment: "e-1"}})
	r.want(ok, "", &clusterv1.DeleteIdentity{Id: "ann"})
	r.want(ok, "", &clusterv1.PutJoinToken{Token: &clusterv1.JoinToken{Id: "t", SecretHash: make([]byte, 32), Role: clusterv1.Role_ROLE_ADMIN}})
	r.want(ok, "", &clusterv1.UseJoinToken{Id: "t", Identity: &clusterv1.Identity{Id: "ann", Role: clusterv1.Role_ROLE_ADMIN, Enrolment: "e-2"}})
	data := persisted(t, r.Store)
	s := New()
	if err := s.Restore(bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]string{"old": "", "ann": "e-2"} {
		if got := s.View().Identity(id); got == nil || got.GetEnrolment() != want {
			t.Errorf("identity %s: %v, want enrolment %q", id, got, want)
		}
	}
	if !bytes.Equal(data, persisted(t, s)) {
		t.Error("what was restored is not what was written")
	}
}

// Only entries with an enrolment need a host that knows what it is.
func TestEntriesWithAnEnrolmentNeedAHostThatKnowsIt(t *testing.T) {
	for _, c := range []struct {
		op   any
		want uint32
	}{
		{&clusterv1.PutIdentity{Identity: &clusterv1.Identity{Id: "a"}}, 1},
		{&clusterv1.PutIdentity{Identity: &clusterv1.Identity{Id: "a", Enrolment: "e-1"}}, ProtocolEnrolments},
		{&clusterv1.UseJoinToken{Id: "t", Identity: &clusterv1.Identity{Id: "a"}}, 1},
		{&clusterv1.UseJoinToken{Id: "t", Identity: &clusterv1.Identity{Id: "a", Enrolment: "e-1"}}, ProtocolEnrolments},
		{&clusterv1.UseJoinToken{}, 1},
		{&clusterv1.DeleteIdentity{Id: "a"}, 1},
	} {
		if got := VersionOf(command(t, c.op)); got != c.want {
			t.Errorf("%v: %d, want %d", c.op, got, c.want)
		}
	}
}
