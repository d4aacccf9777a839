// Package network reads the network interfaces of this host and limits the bandwidth of a
// migration. No other package changes the network. Package inventory reads interfaces
// through hostd/inventory/hostinfo.
//
// It talks to the kernel by netlink, in the network namespace of the thread that called
// Open. It reads speeds from sysfs, below the root that is passed to Open. Each answer of
// the kernel has a deadline.
//
// # Bandwidth
//
// libvirt's libxl driver cannot limit a migration. So this package uses traffic control
// (tc-htb(8)): packets to the destination go through a class of a hierarchical token
// bucket (HTB) on the interface that they leave by. The HTB is the root queueing
// discipline 4750: of that interface. It exists only while there are limits. If the
// interface has a root queueing discipline of somebody else, it is not changed, and the
// error wraps ErrBusy and names it. Other traffic is not limited, but it goes through the
// single queue of the discipline, too. Fast cards (25 Gbit/s and more) on hosts with many
// cores lose some speed by that.
//
// A class counts the bytes that went through it, including headers and retransmissions.
// That is how far a migration has come. A hostd that was killed leaves its limits behind;
// Reconcile removes them.
//
// Packets with IPv4 options or IPv6 extension headers are not limited. TCP connections of
// this host send none.
package network
