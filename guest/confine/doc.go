// Package confine starts processes that can do little: those that run vendors'
// libraries on what applications send, and so may run an application's own
// native code.
//
// A Policy is entered by a thread that then starts the process and ends: what
// the thread gave up, the process has not. Users gives each session a user of
// its own, which is what keeps sessions from each other on every kernel;
// Landlock, where the kernel has it, and a list of forbidden system calls come
// on top.
package confine
