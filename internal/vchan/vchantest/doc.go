// Package vchantest simulates a hypervisor for tests of package vchan and its users,
// inside the test's process: domains grant and map pages of real shared memory and send
// each other events. It enforces the important rules: who may map and bind what, how many
// pages may be granted, what the kernel does when a process dies, what a migration
// removes, and what must not be closed after one. A test that leaves anything open fails.
package vchantest
