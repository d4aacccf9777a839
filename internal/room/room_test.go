package room

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// A file's room is that of its file system and what it has already, and in memory that of the
// machine.
func TestRoomOfAFileHasWhatItTakesAlready(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fd, err := unix.MemfdCreate("m", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	m := os.NewFile(uintptr(fd), "m")
	defer m.Close()
	const size = 8 << 20
	for _, x := range []*os.File{f, m} {
		if _, err := x.Write(make([]byte, size)); err != nil {
			t.Fatal(err)
		}
		if err := x.Sync(); err != nil {
			t.Fatal(err)
		}
		if n, err := taken(x); err != nil || n < size {
			t.Errorf("%s takes %d bytes of %d: %v", x.Name(), n, size, err)
		}
	}
	for name, of := range map[string]func() (uint64, error){
		"memory": Memory, "folder": func() (uint64, error) { return Folder(filepath.Dir(f.Name())) },
		"file": func() (uint64, error) { return File(f) }, "memory file": func() (uint64, error) { return MemoryFile(m) },
	} {
		if n, err := of(); err != nil || n < 1<<20 || n > 1<<50 {
			t.Errorf("%s: %d, %v", name, n, err)
		}
	}
	if _, err := Folder(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a folder that is not there has room")
	}
}
