// Package server is the process that has one mediated GPU: the software model, the
// mediator, and an ioreq server for each VM with a part of it. It outlives the daemon that
// has started it, as the contents of the GPU are in it.
//
// The daemon tells it over a socket who gets a part (package's Client). Only the owner of
// the socket's folder can connect.
//
// # After the death of this process
//
// The GPU's contents are gone, and vCPUs that access it stand still. The next process for
// the GPU reads the journal and adopts the ioreq servers of the dead one. They answer with
// ones from then on, as a card that was pulled; their parts are listed as lost. A VM gets
// a working part again when it is started anew.
//
// The journal is written before an ioreq server is enabled, so none exists that no journal
// knows. A lock on a file keeps two processes from having the same GPU.
//
// # Moving a part to another host
//
// On the source a part is parked (no command begins), saved, which seals it (accesses wait, and
// nothing changes), and given, for good. On the destination it awaits its contents (the VM's accesses
// wait), is restored and is resumed. A seal tells contents from those of another time: a part is
// given only by who has the present ones. So one process at a time serves a VM's GPU.
//
// # Other packages
//
// Who is to have a part, claims and records of VMs are the daemon's. What a VM may do with
// its part is package mediate's, how its accesses get here package xen's.
package server
