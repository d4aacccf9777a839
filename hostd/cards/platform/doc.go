// Package platform is what hostd's keeper of cards stands on: the hypervisor
// (Xen, or KVM through libvirt), libvirt's VMs, drivers, resets, isolation and
// the catalogue of models, each wrapped as hostd/cards wants it. It also
// listens to what happens: uevents of the kernel, events of libvirt and its
// hooks, and passes that on to the keeper.
//
// Nothing is decided here. On a machine without a hypervisor cards are listed
// and judged all the same; giving one away is refused with the reason.
package platform
