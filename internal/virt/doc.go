// Package virt is gpuctl's way to libvirt, for xen:///system and for
// qemu:///system: the calls that gpuctl needs, each with a deadline, and
// libvirt's events.
//
// It speaks libvirt's protocol through go-libvirt, whose calls know neither
// context nor time limit, and whose decoder trusts its peer. So:
//
//   - Every call has a connection of its own, out of a small pool. When its
//     time is up, its job is aborted where there is one to abort, its
//     connection is closed, and it fails with ErrTimeout. No other call feels
//     that.
//   - A call that changes something and whose answer never came also fails with
//     ErrUnknownOutcome: it may have been done, may be done later, or never. Who
//     gets that must look at the domain before doing anything else. Calls that
//     only read are repeated once when the connection was lost under them.
//   - One more connection receives events and asks now and then whether libvirtd
//     still answers. While it doesn't, calls fail at once with ErrDisconnected,
//     instead of each waiting for its deadline, and the client reconnects in the
//     background. After that every subscription receives a Resync: events were
//     missed, look at everything.
//   - Every message of libvirtd is checked before go-libvirt sees it.
//
// What lives elsewhere: what to write into a domain's XML (passthrough/domxml),
// hooks (hostd/cards/libvirthook), and whether an attach or a detach worked. What libvirt
// returns is not proof of that: its libxl driver has no device events, and
// after a detach that the guest did not answer it has forgotten a device that
// Xen still has. Ask Xen and the guest.
//
// Save, snapshot and restore are left out on purpose: libvirt does not refuse
// to save a domain with a PCI device, and leaves its devices half released.
package virt
