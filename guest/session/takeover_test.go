package session

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// change restarts the manager, with another record of the bench's session.
func (b *bench) change(to func(*record)) {
	b.t.Helper()
	dir := b.m.sessionDir(b.id)
	b.restart(func() {
		rec, err := readRecord(dir)
		if err != nil {
			b.t.Error(err)
			return
		}
		to(rec)
		raw, err := json.Marshal(rec)
		if err == nil {
			err = replaceFile(dir, recordName, raw)
		}
		if err != nil {
			b.t.Error(err)
		}
	})
}

// A program whose first thread ends goes on, and so does its session.
func TestNextManagerTakesOverAnApplicationWhoseFirstThreadHasEnded(t *testing.T) {
	b := newBench(t)
	b.suspend("", "") // no executor has its memory
	var files []*os.File
	for _, fd := range b.fds {
		fd, err := unix.Dup(fd)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, os.NewFile(uintptr(fd), "memory"))
	}
	pid := testkit.Half(t, nil, files...)
	for _, f := range files {
		f.Close()
	}
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		t.Fatal(err)
	}
	start, err := strconv.ParseUint(strings.Fields(string(stat))[21], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	b.change(func(r *record) { r.PID, r.Start = pid, start })
	b.isSuspended("memory")
}

// The number of an executor that has ended may be a thread's. No gpuguest would start as long as
// that thread runs.
func TestExecutorWhoseNumberAThreadHasIsGone(t *testing.T) {
	names, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	threads := 0
	for _, e := range names {
		tid, err := strconv.Atoi(e.Name())
		if err != nil || tid == os.Getpid() {
			continue
		}
		threads++
		if _, err := (&ExecLauncher{}).Adopt(tid, 7, filepath.Join(t.TempDir(), "log")); !errors.Is(err, ErrGone) {
			t.Errorf("thread %d: %v", tid, err)
		}
	}
	if threads == 0 {
		t.Error("no threads")
	}
}

// Out of descriptors, nobody knows what has ended. A gpuguest that starts then must not take a
// session that runs for one that is over.
func TestTakeOverWithoutDescriptorsDropsNoSession(t *testing.T) {
	b := newBench(t)
	dir := b.m.sessionDir(b.id)
	refused := 0
	for left := range 12 {
		b.m.Close()
		testkit.FewDescriptors(t, left, func() {
			m := &Manager{cfg: Config{Dir: b.dir, Launcher: b.l}, log: b.m.log, sessions: map[string]*session{}, budgets: b.m.budgets, losses: b.m.losses}
			m.sharing = newSharing(m, b.m.sharing.cfg)
			m.ctx, m.cancel = context.WithCancel(context.Background())
			if err := m.adopt(dir, b.id); err != nil {
				refused++
			}
			m.cancel()
			for _, s := range m.list() {
				s.mu.Lock()
				op := s.op
				s.mu.Unlock()
				if op != nil {
					<-op.Done()
				}
				s.release()
			}
		})
		if _, err := os.Stat(filepath.Join(dir, recordName)); err != nil {
			t.Fatalf("with %d descriptors: %v", left, err)
		}
		b.m = newManager(t, b.dir, b.l)
	}
	if refused == 0 {
		t.Error("it was never out of descriptors")
	}
	b.runsOn(1)
}
