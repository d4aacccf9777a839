package wire

import "slices"

// Drivers of libvirt that have hooks for domains.
const (
	LibXL = "libxl"
	QEMU  = "qemu"
)

// Operations that libvirt calls hooks for (docs/hooks.rst of libvirt).
const (
	Prepare   = "prepare"   // before resources are taken; can refuse the start
	Start     = "start"     // before the domain runs; can refuse the start
	Started   = "started"   // it runs; a failure kills it
	Stopped   = "stopped"   // it has ended
	Release   = "release"   // libvirt has given its resources back
	Migrate   = "migrate"   // on the destination; may replace the XML
	Restore   = "restore"   // of a saved domain; may replace the XML; qemu only
	Reconnect = "reconnect" // libvirtd was restarted; a failure kills the domain
	Attach    = "attach"    // to a process that runs already; qemu only
)

// Drivers lists the drivers.
func Drivers() []string { return []string{LibXL, QEMU} }

// Operations lists what libvirt calls the hook of a driver for.
func Operations(driver string) []string {
	ops := []string{Prepare, Start, Started, Stopped, Release, Migrate, Reconnect}
	if driver == QEMU {
		ops = append(ops, Restore, Attach)
	}
	return ops
}

// Known says that a driver's hook is called for an operation.
func Known(driver, operation string) bool {
	return slices.Contains(Drivers(), driver) && slices.Contains(Operations(driver), operation)
}

// Event is one call of a hook.
type Event struct {
	Driver    string // LibXL or QEMU
	Domain    string // its name
	Operation string
	Sub       string // begin or end
	Extra     string // what libvirt adds; "-": nothing
	XML       []byte // the domain's; libxl's migrate of libvirt 9.0 gives none
}

// Filters says that libvirt takes what the hook prints as the domain's XML.
func (e Event) Filters() bool { return e.Operation == Migrate || e.Operation == Restore }

// Refusable says that a failure of the hook keeps a domain from starting, and
// harms none that runs.
func (e Event) Refusable() bool {
	switch e.Operation {
	case Prepare, Start, Migrate, Restore:
		return true
	}
	return false
}

// Answer is what hostd wants done.
type Answer struct {
	XML []byte // instead of the domain's; empty: unchanged
}
