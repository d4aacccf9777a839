// Package channeltest is a hypervisor's channel to a VM, made of a
// pseudo-terminal and a unix socket: a Xen PV console as QEMU serves it, with
// what makes it hard. Its guest's end is a real terminal, which echoes and
// edits lines until it is told not to, and hangs up. Its host's end keeps what
// the guest writes for the next client, cuts what a client left half written,
// and accepts a second client without answering it.
package channeltest
