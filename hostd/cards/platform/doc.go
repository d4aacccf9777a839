// Package platform implements what the keeper of cards needs on this host: the hypervisor
// (Xen, or KVM through libvirt), libvirt's VMs, drivers, resets, isolation and the
// catalogue of models. Each part implements an interface of hostd/cards. A Runner listens to
// uevents of the kernel, events of libvirt and libvirt's hook, and passes them on to the
// keeper.
//
// It decides nothing. On a host without a hypervisor, cards are listed and judged as
// well, and an attach is refused with the reason.
package platform
