package engine

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

func open(t *testing.T, dir string) *Losses {
	t.Helper()
	l, err := OpenLosses(dir, "lost")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func add(t *testing.T, l *Losses, id, command, why string) {
	t.Helper()
	if err := l.Add(&gpuctlv1.Session{Id: id, Command: command}, why); err != nil {
		t.Fatal(err)
	}
}

// What was lost is known to the next gpuguest, also if the last one ended while it wrote.
func TestLossesOutliveGpuguest(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	add(t, l, "s-1", "x264 clip", "its executor\nhas ended")
	add(t, l, "s-1", "x264 clip", "another reason")
	add(t, l, "s-2", strings.Repeat("c", 1000), strings.Repeat("w", 1000))
	f, err := os.OpenFile(filepath.Join(dir, "lost"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(`{"id":"s-3`); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	l = open(t, dir)
	add(t, l, "s-4", "app", "why")
	all := open(t, dir).All()
	if len(all) != 3 || all[0].GetId() != "s-1" || all[0].GetReason() != "its executorhas ended" || all[0].GetLostUnixMs() == 0 || all[2].GetId() != "s-4" {
		t.Fatalf("%v", all)
	}
	if n := len(all[1].GetCommand()) + len(all[1].GetReason()); n != lostCommand+lostReason {
		t.Errorf("%d bytes are kept of the text", n)
	}
	if !l.Has("s-2") || l.Has("s-3") {
		t.Error("s-2 was lost, and s-3 was not")
	}
}

// However many are lost, and however often, file and memory are bounded.
func TestLossesAreBounded(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	for i := range 3 * mostLosses {
		add(t, l, fmt.Sprintf("s-%d", i), "app", "why")
	}
	if all := l.All(); len(all) != mostLosses || all[mostLosses-1].GetId() != fmt.Sprintf("s-%d", 3*mostLosses-1) {
		t.Errorf("%d", len(all))
	}
	b, err := os.ReadFile(filepath.Join(dir, "lost"))
	if err != nil || strings.Count(string(b), "\n") > 2*mostLosses {
		t.Errorf("%v, %d lines", err, strings.Count(string(b), "\n"))
	}
	if all := open(t, dir).All(); len(all) != mostLosses || all[mostLosses-1].GetId() != fmt.Sprintf("s-%d", 3*mostLosses-1) {
		t.Errorf("%d", len(all))
	}
}

// A line that was cut off does not spoil the one after it, and is no reason not to start where
// nothing can be written.
func TestLossAfterOneThatWasCutOffIsKept(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "lost"), []byte("{\"id\":\"s-1\"}\n{\"id\":\"s-"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "lost.new"), 0o700); err != nil { // so that nothing can
		t.Fatal(err)
	}
	l := open(t, dir)
	if err := os.Remove(filepath.Join(dir, "lost.new")); err != nil {
		t.Fatal(err)
	}
	add(t, l, "s-2", "app", "why")
	if all := open(t, dir).All(); len(all) != 2 || all[1].GetId() != "s-2" {
		t.Errorf("%v", all)
	}
}

// Whoever loses thousands of sessions pushes out what others have lost neither in this gpuguest nor in the
// next one, and what an earlier version has written is read.
func TestLossesOfOneOwnerPushOutNoneOfAnother(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "lost"), []byte(`{"id":"s-old","command":"app"}`+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l := open(t, dir)
	lose := func(id, owner string) {
		t.Helper()
		if err := l.Add(&gpuctlv1.Session{Id: id, Owner: owner}, "why"); err != nil {
			t.Fatal(err)
		}
	}
	lose("s-1", "user:1")
	for i := range 2*mostLosses + 10 { // the file is written anew meanwhile
		lose(fmt.Sprint("x-", i), "user:2")
	}
	for range 2 {
		if n := len(l.All()); n != mostLosses || !l.Has("s-old") || !l.Has("s-1") || l.Has("x-1") || !l.Has(fmt.Sprint("x-", 2*mostLosses)) {
			t.Errorf("%d are known; s-old: %v, s-1: %v", n, l.Has("s-old"), l.Has("s-1"))
		}
		l = open(t, dir)
	}
}
