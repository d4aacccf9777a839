// Package cards keeps the state of each PCI card of a host. A card is taken from its
// driver in dom0, reset, attached to a VM, detached, reset again and returned, or put
// into quarantine. No other package of hostd binds, resets or attaches a card.
//
// The hypervisor decides what is true. The record on disk contains what is wanted, and
// which step has begun. It is written before each step, so after a crash at any point
// [Keeper.Reconcile] finishes or undoes the step. Three sources must agree that a card
// has one owner: the cluster's claim, this record, and the hypervisor. A step goes on
// only if they do.
//
// A VM gets a whole card, or a slice of it: a virtual function, a mediated device or a
// vGPU. The slice is created for the VM and deleted after it. While slices of a card are
// assigned, the card is not taken, reset or attached as a whole. While the card is
// assigned as a whole, no slice is created.
//
// The packages under passthrough bind drivers and reset cards, internal/virt talks to
// libvirt, and hostd/cards/libvirthook has the protocol of libvirt's hook. This package
// uses them through its own interfaces.
package cards
