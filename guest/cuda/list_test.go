package cuda

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/guest/cuda/ask"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// slowLook is a rig with a session, whose driver was asked for a list of sessions and has not
// answered yet: it answers with what it saw then.
func slowLook(t *testing.T) (r *rig, id string, answer func()) {
	t.Helper()
	dir := t.TempDir()
	hold, saw, answers := filepath.Join(dir, "hold"), filepath.Join(dir, "saw"), filepath.Join(dir, "answer")
	if err := syscall.Mkfifo(answers, 0o600); err != nil {
		t.Fatal(err)
	}
	r = newRig(t, func(c *Config) {
		script := `if test "$5" = devices && rm "$2" 2>/dev/null; then a=$("$1" helper "$5"); : > "$3"; read -r _ < "$4"; echo "$a"; exit; fi
exec "$1" helper "$5"`
		c.Helper = ask.Helper{Path: "/bin/sh", Args: []string{"-c", script, "sh", c.Helper.Path, hold, saw, answers}, Env: c.Helper.Env}
	})
	id = r.adopt(r.start(nil).pid)
	if err := os.WriteFile(hold, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r.m.mu.Lock()
	r.m.seenAt = time.Time{}
	r.m.mu.Unlock()
	listed := make(chan int, 1)
	go func() { listed <- len(r.m.List(t.Context())) }()
	answered := false
	answer = func() {
		if answered {
			return
		}
		answered = true
		if err := os.WriteFile(answers, []byte("now\n"), 0o600); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(answer)
	testkit.Until(t, "the driver was asked", func() error { _, err := os.Stat(saw); return err })
	select {
	case n := <-listed:
		if n != 1 {
			t.Errorf("%d sessions", n)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the list waits for the driver")
	}
	return r, id, answer
}

// Everybody's swaps and claims wait for lists of sessions, and one program may have its GPU hang.
func TestDriverThatIsSlowKeepsNoListWaiting(t *testing.T) {
	r, _, answer := slowLook(t)
	for range 2 { // nor do those that come meanwhile, or ask it again
		began := time.Now()
		if n := len(r.m.List(t.Context())); n != 1 || time.Since(began) > 20*time.Second {
			t.Errorf("%d sessions after %v", n, time.Since(began))
		}
	}
	answer()
	testkit.Until(t, "the look has ended", r.lookEnded)
}

// Its GPU would be given to others, and that where it was would not.
func TestLateLookLeavesASessionWhereItsSwapHasBroughtIt(t *testing.T) {
	r, id, answer := slowLook(t)
	r.done(id, kindSwap, cardB)
	answer()
	testkit.Until(t, "the look has ended", r.lookEnded)
	if on := r.session(id).GetDriver().GetGpus(); len(on) != 1 || on[0].GetUuid() != string(cardB) {
		t.Errorf("after a swap to %s it is said to be on %v", cardB, on)
	}
}

func (r *rig) lookEnded() error {
	r.m.mu.Lock()
	defer r.m.mu.Unlock()
	return testkit.Want(r.m.looking == nil, "it goes on")
}
