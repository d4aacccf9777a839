package criu

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/beneath"
	"github.com/gpuctl/gpuctl/internal/rundir"
)

const (
	manifestName    = "manifest.json"
	usedName        = "resumed.json"
	takenPrefix     = "resuming-" // and the token of who resumes it
	manifestVersion = 2
	mostManifest    = 16 << 20
	mostFiles       = 1 << 16
	mostProcesses   = 1 << 15
)

// ErrFolder means that a folder can't be used, or is not what was written.
var ErrFolder = errors.New("not a folder of a suspended session that can be used")

// Manifest says what is in a folder.
type Manifest struct {
	Version   int             `json:"version"`
	Session   string          `json:"session"`
	Driver    string          `json:"driver"` // version of NVIDIA's driver
	CRIU      string          `json:"criu"`
	Root      int             `json:"root"`
	Processes []Process       `json:"processes"`
	State     json.RawMessage `json:"state"` // the session's record
	Files     []File          `json:"files"`
}

// Process is one of the tree.
type Process struct {
	PID     int    `json:"pid"`
	Threads []int  `json:"threads"`
	Name    string `json:"name"`
	// Layout says where the parts of its memory are. What criu makes has them there, too, and
	// hardly another process that gets the pid.
	Layout string `json:"layout"`
}

// File is one that criu has written.
type File struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
}

// ID tells a folder from another that has its name later.
type ID struct {
	Dev uint64 `json:"dev"`
	Ino uint64 `json:"ino"`
}

// Is reports whether a folder is the one with that id.
func Is(dir string, id ID) bool {
	have, err := idOf(dir)
	return err == nil && have == id
}

func idOf(dir string) (id ID, err error) {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return id, &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return id, fmt.Errorf("%s is no folder", dir)
	}
	return ID{Dev: st.Dev, Ino: st.Ino}, nil
}

// part is the name that a folder has until its id is known. A token is never used twice.
func part(dir, token string) string { return dir + "." + token + ".part" }

func clean(dir string) error {
	if !filepath.IsAbs(dir) || filepath.Clean(dir) != dir || dir == "/" {
		return fmt.Errorf("%w: %q is not an absolute, clean path", ErrFolder, dir)
	}
	return nil
}

// Make makes a new folder that only this user can look into, or change. made is told its id
// before it has its name, so that Remove finds it however the maker ends.
func Make(dir, token string, made func(ID) error) error {
	if err := clean(dir); err != nil {
		return err
	}
	tmp := part(dir, token)
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return fmt.Errorf("%w: %w", ErrFolder, err)
	}
	err := rundir.Own(tmp)
	var id ID
	if err == nil {
		id, err = idOf(tmp)
	}
	if err == nil {
		err = made(id)
	}
	if err == nil {
		err = renameNew(tmp, dir)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("%w: %w", ErrFolder, err), os.Remove(tmp))
	}
	return nil
}

// renameNew renames a folder to a name that nothing has.
func renameNew(from, to string) error {
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) { // a file system of a server: an empty folder of that name may be replaced
		if _, lerr := os.Lstat(to); !errors.Is(lerr, fs.ErrNotExist) {
			return &os.LinkError{Op: "rename", Old: from, New: to, Err: fs.ErrExist}
		}
		return os.Rename(from, to)
	}
	if err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	return nil
}

// Remove takes away a folder that Make has made, or has begun to make, and nothing else that
// has its name. The manifest goes first.
func Remove(dir, token string, id ID) error {
	if err := os.RemoveAll(part(dir, token)); err != nil {
		return err
	}
	have, err := idOf(dir)
	if errors.Is(err, fs.ErrNotExist) || err == nil && have != id {
		return nil
	}
	if err != nil {
		return err
	}
	if err := os.Remove(filepath.Join(dir, manifestName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.RemoveAll(dir)
}

// Seal writes the manifest. All files are on the disk then.
func Seal(dir string, m *Manifest) error {
	m.Version = manifestVersion
	var err error
	if m.Files, err = files(dir, nil); err != nil {
		return err
	}
	b, err := json.MarshalIndent(m, "", "\t")
	if err != nil {
		return err
	}
	if err := beneath.Replace(dir, manifestName, b, 0o600); err != nil {
		return err
	}
	return errors.Join(syncAll(dir, manifestName, "."), syncAll(filepath.Dir(dir), "."))
}

// Open reads and compares a folder that Seal has sealed.
func Open(dir string) (*Manifest, error) {
	m, err := open(dir)
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %w", dir, ErrFolder, err)
	}
	return m, nil
}

func open(dir string) (*Manifest, error) {
	m, err := read(dir)
	if err != nil {
		return nil, err
	}
	have, err := files(dir, m.Files)
	if err != nil {
		return nil, err
	}
	for _, want := range m.Files {
		i := slices.IndexFunc(have, func(f File) bool { return f.Name == want.Name })
		if i < 0 {
			return nil, fmt.Errorf("%s is missing", want.Name)
		}
		if have[i] != want {
			return nil, fmt.Errorf("%s has changed", want.Name)
		}
	}
	return m, nil
}

// Read reads the manifest of a folder, without comparing its files.
func Read(dir string) (*Manifest, error) {
	m, err := read(dir)
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %w", dir, ErrFolder, err)
	}
	return m, nil
}

func read(dir string) (*Manifest, error) {
	if err := clean(dir); err != nil {
		return nil, err
	}
	if err := rundir.Own(dir); err != nil {
		return nil, err
	}
	b, err := beneath.ReadFile(dir, manifestName, mostManifest)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, missing(dir)
	}
	if err != nil {
		return nil, err
	}
	return parse(b)
}

// missing says why a folder has no manifest.
func missing(dir string) error {
	names, err := list(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		switch {
		case name == usedName:
			return errors.New("it has been resumed already")
		case strings.HasPrefix(name, takenPrefix):
			return fmt.Errorf("it is being resumed, here or on another host; if that host is gone for good and its processes with it, rename %s to %s", name, manifestName)
		}
	}
	return errors.New("it has no manifest")
}

func parse(b []byte) (*Manifest, error) {
	m := &Manifest{}
	if err := json.Unmarshal(b, m); err != nil {
		return nil, err
	}
	switch {
	case m.Version != manifestVersion:
		return nil, fmt.Errorf("version %d is not %d", m.Version, manifestVersion)
	case len(m.Processes) == 0 || len(m.Processes) > mostProcesses:
		return nil, fmt.Errorf("%d processes", len(m.Processes))
	case len(m.Files) == 0 || len(m.Files) > mostFiles:
		return nil, fmt.Errorf("%d files", len(m.Files))
	case !slices.ContainsFunc(m.Processes, func(p Process) bool { return p.PID == m.Root }):
		return nil, errors.New("its first process is none of it")
	}
	seen := map[int]bool{}
	for _, p := range m.Processes {
		if seen[p.PID] {
			return nil, fmt.Errorf("two processes have the number %d", p.PID)
		}
		seen[p.PID] = true
		if p.PID <= 1 || slices.ContainsFunc(p.Threads, func(t int) bool { return t <= 1 }) {
			return nil, errors.New("a process is malformed")
		}
	}
	names := map[string]bool{}
	for _, f := range m.Files {
		if f.Name != filepath.Base(f.Name) || f.Name == "" || f.Size < 0 || names[f.Name] {
			return nil, fmt.Errorf("a file is malformed: %.64q", f.Name)
		}
		names[f.Name] = true
	}
	return m, nil
}

// Take takes a folder to resume it. Nobody else can then, on whatever host.
func Take(dir, token string) error {
	err := os.Rename(filepath.Join(dir, manifestName), filepath.Join(dir, taken(token)))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: %w: %w", dir, ErrFolder, missing(dir))
	}
	return errors.Join(err, syncAll(dir, "."))
}

// GiveBack gives it back. One that this token has not taken is left as it is.
func GiveBack(dir, token string) error {
	return renameOwn(dir, taken(token), manifestName)
}

// Used marks a taken folder as resumed: its processes must not be made twice.
func Used(dir, token string) error {
	return renameOwn(dir, taken(token), usedName)
}

func taken(token string) string { return takenPrefix + token + ".json" }

func renameOwn(dir, from, to string) error {
	err := os.Rename(filepath.Join(dir, from), filepath.Join(dir, to))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return errors.Join(err, syncAll(dir, "."))
}

// list returns the names in a folder.
func list(dir string) ([]string, error) {
	d, err := beneath.OpenDir(dir, ".")
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(mostFiles + 1)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if len(names) > mostFiles {
		return nil, fmt.Errorf("more than %d files", mostFiles)
	}
	slices.Sort(names)
	return names, nil
}

// files returns the files that criu has written. Without want they are written to the disk;
// with it, a file that has not the size that it must have is not read.
func files(dir string, want []File) ([]File, error) {
	names, err := list(dir)
	if err != nil {
		return nil, err
	}
	sizes := map[string]int64{}
	for _, f := range want {
		sizes[f.Name] = f.Size
	}
	var all []File
	for _, name := range names {
		if strings.HasPrefix(name, manifestName) || strings.HasPrefix(name, takenPrefix) || name == usedName || strings.HasSuffix(name, ".log") || strings.HasPrefix(name, "stats-") {
			continue
		}
		size, named := sizes[name]
		if want != nil && !named {
			return nil, fmt.Errorf("it has %q, which the manifest does not name", name)
		}
		f, err := sum(dir, name, want == nil, size)
		if err != nil {
			return nil, err
		}
		all = append(all, f)
	}
	return all, nil
}

func sum(dir, name string, sync bool, want int64) (File, error) {
	f, err := beneath.OpenFile(dir, name, os.O_RDONLY, 0)
	if err != nil {
		return File{}, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !sync && info.Size() != want {
		return File{}, errors.Join(err, fmt.Errorf("%s has changed", name))
	}
	h := sha256.New()
	n, err := io.Copy(h, f)
	if err == nil && sync {
		err = f.Sync()
	}
	return File{Name: name, Size: n, SHA256: hex.EncodeToString(h.Sum(nil))}, err
}

func syncAll(dir string, names ...string) error {
	for _, name := range names {
		open := beneath.OpenDir
		if name != "." {
			open = func(dir, name string) (*os.File, error) { return beneath.OpenFile(dir, name, os.O_RDONLY, 0) }
		}
		f, err := open(dir, name)
		if err != nil {
			return err
		}
		if err := errors.Join(f.Sync(), f.Close()); err != nil {
			return err
		}
	}
	return nil
}
