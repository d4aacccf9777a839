// Package shm is the shared memory by which an application and its executor communicate:
// memfd regions, atomic words, futexes, OFD locks, passing of descriptors, and the
// executor's side of the rings of the session protocol. guest/opencl/wire/PROTOCOL.md
// specifies them.
//
// The other side of the memory is hostile. It can change any byte at any time. So what is
// read is copied before it is checked, and no value from the memory is used as an index or
// length without a check. The other side cannot shrink a region, because regions are
// sealed.
//
// An OFD lock belongs to an open file description, and a descriptor that was passed over a
// socket shares its description. To lock a byte of a memfd that others have open, too, a
// process needs a description of its own, made with Reopen.
package shm
