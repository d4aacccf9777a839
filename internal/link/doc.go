// Package link carries frames between two processes, in order and exactly once,
// over connections that may break.
//
// Here live the format of frames, what is sent again after a connection was
// replaced by another, flow control, and the detection of a peer that is silent.
//
// Not here: making, authenticating and encrypting connections, and what frames
// mean. A user who wants small frames not to wait for large ones has a stream for
// each.
//
// Both ends have a [Stream] of the same id. Whenever there is a connection, each
// end gives it to [Stream.Serve], which returns when the connection is broken;
// the stream lives on. What was sent and not acknowledged is sent again over the
// next one. DESIGN.md says why it is built this way.
package link
