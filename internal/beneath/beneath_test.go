package beneath_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/beneath"
)

func TestNothingLeadsOutOfTheFolder(t *testing.T) {
	outside, dir := t.TempDir(), t.TempDir()
	secret := filepath.Join(outside, "secret")
	const content = "secret"
	err := errors.Join(
		os.WriteFile(secret, []byte(content), 0o600),
		os.Symlink(secret, filepath.Join(dir, "link")),
		os.Symlink("file", filepath.Join(dir, "inside")),
		os.Symlink(outside, filepath.Join(dir, "folder")),
		os.Symlink(filepath.Join(outside, "new"), filepath.Join(dir, "dangling")),
		os.WriteFile(filepath.Join(dir, "file"), []byte("mine"), 0o600),
		os.Mkdir(filepath.Join(dir, "sub"), 0o700),
		unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600),
	)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"link", "inside", "folder/secret", "dangling", "../" + filepath.Base(outside) + "/secret", secret, "sub", "fifo", "missing", ""} {
		for _, flags := range []int{os.O_RDONLY, os.O_WRONLY | os.O_TRUNC, os.O_RDWR} {
			if f, err := beneath.OpenFile(dir, name, flags, 0o600); err == nil {
				t.Errorf("%q was opened with %#x: %s", name, flags, f.Name())
				f.Close()
			}
		}
		if name == "missing" {
			continue
		}
		if f, err := beneath.OpenFile(dir, name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600); err == nil {
			t.Errorf("%q was made", name)
			f.Close()
		}
	}
	if b, err := os.ReadFile(secret); err != nil || string(b) != content {
		t.Errorf("the file outside: %q, %v", b, err)
	}
	if _, err := os.Lstat(filepath.Join(outside, "new")); !errors.Is(err, fs.ErrNotExist) {
		t.Error("a file was made outside", err)
	}
	if err := os.Symlink(secret, filepath.Join(dir, "state.new")); err != nil {
		t.Fatal(err)
	}
	if err := beneath.Replace(dir, "state", []byte("x"), 0o600); err == nil {
		t.Error("replaced through a link")
	}
}

func TestFilesInTheFolder(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "sub/a"} {
		for _, content := range []string{"first and longer", "second"} {
			if err := beneath.Replace(dir, name, []byte(content), 0o640); err != nil {
				t.Fatal(err)
			}
			if b, err := beneath.ReadFile(dir, name, 16); err != nil || string(b) != content {
				t.Errorf("%q, %v", b, err)
			}
		}
		if fi, err := os.Stat(filepath.Join(dir, name)); err != nil || fi.Mode() != 0o640 {
			t.Error(fi.Mode(), err)
		}
		if _, err := beneath.ReadFile(dir, name, 5); err == nil {
			t.Error("a file that is too long was read")
		}
	}
	if _, err := beneath.ReadFile(dir, "missing", 5); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if _, err := beneath.ReadFile(dir, "sub", 5); !errors.Is(err, beneath.ErrNotRegular) {
		t.Error(err)
	}
}

func TestReadIsBounded(t *testing.T) {
	dir := t.TempDir()
	if _, err := beneath.ReadFile(dir, "f", 3); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("there is no file, and the error is %v", err)
	}
	for content, fits := range map[string]bool{"": true, "abc": true, "abcd": false} {
		if err := beneath.Replace(dir, "f", []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := beneath.ReadFile(dir, "f", 3); (err == nil) != fits || fits && string(got) != content {
			t.Errorf("%q: %q, %v", content, got, err)
		}
	}
}
