// Package stash keeps the GPU states of VMs' sessions on a host, in its memory,
// while their VMs are migrated: those that a VM has no room for itself.
//
// It is a folder, on a tmpfs (a VM's data must not come to lie on a disk), that
// outlives hostd: a state that is kept is a file with its mark beside it, and
// there only once it is whole; what a hostd that died was still writing goes at
// the next Open. A state is read back with its digest compared, so that a wrong
// byte is an error and never a result.
//
// Of a session there is one state, the newest. What is kept counts against a
// limit, from the moment that it is announced: it is the host's memory, and VMs
// are not to be starved of it. States go when their migration has ended, by
// Forget, or by Sweep where nobody could say so.
//
// Nothing here says who may bring a state or have it: that is hostd/migration/endpoint, which
// gives one to nobody but the VM that it came from.
package stash
