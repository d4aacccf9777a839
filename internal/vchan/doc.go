// Package vchan transports bytes between two domains of one Xen host through shared
// memory. It implements the protocol of Xen's libxenvchan
// (xen/include/public/io/libxenvchan.h) as net.Listener and net.Conn. It needs no network
// in the guest and is many times faster than a PV console.
//
// The server, a VM, grants pages to one peer, dom0, and publishes them:
//
//	l, err := vchan.Listen(ctx, store, "data/gpuctl/bulk", 0, vchan.Options{})
//
// The client maps them:
//
//	c, err := vchan.Dial(ctx, store, 7, "data/gpuctl/bulk", vchan.Options{})
//
// Both sides use the same path, relative to the server's home in xenstore
// (/local/domain/7): a guest does not know its number, and has another one after a
// migration or a restore. "data" is the part of its home that a guest may write. The path
// belongs to the listener and is removed with it.
//
// # Trust
//
// Each side treats the other as hostile. Ring sizes, grants and indexes are read once
// into private memory and checked there. Data is copied out before it is used, and a side
// never reads its own indexes back. A peer can only end its own connection, with
// ErrProtocol, and send events. Events without data are handled with a delay.
//
// # The end of a connection
//
// Close sets bit 7 of the byte in which the closing side asks for events. libxenvchan
// does not use that bit. The other side reads what is left in the ring and then gets
// io.EOF; its writes fail with EPIPE. After a peer that died, or one that uses
// libxenvchan, which does not set the bit, Read returns ErrDied instead of io.EOF, after
// what is left in the ring. Xen reports a death: the kernel clears the liveness byte and
// sends an event when it unmaps the page.
//
// # Migration
//
// Neither side of a ring is notified when its domain is migrated or restored, so they
// would wait for ever. But the path in xenstore is not migrated: both sides watch it, and
// end with ErrMoved when it does not exist any more. Accept then makes a new ring and
// publishes it.
//
// That should be avoided, for two reasons. While dom0 maps pages of the old domain, that
// domain is a zombie, until the watch fires. And Linux 6.1 cannot close a program's event
// channel that was bound before a migration: its resume forgets which interrupt belongs
// to which port, and closing is a BUG in evtchn_unbind_from_user, or affects the device
// that has got the same port. So a ring that has moved is abandoned instead of closed:
// its port and one page stay until the process ends, and then that end runs into the BUG.
// So listen only as long as a transfer needs, and close both sides before a migration.
// The watch is for unexpected migrations. For the same reason, a domain that is migrated
// must not be a client.
//
// # Other packages
//
// This package does not know the meaning of the bytes, and does not ask the guest to
// listen. Package vchantest is the fake for tests.
package vchan
