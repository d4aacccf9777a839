// Package stash keeps GPU states of sessions in this host's memory while their VMs
// migrate: those states that a VM has no room for.
//
// A stash is a folder on a tmpfs, because a VM's data must not be written to a disk. It
// stays when hostd ends. A state is a file, with its mark in another file. The state's
// file gets its final name only when it is complete. Open removes incomplete files, which
// a hostd that died has left. When a state is read, its digest is compared, so a wrong
// byte is an error and never a result.
//
// For each session there is only one state, the newest. Its size counts against a limit
// as soon as it is announced, because it takes memory of the host, which VMs need, too.
// Forget removes states when their migration has ended. Sweep removes those whose
// migration has ended without a call of Forget.
//
// This package does not decide who may store or get a state. Package
// hostd/migration/endpoint does: it returns a state only to the VM that it came from.
package stash
