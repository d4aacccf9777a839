package install

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/google/renameio/v2"

	"github.com/gpuctl/gpuctl/internal/hook/wire"
)

// Name is the hook's in the folders of the drivers.
const Name = "50-gpuctl"

// program is the main package that a file of ours was built from.
const program = "github.com/gpuctl/gpuctl/cmd/gpuctl-hook"

const maxProgram = 64 << 20

// Errors of this package.
var (
	// ErrForeign says that a file has our name and is not ours.
	ErrForeign = errors.New("is not gpuctl's")
	// ErrNoLibvirt says that the machine has no libvirt.
	ErrNoLibvirt = errors.New("libvirt is not installed")
)

// Action is what a Change does.
type Action string

// Actions.
const (
	Install Action = "install"
	Update  Action = "update"
	Remove  Action = "remove"
	Nothing Action = "nothing"
)

// Change is what is to be done, or was done, for one driver.
type Change struct {
	Driver  string `json:"driver"`
	Path    string `json:"path"`
	Action  Action `json:"action"`
	From    string `json:"from,omitempty"`    // the version there is
	To      string `json:"to,omitempty"`      // the version to come
	Restart string `json:"restart,omitempty"` // the daemon that must be started anew

	source string
	since  time.Time // of the first installation
}

// Machine is where hooks are installed.
type Machine struct {
	Root   string // "/", or a folder with the files of another system
	Source string // the hook's program
}

func (m Machine) hooks() string               { return filepath.Join(m.Root, "etc/libvirt/hooks") }
func (m Machine) folder(driver string) string { return filepath.Join(m.hooks(), driver+".d") }
func (m Machine) path(driver string) string   { return filepath.Join(m.folder(driver), Name) }

// Drivers are those of the libvirt that is there; all that have hooks, if that
// can't be told.
func (m Machine) Drivers() []string {
	var found []string
	for _, d := range wire.Drivers() {
		for _, lib := range []string{"usr/lib/*/libvirt", "usr/lib64/libvirt", "usr/lib/libvirt"} {
			if all, _ := filepath.Glob(filepath.Join(m.Root, lib, "connection-driver/libvirt_driver_"+d+".so")); len(all) > 0 {
				found = append(found, d)
				break
			}
		}
	}
	if len(found) == 0 {
		return wire.Drivers()
	}
	return found
}

// PlanInstall says what Apply would do to have the hook of a driver there.
func (m Machine) PlanInstall(driver string) (Change, error) {
	c := Change{Driver: driver, Path: m.path(driver), source: m.Source}
	if _, err := os.Stat(filepath.Join(m.Root, "etc/libvirt")); err != nil {
		return c, fmt.Errorf("hook for %s: %w: there is no %s", driver, ErrNoLibvirt, filepath.Join(m.Root, "etc/libvirt"))
	}
	theirs, err := identify(m.Source)
	if err != nil {
		return c, fmt.Errorf("hook's program: %w", err)
	}
	c.To = theirs.version
	ours, err := identify(c.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		c.Action, c.since = Install, time.Now()
		// Another hook of this driver has libvirtd look into the folder already.
		if d, err := m.daemon(driver); err == nil && d != nil && !m.knows(*d, driver) {
			c.Restart = d.Name
		}
		return c, nil
	case err != nil:
		return c, fmt.Errorf("hook for %s: %w", driver, err)
	}
	c.From, c.since = ours.version, ours.since
	c.Action = Update
	if ours.sum == theirs.sum && ours.executable {
		c.Action = Nothing
	}
	if d, err := m.daemon(driver); err == nil && d != nil && !m.knows(*d, driver) {
		c.Restart = d.Name
	}
	return c, nil
}

// PlanRemove says what Apply would do to have the hook of a driver gone.
func (m Machine) PlanRemove(driver string) (Change, error) {
	c := Change{Driver: driver, Path: m.path(driver), Action: Nothing}
	ours, err := identify(c.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return c, nil
	case err != nil:
		return c, fmt.Errorf("hook for %s: %w", driver, err)
	}
	c.From, c.Action = ours.version, Remove
	return c, nil
}

// Apply does it. libvirt sees the old file, or the whole new one.
func Apply(c Change) error {
	switch c.Action {
	case Install, Update:
		if err := put(c); err != nil {
			return fmt.Errorf("hook for %s: %w", c.Driver, err)
		}
	case Remove:
		if err := os.Remove(c.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("hook for %s: %w", c.Driver, err)
		}
		// The folder goes if nothing else is in it.
		_ = os.Remove(filepath.Dir(c.Path))
	case Nothing:
	}
	return nil
}

func put(c Change) error {
	data, err := readProgram(c.source)
	if err != nil {
		return err
	}
	dir := filepath.Dir(c.Path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	// libvirt runs whatever it finds there, whatever its name, if it is
	// executable: so it becomes that when it is whole.
	f, err := renameio.NewPendingFile(c.Path, renameio.WithTempDir(dir), renameio.WithStaticPermissions(0o600))
	if err != nil {
		return err
	}
	defer func() { _ = f.Cleanup() }()
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := os.Chtimes(f.Name(), c.since, c.since); err != nil {
		return err
	}
	if err := f.Chmod(0o755); err != nil {
		return err
	}
	return f.CloseAtomicallyReplace()
}

type identity struct {
	version    string
	sum        [sha256.Size]byte
	since      time.Time
	executable bool
}

// identify says which version of our program a file is, by what its linker
// wrote into it: it is not run.
func identify(path string) (identity, error) {
	data, err := readProgram(path)
	if err != nil {
		return identity{}, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return identity{}, err
	}
	build, err := buildinfo.Read(bytes.NewReader(data))
	if err != nil || build.Path != program {
		return identity{}, fmt.Errorf("%s %w: look at it, and move it out of that folder", path, ErrForeign)
	}
	id := identity{version: build.Main.Version, sum: sha256.Sum256(data), since: info.ModTime(), executable: info.Mode()&0o111 != 0}
	if id.version == "" || id.version == "(devel)" {
		id.version = "devel"
	}
	return id, nil
}

func readProgram(path string) ([]byte, error) {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular() || info.Size() > maxProgram:
		return nil, fmt.Errorf("%s %w: look at it, and move it out of that folder", path, ErrForeign)
	}
	return os.ReadFile(path)
}
