// Package compress sends less over a connection that is slower than compressing is.
//
// Here live the packets of such a connection, the decision for each piece that is sent,
// and the limits of what is expanded. Both ends must have agreed on it: DESIGN.md of
// guest/opencl/remote says how carriers do.
//
// Not here: how fast a connection is (who has the socket measures that), and what is
// sent.
package compress
