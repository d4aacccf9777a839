// Package servicevm keeps which VMs of this host are service VMs: VMs that own cards and whose
// gpuguest runs executors for sessions of other VMs and hosts.
//
// Here live the operator's declarations and their record (Registry), what such a VM says of its
// cards, checked and bounded, whether it runs and answers (Keeper), and how an operator has a
// VM serve (Service). Each needs the one before, and another part of hostd needs it: the
// sessions, the keeper of cards, the API.
//
// Not here: who has how much of its GPUs (package sessions), how the VM serves (guest/lease),
// and the cards themselves (package cards). A VM that was not declared is never asked, however
// loudly it offers itself.
package servicevm
