// Package lease lends GPUs of this host to sessions of other hosts.
//
// Here live the leases and their journal, the start and the end of far executors,
// and the way of a carrier's connection to its far executor: a listener, or a socket
// to which hostd hands over what it has accepted.
//
// Not here: who may have a lease (hostd decides that before it calls Lend), what far
// executors do (package opencl/executor), and the beginning of connections behind the
// preamble (package opencl/remote).
package lease
