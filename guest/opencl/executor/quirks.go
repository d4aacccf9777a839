package executor

import (
	"cmp"
	"fmt"
	"os"
	"strings"

	"github.com/gpuctl/gpuctl/guest/confine"
)

// quirk is a known fault of a runtime that the probes do not find.
type quirk struct {
	platform string // prefix of its name
	device   string // prefix of the name of its first device
	serial   bool   // not thread-safe: one call at a time
	// It generates the same code with the option that describes arguments, so no second
	// build is needed for the description.
	sameCode bool
	// The logs of its builds have the compiler's warnings, also of a program that it has taken
	// from its cache.
	warns bool
	// Its own binaries cannot be used.
	badBinaries bool
	// It compiles every kernel once more, for any group size, when it is asked for a program's
	// binaries, and compiles none that is launched meanwhile. A program with a fixed group size
	// must not run then at all.
	dearBinaries bool
	// It compiles kernels to libraries in its cache, and ends the process if it can't load
	// one. cache is the variable that names another folder than the home.
	libraries bool
	cache     string
}

var quirks = [...]quirk{
	// Oclgrind 21.10 fails assertions in Context.cpp or crashes if two threads enqueue or
	// wait. It also crashes if it is asked for the arguments of a kernel that comes from a
	// binary. It builds in milliseconds.
	{platform: "Oclgrind", serial: true, warns: true, badBinaries: true},
	// PoCL's basic device runs commands in any thread that enqueues or waits, and locks
	// events in the order of their dependencies. Two threads that use the same buffer may
	// block each other for ever, also with different queues. Since PoCL 4 the device is called
	// cpu-minimal, and a wait returns while another thread still runs the command: a blocking
	// write of one thread came after the kernel that it was for.
	{platform: "Portable Computing Language", device: "basic-", serial: true, sameCode: true, warns: true, dearBinaries: true, libraries: true, cache: "POCL_CACHE_DIR"},
	{platform: "Portable Computing Language", device: "cpu-minimal-", serial: true, sameCode: true, warns: true, dearBinaries: true, libraries: true, cache: "POCL_CACHE_DIR"},
	// PoCL 3.1 adds metadata only; the compiled code is equal, byte for byte. When it is
	// asked for a program's binaries, it compiles kernels with a fixed group size once
	// more, for other offsets and grids. pocl_release_dlhandle_cache confuses that code,
	// which nobody uses, with the code of a kernel that ends, and aborts.
	{platform: "Portable Computing Language", sameCode: true, warns: true, dearBinaries: true, libraries: true, cache: "POCL_CACHE_DIR"},
}

func quirkOf(platform, device string) quirk {
	for _, q := range quirks {
		if strings.HasPrefix(platform, q.platform) && strings.HasPrefix(device, q.device) {
			return q
		}
	}
	return quirk{}
}

// check returns an error if the runtime would end this process at its first kernel. It is
// better not to begin: a session that comes from another GPU stays there.
func (q quirk) check(rt string) error {
	if !q.libraries {
		return nil
	}
	home := os.Getenv("HOME")
	if q.cache != "" {
		home = cmp.Or(os.Getenv(q.cache), home)
	}
	if home == "" {
		return nil
	}
	if err := confine.Loadable(home); err != nil {
		return fmt.Errorf("%s loads what it compiles, and can't from its cache: %w: mount the run folder's file system with exec", rt, err)
	}
	return nil
}
