package executor

import "strings"

// quirk is what is known to be wrong with a runtime, beyond what the probes
// find out by themselves.
type quirk struct {
	platform string // its name begins with this
	device   string // and its first device's with this
	serial   bool   // not thread-safe: one call at a time
	// Asked to describe arguments, it makes the same code: no other build is
	// needed for that.
	sameCode bool
	// What it makes of its own binaries can't be used.
	badBinaries bool
	// Kernels of a program that have a fixed group size must not run while it
	// is asked for its binaries.
	stillBinaries bool
}

var quirks = [...]quirk{
	// Oclgrind 21.10 asserts in Context.cpp or crashes when two threads
	// enqueue or wait, and crashes when a kernel of a binary is asked for its
	// arguments. It builds in milliseconds.
	{platform: "Oclgrind", serial: true, badBinaries: true},
	// PoCL's basic device runs commands in whatever thread enqueues or waits,
	// and locks events in the order of their dependence: two threads that use
	// one buffer, in queues of their own or not, may block each other for ever.
	{platform: "Portable Computing Language", device: "basic-", serial: true, sameCode: true, stillBinaries: true},
	// PoCL 3.1 adds metadata; what is compiled of it is equal, byte for byte. For
	// a program's binaries it compiles kernels of a fixed group size once more,
	// for other offsets and grids. pocl_release_dlhandle_cache takes that code,
	// which nobody uses, for the code of a kernel that ends, and aborts.
	{platform: "Portable Computing Language", sameCode: true, stillBinaries: true},
}

func quirkOf(platform, device string) quirk {
	for _, q := range quirks {
		if strings.HasPrefix(platform, q.platform) && strings.HasPrefix(device, q.device) {
			return q
		}
	}
	return quirk{}
}
