// Package stash keeps GPU states of sessions in this host's memory while their
// VMs migrate: those states that a VM has no room for.
//
// A stash is a folder on a tmpfs, because a VM's data must not be written to a
// disk. It outlives hostd. A kept state is a file with its mark beside it; the
// file has its name only once it is complete. Open removes what a hostd that died
// was still writing. A state is read back with its digest compared, so a wrong
// byte is an error and never a result.
//
// There is one state of each session, the newest. Its size counts against a limit
// from the moment that it is announced: it is the host's memory, and VMs need
// that, too. Forget removes states when their migration has ended. Sweep removes
// those whose migration has ended without a call of Forget.
//
// This package does not decide who may bring or get a state. Package
// hostd/migration/endpoint does: it returns a state only to the VM that it came
// from.
package stash
