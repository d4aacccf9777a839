// Package remote is what a carrier and a far executor agree on.
//
// A carrier is a process beside the application. It owns the session's ring as an
// executor does, but has no runtime: it passes everything on to a far executor on
// another host.
//
// Here live the beginning of a connection (its preamble, TLS with both ends
// pinned, the hello), that of a connection between two far executors, the frames of the two streams and their decoders, blocks of
// the arena, and how a bulk transfer is cut into chunks. DESIGN.md says why it is
// built this way.
//
// Not here: the carrier (package carrier), the far executor (package executor),
// and who may have a GPU (package lease). Frames that arrive in order and once are
// those of internal/link.
package remote
