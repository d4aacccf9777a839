// Package vchantest is a hypervisor for tests of what uses package vchan, within
// the test's process: domains that grant and map pages of real shared memory and
// send each other events. It keeps the rules that matter: who may map and bind
// what, how many pages may be granted, what the kernel does when a process dies,
// what a migration takes away, and what must not be closed after one. A test
// that leaves anything open fails.
package vchantest
