package cuda

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/cuda/ask"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
)

// What runs gpuguest's program is gpuguest's own only if it, or an earlier one, has started it.
func TestProcessesOfGpuguestAreKnownByWhoStartedThem(t *testing.T) {
	proc := t.TempDir()
	self := os.Getpid()
	add := func(pid, parent int, exe string) {
		dir := filepath.Join(proc, fmt.Sprint(pid))
		stat := fmt.Sprintf("%d (x) S %d 1 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 7 0 0", pid, parent)
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "stat"), []byte(stat), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(exe, filepath.Join(dir, "exe")); err != nil {
			t.Fatal(err)
		}
	}
	const gpuguest, none = "/usr/bin/gpuguest", 4194000 // more than the pids of this machine
	m := &Manager{self: gpuguest, cfg: Config{Roots: holders.Roots{Proc: proc}}}
	add(none+1, 1, "/usr/bin/supervise")
	add(self, none+1, gpuguest)
	add(none+2, self, gpuguest)              // a helper
	add(none+3, none+2, gpuguest)            // and its child
	add(none+4, 1, gpuguest+" (deleted)")    // of an earlier gpuguest, before an update
	add(none+5, none+1, gpuguest)            // the same below what starts gpuguest again
	add(none+6, 1, "/bin/bash")              // a user
	add(none+7, none+6, gpuguest)            // who runs the program
	add(none+8, none+7, gpuguest)            // which starts itself
	add(none+9, self, "/usr/bin/nvidia-smi") // another program
	add(none+10, none+11, gpuguest)          // whose parent has ended meanwhile
	for pid, want := range map[int]bool{
		self: true, none + 2: true, none + 3: true, none + 4: true, none + 5: true,
		none + 1: false, none + 6: false, none + 7: false, none + 8: false, none + 9: false, none + 10: false, none + 12: false,
	} {
		if got := m.ours(pid); got != want {
			t.Errorf("process %d: ours is %v", pid, got)
		}
	}
}

// Whoever asks whose a process is may ask while a session's processes are being made again.
func TestProcessesAreFoundWhileAnOperationGivesThemOtherStarts(t *testing.T) {
	m := &Manager{sessions: map[string]*session{}}
	mb := &member{PID: 7, Start: 1}
	s := &session{m: m, id: "d-1", silent: true, rec: record{PID: 7, Start: 1, Members: []*member{mb}}}
	m.sessions[s.id] = s
	made := make(chan struct{})
	go func() {
		defer close(made)
		for i := range uint64(1000) {
			if err := s.update(func(r *record) { r.Start, mb.Start = i, i }); err != nil {
				t.Error(err)
			}
		}
	}()
	for range 1000 {
		m.sessionOf(7, 0)
	}
	<-made
	if m.sessionOf(7, 999) != s || m.sessionOf(7, 1) != nil {
		t.Error("not found by its start")
	}
}

// A plan looks at a session's members while lists of sessions bring their usage up to date.
func TestUsageLeavesWhatAPlanIsLookingAt(t *testing.T) {
	c := &machine{Answer: &ask.Answer{Processes: []ask.Process{{PID: 7, GPU: cardA, Used: 1}, {PID: 7, GPU: cardB, Used: 2}}}}
	s := &session{state: gpuctlv1.SessionState_SESSION_STATE_RUNNING, rec: record{
		GPUs:    []gpu{{UUID: cardB, Used: 1}},
		Members: []*member{{PID: 7, Uses: []ask.UUID{cardB}, Used: []uint64{1}, Slots: []int{0}}},
	}}
	members := s.members()
	s.used(c, 0)
	for _, mb := range members {
		if to := mb.on([]ask.UUID{cardB}); len(to) != 1 || mb.bytes() != 1 {
			t.Errorf("the member goes to %v, with %d bytes", to, mb.bytes())
		}
	}
	if now := s.members()[0]; len(now.Uses) != 2 || now.bytes() != 3 || len(s.rec.GPUs) != 2 {
		t.Errorf("not brought up to date: %v on %v", now, s.rec.GPUs)
	}
}
