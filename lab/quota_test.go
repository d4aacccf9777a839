package lab

import (
	"os"
	"path/filepath"
	"testing"
)

func TestParseQuota(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]int{"": 0, "50": 50, "1": 1, "1000": 1000} {
		if got, err := parseQuota(in); err != nil || got != want {
			t.Errorf("%q: %d, %v; want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"0", "-5", "half", "1001", "50%"} {
		if got, err := parseQuota(in); err == nil {
			t.Errorf("%q: %d", in, got)
		}
	}
}

// The files are plain ones here. `make lab-test QUOTA=50` has the kernel's.
func TestLimit(t *testing.T) {
	t.Parallel()
	for _, x := range []struct{ name, have, dir, file, want string }{
		{"version 2", "cgroup.controllers", "lab-xena", "cpu.max", "50000 100000"},
		{"version 1", "cpu/tasks", "cpu/lab-xena", "cpu.cfs_quota_us", "50000"},
	} {
		t.Run(x.name, func(t *testing.T) {
			t.Parallel()
			root := t.TempDir()
			for _, f := range []string{x.have, "cgroup.subtree_control"} {
				if err := os.MkdirAll(filepath.Dir(filepath.Join(root, f)), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(root, f), nil, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			for range 2 { // the second time as after a host's end
				if err := limit(root, "lab-xena", 4711, 50); err != nil {
					t.Fatal(err)
				}
			}
			for f, want := range map[string]string{x.file: x.want, "cgroup.procs": "4711"} {
				if b, err := os.ReadFile(filepath.Join(root, x.dir, f)); err != nil || string(b) != want {
					t.Errorf("%s: %q, %v; want %q", f, b, err, want)
				}
			}
		})
	}
}
