package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
)

// cgroups is where this machine has its cgroups.
const cgroups = "/sys/fs/cgroup"

// quotaPeriod is the time in which a host may use its part of a processor, in µs.
const quotaPeriod = 100_000

// parseQuota reads $GPUCTL_LAB_QUOTA: percent of one processor that each host may use.
// Empty means no quota, as 0.
func parseQuota(s string) (int, error) {
	if s == "" {
		return 0, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 || n > 1000 {
		return 0, fmt.Errorf("lab: GPUCTL_LAB_QUOTA is percent of one processor from 1 to 1000, not %q", s)
	}
	return n, nil
}

// limit gives a host's QEMU percent of one processor, in a cgroup below root (cgroups(7),
// version 2 or 1).
func limit(root, group string, pid, percent int) error {
	quota := strconv.Itoa(percent * quotaPeriod / 100)
	dir, file, value := filepath.Join(root, "cpu", group), "cpu.cfs_quota_us", quota
	if _, err := os.Stat(filepath.Join(root, "cgroup.controllers")); err == nil {
		if err := os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte("+cpu"), 0); err != nil {
			return fmt.Errorf("lab: quota: %w", err)
		}
		dir, file, value = filepath.Join(root, group), "cpu.max", fmt.Sprintf("%s %d", quota, quotaPeriod)
	}
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("lab: quota: %w", err)
	}
	for _, f := range [][2]string{{file, value}, {"cgroup.procs", strconv.Itoa(pid)}} {
		if err := os.WriteFile(filepath.Join(dir, f[0]), []byte(f[1]), 0o644); err != nil {
			return fmt.Errorf("lab: quota: %w", err)
		}
	}
	return nil
}

// lift removes the cgroup of a host whose QEMU has ended.
func lift(root, group string) {
	for _, dir := range []string{filepath.Join(root, group), filepath.Join(root, "cpu", group)} {
		_ = os.Remove(dir) // none is the usual case; one that stays is used again
	}
}
