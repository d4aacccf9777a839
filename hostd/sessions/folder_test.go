package sessions

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/guesttest"
	"github.com/gpuctl/gpuctl/internal/reason"
)

const disk = "/srv/one"

// root is who may name folders.
func root() *gpuctlv1.FileOwner { return &gpuctlv1.FileOwner{} }

// await runs an operation to its end.
func await(t *testing.T, start func(emit) error) (*gpuctlv1.OperationUpdate, error) {
	t.Helper()
	end := make(chan *gpuctlv1.OperationUpdate, 1)
	err := start(func(u *gpuctlv1.OperationUpdate) {
		if u.GetProgress().GetResult() != nil {
			end <- u
		}
	})
	if err != nil {
		return nil, err
	}
	return <-end, nil
}

func (f *fixture) toFolder(t *testing.T, id, failAt string) *gpuctlv1.SwapResult {
	t.Helper()
	u, err := await(t, func(send emit) error {
		return f.host.suspend(&gpuctlv1.HostSuspendRequest{Session: id, Folder: disk, FailAt: failAt}, root(), send)
	})
	if err != nil {
		t.Fatal(err)
	}
	return u.GetProgress().GetResult()
}

func (f *fixture) fromFolder(t *testing.T, to, failAt string) *gpuctlv1.OperationUpdate {
	t.Helper()
	u, err := await(t, func(send emit) error {
		return f.host.resume(&gpuctlv1.HostResumeRequest{Folder: disk, To: to, FailAt: failAt}, root(), send)
	})
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func newFolderFixture(t *testing.T) (*fixture, string) {
	f := newDriverFixture(t)
	f.guest.Open(guesttest.Process{PID: pidOne, Start: startOne, Command: "train", Memory: 1 << 30, GPUs: []string{uuidOf(cardA)}})
	return f, f.adopt(&gpuctlv1.HostAdoptRequest{Pid: pidOne}).GetSessions()[0].GetId()
}

func TestSessionGoesToAFolderAndGetsAClaimWhenItComesBack(t *testing.T) {
	f, id := newFolderFixture(t)
	plan, err := f.host.planSwap(t.Context(), &gpuctlv1.HostPlanRequest{Session: id, Folder: disk}, root())
	if err != nil || !slices.Equal(plan.GetGpus(), []string{cardA}) || !slices.Contains(plan.GetSteps(), "dump") {
		t.Errorf("%v %v", plan, err)
	}
	if r := f.toFolder(t, id, "dump"); !r.GetRolledBack() {
		t.Errorf("%v", r)
	}
	f.holds(t, cardA+": "+id)
	if r := f.toFolder(t, id, ""); r.GetError() != "" || r.GetSession().GetSuspendedTo() != disk {
		t.Fatalf("%v", r)
	}
	f.holds(t)
	f.releaseAll() // its process is the fixture's, and lives on

	// Somebody else has the GPU meanwhile.
	other := f.claim(&gpuctlv1.CreateClaimRequest{Engine: "driver", Expr: `id == "` + cardA + `"`})
	if u := f.fromFolder(t, cardA, ""); !u.GetProgress().GetResult().GetRefused() || !strings.Contains(u.GetRejected()[0].GetReasons()[0].GetMessage(), "held by claim") {
		t.Errorf("%v", u)
	}
	plan, err = f.host.planSwap(t.Context(), &gpuctlv1.HostPlanRequest{From: disk}, root())
	if err != nil || plan.GetSession() != id || !slices.Equal(plan.GetFrom(), []string{cardA}) || !slices.Equal(plan.GetGpus(), []string{cardB}) {
		t.Errorf("%v %v", plan, err)
	}
	if u := f.fromFolder(t, "", "make"); !u.GetProgress().GetResult().GetRolledBack() {
		t.Errorf("%v", u)
	}
	f.holds(t, cardA+": claim")
	if got := f.guest.Folders(); !slices.Equal(got, []string{disk}) {
		t.Errorf("%v", got)
	}
	if u := f.fromFolder(t, "", ""); u.GetProgress().GetResult().GetError() != "" || !slices.Equal(u.GetGpus(), []string{cardB}) {
		t.Fatalf("%v", u)
	}
	f.holds(t, cardA+": claim", cardB+": "+id)
	f.halt()
	f.start()
	f.holds(t, cardA+": claim", cardB+": "+id)
	f.host.mu.Lock()
	s := f.host.sessions[id]
	if c := f.host.claims[s.GetClaim()]; c == nil || c.Holder.PID != pidOne {
		t.Errorf("its claim does not end with it: %+v", c)
	}
	f.host.mu.Unlock()
	f.guest.End(id)
	if _, err := f.ReleaseClaim(t.Context(), connect.NewRequest(&gpuctlv1.ReleaseClaimRequest{Claim: other.GetClaim().GetId()})); err != nil {
		t.Error(err)
	}
	f.releaseAll()
	f.holds(t)
}

// hostd is gone in the middle of a resume from a folder. Its successor hears of the session,
// or that there is none, and nothing stays reserved.
func TestKilledHostdSettlesAResumeFromAFolder(t *testing.T) {
	for _, done := range []bool{true, false} {
		f, id := newFolderFixture(t)
		if r := f.toFolder(t, id, ""); r.GetError() != "" {
			t.Fatalf("%v", r)
		}
		f.releaseAll()
		f.holds(t)
		fail := "make"
		if done {
			fail = ""
		}
		// As the journal says in the middle, whatever has become of the operation since.
		middle := make(chan []byte, 1)
		f.guest.Step = func(kind, _ string) error {
			if kind == "revive" {
				f.host.mu.Lock()
				defer f.host.mu.Unlock()
				select {
				case middle <- slices.Clone(f.host.saved):
				default:
				}
			}
			return nil
		}
		if u := f.fromFolder(t, cardB, fail); (u.GetProgress().GetResult().GetError() == "") != done {
			t.Fatalf("%v", u)
		}
		f.halt()
		writeState(t, f.state, <-middle)
		f.start()
		if !done {
			f.holds(t)
			f.host.mu.Lock()
			if len(f.host.claims) > 0 || len(f.host.ops) > 0 {
				t.Errorf("%v, %v", f.host.claims, f.host.ops)
			}
			f.host.mu.Unlock()
			continue
		}
		f.holds(t, cardB+": "+id)
		f.host.mu.Lock()
		for _, c := range f.host.claims {
			if c.Holder.PID != pidOne {
				t.Errorf("its claim does not end with it: %+v", c)
			}
		}
		f.host.mu.Unlock()
		f.guest.End(id)
		f.releaseAll()
		f.holds(t)
	}
}

// hostd is dead while a session goes to a folder. The list of sessions does not say whether it is
// there, or has ended.
func TestTheNextHostdFindsASessionInItsFolder(t *testing.T) {
	for what, c := range map[string]struct {
		failAt string
		ends   bool // the session, while hostd is dead
		want   clusterv1.MigrationState
	}{
		"done":                       {want: clusterv1.MigrationState_MIGRATION_STATE_DONE},
		"undone":                     {failAt: "dump", want: clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK},
		"undone, and it ended later": {failAt: "dump", ends: true, want: clusterv1.MigrationState_MIGRATION_STATE_FAILED},
	} {
		t.Run(what, func(t *testing.T) {
			f, id := newFolderFixture(t)
			killed := f.killedAtLastStep(t)
			f.toFolder(t, id, c.failAt)
			f.halt()
			if c.ends {
				f.guest.End(id)
			}
			killed()
			f.start()
			f.recordEnds(t, "suspend", id, c.want)
			f.guest.End(id)
			f.releaseAll()
			f.holds(t)
		})
	}
}

func TestFoldersAreRootsOnly(t *testing.T) {
	f, id := newFolderFixture(t)
	none := func(*gpuctlv1.OperationUpdate) {}
	for _, caller := range []*gpuctlv1.FileOwner{nil, {Uid: 1000}} {
		for what, err := range map[string]error{
			"suspend": f.host.suspend(&gpuctlv1.HostSuspendRequest{Session: id, Folder: disk}, caller, none),
			"resume":  f.host.resume(&gpuctlv1.HostResumeRequest{Folder: disk}, caller, none),
			"plan":    second(f.host.planSwap(t.Context(), &gpuctlv1.HostPlanRequest{From: disk}, caller)),
		} {
			if reason.Of(err).Code != reason.Denied {
				t.Errorf("%s as %v: %v", what, caller, err)
			}
		}
	}
	for _, dir := range []string{"relative", "/a/../b", "/a//b", "/a/"} {
		if err := f.host.suspend(&gpuctlv1.HostSuspendRequest{Session: id, Folder: dir}, root(), none); !errors.Is(err, errInvalid) {
			t.Errorf("%s: %v", dir, err)
		}
	}
	if err := f.host.resume(&gpuctlv1.HostResumeRequest{Folder: "/srv/none"}, root(), none); err == nil || !strings.Contains(err.Error(), "not a folder of a suspended session") {
		t.Errorf("%v", err)
	}
	f.holds(t, cardA+": "+id)
	f.guest.End(id)
	f.releaseAll()
}

func second[T any](_ T, err error) error { return err }

func writeState(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}
