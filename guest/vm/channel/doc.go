// Package channel carries net.Conn streams, and HTTP in them, between a host
// and the agent of one of its VMs, over what a hypervisor calls a channel: a
// Xen PV console or a virtio-serial port in the VM, a unix socket on the host.
//
// Such a channel is a stream of bytes that knows no connections. What a former
// client wrote comes out for the next one, half a message included; what the
// VM wrote while nobody listened comes late; after a live migration a terminal
// echoes until it is told not to. So there are three layers:
//
//   - Frames (frame.go) have a magic, a connection, a direction, a bounded
//     length and checksums. A decoder finds the next good frame whatever is in
//     between.
//   - A link (link.go) is one connection of them. The host chooses its number
//     at random; a frame of any other number means nothing. Frames are
//     numbered and acknowledged, and sent again when they were lost, so that a
//     link is reliable and in order. What is under way is bounded: the channel
//     moves some 100 KB/s and what waits in it delays everything.
//   - A yamux session over the link, the host its client, gives streams.
//
// Client is the host's side, Serve the guest's. Who the VM is follows from the
// path of its socket and from nothing that is said. The guest is hostile: it
// cannot make the host keep more than some hundred kilobytes for each stream
// that the host itself opened. One that is silent is given up (WithDeadAfter);
// one that talks and does not answer costs a request the time that its context
// has, so give each one a deadline.
//
// What is said in the streams is AgentService and GuestService of
// api/gpuctl/v1; nothing here knows them.
package channel
