// Package relay makes connections of programs in a VM to ports outside through the VM's
// host, for VMs that have no network, or whose network does not reach those ports.
//
//	program ── socket ── Guest ══ streams between VM and host ══ Host ── TCP ── port
//
// A program connects to a socket in the VM and says where it wants to go, and what it sends
// first (Dial). Guest tells the host of it (Watch). Host decides whether the VM may go there,
// connects, sends what is first, and asks Guest for the rest by an HTTP request whose
// connection becomes the program's. So only the host opens streams, as package
// guest/vm/channel wants it, and the host connects to nothing before the program has shown
// something that the port's owner can judge.
//
// Guest and Host are hostile to each other: each bounds what the other one can make it keep.
// Neither looks at what passes; both ends of it use TLS.
//
// Near and Pass do the same without a VM, for ways that programs cannot take themselves, as
// connections that cannot be handed from one process to another: Near makes programs'
// connections, and Pass passes on to a port what has come by such a way.
//
// What streams are made of (a vchan, a virtio port) and which ports a VM may reach is the
// callers' to know.
package relay
