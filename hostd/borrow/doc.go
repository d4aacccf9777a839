// Package borrow gives VMs of this host GPUs that hosts lend to them lastingly: until they
// are detached, or the VM ends.
//
// The claim is in the cluster's log, is one of the host that lends, and names the VM. A
// Keeper attaches and detaches them, and serves those whose VM runs on this host: it tells
// the VM's gpuguest, which then asks for a lease for each session. So a claim follows its VM
// without a word of whoever has moved the VM: the keeper of the next host finds the VM there.
// When a VM has ended is decided by the host that lends, which looks for it.
//
// For VMs whose network does not reach a GPU that is lent to them, lastingly or while they
// move, the Keeper has their carriers connect through this host: to these GPUs' ports only.
//
// The Keeper keeps nothing itself. After a restart it finds everything in the log.
//
// What the host that lends does is in hostd/sessions, the two hosts' calls and those to
// gpuguest are in hostd/migration/endpoint.
package borrow
