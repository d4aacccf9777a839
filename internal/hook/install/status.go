package install

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gpuctl/gpuctl/internal/hook/dropin"
	"github.com/gpuctl/gpuctl/internal/hook/wire"
)

// State is the state of a hook's file.
type State string

// States.
const (
	Absent    State = "absent"
	Installed State = "installed"
	Outdated  State = "outdated" // another version than this gpuctl
	Foreign   State = "foreign"  // a file of somebody else has our name
)

// Status is the status of one driver's hook.
type Status struct {
	Driver   string   `json:"driver"`
	Path     string   `json:"path"`
	State    State    `json:"state"`
	Version  string   `json:"version,omitempty"`
	Daemon   *Daemon  `json:"daemon,omitempty"` // libvirt's daemon, if it runs
	Restart  bool     `json:"restart"`          // it was started before a hook was installed, and must be restarted
	Others   []string `json:"others,omitempty"` // other hooks
	Hostd    string   `json:"hostd,omitempty"`  // version of the hostd that answers
	Policy   string   `json:"onUnreachable"`
	Problems []string `json:"problems,omitempty"` // with what to do about them
}

// Daemon is a process of libvirt.
type Daemon struct {
	Name    string    `json:"name"`
	PID     int       `json:"pid"`
	Started time.Time `json:"started"`
}

const pingTime = 2 * time.Second

// Check checks the hook of a driver, the daemon that calls it, and the hostd that the
// hook calls.
func (m Machine) Check(ctx context.Context, driver string) Status {
	s := Status{Driver: driver, Path: m.path(driver), State: Installed}
	problem := func(format string, args ...any) { s.Problems = append(s.Problems, fmt.Sprintf(format, args...)) }
	ours, err := identify(s.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		s.State = Absent
		problem("the hook is not installed: gpuctl hook install --driver %s", driver)
	case errors.Is(err, ErrForeign):
		s.State = Foreign
		problem("%v", err)
	case err != nil:
		s.State = Foreign
		problem("the hook can't be read: %v", err)
	default:
		s.Version = ours.version
		if !ours.executable {
			problem("%s is not executable, and libvirt passes it over: gpuctl hook install --driver %s", s.Path, driver)
		}
		if theirs, err := identify(m.Source); err == nil && theirs.sum != ours.sum {
			s.State = Outdated
			problem("the hook is version %s, and this gpuctl brings %s: gpuctl hook install --driver %s", ours.version, theirs.version, driver)
		}
	}
	for _, dir := range []string{m.hooks(), m.folder(driver), s.Path} {
		if info, err := os.Stat(dir); err == nil {
			if stat, ok := info.Sys().(*syscall.Stat_t); info.Mode().Perm()&0o022 != 0 || ok && stat.Uid != 0 && int(stat.Uid) != os.Getuid() {
				problem("others than root can write %s, and libvirtd runs it as root: chown root:root, chmod go-w", dir)
			}
		}
	}
	s.Others = m.others(driver)
	if s.Daemon, err = m.daemon(driver); err != nil {
		problem("libvirt's processes can't be listed: %v", err)
	}
	if s.Daemon != nil && s.State != Absent && s.State != Foreign && !m.knows(*s.Daemon, driver) {
		s.Restart = true
		problem("%s (process %d) began before the hook was there and does not call it: systemctl restart %s", s.Daemon.Name, s.Daemon.PID, s.Daemon.Name)
	}
	config, err := dropin.LoadConfig(os.DirFS(m.Root))
	if err != nil {
		problem("%v: the defaults hold", err)
	}
	s.Policy = config.OnUnreachable
	socket := config.SocketBelow(m.Root)
	ctx, cancel := context.WithTimeout(ctx, pingTime)
	defer cancel()
	s.Hostd, err = wire.Client{Socket: socket}.Ping(ctx)
	switch {
	case errors.Is(err, fs.ErrPermission):
		problem("whether hostd answers can only root see")
	case err != nil:
		problem("at %s %v: start hostd", socket, err)
	}
	return s
}

// others returns the other hooks of a driver, in the order in which they are called.
func (m Machine) others(driver string) []string {
	var all []string
	for _, path := range m.candidates(driver) {
		if path != m.path(driver) {
			all = append(all, path)
		}
	}
	return all
}

// candidates returns the files that libvirt would run for a driver.
func (m Machine) candidates(driver string) []string {
	paths := []string{filepath.Join(m.hooks(), driver)}
	entries, _ := os.ReadDir(m.folder(driver))
	for _, e := range entries {
		paths = append(paths, filepath.Join(m.folder(driver), e.Name()))
	}
	return slices.DeleteFunc(paths, func(path string) bool {
		info, err := os.Stat(path)
		return err != nil || !info.Mode().IsRegular() || info.Mode()&0o111 == 0
	})
}

// knows reports whether the driver had a hook when the daemon was started. The start
// times of processes are at most a second wrong.
func (m Machine) knows(d Daemon, driver string) bool {
	for _, path := range m.candidates(driver) {
		if info, err := os.Stat(path); err == nil && info.ModTime().Add(time.Second).Before(d.Started) {
			return true
		}
	}
	return false
}

// daemon returns libvirt's process for a driver: its own one, or libvirtd. nil: none
// runs.
func (m Machine) daemon(driver string) (*Daemon, error) {
	names := []string{map[string]string{wire.LibXL: "virtxend", wire.QEMU: "virtqemud"}[driver], "libvirtd"}
	proc := filepath.Join(m.Root, "proc")
	entries, err := os.ReadDir(proc)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	booted := bootTime(proc)
	found := map[string]*Daemon{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid <= 0 {
			continue
		}
		stat, err := os.ReadFile(filepath.Join(proc, e.Name(), "stat"))
		if err != nil {
			continue // the process has ended
		}
		name, started, ok := parseStat(string(stat))
		if !ok || !slices.Contains(names, name) || found[name] != nil {
			continue
		}
		found[name] = &Daemon{Name: name, PID: pid, Started: booted.Add(started)}
	}
	for _, name := range names {
		if found[name] != nil {
			return found[name], nil
		}
	}
	return nil, nil
}

func bootTime(proc string) time.Time {
	data, _ := os.ReadFile(filepath.Join(proc, "stat"))
	for line := range strings.Lines(string(data)) {
		if after, ok := strings.CutPrefix(line, "btime "); ok {
			if n, err := strconv.ParseInt(strings.TrimSpace(after), 10, 64); err == nil {
				return time.Unix(n, 0)
			}
		}
	}
	return time.Time{}
}

// tick is the unit of times in /proc/PID/stat, which is the same on all platforms.
const tick = 10 * time.Millisecond

// parseStat returns the name, which may contain anything, and the start time after boot
// (proc_pid_stat(5), fields 2 and 22).
func parseStat(s string) (name string, started time.Duration, ok bool) {
	open, end := strings.IndexByte(s, '('), strings.LastIndexByte(s, ')')
	if open < 0 || end < open {
		return "", 0, false
	}
	fields := strings.Fields(s[end+1:])
	if len(fields) < 20 {
		return "", 0, false
	}
	n, err := strconv.ParseInt(fields[19], 10, 64)
	if err != nil || n < 0 || n > int64(100*365*24*time.Hour/tick) {
		return "", 0, false
	}
	return s[open+1 : end], time.Duration(n) * tick, true
}
