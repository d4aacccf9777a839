package hostd

import (
	"bytes"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/gpuctl/gpuctl/internal/rundir"
)

func TestHostdChangesNoFolderThatItDidNotMake(t *testing.T) {
	for name, c := range map[string]struct {
		mode, want os.FileMode // 0: hostd makes it
		warns      bool
	}{
		"a folder of the system": {0o755, 0o755, false},
		"a closed folder":        {0o700, 0o700, true},
		"its own":                {0, 0o711, false},
	} {
		var log bytes.Buffer
		folder := filepath.Join(t.TempDir(), "run")
		if c.mode != 0 {
			if err := os.Mkdir(folder, c.mode); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(folder, c.mode); err != nil {
				t.Fatal(err)
			}
		}
		made, err := rundir.MakeNew(folder)
		if err != nil {
			t.Fatal(err)
		}
		o := Options{Socket: filepath.Join(folder, "x.sock"), Data: "/data", Log: slog.New(slog.NewTextHandler(&log, nil))}
		l, err := listen(o, made)
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		info, err := os.Stat(folder)
		if err != nil || info.Mode().Perm() != c.want {
			t.Errorf("%s: %o, %v", name, info.Mode().Perm(), err)
		}
		if got := strings.Contains(log.String(), "do not reach"); got != c.warns {
			t.Errorf("%s: %s", name, &log)
		}
	}
}

// Who can write to the data folder could say which cards VMs have, and who
// leads the cluster.
func TestDataFolderThatOthersCanWriteIsRefused(t *testing.T) {
	above := t.TempDir()
	dir := filepath.Join(above, "data")
	if err := makeData(dir); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir, above} {
		if err := os.Chmod(path, 0o777); err != nil {
			t.Fatal(err)
		}
		err := Run(t.Context(), Options{Dir: filepath.Join(t.TempDir(), "run"), Data: dir, Socket: filepath.Join(t.TempDir(), "api", "x.sock")})
		if !errors.Is(err, fs.ErrPermission) || !strings.Contains(err.Error(), "data folder") {
			t.Errorf("%s is open to all: %v", path, err)
		}
		if err := os.Chmod(path, 0o700); err != nil {
			t.Fatal(err)
		}
	}
}

// gpuguest bounds its log only if it may read it.
func TestGpuguestCanBoundItsLog(t *testing.T) {
	dir := t.TempDir()
	binary := filepath.Join(dir, "gpuguest")
	if err := os.WriteFile(binary, []byte("#!/bin/sh\ncat /proc/self/fdinfo/2 >&2\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	g := &Guest{Dir: dir, Binary: binary, Log: slog.New(slog.DiscardHandler)}
	_, err := g.Ensure(t.Context())
	if err == nil {
		t.Fatal("a program that ends is taken for a gpuguest that answers")
	}
	_, flags, _ := strings.Cut(err.Error(), "flags:")
	n, perr := strconv.ParseInt(strings.Fields(flags + " 0")[0], 8, 64)
	if want := int64(os.O_RDWR | os.O_APPEND); perr != nil || n&want != want {
		t.Errorf("flags %o: %v", n, err)
	}
}
