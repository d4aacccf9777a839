// Package xen serves a device to a domain of Xen, beside the domain's device model. It is
// an ioreq server (xen/include/public/hvm/{dm_op,ioreq}.h): Xen stops a vCPU that accesses
// a range of the server, describes the access in a page that both share, and goes on when
// the server has answered. It needs no cgo, no patch and no library of Xen.
//
//	s, err := xen.Create(ctx, linux, xen.Config{Domain: 7, Function: f, Slot: 0xe})
//	err = s.Serve(ctx, device)  // until ctx ends
//	err = s.Destroy(ctx)
//
// Create the server while the domain is paused. A VM that runs finds no function at the
// slot, and does not look again.
//
// # What lives on without this process
//
// A server is Xen's object. If its process ends, the vCPU that accesses it stands still
// until another process takes the server over (Adopt). The device's state was in the
// process, so the other one must not guess: it answers with a Gone device, whose reads are
// all ones, as of a card that was pulled. Server ids are journalled for that by the
// caller, before the server is enabled (Config.Created).
//
// A server is destroyed only when no vCPU waits for it (Destroy): what waits for a server
// that does not exist any more waits for good.
//
// # Trust
//
// The shared page is mapped as a resource, so no domain can write to it; only Xen does.
// What it describes is the VM's: addresses, sizes, counts and pointers are checked, and
// refused and counted. Memory of the VM is mapped page by page, for one copy.
//
// # Order
//
// State, direction and type of a request are in bytes 28 to 31. They are read and written
// as one atomic word. What else is in a request is read after the word says that it is
// ready, and written before the word says that it is answered. Go's atomics are
// sequentially consistent, which is more than the ABI needs.
//
// # Other packages
//
// What a BAR does is a mmio.Device, what the VM finds is a pciconf.Space. Package xentest
// is a hypervisor with rules for tests.
package xen
