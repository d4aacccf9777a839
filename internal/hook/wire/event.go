package wire

import "slices"

// Drivers of libvirt that have hooks for domains.
const (
	LibXL = "libxl"
	QEMU  = "qemu"
)

// Operations for which libvirt calls hooks (docs/hooks.rst of libvirt).
const (
	Prepare   = "prepare"   // before resources are allocated; can refuse the start
	Start     = "start"     // before the domain runs; can refuse the start
	Started   = "started"   // the domain runs; a failure kills it
	Stopped   = "stopped"   // the domain has ended
	Release   = "release"   // libvirt has released its resources
	Migrate   = "migrate"   // on the destination; may replace the XML
	Restore   = "restore"   // start of a saved domain; may replace the XML; qemu only
	Reconnect = "reconnect" // libvirtd was restarted; a failure kills the domain
	Attach    = "attach"    // libvirt attaches to a running process; qemu only
)

// Drivers returns the drivers.
func Drivers() []string { return []string{LibXL, QEMU} }

// Operations returns the operations for which libvirt calls the hook of a driver.
func Operations(driver string) []string {
	ops := []string{Prepare, Start, Started, Stopped, Release, Migrate, Reconnect}
	if driver == QEMU {
		ops = append(ops, Restore, Attach)
	}
	return ops
}

// Known reports whether a driver's hook is called for an operation.
func Known(driver, operation string) bool {
	return slices.Contains(Drivers(), driver) && slices.Contains(Operations(driver), operation)
}

// Event is one call of a hook.
type Event struct {
	Driver    string // LibXL or QEMU
	Domain    string // name of the domain
	Operation string
	Sub       string // begin or end
	Extra     string // libvirt's extra argument; "-": none
	XML       []byte // XML of the domain; none for libxl's migrate in libvirt 9.0
}

// Filters reports whether libvirt uses the hook's output as the domain's XML.
func (e Event) Filters() bool { return e.Operation == Migrate || e.Operation == Restore }

// Refusable reports whether a failure of the hook prevents a domain from starting, and
// does not affect a running one.
func (e Event) Refusable() bool {
	switch e.Operation {
	case Prepare, Start, Migrate, Restore:
		return true
	}
	return false
}

// Answer is hostd's answer to an event.
type Answer struct {
	XML []byte // replaces the domain's XML; empty: unchanged
}
