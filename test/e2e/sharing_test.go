package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/test/rig"
)

// startSharing starts a hostd with settings of sharing.
func startSharing(t *testing.T, settings string) *rig.Rig {
	t.Helper()
	root, err := rig.Root()
	if err != nil {
		t.Fatal(err)
	}
	memory, err := rig.TestMemory()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "gx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	r, err := rig.Start(t.Context(), rig.Options{Dir: dir, Config: rig.Config(root, memory) + "sharing: " + settings + "\n"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.Close()
		if t.Failed() {
			t.Logf("log of hostd:\n%s\nlog of gpuguest:\n%s", tail(r.Log(), 16<<10), tail(r.GuestLog(), 16<<10))
		}
	})
	return r
}

// owned is a command that runs in the name of an owner on a GPU that it shares.
func owned(t *testing.T, r *rig.Rig, owner, gpu string, argv ...string) *exec.Cmd {
	t.Helper()
	args := append([]string{"run", "--gpu", fmt.Sprintf("id == %q", gpu), "--min-memory", "64MiB", "--owner", owner, "--"}, argv...)
	cmd := exec.CommandContext(t.Context(), r.Bin("gpuctl"), args...)
	cmd.Env = r.Env()
	return cmd
}

func sharedStream(t *testing.T, r *rig.Rig, owner, gpu string, args ...string) *stream {
	t.Helper()
	cmd := owned(t, r, owner, gpu, append([]string{r.Program("stream"), "--verbose", "--stdin"}, args...)...)
	stop, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	s := &stream{launch(t, cmd), args, stop}
	t.Cleanup(func() { _ = stop.Close() }) // before gpuctl is killed, whose application would stay
	return s
}

// tenant starts a program of kernels, which ends with its standard input.
func tenant(t *testing.T, r *rig.Rig, owner, gpu string, args ...string) *app {
	t.Helper()
	cmd := owned(t, r, owner, gpu, append([]string{r.Program("tenant")}, args...)...)
	stop, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	a := launch(t, cmd)
	t.Cleanup(func() { _ = stop.Close() })
	return a
}

// shared is what gpuctl says of a session.
type shared struct {
	ID, State, Owner, Message, Command string
	Weight                             int
	Share                              *struct {
		Shared bool
		Turns  int
	}
}

// ofOwner waits until an owner's session is as it should be.
func ofOwner(t *testing.T, r *rig.Rig, owner, what string, is func(shared) bool) (found shared) {
	t.Helper()
	testkit.Until(t, owner+": "+what, func() error {
		all, err := sessions(t, r)
		if err != nil {
			return err
		}
		for _, s := range all {
			if s.Owner == owner && is(s) {
				found = s
				return nil
			}
		}
		return fmt.Errorf("sessions: %+v", all)
	})
	return found
}

func sessions(t *testing.T, r *rig.Rig) (all []shared, err error) {
	t.Helper()
	out, err := r.Gpuctl(t.Context(), "-o", "json", "sessions")
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(out, &all); err != nil {
		t.Fatal(err)
	}
	return all, nil
}

// operate repeats an operation until it is not rolled back: on a busy machine a freeze may take too long.
func operate(t *testing.T, r *rig.Rig, verb string, args ...string) {
	t.Helper()
	testkit.Until(t, verb, func() error {
		s, err := r.Operate(t.Context(), verb, args...)
		return testkit.Want(err == nil && !s.RolledBack && !s.Refused, s, err)
	})
}

func takesTurns(s shared) bool { return s.Share != nil && s.Share.Shared && s.Share.Turns > 0 }

// Owners share a GPU while executors, applications and gpuguest are killed, and sessions are
// swapped, suspended and resumed. The others' results are right.
func TestOwnersThatShareAGPU(t *testing.T) {
	r := startSharing(t, "{policy: fair}")
	args := map[string][]string{"a": {"--kib", "256", "--events"}, "b": {"--kib", "256", "--threads", "2", "--queues", "2"}}
	a := sharedStream(t, r, "a", rig.Pthread, args["a"]...)
	b := sharedStream(t, r, "b", rig.Pthread, args["b"]...)
	both := func(what string) {
		t.Helper()
		for _, s := range []*stream{a, b} {
			s.more(t, 2)
		}
		for _, owner := range []string{"a", "b"} {
			ofOwner(t, r, owner, "it takes turns: "+what, takesTurns)
		}
	}
	both("at first")

	victim := tenant(t, r, "killed", rig.Pthread, "--iterations", "200000", "--think-us", "0", "--seconds", "3600")
	ofOwner(t, r, "killed", "it takes turns", takesTurns)
	killed := 0
	for _, pid := range children(t, os.Getpid(), "tenant --iterations") {
		if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err != nil || exe != r.Program("tenant") {
			continue // the gpuctl run that has started it
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && err != syscall.ESRCH {
			t.Fatal(err)
		}
		killed++
	}
	if killed != 1 {
		t.Fatalf("%d applications to kill", killed)
	}
	_ = victim.wait(t)
	both("after the end of an application in its turn")

	killGpuguest(t, r)
	both("by the next gpuguest")

	for _, to := range []string{rig.Basic, rig.Pthread} {
		id := ofOwner(t, r, "a", "it runs", func(s shared) bool { return s.State == "running" }).ID
		operate(t, r, "migrate", id, "--to", to)
		a.more(t, 2)
	}
	both("after a swap")

	id := ofOwner(t, r, "b", "it runs", func(s shared) bool { return s.State == "running" }).ID
	operate(t, r, "suspend", id)
	a.more(t, 2)
	operate(t, r, "resume", id)
	both("after a resume")

	a.verify(t)
	b.verify(t)
}

// A kernel without an end: others go on beside it, its session is told of and then ended.
func TestSessionThatKeepsTheGPUIsEnded(t *testing.T) {
	r := startSharing(t, "{policy: fair, limit: 500ms, endAfter: 15s}")
	b := sharedStream(t, r, "b", rig.Pthread, "--kib", "256")
	b.more(t, 1)
	a := tenant(t, r, "endless", rig.Pthread, "--loop", "--seconds", "3600")
	lost := func() bool { return strings.Contains(r.GuestLog(), `"session lost"`) }
	// Where processors are rare, the command before it may be the one that takes so long at first.
	testkit.Until(t, "it is told of", func() error {
		over := lost()
		all, err := sessions(t, r)
		told := func(s shared) bool { return strings.Contains(s.Message, " has had GPU large for ") }
		switch {
		case err != nil || slices.ContainsFunc(all, told):
			return err
		case over:
			return testkit.GiveUp(errors.New(tail(r.GuestLog(), 2048)))
		}
		return fmt.Errorf("sessions: %+v", all)
	})
	b.more(t, 1)
	// Its application ends when it is told, and the session with it: the list may not show it any more.
	testkit.Until(t, "the session is lost", func() error { return testkit.Want(lost(), tail(r.GuestLog(), 2048)) })
	why := regexp.MustCompile(`session lost" .*err="command forever has had GPU large for \d+s while others wait"`)
	if text := r.GuestLog(); !why.MatchString(text) {
		t.Errorf("gpuguest does not say why: %s", tail(text, 2048))
	}
	if err := a.wait(t); err == nil {
		t.Error("the application of a session that is lost ends well")
	}
	if out := a.output(); !strings.Contains(out, " was lost: command forever has had GPU large for ") {
		t.Errorf("gpuctl run does not say why: %s", out)
	}
	b.more(t, 2)
	b.verify(t)
}

// Who wants more memory than it has stated is refused, and its neighbour gets what it has stated.
func TestMemoryOfANeighbourIsNotTaken(t *testing.T) {
	r := startSharing(t, "{policy: fair}")
	greedy := tenant(t, r, "greedy", rig.Basic, "--iterations", "1000", "--seconds", "3600", "--allocate", "2048")
	greedy.until(t, "ready")
	if out := greedy.output(); !strings.Contains(out, "allocated 56 MiB, then -4") { // and 4 KiB of its own
		t.Errorf("who asks for more than 64 MiB: %s", out)
	}
	honest := tenant(t, r, "honest", rig.Basic, "--iterations", "1000", "--seconds", "1", "--allocate", "56")
	honest.until(t, "allocated 56 MiB, then 0")
	if err := honest.wait(t); err != nil {
		t.Error(err)
	}
}
