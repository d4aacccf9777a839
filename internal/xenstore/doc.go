// Package xenstore is a client of Xen's store of configuration and status,
// over xenstored's unix socket (a control domain) or the kernel's device
// xenbus (any domain). The protocol is that of xen/include/public/io/xs_wire.h
// and docs/misc/xenstore.txt.
//
// A Client keeps one connection and makes it anew when it breaks. Watches
// survive that: they are registered again, and the event that registration
// causes tells their owners to look again. Transactions and calls under way do
// not survive it; they fail with ErrConnection.
//
// What the keys mean is not known here.
package xenstore
