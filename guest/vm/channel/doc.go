// Package channel transports net.Conn streams, and HTTP in them, between a host and the
// agent of one of its VMs, over a hypervisor's channel: a Xen PV console or a
// virtio-serial port in the VM, and a Unix socket on the host.
//
// Such a channel is a stream of bytes without connections. What an earlier client has
// written arrives at the next one, perhaps the second half of a message only. What the VM
// has written while there was no client arrives late. After a live migration, a terminal
// echoes until it is switched to raw mode. So there are three layers:
//
//   - Frames (frame.go) have a magic number, a connection, a direction, a limited
//     length and checksums. A decoder finds the next valid frame, whatever is in
//     between.
//   - A link (link.go) is one connection of frames. The host chooses its number
//     at random; frames with another number are ignored. Frames are
//     numbered and acknowledged, and sent again if they are lost. So a
//     link is reliable and keeps the order. The data in transit is limited, because the channel
//     transports about 100 KB/s, and data that waits in it delays all other data.
//   - A yamux session over the link provides streams. The host is its client.
//
// Client is the host's end, Serve the guest's. The host identifies the VM only by the
// path of its socket, and by nothing that the VM sends. The guest is hostile: it cannot
// make the host keep more than some hundred kilobytes for each stream that the host has
// opened. A guest that sends nothing is disconnected (WithDeadAfter). A guest that sends
// data but does not answer can delay a request until its context ends, so each request
// needs a deadline.
//
// The streams carry AgentService and GuestService of api/gpuctl/v1. This package does not
// know them.
package channel
