// Package cards keeps the life of every PCI card of a host: taken from
// dom0's driver, reset, given to a VM, taken back, reset again, returned, or
// put into quarantine. Nothing else in hostd binds, resets or gives away a
// card.
//
// What is true is what the hypervisor says; the record on disk says what is
// wanted and how far it got. It is written before every step, so that after a
// crash at any point [Keeper.Reconcile] finishes or undoes what it finds. That
// a card has one owner is decided three times: by the cluster's claim, by this
// record, and by the hypervisor, and a step goes on only if they agree.
//
// A VM gets a card whole, or a slice of it: a virtual function, mediated device
// or vGPU, which is made for it and deleted after it. While slices of a card
// are out it is not taken, reset or given away, and the other way round.
//
// How a driver is bound or a card is reset is with the packages under
// passthrough; talking to libvirt is with internal/virt; the protocol of the
// hooks is with hostd/cards/libvirthook. They are interfaces here.
package cards
