package sessions

import (
	"path/filepath"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// A session is reported on its target as soon as the swap is committed. Its executor on the
// source ends after that, so the source is others' only when the swap is over.
func TestSourceOfASwapStaysReservedUntilTheSwapIsOver(t *testing.T) {
	f := newFixture(t, filepath.Join(t.TempDir(), "state.json"))
	defer f.close()
	c := f.claim(&gpuctlv1.CreateClaimRequest{Expr: "id == 'big'"})
	id, err := f.guest.Begin(c.GetToken(), 1, "x", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.host.Resync(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := f.ReleaseClaim(t.Context(), connect.NewRequest(&gpuctlv1.ReleaseClaimRequest{Claim: c.GetClaim().GetId()})); err != nil {
		t.Fatal(err)
	}
	op, s, known, err := f.host.begin(id, "migrate")
	if err != nil {
		t.Fatal(err)
	}
	moved := proto.CloneOf(s)
	moved.Target.Gpu, moved.Generation, moved.State = "mid", 2, gpuctlv1.SessionState_SESSION_STATE_SWAPPING
	held := func() bool {
		f.host.mu.Lock()
		defer f.host.mu.Unlock()
		_, ok := f.host.ledger.Holds(known.ID, "big")
		return ok
	}
	f.host.mu.Lock()
	f.host.update(moved, time.Time{})
	f.host.mu.Unlock()
	if !held() {
		t.Error("the source is free while the swap is at its last step")
	}
	moved = proto.CloneOf(moved)
	moved.State = gpuctlv1.SessionState_SESSION_STATE_RUNNING
	f.host.commit(op, known, moved)
	f.host.end(op, known)
	if held() {
		t.Error("the source is reserved after the swap")
	}
}
