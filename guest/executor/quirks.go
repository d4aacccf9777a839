package executor

import "strings"

// quirk is what is known to be wrong with a runtime, beyond what the probes
// find out by themselves.
type quirk struct {
	platform string // its name begins with this
	serial   bool   // not thread-safe: one call at a time
}

var quirks = [...]quirk{
	// Oclgrind 21.10 asserts in Context.cpp or crashes when two threads
	// enqueue or wait.
	{platform: "Oclgrind", serial: true},
}

func quirkOf(platform string) quirk {
	for _, q := range quirks {
		if strings.HasPrefix(platform, q.platform) {
			return q
		}
	}
	return quirk{}
}
