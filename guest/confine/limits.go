package confine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// Limits creates a control group (version 2) for each session, in a group that exists for
// them.
type Limits struct {
	Group  string // folder
	Memory uint64 // bytes for each session; files in memory file systems count
}

// FindLimits returns the limits for sessions if there can be groups in the folder: it must
// be a control group with a controller for memory, and writable for this process.
func FindLimits(group string, memory uint64) (*Limits, error) {
	have, err := os.ReadFile(filepath.Join(group, "cgroup.controllers"))
	if err != nil {
		return nil, fmt.Errorf("control group of sessions: %w", err)
	}
	if !hasWord(have, "memory") {
		return nil, fmt.Errorf("control group %s has no controller for memory, but for %q", group, strings.TrimSpace(string(have)))
	}
	control := filepath.Join(group, "cgroup.subtree_control")
	if err := os.WriteFile(control, []byte("+memory"), 0); err != nil {
		return nil, fmt.Errorf("control group of sessions: %w", err)
	}
	return &Limits{Group: group, Memory: memory}, nil
}

func hasWord(text []byte, word string) bool {
	for _, w := range strings.Fields(string(text)) {
		if w == word {
			return true
		}
	}
	return false
}

// Add puts a process that has done nothing yet into the group of a session. It creates the
// group if it is missing. If l is nil, it does nothing.
func (l *Limits) Add(session string, pid int) error {
	if l == nil {
		return nil
	}
	dir := filepath.Join(l.Group, session)
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("control group of %s: %w", session, err)
	}
	for _, f := range []struct{ name, value string }{
		{"memory.max", strconv.FormatUint(l.Memory, 10)},
		{"cgroup.procs", strconv.Itoa(pid)},
	} {
		if err := os.WriteFile(filepath.Join(dir, f.name), []byte(f.value), 0); err != nil {
			return fmt.Errorf("control group of %s: %w", session, err)
		}
	}
	return nil
}

// Remove deletes the group of a session whose processes have ended.
func (l *Limits) Remove(session string) error {
	if l == nil {
		return nil
	}
	err := syscall.Rmdir(filepath.Join(l.Group, session))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("control group of %s: %w", session, err)
	}
	return nil
}
