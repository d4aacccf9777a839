package session

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

func testMemory(t *testing.T) (*memory, [3]inode) {
	t.Helper()
	m, err := createMemory("s-test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.close)
	ids, err := m.inodes()
	if err != nil {
		t.Fatal(err)
	}
	return m, ids
}

// A process keeps exchanging the file of one of its descriptors between the session's state
// and a file that the session has no right to.
func TestNextManagerIsNotTrickedIntoAnotherFile(t *testing.T) {
	mem, ids := testMemory(t)
	other, err := os.Create(filepath.Join(t.TempDir(), "other"))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	victim, err := unix.Dup(int(mem.state.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(victim)
	fds, err := openDescriptors(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer fds.Close()
	stop, over := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(over)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			from := int(mem.state.Fd())
			if i%2 == 0 {
				from = int(other.Fd())
			}
			_ = unix.Dup3(from, victim, unix.O_CLOEXEC)
		}
	}()
	defer func() { close(stop); <-over }()
	for found := 0; found < 3000; {
		f, err := openMemfd(fds, strconv.Itoa(victim), ids[stateMemfd], stateMemfd)
		if err != nil {
			t.Fatal(err)
		}
		if f == nil {
			continue
		}
		found++
		id, err := statInode(int(f.Fd()), stateMemfd)
		f.Close()
		if err != nil || id != ids[stateMemfd] {
			t.Fatalf("after %d: %+v was opened (%v), not %+v", found, id, err, ids[stateMemfd])
		}
	}
}

// To open a descriptor's file can block, or have an effect. So it is not even opened.
func TestNextManagerOpensNothingButItsMemory(t *testing.T) {
	_, ids := testMemory(t)
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	end, err := os.OpenFile(fifo, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer end.Close()
	unsealed, err := unix.MemfdCreate("unsealed", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(unsealed)
	shrunk, err := createMemfd("shrunk", 4096, sealsFixed)
	if err != nil {
		t.Fatal(err)
	}
	defer shrunk.Close()
	file, err := os.Create(filepath.Join(dir, "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	fds, err := openDescriptors(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer fds.Close()
	for name, fd := range map[string]int{"a named pipe": int(end.Fd()), "a memfd without seals": unsealed, "a file": int(file.Fd()), "a folder": int(fds.Fd())} {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			t.Fatal(err)
		}
		// Not even if it were the file that the journal names.
		if f, err := openMemfd(fds, strconv.Itoa(fd), inode{Dev: st.Dev, Ino: st.Ino}, stateMemfd); f != nil || err != nil {
			t.Errorf("%s was opened", name)
		}
	}
	id, err := statInode(int(shrunk.Fd()), 0)
	if err != nil {
		t.Fatal(err)
	}
	id.Size = ids[0].Size
	if f, err := openMemfd(fds, strconv.Itoa(int(shrunk.Fd())), id, 0); f != nil || err != nil {
		t.Error("a memfd of another size was opened")
	}
	if _, err := findMemory([3]inode{}, os.Getpid()); err == nil {
		t.Error("memory that the journal does not name was found")
	}
}

// What an application has open may be of a file server that does not answer, as that of a network that
// is gone. The next gpuguest must not wait for it, and with it everybody.
func TestMemoryIsFoundBesideFilesOfServersThatDoNotAnswer(t *testing.T) {
	path, hush := testkit.Mute(t)
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	mem, err := createMemory("s-000000")
	if err != nil {
		t.Fatal(err)
	}
	defer mem.close()
	want, err := mem.inodes()
	if err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t // as an older gpuguest has journalled it
	if err := unix.Fstat(int(mem.ring.Fd()), &st); err != nil || want[0] != (inode{Dev: st.Dev, Ino: st.Ino, Size: st.Size}) {
		t.Errorf("%v, not %v: %v", want[0], st, err)
	}
	hush()
	found := make(chan error, 1)
	go func() {
		again, err := findMemory(want, os.Getpid())
		if err == nil {
			again.close()
		}
		found <- err
	}()
	select {
	case err := <-found:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("it waits for a file server")
	}
}
