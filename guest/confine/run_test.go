package confine

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Debian's /run is mounted with noexec, and run folders are there. Runtimes that compile for
// the processor load what they have compiled from the home of their session.
func TestLibrariesAreLoadedFromARunFolderMountedNoexec(t *testing.T) {
	needRoot(t)
	file := t.TempDir()
	if err := unix.Mount("tmpfs", file, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "size=1m"); err != nil {
		t.Skipf("no rights to mount: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(file, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	run := filepath.Join(file, "gpuctl")
	program := filepath.Join(run, "sessions", "program")
	inner := filepath.Join(run, "stash")
	if err := errors.Join(os.MkdirAll(filepath.Dir(program), 0o711), os.Mkdir(inner, 0o700),
		os.WriteFile(program, []byte("#!/bin/sh\nexit 0\n"), 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", inner, "tmpfs", unix.MS_NOEXEC, "size=1m"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(inner, "state"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Loadable(filepath.Dir(program)); !errors.Is(err, ErrNoExec) {
		t.Fatal("before:", err)
	}
	if err := exec.Command(program).Run(); !errors.Is(err, unix.EACCES) {
		t.Fatal("before:", err)
	}
	for range 2 { // the next gpuguest finds it as it should be
		if err := MakeLoadable(run); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(Loadable(filepath.Dir(program)), exec.Command(program).Run()); err != nil {
		t.Error("after:", err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(run, &st); err != nil || st.Flags&unix.ST_NOSUID == 0 || st.Flags&unix.ST_NODEV == 0 || st.Flags&unix.ST_RDONLY != 0 {
		t.Errorf("flags %#x: %v", st.Flags, err)
	}
	if err := Loadable(file); !errors.Is(err, ErrNoExec) {
		t.Error("the folder above:", err)
	}
	if err := Loadable(inner); !errors.Is(err, ErrNoExec) {
		t.Error("what is mounted in it:", err)
	}
	if _, err := os.Stat(filepath.Join(inner, "state")); err != nil {
		t.Error(err)
	}
	if err := unix.Unmount(run, unix.MNT_DETACH); err != nil {
		t.Error(err)
	}
	if err := Loadable(run); !errors.Is(err, ErrNoExec) {
		t.Error("it was mounted more than once:", err)
	}
}
