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

	"github.com/gpuctl/gpuctl/internal/beneath"
	"github.com/gpuctl/gpuctl/internal/rundir"
)

const (
	manifestName    = "manifest.json"
	usedName        = "resumed.json"
	manifestVersion = 1
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
}

// File is one that criu has written.
type File struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
}

// Make makes a new folder that only this user can look into, or change.
func Make(dir string) error {
	if !filepath.IsAbs(dir) || filepath.Clean(dir) != dir {
		return fmt.Errorf("%w: %q is not an absolute, clean path", ErrFolder, dir)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return fmt.Errorf("%w: %w", ErrFolder, err)
	}
	if err := rundir.Own(dir); err != nil {
		return errors.Join(fmt.Errorf("%w: %w", ErrFolder, err), os.Remove(dir))
	}
	return nil
}

// Remove takes away a folder that was made and is not needed. The manifest goes first.
func Remove(dir string) error {
	err := os.Remove(filepath.Join(dir, manifestName))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.RemoveAll(dir)
}

// Seal writes the manifest. All files are on the disk then.
func Seal(dir string, m *Manifest) error {
	m.Version = manifestVersion
	var err error
	if m.Files, err = files(dir, true); err != nil {
		return err
	}
	b, err := json.MarshalIndent(m, "", "\t")
	if err != nil {
		return err
	}
	if err := beneath.Replace(dir, manifestName, b, 0o600); err != nil {
		return err
	}
	return syncAll(dir, manifestName, ".")
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
	if !filepath.IsAbs(dir) || filepath.Clean(dir) != dir {
		return nil, errors.New("the path must be absolute and clean")
	}
	if err := rundir.Own(dir); err != nil {
		return nil, err
	}
	b, err := beneath.ReadFile(dir, manifestName, mostManifest)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := beneath.ReadFile(dir, usedName, mostManifest); err == nil {
			return nil, errors.New("it has been resumed already")
		}
		return nil, errors.New("it has no manifest")
	}
	if err != nil {
		return nil, err
	}
	m, err := parse(b)
	if err != nil {
		return nil, err
	}
	have, err := files(dir, false)
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
	if len(have) != len(m.Files) {
		return nil, errors.New("it has files that the manifest does not name")
	}
	return m, nil
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
	for _, p := range m.Processes {
		if p.PID <= 1 || slices.ContainsFunc(p.Threads, func(t int) bool { return t <= 1 }) {
			return nil, errors.New("a process is malformed")
		}
	}
	return m, nil
}

// Used marks a folder as resumed: its processes must not be made twice.
func Used(dir string) error {
	err := os.Rename(filepath.Join(dir, manifestName), filepath.Join(dir, usedName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return errors.Join(err, syncAll(dir, "."))
}

// files returns the files that criu has written, and has them written to the disk.
func files(dir string, sync bool) ([]File, error) {
	d, err := beneath.OpenDir(dir, ".")
	if err != nil {
		return nil, err
	}
	names, err := d.Readdirnames(mostFiles + 1)
	d.Close()
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if len(names) > mostFiles {
		return nil, fmt.Errorf("more than %d files", mostFiles)
	}
	slices.Sort(names)
	var all []File
	for _, name := range names {
		if strings.HasPrefix(name, manifestName) || name == usedName || strings.HasSuffix(name, ".log") || strings.HasPrefix(name, "stats-") {
			continue
		}
		f, err := sum(dir, name, sync)
		if err != nil {
			return nil, err
		}
		all = append(all, f)
	}
	return all, nil
}

func sum(dir, name string, sync bool) (File, error) {
	f, err := beneath.OpenFile(dir, name, os.O_RDONLY, 0)
	if err != nil {
		return File{}, err
	}
	defer f.Close()
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
