package executor

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/confine"
)

// PoCL ends the process at the first kernel that it can't load. A session would be lost
// after its swap, so the swap must fail instead.
func TestARuntimeThatCannotLoadItsKernelsIsRefused(t *testing.T) {
	cache := t.TempDir()
	if err := unix.Mount("tmpfs", cache, "tmpfs", unix.MS_NOEXEC, "size=1m"); err != nil {
		t.Skipf("no rights to mount: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(cache, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	t.Setenv("POCL_CACHE_DIR", "")
	for _, device := range []string{"basic-x", "cpu-minimal-x", "pthread-x", ""} {
		q := quirkOf("Portable Computing Language", device)
		t.Setenv("HOME", cache)
		if err := q.check("libpocl.so.2"); !errors.Is(err, confine.ErrNoExec) {
			t.Errorf("%q: %v", device, err)
		}
		t.Setenv("HOME", t.TempDir())
		if err := q.check("libpocl.so.2"); err != nil {
			t.Errorf("%q: %v", device, err)
		}
		t.Setenv("POCL_CACHE_DIR", cache)
		if err := q.check("libpocl.so.2"); !errors.Is(err, confine.ErrNoExec) {
			t.Errorf("%q, with a cache of its own: %v", device, err)
		}
		t.Setenv("POCL_CACHE_DIR", "")
	}
	t.Setenv("HOME", cache)
	if err := quirkOf("NVIDIA CUDA", "").check("libnvidia-opencl.so.1"); err != nil {
		t.Error("it needs no libraries:", err)
	}
}

// PoCL 4 gave its devices other names. Its single-threaded one, used by several threads at
// once, computes wrong results.
func TestPoCLsSingleThreadedDeviceIsKnownByEachOfItsNames(t *testing.T) {
	for device, serial := range map[string]bool{
		"basic-skylake-avx512-AMD EPYC": true, "cpu-minimal-skylake-avx512-AMD EPYC": true,
		"pthread-skylake-avx512-AMD EPYC": false, "cpu-skylake-avx512-AMD EPYC": false,
	} {
		if q := quirkOf("Portable Computing Language", device); q.serial != serial || !q.libraries {
			t.Errorf("%q: %+v", device, q)
		}
	}
}
