package session

import (
	"encoding/json"
	"os"
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
