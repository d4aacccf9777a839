// Package servicevm keeps which VMs of this host are service VMs: VMs that own cards and whose
// gpuguest runs executors for sessions of other VMs and hosts.
//
// Here live the operator's declarations and their record, what such a VM says of its cards,
// checked and bounded, and whether it runs and answers.
//
// Not here: who has how much of its GPUs (package sessions), how the VM serves (guest/lease),
// and the cards themselves (package cards). A VM that was not declared is never asked, however
// loudly it offers itself.
package servicevm
