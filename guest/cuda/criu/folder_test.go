package criu

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func sealed(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "disk")
	if err := Make(dir); err != nil {
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
		"missing":   func(dir string) error { return os.Remove(filepath.Join(dir, "pages-1.img")) },
		"more":      func(dir string) error { return os.WriteFile(filepath.Join(dir, "x.so"), nil, 0o600) },
		"link":      func(dir string) error { return os.Symlink("/etc/passwd", filepath.Join(dir, "y.img")) },
		"writable":  func(dir string) error { return os.Chmod(dir, 0o777) },
		"no seal":   func(dir string) error { return os.Remove(filepath.Join(dir, manifestName)) },
		"half":      func(dir string) error { return os.Truncate(filepath.Join(dir, manifestName), 40) },
		"used once": Used,
	} {
		dir := sealed(t)
		if err := change(dir); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(dir); !errors.Is(err, ErrFolder) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := Make(sealed(t)); !errors.Is(err, ErrFolder) {
		t.Errorf("a folder that is there: %v", err)
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
