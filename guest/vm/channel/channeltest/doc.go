// Package channeltest simulates a hypervisor's channel to a VM, with a pseudo-terminal
// and a Unix socket: a Xen PV console as QEMU serves it, including its difficulties. The
// guest's end is a real terminal, which echoes and edits lines until it is switched to
// raw mode, and which hangs up. The host's end keeps what the guest writes for the next
// client, loses the rest of what a client has written half, and accepts a second client
// without answering it.
package channeltest
