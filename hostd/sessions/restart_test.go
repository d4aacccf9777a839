package sessions

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

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
			var mu sync.Mutex
			var journal []byte // at the operation's last step
			f.guest.Step = func(string, string) (err error) {
				mu.Lock()
				defer mu.Unlock()
				journal, err = os.ReadFile(f.state)
				return err
			}
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
			mu.Lock()
			if err := os.WriteFile(f.state, journal, 0o600); err != nil {
				t.Fatal(err)
			}
			mu.Unlock()
			f.start()
			f.recordEnds(t, c.verb, id, c.want)
		})
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
