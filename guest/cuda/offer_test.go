package cuda

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/cuda/ask"
	"github.com/gpuctl/gpuctl/guest/engine"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// asked is a rig whose helpers wait before they tell the state of a process, and say that. Nobody
// looks for offered processes but the test.
type asked struct {
	*rig
	first, answer string // pipes
}

func newAsked(t *testing.T) *asked {
	t.Helper()
	dir := t.TempDir()
	a := &asked{first: filepath.Join(dir, "first"), answer: filepath.Join(dir, "answer")}
	for _, name := range []string{a.first, a.answer} {
		if err := syscall.Mkfifo(name, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	a.rig = newRig(t, func(c *Config) {
		script := `if test "$4" = state; then : > "$2"; read -r _ < "$3"; fi; exec "$1" helper "$4"`
		c.Helper = ask.Helper{Path: "/bin/sh", Args: []string{"-c", script, "sh", c.Helper.Path, a.first, a.answer}, Env: c.Helper.Env}
		c.Deadlines.State = time.Minute // also on a busy machine
	})
	a.m.cancel()
	a.m.wg.Wait()
	return a
}

// look looks for offered processes, and does something while the helper waits.
func (a *asked) look(during func() error) error {
	a.t.Helper()
	done := make(chan error, 1)
	go func() {
		found, err := a.m.findOffered()
		for _, o := range found {
			err = errors.Join(err, a.m.adoptOffer(a.t.Context(), o))
		}
		done <- err
	}()
	_, err := os.ReadFile(a.first) // once a helper has opened it
	if err == nil {
		err = during()
	}
	if err == nil {
		err = os.WriteFile(a.answer, []byte("\n"), 0)
	}
	if err != nil {
		a.t.Fatal(err)
	}
	return <-done
}

// A GPU that is not offered any more may be somebody else's as soon as its caller knows. So no
// session begins by that offer later, however long its processes were being looked at.
func TestNoSessionBeginsByAnOfferThatWasReplaced(t *testing.T) {
	a := newAsked(t)
	offer := func(claim string, card ask.UUID) error {
		return a.m.Offer(t.Context(), &gpuctlv1.OfferRequest{Token: "t0ken", Claim: claim, Target: targetTo(card)})
	}
	p := a.start([]string{tokenName + "=t0ken"})
	for what, during := range map[string]func() error{
		"withdrawn": func() error { return a.m.Withdraw(t.Context(), "t0ken") },
		"replaced":  func() error { return offer("c-2", cardB) },
	} {
		if err := offer("c-1", cardA); err != nil {
			t.Fatal(err)
		}
		if err := a.look(during); !errors.Is(err, engine.ErrOfferedAnew) || len(a.m.list()) != 0 {
			t.Fatalf("%s: %v, %d sessions", what, err, len(a.m.list()))
		}
	}
	if err := offer("c-2", cardB); err != nil {
		t.Fatal(err)
	}
	err := a.look(func() error { return offer("c-2", cardB) }) // the same again is no other offer
	if err != nil || len(a.m.list()) != 1 {
		t.Fatalf("%v, %d sessions", err, len(a.m.list()))
	}
	if s := a.m.list()[0]; s.snapshot().GetClaim() != "c-2" || targetOf(s.rec.Target).GetDriver()[0].GetUuid() != string(cardB) {
		t.Errorf("the session is of %v", s.snapshot())
	}
	p.works()
}

// stopHelpers has each helper stopped that asks for a process, and returns the file which then is
// there.
func (r *rig) stopHelpers(pids ...int) (stopped string) {
	r.t.Helper()
	h := r.m.cfg.Helper
	stopped = filepath.Join(r.dir, "stopped")
	var those []string
	for _, pid := range pids {
		those = append(those, fmt.Sprintf(`*'"pid":%d,'*`, pid))
	}
	script := fmt.Sprintf(`in=$(cat); case "$in" in %s) echo $$ >> %s; kill -STOP $$;; esac; printf %%s "$in" | "%s" helper "$1"`, strings.Join(those, "|"), stopped, h.Path)
	r.m.ask.Helper = ask.Helper{Path: "/bin/sh", Args: []string{"-c", script, "sh"}, Env: h.Env}
	r.t.Cleanup(func() { // before the manager waits for it
		b, err := os.ReadFile(stopped)
		if err != nil {
			r.t.Error(err)
		}
		for _, line := range strings.Fields(string(b)) {
			if pid, err := strconv.Atoi(line); err == nil {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	})
	return stopped
}

// A user can stop the helpers that ask for its processes. Nobody else may wait for them.
func TestHelperOfOneJobThatIsStoppedKeepsNobodyWaiting(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Deadlines.State = time.Hour })
	bad := r.start([]string{tokenName + "=bad"})
	stopped := r.stopHelpers(bad.pid)
	for token, claim := range map[string]string{"bad": "c-1", "good": "c-2"} {
		if err := r.m.Offer(t.Context(), &gpuctlv1.OfferRequest{Token: token, Claim: claim, Target: targetTo(cardA)}); err != nil {
			t.Fatal(err)
		}
	}
	testkit.Until(t, "the helper is stopped", func() error { _, err := os.Stat(stopped); return err })
	p, q := r.start([]string{tokenName + "=good"}), r.start(nil)
	testkit.Until(t, "another offered process is a session", func() error { return testkit.Want(len(r.m.list()) == 1, r.m.list()) })
	if s := r.m.list()[0].snapshot(); s.GetClaim() != "c-2" || int(s.GetPid()) != p.pid {
		t.Errorf("%v", s)
	}
	r.adopt(q.pid)
}

// Nor may an operator that adopts all that there is, who waits for a while only.
func TestHelpersThatAreStoppedKeepNoOthersFromBeingAdopted(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Deadlines.State = 8 * time.Second })
	var bad []int
	for range 3 {
		bad = append(bad, r.start(nil).pid)
	}
	good := r.start(nil).pid
	r.stopHelpers(bad...)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	resp, err := r.m.Adopt(ctx, &gpuctlv1.AdoptRequest{All: true, Look: true})
	if err != nil || len(resp.GetSessions()) != 1 || int(resp.GetSessions()[0].GetPid()) != good || len(resp.GetRefused()) != len(bad) {
		t.Errorf("%v, %v", resp, err)
	}
}

// What a VM offers is for all its users, and is one offer. A user who stops the helpers that ask for
// one of its jobs does not keep those of others waiting.
func TestHelperThatIsStoppedKeepsNoOtherUserOfItsOfferWaiting(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Deadlines.State = time.Hour })
	bad, good := r.start(nil), r.start(nil)
	stopped := r.stopHelpers(bad.pid)
	offer := &gpuctlv1.OfferRequest{Token: "vm", Claim: "c-1", Target: targetTo(cardA)}
	if err := r.m.Offer(t.Context(), offer); err != nil {
		t.Fatal(err)
	}
	r.m.adoptAside(offered{pid: bad.pid, uid: 65533, by: offer})
	testkit.Until(t, "the helper is stopped", func() error { _, err := os.Stat(stopped); return err })
	r.m.adoptAside(offered{pid: good.pid, uid: 65532, by: offer})
	testkit.Until(t, "the other user's job is a session", func() error { return testkit.Want(len(r.m.list()) == 1, r.m.list()) })
	if pid := int(r.m.list()[0].snapshot().GetPid()); pid != good.pid {
		t.Errorf("process %d is one", pid)
	}
}

// A job may begin with processes that only look at GPUs, one of which has the token. The session
// has the offer's claim all the same: without it, its GPU would be somebody else's as well.
func TestSessionHasItsOffersClaimIfWhoHasTheTokenUsesNoCUDA(t *testing.T) {
	r := newRig(t)
	if err := r.m.Offer(t.Context(), &gpuctlv1.OfferRequest{Token: "t0ken", Claim: "c-1", Target: targetTo(cardA)}); err != nil {
		t.Fatal(err)
	}
	const (
		watcher = `exec 3<"$1"; "$2" -c "$3" sh "$@"; :`
		runner  = `exec 3<"$1"; ` + tokenName + `=t0ken; export ` + tokenName + `; "$2" -c "$4" sh "$@"; :`
		holder  = `exec 3<"$1"; unset ` + tokenName + `; "$5"; :`
	)
	p := r.startProgram("/bin/sh", environment(r.dir), nil,
		"-c", watcher, "sh", filepath.Join(r.cfg.Roots.Dev, "nvidiactl"), "/bin/sh", runner, holder, programs+"/cudaloop")
	testkit.Until(t, "the job is a session", func() error { return testkit.Want(len(r.m.list()) == 1, r.log.String()) })
	s := r.m.list()[0]
	if got := s.snapshot(); got.GetClaim() != "c-1" || targetOf(s.rec.Target).GetDriver()[0].GetUuid() != string(cardA) {
		t.Errorf("the session is of %v", got)
	}
	p.works()
}

// Once a withdrawal has been answered, no gpuguest offers that again, also if it failed before.
func TestOfferIsThereUntilItsWithdrawalIsWritten(t *testing.T) {
	r := newRig(t)
	if err := r.m.Offer(t.Context(), &gpuctlv1.OfferRequest{Token: "t0ken", Claim: "c-1", Target: targetTo(cardA)}); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(r.cfg.Dir, engine.OffersName)
	if err := os.Rename(name, name+".old"); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(name, "in the way"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := r.m.Withdraw(t.Context(), "t0ken"); err == nil {
		t.Fatal("withdrawn, and not written")
	}
	if err := os.RemoveAll(name); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(name+".old", name); err != nil {
		t.Fatal(err)
	}
	if err := r.m.Withdraw(t.Context(), "t0ken"); err != nil {
		t.Fatal(err)
	}
	r.m.Close()
	r.open()
	if len(r.m.offers) != 0 {
		t.Errorf("the next gpuguest offers %v", r.m.offers)
	}
}
