// Package shm is the shared memory that an application and its executor talk
// through: memfd regions, atomic words, futexes, OFD locks, descriptor
// passing, and the executor's side of the session protocol's rings, which
// guest/opencl/wire/PROTOCOL.md specifies.
//
// The other side of the memory is hostile. It can change any byte at any time,
// so what is read is copied before it is judged, and no value found there is
// used as an index or length unchecked. It cannot shrink a region under us:
// regions are sealed.
//
// Locks: an OFD lock belongs to an open file description, which a descriptor
// passed over a socket shares. Whoever locks a byte of a memfd that others
// hold too must do it on a description of its own, made with Reopen.
package shm
