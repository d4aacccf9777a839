package sessions

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/config"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// withTwoCards returns a host whose runtime finds the cards that restart is given: at first none.
func withTwoCards(t *testing.T) (f *fixture, two []*gpuctlv1.ProbedDevice, restart func(there []*gpuctlv1.ProbedDevice)) {
	t.Helper()
	f = newFixture(t, filepath.Join(t.TempDir(), "state.json"), func(c *HostConfig) {
		c.Config = config.Config{Version: 1, GPUs: []config.GPU{{ID: "nv", Library: "/libnv.so"}}}
	})
	two = []*gpuctlv1.ProbedDevice{
		{Index: 0, Name: "H200", PciAddress: "0000:19:00.0", Limits: &gpuctlv1.Limits{GlobalMemory: 1 << 30}},
		{Index: 1, Name: "H200", PciAddress: "0000:3b:00.0", Limits: &gpuctlv1.Limits{GlobalMemory: 1 << 30}},
	}
	return f, two, func(there []*gpuctlv1.ProbedDevice) {
		f.halt()
		f.guest.Probes = map[string]*gpuctlv1.ProbeResponse{"/libnv.so": {Platform: "NVIDIA CUDA", Devices: there}}
		f.start()
	}
}

// A VM has a card when hostd is restarted: the runtime numbers those that are left anew.
func TestCardKeepsItsNameOverARestartOfHostd(t *testing.T) {
	f, two, restart := withTwoCards(t)
	defer f.close()
	for _, c := range []struct {
		there []*gpuctlv1.ProbedDevice
		want  string
	}{{two, "nv-0 nv-1"}, {two[1:], "nv-1"}} {
		restart(c.there)
		var ids []string
		for _, g := range f.host.gpus {
			ids = append(ids, g.GetId())
		}
		if got := strings.Join(ids, " "); got != c.want {
			t.Errorf("got %s, want %s", got, c.want)
		}
	}
}

// An operation goes on, or is undone, while hostd is dead. Its record ends all the same.
func TestTheNextHostdEndsRecords(t *testing.T) {
	const done, back, failed = clusterv1.MigrationState_MIGRATION_STATE_DONE, clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK, clusterv1.MigrationState_MIGRATION_STATE_FAILED
	for what, c := range map[string]struct {
		verb, failAt string
		ends         bool // the session, while hostd is dead
		want         clusterv1.MigrationState
	}{
		"a swap":                         {verb: "migrate", want: done},
		"a swap that is undone":          {verb: "migrate", failAt: "commit", want: back},
		"a swap of a session that ended": {verb: "migrate", ends: true, want: failed},
		"a suspend":                      {verb: "suspend", want: done},
		"a suspend that is undone":       {verb: "suspend", failAt: "commit", want: back},
		"a resume":                       {verb: "resume", want: done},
		"a resume that is undone":        {verb: "resume", failAt: "commit", want: back},
	} {
		t.Run(what, func(t *testing.T) {
			f := newFixture(t, filepath.Join(t.TempDir(), "state.json"))
			defer f.close()
			id, err := f.guest.Begin(f.claim(&gpuctlv1.CreateClaimRequest{Expr: "id == 'big'"}).GetToken(), 1, "x", 1<<20)
			if err != nil {
				t.Fatal(err)
			}
			suspend := func(failAt string) {
				_, _ = last(f.Suspend(t.Context(), connect.NewRequest(&gpuctlv1.HostSuspendRequest{Session: id, FailAt: failAt})))
			}
			if c.verb == "resume" {
				suspend("")
			}
			killed := f.killedAtLastStep(t)
			switch c.verb {
			case "migrate":
				_, _ = f.swap(id, gpuctlv1.Verb_VERB_MIGRATE, "mid", c.failAt)
			case "suspend":
				suspend(c.failAt)
			case "resume":
				_, _ = last(f.Resume(t.Context(), connect.NewRequest(&gpuctlv1.HostResumeRequest{Session: id, FailAt: c.failAt})))
			}
			f.halt()
			if c.ends {
				f.guest.End(id)
			}
			killed()
			f.start()
			f.recordEnds(t, c.verb, id, c.want)
		})
	}
}

// killedAtLastStep keeps the journal of each step that gpuguest begins from now on. The returned function leaves what a
// hostd leaves that was killed at the last one.
func (f *fixture) killedAtLastStep(t *testing.T) (leave func()) {
	var mu sync.Mutex
	var journal []byte
	f.guest.Step = func(string, string) (err error) {
		mu.Lock()
		defer mu.Unlock()
		journal, err = os.ReadFile(f.state)
		return err
	}
	return func() {
		t.Helper()
		mu.Lock()
		defer mu.Unlock()
		writeState(t, f.state, journal)
	}
}

// recordEnds waits for the end of the one record that the cluster has.
func (f *fixture) recordEnds(t *testing.T, verb, session string, want clusterv1.MigrationState) {
	t.Helper()
	testkit.Until(t, "the record has ended", func() error {
		for m := range f.node.View().Migrations() { // the cluster is in memory: what was there before is gone
			if m.GetVerb() != verb || m.GetObject() != "here/"+session || m.GetState() != want || m.GetEndedUnixMs() == 0 || m.GetStep() != "" {
				return testkit.GiveUp(fmt.Errorf("%v", m))
			}
			return nil
		}
		return errors.New("there is none")
	})
}

// older makes a journal as a hostd wrote it that did not say what is offered, nor where the
// sessions of operations were.
func older(t *testing.T, journal []byte) []byte {
	t.Helper()
	var j map[string]any
	if err := json.Unmarshal(journal, &j); err != nil {
		t.Fatal(err)
	}
	delete(j, "revision")
	for list, key := range map[string]string{"claims": "offered", "operations": "from"} {
		for _, one := range j[list].([]any) {
			delete(one.(map[string]any), key)
		}
	}
	b, err := json.Marshal(j)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// A swap ends while hostd is dead, which an older one was. Until gpuguest has the new offer, a
// session can begin on the source.
func TestWhatAnOlderHostdOfferedStaysReservedUntilItIsReplaced(t *testing.T) {
	f := newFixture(t, filepath.Join(t.TempDir(), "state.json"))
	defer f.close()
	id, err := f.guest.Begin(f.claim(&gpuctlv1.CreateClaimRequest{Expr: "id == 'big'"}).GetToken(), 1, "x", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	middle := make(chan []byte, 1)
	f.guest.Step = func(string, string) error {
		journal, err := os.ReadFile(f.state)
		select {
		case middle <- journal:
		default:
		}
		return err
	}
	if r, err := f.swap(id, gpuctlv1.Verb_VERB_MIGRATE, "mid", ""); err != nil || r.GetError() != "" {
		t.Fatalf("%v %v", r, err)
	}
	f.halt()
	writeState(t, f.state, older(t, <-middle))
	held := make(chan []string, 1) // by the claim, when gpuguest is offered something
	f.guest.Offering = func() {
		j, err := readJournal(f.state)
		if err != nil || len(j.Claims) != 1 {
			return // held stays empty
		}
		select {
		case held <- slices.Sorted(maps.Keys(j.Claims[0].Held)):
		default:
		}
	}
	f.start()
	testkit.Until(t, "the source is given back", func() error {
		held := f.holders()
		return testkit.Want(slices.Equal(held, []string{"mid: " + id}), held)
	})
	if got := <-held; !slices.Equal(got, []string{"big", "mid"}) {
		t.Errorf("reserved while the source is still offered: %v", got)
	}
}

// gpuguest is still at the last step of a swap, whose source has its executor.
func TestSourceOfAnOlderHostdsOperationIsThatOfItsRecord(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	swap := record{&clusterv1.Migration{Id: "m-1", From: "big,mid"}}
	b, err := journal{Version: journalVersion, Revision: journalRevision, Claims: []*claim{}, Operations: []*operation{
		{Session: "1", Kind: "migrate", From: []string{"big", "mid"}, Record: swap},
		{Session: "2", Kind: "resume", Record: swap},
		{Session: "3", Kind: "migrate", Record: swap}, // it is committed
	}}.encode()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		journal []byte
		want    [][]string
	}{
		{b, [][]string{{"big", "mid"}, nil, nil}},
		{older(t, b), [][]string{{"big", "mid"}, nil, {"big", "mid"}}},
	} {
		writeState(t, path, c.journal)
		j, err := readJournal(path)
		if err != nil {
			t.Fatal(err)
		}
		for i, op := range j.Operations {
			if !slices.Equal(op.From, c.want[i]) {
				t.Errorf("%s of session %s was on %v, want %v", op.Kind, op.Session, op.From, c.want[i])
			}
		}
	}
}

// A runtime that fails once at a start of hostd shows no GPU. What a claim has there stays the claim's: a session may
// compute on it all the while, and the claim's next one begins there when the GPU is found again.
func TestGPUThatIsNotFoundOnceStaysItsClaims(t *testing.T) {
	for _, began := range []bool{true, false} {
		t.Run(fmt.Sprintf("session %t", began), func(t *testing.T) {
			f, two, restart := withTwoCards(t)
			defer f.close()
			restart(two)
			c := f.claim(&gpuctlv1.CreateClaimRequest{Expr: "id == 'nv-0'"})
			if began {
				if _, err := f.guest.Begin(c.GetToken(), 1, "x", 1<<20); err != nil {
					t.Fatal(err)
				}
				if err := f.host.Resync(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			restart(two[1:])
			if !f.host.Uses(c.GetClaim().GetId(), "nv-0") {
				t.Error("the log is told that nothing uses it, and gives it to others")
			}
			restart(two)
			if other := f.claim(&gpuctlv1.CreateClaimRequest{Expr: "id == 'nv-0'"}); other != nil {
				t.Errorf("it has two owners: %v", f.owners()["nv-0"])
			}
			if _, err := f.ReleaseClaim(t.Context(), connect.NewRequest(&gpuctlv1.ReleaseClaimRequest{Claim: c.GetClaim().GetId()})); err != nil {
				t.Fatal(err)
			}
			if !began && f.claim(&gpuctlv1.CreateClaimRequest{Expr: "id == 'nv-0'"}) == nil {
				t.Error("it is not free after its claim has ended")
			}
		})
	}
}
