package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuctl/gpuctl/internal/excerpt"
	"github.com/gpuctl/gpuctl/passthrough/bind"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
)

// units are the services of the VM that may be stopped while a card is away: units of
// systemd.
type units struct {
	machine sysfs.Root
	binder  *bind.Binder
	may     []string
}

// Watching returns which of the units have processes with the functions open.
func (u *units) Watching(ctx context.Context, functions []pci.Address) ([]string, error) {
	if len(u.may) == 0 {
		return nil, nil
	}
	users, err := u.binder.Users(ctx, functions)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, user := range users {
		if user.Kind != bind.UserProcess {
			continue
		}
		unit, err := u.unitOf(user.PID)
		if err != nil {
			return nil, err
		}
		if slices.Contains(u.may, unit) && !slices.Contains(out, unit) {
			out = append(out, unit)
		}
	}
	return out, nil
}

// unitOf returns the unit of systemd that a process belongs to, or "". The name of its
// control group has it (cgroups(7)).
func (u *units) unitOf(pid int) (string, error) {
	data, err := u.machine.ReadFile(path.Join("proc", strconv.Itoa(pid), "cgroup"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil // it has ended
	}
	if err != nil {
		return "", fmt.Errorf("pid %d: %w", pid, err)
	}
	for line := range strings.Lines(string(data)) {
		_, group, ok := strings.Cut(strings.TrimSpace(line), "::")
		if !ok {
			continue
		}
		for _, name := range slices.Backward(strings.Split(group, "/")) {
			if strings.HasSuffix(name, ".service") {
				return name, nil
			}
		}
	}
	return "", nil
}

func (u *units) Stop(ctx context.Context, service string) error {
	return systemctl(ctx, "stop", service)
}

func (u *units) Start(ctx context.Context, service string) error {
	return systemctl(ctx, "start", service)
}

func systemctl(ctx context.Context, what, unit string) error {
	cmd := exec.CommandContext(ctx, "systemctl", what, "--", unit)
	var said bytes.Buffer
	cmd.Stderr = &said
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("systemctl %s %s: %w: %s", what, unit, err, excerpt.Of(strings.TrimSpace(said.String()), 200))
	}
	return nil
}
