package sessions

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/guesttest"
	"github.com/gpuctl/gpuctl/hostd/inventory/nvml"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// cards is NVIDIA's driver with cards of these addresses. Their UUIDs end with the address.
type cards []string

func uuidOf(address string) string {
	return "GPU-734814f7-e8f5-4d3a-ac70-0000" + strings.NewReplacer(":", "", ".", "").Replace(address)[:8]
}

func (c cards) List(context.Context) (*nvml.Response, error) {
	memory := uint64(80 << 30)
	r := &nvml.Response{Status: nvml.OK, Driver: "580.1"}
	for _, a := range c {
		r.GPUs = append(r.GPUs, nvml.GPU{UUID: uuidOf(a), Name: "NVIDIA H100", PCIAddress: a, Memory: &memory})
	}
	return r, nil
}

func (c cards) Facts(ctx context.Context) (*nvml.Response, error) { return c.List(ctx) }

const (
	cardA, cardB = "0000:0a:00.0", "0000:0b:00.0"
	pidOne       = 1 // the fixture's only process
	startOne     = 77
)

func newDriverFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{t: t, guest: guesttest.New(), state: filepath.Join(t.TempDir(), "state.json"), nvml: cards{cardA, cardB}}
	f.open()
	t.Cleanup(f.close)
	return f
}

func (f *fixture) adopt(req *gpuctlv1.HostAdoptRequest) *gpuctlv1.HostAdoptResponse {
	res, err := f.Adopt(context.Background(), connect.NewRequest(req))
	if err != nil {
		f.t.Fatal(err)
	}
	return res.Msg
}

// holders returns who has which GPU, as "gpu: claim or session".
func (f *fixture) holders() (out []string) {
	for gpu, owners := range f.owners() {
		for _, o := range owners {
			who := strings.Join(o.GetSessions(), "+")
			if who == "" {
				who = "claim"
			}
			out = append(out, gpu+": "+who)
		}
	}
	slices.Sort(out)
	return out
}

func (f *fixture) holds(t *testing.T, want ...string) {
	t.Helper()
	testkit.Until(t, fmt.Sprint("holders are ", want), func() error {
		if err := f.host.Resync(context.Background()); err != nil {
			return err
		}
		got := f.holders()
		return testkit.Want(slices.Equal(got, want), got)
	})
}

func TestAdoptedProcessHasItsGPUsUntilItIsSuspended(t *testing.T) {
	f := newDriverFixture(t)
	f.guest.Open(guesttest.Process{PID: pidOne, Start: startOne, Command: "python train.py", Memory: 6 << 30, GPUs: []string{uuidOf(cardA)}})

	// A plan touches nothing.
	res := f.adopt(&gpuctlv1.HostAdoptRequest{All: true, Plan: true})
	if len(res.GetSessions()) != 1 || res.GetSessions()[0].GetId() != "" || res.GetSessions()[0].GetTarget().GetGpu() != cardA {
		t.Fatalf("%v", res)
	}
	f.holds(t)

	res = f.adopt(&gpuctlv1.HostAdoptRequest{Pid: pidOne})
	if len(res.GetSessions()) != 1 || len(res.GetRefused()) != 0 {
		t.Fatalf("%v", res)
	}
	id := res.GetSessions()[0].GetId()
	f.holds(t, cardA+": "+id)
	// Once more: it is the same session, and nobody else gets the GPU.
	if again := f.adopt(&gpuctlv1.HostAdoptRequest{All: true}); len(again.GetSessions()) != 1 || again.GetSessions()[0].GetId() != id {
		t.Errorf("%v", again)
	}
	if c := f.claim(&gpuctlv1.CreateClaimRequest{Engine: "driver", Expr: `id == "` + cardA + `"`}); c != nil {
		t.Errorf("%v has a GPU that is in use", c)
	}

	if r, err := f.swap(id, gpuctlv1.Verb_VERB_MIGRATE, strings.ToUpper(uuidOf(cardB)), ""); err != nil || r.GetError() != "" {
		t.Fatalf("%v %v", r, err)
	}
	f.holds(t, cardB+": "+id)
	if r, err := last(f.Suspend(t.Context(), connect.NewRequest(&gpuctlv1.HostSuspendRequest{Session: id}))); err != nil || r.GetError() != "" {
		t.Fatalf("%v %v", r, err)
	}
	f.holds(t)
	if r, err := last(f.Resume(t.Context(), connect.NewRequest(&gpuctlv1.HostResumeRequest{Session: id, To: cardA}))); err != nil || r.GetError() != "" {
		t.Fatalf("%v %v", r, err)
	}
	f.holds(t, cardA+": "+id)
	f.halt()
	f.start() // hostd's successor knows as much
	f.holds(t, cardA+": "+id)
	f.guest.End(id)
	// The process of this test lives on; its claim would, too, and is given back here.
	f.releaseAll()
	f.holds(t)
}

func (f *fixture) releaseAll() {
	res, err := f.ListClaims(context.Background(), connect.NewRequest(&gpuctlv1.ListClaimsRequest{}))
	if err != nil {
		f.t.Fatal(err)
	}
	for _, c := range res.Msg.GetClaims() {
		if _, err := f.ReleaseClaim(context.Background(), connect.NewRequest(&gpuctlv1.ReleaseClaimRequest{Claim: c.GetId()})); err != nil {
			f.t.Fatal(err)
		}
	}
}

func TestAdoptionIsRefusedWithEveryReasonAndTouchesNothing(t *testing.T) {
	f := newDriverFixture(t)
	reasonsOf := func(req *gpuctlv1.HostAdoptRequest) (out []string) {
		for _, r := range f.adopt(req).GetRefused() {
			for _, why := range r.GetReasons() {
				out = append(out, fmt.Sprintf("%d %s", r.GetPid(), why.GetCode()))
			}
		}
		slices.Sort(out)
		return out
	}
	held := f.claim(&gpuctlv1.CreateClaimRequest{Engine: "driver", Expr: `id == "` + cardB + `"`})
	f.guest.Open(guesttest.Process{PID: pidOne, Start: startOne, Memory: 1, GPUs: []string{uuidOf(cardB)}})
	f.guest.Open(guesttest.Process{PID: pidOne, Start: startOne, Memory: 1, GPUs: []string{"GPU-of-nobody"}})
	f.guest.Open(guesttest.Process{PID: 77, Memory: 1, GPUs: []string{uuidOf(cardA)}}) // it has ended
	f.guest.Open(guesttest.Process{PID: 78, GPUs: []string{uuidOf(cardA)}, Refused: "it uses MPS"})
	if got := reasonsOf(&gpuctlv1.HostAdoptRequest{All: true}); !slices.Equal(got, []string{"1 busy", "1 gpu", "77 ended", "78 cuda"}) {
		t.Error(got)
	}
	if got := reasonsOf(&gpuctlv1.HostAdoptRequest{Pid: 99}); !slices.Equal(got, []string{"99 cuda"}) {
		t.Error(got)
	}
	f.holds(t, cardB+": claim")
	for _, bad := range []*gpuctlv1.HostAdoptRequest{{}, {Pid: 1, All: true}} {
		if _, err := f.Adopt(t.Context(), connect.NewRequest(bad)); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%v: %v", bad, err)
		}
	}
	if _, err := f.ReleaseClaim(t.Context(), connect.NewRequest(&gpuctlv1.ReleaseClaimRequest{Claim: held.GetClaim().GetId()})); err != nil {
		t.Error(err)
	}
}

func TestForeignProcessIsNotAdopted(t *testing.T) {
	f := newDriverFixture(t)
	s := &gpuctlv1.Session{Driver: &gpuctlv1.DriverState{Processes: []*gpuctlv1.DriverProcess{{Pid: pidOne, Start: startOne}}}}
	for uid, want := range map[uint32]int{0: 0, 1000: 0, 1001: 1} { // the fixture's process is of 1000
		if got := f.host.foreign(s, &gpuctlv1.FileOwner{Uid: uid}); len(got) != want {
			t.Errorf("user %d: %v", uid, got)
		}
	}
	if got := f.host.foreign(s, nil); len(got) != 0 {
		t.Error(got)
	}
	s.Driver.Processes[0].Start = 76 // its pid is another process's now, of the same user
	if got := f.host.foreign(s, &gpuctlv1.FileOwner{Uid: 1000}); len(got) != 1 || got[0].GetCode() != "ended" {
		t.Error(got)
	}
}

// The processes of a lost session live on, some perhaps on the GPUs that they were moved to.
// Nobody gets these before the processes have ended.
func TestALostCUDASessionKeepsWhatItMayBeOn(t *testing.T) {
	f := newDriverFixture(t)
	f.guest.Open(guesttest.Process{PID: pidOne, Start: startOne, Memory: 1, GPUs: []string{uuidOf(cardA)}})
	id := f.adopt(&gpuctlv1.HostAdoptRequest{Pid: pidOne}).GetSessions()[0].GetId()
	f.guest.Step = func(_, step string) error {
		if step == "copy" {
			return guesttest.ErrLose
		}
		return nil
	}
	if r, err := f.swap(id, gpuctlv1.Verb_VERB_MIGRATE, cardB, ""); err != nil || r.GetError() == "" {
		t.Fatal(r, err)
	}
	f.host.mu.Lock()
	late := proto.CloneOf(f.host.sessions[id].Session)
	f.host.mu.Unlock()
	late.State = gpuctlv1.SessionState_SESSION_STATE_SWAPPING
	f.host.handleUpdate(t.Context(), late) // the stream of changes may be behind the result
	if lost := f.host.lostOf(t.Context(), late.GetClaim()); len(lost) != 1 || lost[0].GetId() != id || lost[0].GetReason() == "" {
		t.Errorf("lost: %v", lost)
	}
	if lost := f.host.lostOf(t.Context(), "c-other"); len(lost) != 0 {
		t.Errorf("lost of another claim: %v", lost)
	}
	f.releaseAll()
	for _, card := range []string{cardA, cardB} {
		if c := f.claim(&gpuctlv1.CreateClaimRequest{Engine: "driver", Expr: `id == "` + card + `"`}); c != nil {
			t.Errorf("GPU %s has two owners", card)
		}
	}
	f.halt()
	f.start()
	for _, card := range []string{cardA, cardB} {
		if c := f.claim(&gpuctlv1.CreateClaimRequest{Engine: "driver", Expr: `id == "` + card + `"`}); c != nil {
			t.Errorf("GPU %s has two owners after a restart", card)
		}
	}
	f.guest.End(id)
	f.holds(t)
}

// A pid may be given to somebody else's process between the look, which was for its user's
// sake, and the adoption.
func TestAnotherProcessWithThePidIsNotAdopted(t *testing.T) {
	f := newDriverFixture(t)
	f.guest.Open(guesttest.Process{PID: pidOne, Start: startOne - 1, Memory: 1, GPUs: []string{uuidOf(cardA)}})
	f.guest.Swapped(pidOne, startOne)
	res := f.adopt(&gpuctlv1.HostAdoptRequest{Pid: pidOne})
	if len(res.GetSessions()) != 0 || len(res.GetRefused()) != 1 {
		t.Errorf("%v", res)
	}
	f.holds(t)
}

func TestClaimFindsAGPUThatTheEngineCanUse(t *testing.T) {
	f := newDriverFixture(t)
	for _, c := range []struct {
		req  *gpuctlv1.CreateClaimRequest
		want string // "": refused
	}{
		{&gpuctlv1.CreateClaimRequest{}, "big"}, // OpenCL programs must be able to use it
		{&gpuctlv1.CreateClaimRequest{Engine: "portable"}, "big"},
		{&gpuctlv1.CreateClaimRequest{Engine: "driver"}, cardA},
		{&gpuctlv1.CreateClaimRequest{Expr: `vendor == "NVIDIA Corporation"`}, cardA},
		{&gpuctlv1.CreateClaimRequest{Expr: `vendor == "NVIDIA Corporation"`, MinMemory: 1 << 30}, ""},
		{&gpuctlv1.CreateClaimRequest{Engine: "portable", Expr: `vendor == "NVIDIA Corporation"`}, ""},
		{&gpuctlv1.CreateClaimRequest{Engine: "driver", Expr: `id == "big"`}, ""},
	} {
		got := f.claim(c.req)
		if got == nil {
			if c.want != "" {
				t.Errorf("%v: refused", c.req)
			}
			continue
		}
		if gpus := got.GetClaim().GetGpus(); !slices.Equal(gpus, []string{c.want}) {
			t.Errorf("%v: %v, not %s", c.req, gpus, c.want)
		}
		if c.want == cardA {
			if _, err := f.guest.Begin(got.GetToken(), 1, "opencl", 1); err == nil {
				t.Error("an OpenCL program runs without a runtime")
			}
		}
		if _, err := f.ReleaseClaim(t.Context(), connect.NewRequest(&gpuctlv1.ReleaseClaimRequest{Claim: got.GetClaim().GetId()})); err != nil {
			t.Fatal(err)
		}
	}
	for _, bad := range []*gpuctlv1.CreateClaimRequest{{Engine: "vulkan"}, {Engine: "driver", MinMemory: 1}} {
		if _, err := f.CreateClaim(t.Context(), connect.NewRequest(bad)); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%v: %v", bad, err)
		}
	}
}

func TestCUDASessionStaysAmongGPUsOfTheDriver(t *testing.T) {
	f := newDriverFixture(t)
	c := f.claim(&gpuctlv1.CreateClaimRequest{Engine: "driver"})
	id, err := f.guest.OpenWith(c.GetToken(), guesttest.Process{PID: 5, Command: "train", Memory: 1 << 30, GPUs: []string{uuidOf(cardA)}})
	if err != nil {
		t.Fatal(err)
	}
	f.holds(t, cardA+": "+id)
	if r, err := f.swap(id, gpuctlv1.Verb_VERB_MIGRATE, "big", ""); err != nil || !r.GetRefused() {
		t.Errorf("%v %v", r, err)
	}
	plan, err := f.Plan(t.Context(), connect.NewRequest(&gpuctlv1.HostPlanRequest{Session: id, Verb: gpuctlv1.Verb_VERB_MIGRATE, To: "big"}))
	if err != nil || len(plan.Msg.GetGpus()) != 0 || len(plan.Msg.GetRejected()) == 0 || plan.Msg.GetRejected()[0].GetReasons()[0].GetCode() != "engine" {
		t.Errorf("%v %v", plan, err)
	}
	// A rehearsal needs no other GPU, and changes nothing.
	plan, err = f.Plan(t.Context(), connect.NewRequest(&gpuctlv1.HostPlanRequest{Session: id, Rehearse: true}))
	if err != nil || !slices.Equal(plan.Msg.GetGpus(), []string{cardA}) || !slices.Equal(plan.Msg.GetSteps(), []string{"lock", "checkpoint", "restore", "unlock"}) {
		t.Errorf("%v %v", plan, err)
	}
	r, err := last(f.Swap(t.Context(), connect.NewRequest(&gpuctlv1.HostSwapRequest{Session: id, Rehearse: true})))
	if err != nil || r.GetError() != "" || !r.GetRehearsed() {
		t.Errorf("%v %v", r, err)
	}
	r, err = last(f.Swap(t.Context(), connect.NewRequest(&gpuctlv1.HostSwapRequest{Session: id, Rehearse: true, FailAt: "restore"})))
	if err != nil || !r.GetRolledBack() {
		t.Errorf("%v %v", r, err)
	}
	f.holds(t, cardA+": "+id)
	f.guest.End(id)
	f.releaseAll()
	f.holds(t)
}
