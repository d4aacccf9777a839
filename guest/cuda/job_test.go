package cuda

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/cuda/ask"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// processes returns the processes of a session that use CUDA.
func (r *rig) processes(id string) (pids []int) {
	r.t.Helper()
	for _, p := range r.session(id).GetDriver().GetProcesses() {
		if p.GetState() != "" {
			pids = append(pids, int(p.GetPid()))
		}
	}
	slices.Sort(pids)
	return pids
}

// A launcher may end before its workers. They are one session all the same: the card is free only
// when each has left it.
func TestSessionKeepsItsWorkersWhenTheirLauncherHasEnded(t *testing.T) {
	r := newRig(t)
	work := "setsid " + programs + "/cudaloop --rounds 1000000000 &"
	p := r.startProgram("/bin/sh", environment(r.dir), nil, "-c", work+work+" wait")
	<-p.lines // the other is ready
	id := r.adopt(p.pid)
	workers := r.processes(id)
	t.Cleanup(func() {
		for _, pid := range workers {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	if len(workers) != 2 {
		t.Fatalf("%v", r.session(id))
	}
	if err := p.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	testkit.Until(t, "the launcher has ended", func() error {
		l, err := r.cfg.Roots.Take(false)
		if err == nil && l.Processes[p.pid] != nil {
			err = fmt.Errorf("pid %d is there", p.pid)
		}
		return err
	})
	if plan, err := r.m.Plan(t.Context(), &gpuctlv1.PlanRequest{Session: id}); err != nil || len(plan.GetReasons()) > 0 {
		t.Errorf("plan: %v, %v", plan, err)
	}
	r.done(id, kindSuspend)
	if now := r.processes(id); !slices.Equal(now, workers) {
		t.Errorf("its processes are %v, and were %v", now, workers)
	}
	for _, pid := range workers {
		if st := r.state(pid); st != ask.Checkpointed {
			t.Errorf("pid %d is %s, and its session is suspended", pid, st)
		}
	}
	r.done(id, kindResume)
}

// Its first process has ended, and another program has its pid. That is nobody of the session.
func TestProgramThatHasThePidOfAnEndedOneIsLeftAlone(t *testing.T) {
	r := newRig(t)
	mine, other := r.start(nil), r.start(nil)
	id := r.adopt(mine.pid)
	s, err := r.m.lookup(id)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.update(func(r *record) { r.PID, r.Start = other.pid, 1 }); err != nil {
		t.Fatal(err)
	}
	r.done(id, kindSuspend)
	if st := r.state(other.pid); st != ask.Running {
		t.Errorf("the other program is %s", st)
	}
	if st := r.state(mine.pid); st != ask.Checkpointed {
		t.Errorf("the session's is %s", st)
	}
	r.done(id, kindResume)
	mine.works()
	other.works()
}

// Two programs that were adopted one by one get one parent, as what takes orphans in a user's
// session. They stay two sessions.
func TestProcessIsInOneSessionOnly(t *testing.T) {
	m := &Manager{sessions: map[string]*session{}}
	l := &holders.Look{Processes: map[int]*holders.Process{}, Holders: map[int]*holders.Holder{}}
	l.Processes[10] = &holders.Process{PID: 10, Parent: 1, Start: 10}
	for _, pid := range []int{20, 30} {
		p := holders.Process{PID: pid, Parent: 10, Group: pid, Session: pid, Start: uint64(pid)}
		l.Processes[pid], l.Holders[pid] = &p, &holders.Holder{Process: p}
		id := fmt.Sprint("d-", pid)
		m.sessions[id] = &session{m: m, id: id, rec: record{PID: pid, Start: p.Start, Members: []*member{{PID: pid, Start: p.Start}}}}
	}
	if j := l.JobOf(20); len(j.Holders) != 2 {
		t.Fatalf("%+v", j)
	}
	for id, s := range m.sessions {
		if j := s.job(l); j == nil || len(j.Holders) != 1 || j.Holders[0].PID != s.rec.PID {
			t.Errorf("%s: %+v", id, j)
		}
	}
}

// A process between the first one and a member ends while the job is written. The member is not in
// the folder then, which nobody could resume from, and nothing may be ended.
func TestStoreWithoutAMemberIsTakenBack(t *testing.T) {
	needRoot(t)
	r := newRig(t)
	r.script(`kill -KILL $(cat middle); while [ -e /proc/$(cat middle)/exe ]; do sleep 0.01; done`)
	middle := "echo $$ > " + r.dir + "/middle; " + programs + "/cudaloop --mib 8; true"
	pid, works := r.apartAs("/bin/sh", "-c", "sh -c '"+middle+"'; exec sleep 60")
	id := r.adopt(pid)
	member := r.processes(id)[0]
	t.Cleanup(func() { _ = syscall.Kill(member, syscall.SIGKILL) })
	if res := r.store(id, ""); !res.GetRolledBack() || !strings.Contains(res.GetError(), "does not descend") {
		t.Fatalf("%v", res)
	}
	if _, err := holders.Pin(pid, 0); err != nil {
		t.Errorf("the first process: %v", err)
	}
	works()
}

// Without descriptors, nobody knows whether a program has ended. Its session must not stay for ever.
func TestSessionEndsAlsoIfItsEndComesWithoutDescriptors(t *testing.T) {
	log := &testkit.Log{}
	r := newRig(t, func(c *Config) { c.Logger = slog.New(slog.NewTextHandler(log, nil)) })
	p := r.start(nil)
	id := r.adopt(p.pid)
	s, err := r.m.lookup(id)
	if err != nil {
		t.Fatal(err)
	}
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: before.Max}); err != nil {
		t.Fatal(err)
	}
	watched := make(chan struct{})
	go func() { s.watch(); close(watched) }()
	testkit.Until(t, "it can't be looked at", func() error {
		return testkit.Want(strings.Contains(log.String(), "too many open files"), log.String())
	})
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-watched
	if len(r.m.list()) != 0 {
		t.Errorf("%v", r.m.list())
	}
}
