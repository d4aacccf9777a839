// Package network looks at the network interfaces that migrations go through,
// sets up the virtual functions of network cards for domains that reach remote
// GPUs, and caps the bandwidth of a migration. It is the only place that
// changes anything about the network; inventory reads interfaces through
// hostd/inventory/hostinfo.
//
// It asks the kernel by netlink, in the network namespace of the thread that
// Open was called on, and reads speeds from sysfs below an injected root. Every
// answer of the kernel has a deadline; what is set is read back.
//
// # Bandwidth
//
// libvirt's libxl driver can't limit a migration. So the packets to the
// destination are led through a class of a token bucket (HTB) on the interface
// that they leave by. Ours is the root queueing discipline 4750:, and there
// only while there are limits; another's is never touched: ErrBusy names it.
// All other traffic passes by the class at once, though through the one queue
// of the discipline, which costs cards of 25 Gbit/s and more with many cores
// some of their speed meanwhile.
//
// A class counts what went through it, headers and repetitions included, which
// is how far a migration has come. What a hostd that was killed left behind
// Reconcile removes.
//
// Only packets without options (IPv4) and extension headers (IPv6) are found,
// which is what TCP of this host sends.
package network
