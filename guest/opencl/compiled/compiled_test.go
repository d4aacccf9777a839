package compiled

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func newStore(t *testing.T) *Store {
	t.Helper()
	s, err := Open(filepath.Join(t.TempDir(), "compiled"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// home returns a session's home, with files of these contents.
func home(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// has returns the content of a home that is filled for the program.
func has(t *testing.T, s *Store, p Program) map[string]string {
	t.Helper()
	dir := t.TempDir()
	if err := s.Fill(p, dir); err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		if !e.Type().IsRegular() {
			t.Errorf("%s is %v", path, e.Type())
			return nil
		}
		b, err := os.ReadFile(path)
		name, _ := filepath.Rel(dir, path)
		found[name] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func keep(t *testing.T, s *Store, p Program, files map[string]string) {
	t.Helper()
	if err := s.Keep(p, home(t, files)); err != nil {
		t.Fatal(err)
	}
}

func TestOnlyTheSameUsersSameProgramFindsWhatWasCompiled(t *testing.T) {
	s := newStore(t)
	p := Program{UID: 1000, Dev: 0xfe00, Ino: 7}
	keep(t, s, p, map[string]string{".cache/pocl/a/k.so": "code", ".nv/ComputeCache/index": "index", ".profile": "no", "programs/x": "no", ".cache/empty": ""})
	for _, other := range []Program{{}, {UID: 1001, Dev: 0xfe00, Ino: 7}, {UID: 1000, Dev: 0xfe00, Ino: 8}, {UID: 1000, Dev: 0xfe01, Ino: 7}} {
		if got := has(t, s, other); len(got) != 0 {
			t.Errorf("%+v has %v", other, got)
		}
	}
	again, err := Open(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []*Store{s, again} {
		got := has(t, s, p)
		if len(got) != 2 || got[".cache/pocl/a/k.so"] != "code" || got[".nv/ComputeCache/index"] != "index" {
			t.Errorf("found %v", got)
		}
	}
	// The last session's content counts. A session that compiled nothing deletes nothing.
	keep(t, s, p, map[string]string{".cache/b": "new"})
	keep(t, s, p, nil)
	if got := has(t, s, p); len(got) != 1 || got[".cache/b"] != "new" {
		t.Errorf("found %v", got)
	}
}

func TestNothingIsKeptThatLinksLeadTo(t *testing.T) {
	s := newStore(t)
	outside := home(t, map[string]string{"secret": "secret", "folder/secret": "secret"})
	dir := home(t, map[string]string{".cache/own": "own"})
	cache := filepath.Join(dir, ".cache")
	err := errors.Join(
		os.Symlink(filepath.Join(outside, "secret"), filepath.Join(cache, "link")),
		os.Symlink(filepath.Join(outside, "folder"), filepath.Join(cache, "folder")),
		os.Symlink(outside, filepath.Join(dir, ".nv")),
		unix.Mkfifo(filepath.Join(cache, "pipe"), 0o600),
	)
	if err != nil {
		t.Fatal(err)
	}
	p := Program{UID: 1, Ino: 1}
	if err := s.Keep(p, dir); err == nil {
		t.Error("a link in place of .nv was taken for a folder")
	}
	if got := has(t, s, p); len(got) != 0 {
		t.Errorf("kept %v", got)
	}
	if err := os.Remove(filepath.Join(dir, ".nv")); err != nil {
		t.Fatal(err)
	}
	if err := s.Keep(p, dir); err != nil {
		t.Fatal(err)
	}
	if got := has(t, s, p); len(got) != 1 || got[".cache/own"] != "own" {
		t.Errorf("kept %v", got)
	}
}

func TestAFileThatBecomesALinkIsNotCopied(t *testing.T) {
	outside := home(t, map[string]string{"secret": "secret"})
	dir := home(t, map[string]string{".cache/a": "aaaaaa", ".cache/d/b": "bbbbbb"})
	for _, swapped := range []string{".cache/a", ".cache/d"} {
		tr, err := survey(dir, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, swapped)
		if err := errors.Join(os.RemoveAll(path), os.Symlink(filepath.Join(outside, "secret"), path)); err != nil {
			t.Fatal(err)
		}
		if err := tr.copy(t.TempDir()); err == nil {
			t.Errorf("%s was followed", swapped)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

func TestNoProgramFillsTheStore(t *testing.T) {
	s := newStore(t)
	s.most = 4000 // 1000 for a program, 2000 for a user
	some := func(n int) map[string]string { return map[string]string{".cache/k": strings.Repeat("k", n)} }
	p := func(uid uint32, ino uint64) Program { return Program{UID: uid, Ino: ino} }
	keep(t, s, p(1, 1), some(900))
	if err := s.Keep(p(1, 1), home(t, some(1001))); !errors.Is(err, ErrTooMuch) {
		t.Error(err)
	}
	deep := map[string]string{".cache" + strings.Repeat("/d", mostDepth) + "/k": "k"}
	if err := s.Keep(p(1, 1), home(t, deep)); !errors.Is(err, ErrTooMuch) {
		t.Error(err)
	}
	empty := map[string]string{".cache/k": "k"}
	for i := range mostNames {
		empty[fmt.Sprintf(".cache/%d/%d", i%8, i)] = ""
	}
	if err := s.Keep(p(1, 1), home(t, empty)); !errors.Is(err, ErrTooMuch) {
		t.Error("names without end were looked at", err)
	}
	if got := has(t, s, p(1, 1)); len(got[".cache/k"]) != 900 {
		t.Errorf("what was kept is gone: %v", got)
	}
	// A user who keeps more and more loses only what belongs to that user.
	keep(t, s, p(2, 1), some(900))
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(filepath.Join(s.dir, p(2, 1).String()), old, old); err != nil {
		t.Fatal(err)
	}
	for ino := range uint64(20) {
		keep(t, s, p(1, 100+ino), some(900))
	}
	if got := has(t, s, p(2, 1)); len(got) != 1 {
		t.Error("another user's is gone")
	}
	if got := has(t, s, p(1, 119)); len(got) != 1 {
		t.Error("the last one is not kept")
	}
	if got := has(t, s, p(1, 100)); len(got) != 0 {
		t.Error("the oldest one is kept")
	}
	// Many users together do not have more than the limit of the Store.
	for uid := range uint32(20) {
		keep(t, s, p(10+uid, 1), some(900))
	}
	all, err := bytesOf(s)
	if err != nil || all > s.most {
		t.Errorf("%d bytes are kept: %v", all, err)
	}
}

func bytesOf(s *Store) (int64, error) {
	var n int64
	err := filepath.WalkDir(s.dir, func(_ string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			fi, err := e.Info()
			n += fi.Size()
			return err
		}
		return err
	})
	return n, err
}

func TestWhatWasNotFinishedIsGoneAndNeverFound(t *testing.T) {
	s := newStore(t)
	p := Program{UID: 1, Ino: 1}
	half := filepath.Join(s.dir, p.String()+unfinished)
	if err := os.MkdirAll(filepath.Join(half, ".cache"), 0o700); err != nil {
		t.Fatal(err)
	}
	if got := has(t, s, p); len(got) != 0 {
		t.Error(got)
	}
	if _, err := Open(s.dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(half); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

func TestProgramOfAProcess(t *testing.T) {
	if p := Of(5, os.Getpid()); p.UID != 5 || p.Ino == 0 || p.String() == "" {
		t.Errorf("%+v", p)
	}
	for _, pid := range []int{0, -1, 1 << 30} {
		if p := Of(5, pid); p != (Program{}) || p.String() != "" {
			t.Errorf("%d: %+v", pid, p)
		}
	}
}
