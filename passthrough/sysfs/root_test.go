package sysfs_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
)

func TestDir(t *testing.T) {
	folder := t.TempDir()
	if err := os.MkdirAll(filepath.Join(folder, "sys/devices/a"), 0o755); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(folder, "sys/devices/a/driver_override")
	if err := os.WriteFile(file, []byte("(null)\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("devices/a", filepath.Join(folder, "sys/a")); err != nil {
		t.Fatal(err)
	}
	root := sysfs.Dir(folder)
	if err := root.Write(t.Context(), "sys/a/driver_override", "vfio-pci"); err != nil {
		t.Fatal(err)
	}
	if data, err := root.ReadFile("sys/a/driver_override"); err != nil || string(data) != "vfio-pci" {
		t.Errorf("read %q, %v", data, err)
	}
	if target, err := root.ReadLink("sys/a"); err != nil || target != "devices/a" {
		t.Errorf("link %q, %v", target, err)
	}
	if list, err := root.ReadDir("sys"); err != nil || len(list) != 2 {
		t.Errorf("list %v, %v", list, err)
	}
	if info, err := root.Lstat("sys/a"); err != nil || info.Mode()&fs.ModeSymlink == 0 {
		t.Errorf("%v, %v", info, err)
	}
}

func TestWriteRefuses(t *testing.T) {
	folder := t.TempDir()
	root := sysfs.Dir(folder)
	for name, want := range map[string]error{
		"sys/none": fs.ErrNotExist,
		"../sys":   fs.ErrInvalid,
		"/sys":     fs.ErrInvalid,
		".":        syscall.EISDIR,
	} {
		if err := root.Write(t.Context(), name, "1"); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
	}
	if _, err := os.Stat(filepath.Join(folder, "sys/none")); err == nil {
		t.Error("a write made a file")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := root.Write(ctx, "sys/none", "1"); !errors.Is(err, context.Canceled) || errors.Is(err, sysfs.ErrStuck) {
		t.Errorf("ended before: %v", err)
	}
}

// Opening a pipe that nobody reads waits, as a driver does that hangs.
func TestWriteIsStuckOnce(t *testing.T) {
	folder := t.TempDir()
	pipe := filepath.Join(folder, "unbind")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	root := sysfs.Dir(folder)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	err := root.Write(ctx, "unbind", "0000:65:00.0")
	if !errors.Is(err, sysfs.ErrStuck) || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
	start := time.Now()
	if err := root.Write(t.Context(), "unbind", "0000:65:00.0"); !errors.Is(err, sysfs.ErrStuck) {
		t.Errorf("the second one: %v", err)
	}
	if took := time.Since(start); took > time.Second {
		t.Errorf("the second one waited %v", took)
	}
	// The reader lets the first go on, and the next one too.
	reader, err := os.OpenFile(pipe, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	data := make([]byte, 12)
	if n, err := reader.Read(data); err != nil || string(data[:n]) != "0000:65:00.0" {
		t.Fatalf("read %q, %v", data, err)
	}
	testkit.Until(t, "the next write gets through", func() error {
		err := root.Write(t.Context(), "unbind", "0000:65:00.0")
		if err != nil && !errors.Is(err, sysfs.ErrStuck) {
			t.Fatal(err)
		}
		return err
	})
}
