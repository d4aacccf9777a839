// Package replay makes of a host's capture (internal/capture) a machine whose
// kernel keeps its rules (passthrough/sysfs/sysfstest), for tests of what
// happens on a host that somebody reported a bug of:
//
//	archive, err := capture.Open(file)
//	m, err := replay.Machine(archive)
//	b := bind.New(m, ...)
//
// PCI functions, their drivers and their groups come alive; all other files
// are as they were, and stay so.
package replay
