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

// Name is the hook's file name in the drivers' folders.
const Name = "50-gpuctl"

// program is the main package from which our files are built.
const program = "github.com/gpuctl/gpuctl/cmd/gpuctl-hook"

const maxProgram = 64 << 20

// Errors of this package.
var (
	// ErrForeign means that a file has our name and is not ours.
	ErrForeign = errors.New("is not gpuctl's")
	// ErrNoLibvirt means that libvirt is not installed.
	ErrNoLibvirt = errors.New("libvirt is not installed")
)

// Action is the kind of a Change.
type Action string

// Actions.
const (
	Install Action = "install"
	Update  Action = "update"
	Remove  Action = "remove"
	Nothing Action = "nothing"
)

// Change is a change that is planned or was made for one driver.
type Change struct {
	Driver  string `json:"driver"`
	Path    string `json:"path"`
	Action  Action `json:"action"`
	From    string `json:"from,omitempty"`    // present version
	To      string `json:"to,omitempty"`      // version to be installed
	Restart string `json:"restart,omitempty"` // the daemon that must be restarted

	source string
	since  time.Time // time of the first installation
}

// Machine is the system on which hooks are installed.
type Machine struct {
	Root   string // "/", or the root folder of another system
	Source string // path of the hook's program
}

func (m Machine) hooks() string               { return filepath.Join(m.Root, "etc/libvirt/hooks") }
func (m Machine) folder(driver string) string { return filepath.Join(m.hooks(), driver+".d") }
func (m Machine) path(driver string) string   { return filepath.Join(m.folder(driver), Name) }

// Drivers returns the drivers of the installed libvirt, or all drivers with hooks if they
// cannot be determined.
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

// PlanInstall returns the change that installs the hook of a driver.
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
		// If the driver has another hook, libvirtd reads the folder already.
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

// PlanRemove returns the change that removes the hook of a driver.
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

// Apply makes a change. libvirt sees either the old file or the complete new one.
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
		// Remove the folder if it is empty.
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
	// libvirt runs each executable file there, whatever its name. So the file is made
	// executable only when it is complete.
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

// identify returns the version of our program that a file is, from its Go build
// information. It does not run the file.
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
