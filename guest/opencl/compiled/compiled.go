package compiled

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/beneath"
)

const (
	mostBytes = 256 << 20 // of all programs in a Store
	mostFiles = 8192      // of one program, folders included
	mostNames = 32768     // that are read
	mostDepth = 12        // of nested folders
)

// ErrTooMuch is returned for a program whose runtimes have compiled more than a Store
// accepts.
var ErrTooMuch = errors.New("more than is kept of one program")

// caches returns the folders of a home in which runtimes store what they compile: PoCL,
// Mesa and Intel use .cache, NVIDIA uses .nv.
func caches() []string { return []string{".cache", ".nv"} }

// Program identifies a user's program. The zero value is no program: nothing is kept for
// it.
type Program struct {
	UID uint32 `json:"uid"` // the user who runs it
	Dev uint64 `json:"dev"` // device of its executable
	Ino uint64 `json:"ino"`
}

// Of returns the program that a process runs now, or the zero value if it can't be seen.
func Of(uid uint32, pid int) Program {
	fi, err := os.Stat(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil || pid == 0 {
		return Program{}
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return Program{}
	}
	return Program{UID: uid, Dev: st.Dev, Ino: st.Ino}
}

// String returns the program's name in a Store; empty for the zero value.
func (p Program) String() string {
	if p.Ino == 0 {
		return ""
	}
	return fmt.Sprintf("%d-%x-%d", p.UID, p.Dev, p.Ino)
}

// userOf returns the user in the name of a program.
func userOf(name string) string {
	uid, _, _ := strings.Cut(name, "-")
	return uid
}

// Store is a folder with what was compiled, separate for each program. A nil Store keeps
// nothing.
type Store struct {
	dir  string
	most int64 // bytes; at most half of it for one user, and a quarter for one program

	mu sync.Mutex
}

// Open opens the Store in a folder. It creates the folder if it is missing, and deletes
// what an earlier process did not finish. Only trusted users may be able to write to the
// folder above.
func Open(dir string) (*Store, error) {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("compiled programs: %w", err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return nil, fmt.Errorf("compiled programs: %s: %w", dir, err)
	}
	// The run folder is in memory, which is small in a small VM.
	room := int64(st.Blocks/8) * st.Bsize
	s := &Store{dir: dir, most: min(mostBytes, room)}
	es, err := list(dir, ".")
	if err != nil {
		return nil, fmt.Errorf("compiled programs: %w", err)
	}
	for _, e := range es {
		if strings.HasSuffix(e.Name(), unfinished) {
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return nil, fmt.Errorf("compiled programs: %w", err)
			}
		}
	}
	return s, nil
}

// unfinished is the suffix of a folder that is being written or deleted.
const unfinished = ".new"

// Fill copies what is kept for the program into a home. The home belongs to the caller, and
// nobody uses it yet.
func (s *Store) Fill(p Program, home string) error {
	name := p.String()
	if s == nil || name == "" {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	kept := filepath.Join(s.dir, name)
	if _, err := os.Lstat(kept); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	t, err := survey(kept, s.most/4)
	if err == nil {
		err = t.copy(home)
	}
	if err != nil {
		for _, c := range caches() { // all or nothing
			err = errors.Join(err, os.RemoveAll(filepath.Join(home, c)))
		}
		return fmt.Errorf("fill with what %s has compiled: %w", name, err)
	}
	now := time.Now()
	return os.Chtimes(kept, now, now) // the least recently used are deleted first
}

// Keep keeps what the runtimes of a session of the program have left in its home. It
// replaces what was kept before. No process may use the home any more.
func (s *Store) Keep(p Program, home string) error {
	name := p.String()
	if s == nil || name == "" {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	kept := filepath.Join(s.dir, name)
	old, oldErr := survey(kept, s.most/4)
	t, err := survey(home, s.most/4)
	if err == nil && (len(t.files) == 0 || oldErr == nil && old.same(t)) {
		return nil
	}
	if err == nil {
		err = s.room(name, t.bytes)
	}
	if err == nil {
		err = t.replace(kept)
	}
	if err != nil {
		return fmt.Errorf("keep what %s has compiled: %w", name, err)
	}
	return nil
}

// replace writes the tree to a folder, and replaces the one that is there. An unfinished
// folder is never found under the final name.
func (t *tree) replace(kept string) error {
	tmp := kept + unfinished
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	err := os.Mkdir(tmp, 0o700)
	if err == nil {
		err = t.copy(tmp)
	}
	if err == nil {
		err = os.RemoveAll(kept)
	}
	if err == nil {
		err = os.Rename(tmp, kept)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(tmp))
	}
	return nil
}

// room deletes what was used least recently, until there are n bytes for the program. What
// belongs to the program's user is deleted first.
func (s *Store) room(name string, n int64) error {
	es, err := list(s.dir, ".")
	if err != nil {
		return err
	}
	type entry struct {
		name  string
		used  time.Time
		bytes int64
	}
	var all []entry
	var total, users int64
	for _, e := range es {
		fi, err := e.Info()
		if err != nil || e.Name() == name { // it is replaced
			continue
		}
		t, err := survey(filepath.Join(s.dir, e.Name()), s.most)
		if err != nil {
			t = &tree{bytes: s.most} // deleted first if there is no room
		}
		all = append(all, entry{e.Name(), fi.ModTime(), t.bytes})
		total += t.bytes
		if userOf(e.Name()) == userOf(name) {
			users += t.bytes
		}
	}
	slices.SortFunc(all, func(a, b entry) int { return a.used.Compare(b.used) })
	for _, own := range []bool{true, false} {
		for _, e := range all {
			tight := users+n > s.most/2
			if !own {
				tight = total+n > s.most
			}
			if !tight || own != (userOf(e.name) == userOf(name)) {
				continue
			}
			if err := os.RemoveAll(filepath.Join(s.dir, e.name)); err != nil {
				return err
			}
			total -= e.bytes
			if own {
				users -= e.bytes
			}
		}
	}
	return nil
}

// tree is what is to be copied from a home. The names are relative to it, and folders come
// before their content.
type tree struct {
	root    string
	folders []string
	files   []file
	bytes   int64
	names   int // number of names that were read
}

type file struct {
	name string
	size int64
}

// survey finds the folders and files of the caches in a home. It omits empty files:
// runtimes leave many of them, and they have no information.
func survey(home string, most int64) (*tree, error) {
	t := &tree{root: home}
	for _, c := range caches() {
		if err := t.add(c, most); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	slices.SortFunc(t.files, func(a, b file) int { return cmp.Compare(a.name, b.name) })
	return t, nil
}

func (t *tree) add(folder string, most int64) error {
	if strings.Count(folder, "/") >= mostDepth {
		return fmt.Errorf("%s: %w", folder, ErrTooMuch)
	}
	es, err := list(t.root, folder)
	if err != nil {
		return err
	}
	t.folders = append(t.folders, folder)
	if t.names += len(es); t.names > mostNames {
		return fmt.Errorf("%d names: %w", t.names, ErrTooMuch)
	}
	for _, e := range es {
		name := filepath.Join(folder, e.Name())
		switch {
		case e.IsDir():
			if err := t.add(name, most); err != nil {
				return err
			}
		case e.Type().IsRegular():
			fi, err := e.Info()
			if err != nil {
				return err
			}
			if fi.Size() == 0 {
				continue
			}
			t.files = append(t.files, file{name, fi.Size()})
			t.bytes += fi.Size()
		}
		if t.bytes > most || len(t.files)+len(t.folders) > mostFiles {
			return fmt.Errorf("%d bytes in %d files and %d folders: %w", t.bytes, len(t.files), len(t.folders), ErrTooMuch)
		}
	}
	return nil
}

// list is os.ReadDir of a folder in another folder, and follows no links. It reads at most
// as many names as a program may have files.
func list(dir, name string) ([]fs.DirEntry, error) {
	d, err := beneath.OpenDir(dir, name)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	es, err := d.ReadDir(mostFiles)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return es, nil
}

// same reports whether both have the same files with the same sizes. That is enough,
// because runtimes name what they compile after its source.
func (t *tree) same(other *tree) bool { return slices.Equal(t.files, other.files) }

// copy writes the tree to a folder that belongs to the caller.
func (t *tree) copy(to string) error {
	for _, f := range t.folders {
		if err := os.Mkdir(filepath.Join(to, f), 0o700); err != nil {
			return err
		}
	}
	for _, f := range t.files {
		if err := copyFile(t.root, to, f); err != nil {
			return err
		}
	}
	return nil
}

func copyFile(from, to string, f file) error {
	src, err := beneath.OpenFile(from, f.name, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := beneath.OpenFile(to, f.name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o700) // executable, because some of them are libraries
	if err != nil {
		return err
	}
	n, err := io.Copy(dst, io.LimitReader(src, f.size))
	if err == nil && n != f.size {
		err = fmt.Errorf("%s: %w", f.name, io.ErrUnexpectedEOF)
	}
	return errors.Join(err, dst.Close())
}
