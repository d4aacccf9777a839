package cuda

import (
	"path/filepath"
	"syscall"
	"testing"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/cuda/ask"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
	"github.com/gpuctl/gpuctl/guest/engine"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// twoStep is a launcher whose second worker begins when go is there.
func (r *rig) twoStep(env ...string) (launcher *program, goOn func()) {
	r.t.Helper()
	step := filepath.Join(r.dir, "go")
	work := "setsid " + programs + "/cudaloop --rounds 1000000000 & "
	p := r.startProgram("/bin/sh", append(environment(r.dir), env...), nil, "-c", work+"while [ ! -e "+step+" ]; do sleep 0.02; done; "+work+"wait")
	return p, func() { r.touch("go"); <-p.lines }
}

// ends kills a process and waits until it has gone.
func (r *rig) ends(pid int) {
	r.t.Helper()
	_ = syscall.Kill(pid, syscall.SIGKILL)
	testkit.Until(r.t, "it has ended", func() error {
		l, err := r.cfg.Roots.Take(false)
		return testkit.Want(err == nil && l.Processes[pid] == nil, pid, err)
	})
}

// A worker that begins to use CUDA later belongs to the session, too: the card is free only when it
// has ended, whoever of the session ends before.
func TestSessionHasTheWorkerThatBeginsLater(t *testing.T) {
	for _, by := range []string{"adopted", "offered"} {
		t.Run(by, func(t *testing.T) {
			r := newRig(t)
			p, goOn := r.twoStep(tokenName + "=t0ken")
			var id string
			if by == "adopted" {
				id = r.adopt(p.pid)
			} else {
				if err := r.m.Offer(t.Context(), &gpuctlv1.OfferRequest{Token: "t0ken", Claim: "c-1", Target: targetTo(cardA)}); err != nil {
					t.Fatal(err)
				}
				testkit.Until(t, "it is a session", func() error { return testkit.Want(len(r.m.list()) == 1, r.m.list()) })
				id = r.m.list()[0].id
			}
			first := r.processes(id)
			t.Cleanup(func() { _ = syscall.Kill(first[0], syscall.SIGKILL) })
			goOn()
			testkit.Until(t, "the second one is a member", func() error { return testkit.Want(len(r.processes(id)) == 2, r.session(id)) })
			var second int
			for _, pid := range r.processes(id) {
				if pid != first[0] {
					second = pid
				}
			}
			t.Cleanup(func() { _ = syscall.Kill(second, syscall.SIGKILL) })
			if err := p.cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = p.cmd.Wait()
			r.ends(first[0])
			r.done(id, kindSuspend)
			if st := r.state(second); st != ask.Checkpointed {
				t.Errorf("the second one is %s, and its session is suspended", st)
			}
			r.done(id, kindResume)
			r.ends(second)
			testkit.Until(t, "the session has ended", func() error { return testkit.Want(len(r.m.list()) == 0, r.m.list()) })
		})
	}
}

// A script may start programs with offers of their own, or natively: those are none of the session's.
func TestProgramWithAnotherOfferJoinsNoSession(t *testing.T) {
	m := &Manager{offers: engine.Offers{"t1": {Token: "t1", Claim: "c-1"}, "t2": {Token: "t2", Claim: "c-2"}}}
	run, adopted := &session{m: m, rec: record{Claim: "c-1"}}, &session{m: m, rec: record{Claim: "c-3"}}
	for _, c := range []struct {
		s     *session
		token string
		joins bool
	}{{run, "t1", true}, {run, "t2", false}, {run, "", false}, {adopted, "", true}, {adopted, "t2", false}} {
		if got := m.joins(c.s, m.offers[c.token]); got != c.joins {
			t.Errorf("claim %s, token %q: %v", c.s.rec.Claim, c.token, got)
		}
	}
}

func TestStrangersAreAskedForLessAndLess(t *testing.T) {
	ss, now := strangers{}, time.Unix(1e9, 0)
	h := &holders.Holder{Process: holders.Process{PID: 7, Start: 70}}
	asked := 0
	for range 600 {
		asked += len(ss.due([]*holders.Holder{h}, now))
		ss.forget(now)
		now = now.Add(time.Second)
	}
	if asked < 10 || asked > 20 {
		t.Errorf("asked %d times in ten minutes", asked)
	}
	if ss.forget(now.Add(3 * mostRest)); len(ss) > 0 {
		t.Errorf("%v", ss)
	}
}
