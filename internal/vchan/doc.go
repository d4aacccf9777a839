// Package vchan moves bytes between two domains of one Xen host through memory
// that they share: the protocol of Xen's libxenvchan
// (xen/include/public/io/libxenvchan.h), as net.Listener and net.Conn. It needs
// no network in the guest and is many times faster than a PV channel.
//
// The server, a VM, grants pages to one peer, dom0, and publishes them:
//
//	l, err := vchan.Listen(ctx, store, "data/gpuctl/bulk", 0, vchan.Options{})
//
// The client maps them:
//
//	c, err := vchan.Dial(ctx, store, 7, "data/gpuctl/bulk", vchan.Options{})
//
// Both sides name the same path, relative to the server's home in xenstore
// (/local/domain/7): a guest does not know its number, and has another one after
// a migration or a restore. "data" is the part of its home that a guest may
// write. The path is the listener's own; it is removed with it.
//
// # Trust
//
// Each side takes the other for hostile. Orders, grants and indexes are read
// once into memory of our own and checked there, data is copied out before
// anybody sees it, and our own indexes are never read back. All that a peer can
// do is to end its own connection, with ErrProtocol, and to send events, of which
// those that bring nothing are slowed down.
//
// # The end of a connection
//
// Close says goodbye, in bit 7 of the byte that the closing side asks for
// events in; libxenvchan leaves it alone. The other side reads what is left in
// the ring and then io.EOF; what it writes is EPIPE. A peer that died, or one of
// libxenvchan, which says no goodbye, is ErrDied instead of io.EOF, after what
// is left in the ring. Xen makes a death known: the kernel clears the liveness
// byte and sends an event when it unmaps the page.
//
// # Migration
//
// Nothing tells either side of a ring that its domain was migrated or restored:
// they would block for good. What tells is the path, which is not taken along:
// both sides watch it, and end with ErrMoved when it is gone. Accept then makes
// a new ring and publishes it.
//
// That is the second best way, for two reasons. What dom0 still maps keeps the
// domain that was left as a zombie until the watch fires. And Linux 6.1 cannot
// close an event channel of a program that was bound before a migration: its
// resume forgets which interrupt belongs to which port, and the attempt is a BUG
// in evtchn_unbind_from_user, or hits the device that has got the same port. So
// a ring that moved is abandoned instead of closed: its port and one page stay
// until the process ends, and that end then runs into the BUG. Therefore listen
// for as long as a transfer needs, and close both sides before a migration; the
// watch is for those that come unannounced. For the same reason a domain that
// is migrated must not be a client.
//
// # What is not here
//
// What the bytes mean, and who asks the guest to listen. The fake for tests is
// package vchantest.
package vchan
