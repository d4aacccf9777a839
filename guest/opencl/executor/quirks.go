package executor

import "strings"

// quirk is a known fault of a runtime that the probes do not find.
type quirk struct {
	platform string // prefix of its name
	device   string // prefix of the name of its first device
	serial   bool   // not thread-safe: one call at a time
	// It generates the same code with the option that describes arguments, so no second
	// build is needed for the description.
	sameCode bool
	// Its own binaries cannot be used.
	badBinaries bool
	// Kernels of a program with a fixed group size must not run while the runtime is asked
	// for the program's binaries.
	stillBinaries bool
}

var quirks = [...]quirk{
	// Oclgrind 21.10 fails assertions in Context.cpp or crashes if two threads enqueue or
	// wait. It also crashes if it is asked for the arguments of a kernel that comes from a
	// binary. It builds in milliseconds.
	{platform: "Oclgrind", serial: true, badBinaries: true},
	// PoCL's basic device runs commands in any thread that enqueues or waits, and locks
	// events in the order of their dependencies. Two threads that use the same buffer may
	// block each other for ever, also with different queues.
	{platform: "Portable Computing Language", device: "basic-", serial: true, sameCode: true, stillBinaries: true},
	// PoCL 3.1 adds metadata only; the compiled code is equal, byte for byte. When it is
	// asked for a program's binaries, it compiles kernels with a fixed group size once
	// more, for other offsets and grids. pocl_release_dlhandle_cache confuses that code,
	// which nobody uses, with the code of a kernel that ends, and aborts.
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
