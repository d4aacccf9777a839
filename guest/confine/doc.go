// Package confine starts processes with few rights. They run vendors' libraries on
// what applications send, so they may run an application's own native code.
//
// A thread enters a Policy, starts the process, and ends: the process does not
// have the rights that the thread gave up. Users gives each session a user of its
// own; that keeps sessions apart on every kernel. Landlock, if the kernel has it,
// and a list of forbidden system calls are added.
package confine
