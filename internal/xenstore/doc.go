// Package xenstore is a client of xenstore, Xen's store of configuration and status, over
// xenstored's Unix socket (in a control domain) or the kernel's xenbus device (in any
// domain). The protocol is specified in xen/include/public/io/xs_wire.h and
// docs/misc/xenstore.txt.
//
// A Client keeps one connection, and makes a new one when it is lost. Watches survive
// that: they are registered again, and the event that registration causes makes their
// owners read again. Transactions and calls in progress do not survive; they fail with
// ErrConnection.
//
// The package does not know the meaning of keys.
package xenstore
