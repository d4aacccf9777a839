// Package lend is the port at which carriers of other hosts reach the GPUs that this host
// lends. It reads who a connection is for, and hands it over to gpuguest, which passes it
// on to the far executor.
//
// Anybody can connect. A connection that has not shown the token of a lease is limited:
// it must do so within remote.GreetTimeout and in as many bytes as a preamble has, and
// there are few such connections, in all and from one address. The encryption, and who
// the carrier really is, are between the carrier and the far executor: both have the
// hash of the other's certificate from the hosts' own connection.
//
// Not here: leases (package hostd/sessions), and what follows the preamble (packages
// guest/lease and guest/opencl/remote).
package lend
