package criu

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func sealed(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "disk")
	if err := Make(dir, "t", func(ID) error { return nil }); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"core-7.img", "pages-1.img"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := Seal(dir, &Manifest{Session: "d-1", Root: 7, Processes: []Process{{PID: 7, Threads: []int{7}}}, State: []byte("{}")}); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestFolderThatHasChangedIsRefused(t *testing.T) {
	if _, err := Open(sealed(t)); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(dir string) error{
		"changed": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "pages-1.img"), []byte("pages-2.img"), 0o600)
		},
		"missing":  func(dir string) error { return os.Remove(filepath.Join(dir, "pages-1.img")) },
		"more":     func(dir string) error { return os.WriteFile(filepath.Join(dir, "x.so"), nil, 0o600) },
		"link":     func(dir string) error { return os.Symlink("/etc/passwd", filepath.Join(dir, "y.img")) },
		"writable": func(dir string) error { return os.Chmod(dir, 0o777) },
		"no seal":  func(dir string) error { return os.Remove(filepath.Join(dir, manifestName)) },
		"half":     func(dir string) error { return os.Truncate(filepath.Join(dir, manifestName), 40) },
		"longer": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "pages-1.img"), make([]byte, 1<<20), 0o600)
		},
		"taken":     func(dir string) error { return Take(dir, "other") },
		"used once": func(dir string) error { return errors.Join(Take(dir, "me"), Used(dir, "me")) },
	} {
		dir := sealed(t)
		if err := change(dir); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(dir); !errors.Is(err, ErrFolder) {
			t.Errorf("%s: %v", name, err)
		}
	}
	dir := sealed(t)
	if err := Make(dir, "t", func(ID) error { return nil }); !errors.Is(err, ErrFolder) {
		t.Errorf("a folder that is there: %v", err)
	}
	if left, _ := filepath.Glob(dir + "*"); len(left) != 1 {
		t.Errorf("%v", left)
	}
}

// A folder is resumed by one at a time, and only that one gives it back or uses it up.
func TestFolderIsTakenByOne(t *testing.T) {
	dir := sealed(t)
	if err := Take(dir, "a"); err != nil {
		t.Fatal(err)
	}
	if err := Take(dir, "b"); !errors.Is(err, ErrFolder) || !strings.Contains(err.Error(), "resuming-a.json") {
		t.Errorf("%v", err)
	}
	if err := errors.Join(GiveBack(dir, "b"), Used(dir, "b")); err != nil {
		t.Error(err)
	}
	if _, err := Open(dir); err == nil {
		t.Error("what another has taken was given back")
	}
	if err := errors.Join(GiveBack(dir, "a"), GiveBack(dir, "a")); err != nil {
		t.Error(err)
	}
	if _, err := Open(dir); err != nil {
		t.Error(err)
	}
}

// Only the folder that was made is removed, whenever its maker has died.
func TestFolderOfOthersIsNotRemoved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "disk")
	var id ID
	cut := errors.New("cut")
	if err := Make(dir, "t", func(i ID) error { id = i; return cut }); !errors.Is(err, cut) {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(part(dir, "t"), 0o700); err != nil {
		t.Fatal(err)
	}
	mine, err := idOf(dir)
	if err != nil || mine == id {
		t.Skipf("the file system gives the same number again: %v, %v", mine, err)
	}
	if err := Remove(dir, "t", id); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(dir + "*"); len(left) != 1 || left[0] != dir {
		t.Errorf("%v", left)
	}
	if err := Remove(dir, "t", mine); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(dir + "*"); len(left) != 0 {
		t.Errorf("%v", left)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"version":1,"root":7,"processes":[{"pid":7,"threads":[7,8]}],"files":[{"name":"a","size":1,"sha256":"00"}]}`))
	f.Add([]byte(`{"version":1,"root":1,"processes":[{"pid":-1}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := parse(b)
		if err != nil {
			return
		}
		for _, p := range m.Processes {
			if p.PID <= 1 {
				t.Errorf("%d is accepted", p.PID)
			}
		}
	})
}
