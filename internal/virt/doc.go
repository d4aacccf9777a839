// Package virt is gpuctl's client of libvirt, for xen:///system and qemu:///system: the
// calls that gpuctl needs, each with a deadline, and libvirt's events.
//
// It uses libvirt's protocol through go-libvirt. go-libvirt's calls have neither contexts
// nor time limits, and its decoder trusts its peer. So:
//
//   - Each call has a connection of its own, from a small pool. When its
//     time is over, its job is aborted if it has one, its
//     connection is closed, and it fails with ErrTimeout. Other calls are not
//     affected.
//   - If a call that changes something gets no answer, it also fails with
//     ErrUnknownOutcome: it may have been done, may be done later, or never. The caller
//     must look at the domain before it does anything else. Calls that
//     only read are repeated once if the connection was lost.
//   - One more connection receives events and checks periodically whether libvirtd
//     answers. While it does not, calls fail at once with ErrDisconnected,
//     instead of waiting for their deadlines, and the client reconnects in the
//     background. After that, each subscription receives a Resync: events were
//     missed, so everything must be read again.
//   - Each message of libvirtd is checked before go-libvirt gets it.
//
// The content of a domain's XML is in passthrough/domxml, the hooks in
// hostd/cards/libvirthook. Whether an attach or a detach worked must be asked elsewhere:
// libvirt's answer does not prove it. Its libxl driver has no device events, and after a
// detach that the guest did not answer, it has forgotten a device that Xen still has. Ask
// Xen and the guest.
//
// Save, snapshot and restore are not supported on purpose: libvirt does not refuse to
// save a domain with a PCI device, and leaves its devices half released.
package virt
