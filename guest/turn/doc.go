// Package turn lets the executors of several sessions take turns on one GPU. gpuguest
// has an [Arbiter] for each GPU; each executor on that GPU has a [Seat] there, and a
// connection to it.
//
// Here live the frames of that connection, the arbiter, its clock, the sharing of
// weights by the sessions of an owner, and what is done about executors that keep the
// GPU or break the rules. Who is next is decided by internal/timeshare.
//
// Not here: how an executor finds out that its commands have ended (guest/opencl/executor),
// which sessions are on which GPU and what becomes of a session that is to end
// (guest/session), and limits of memory.
//
// A session that is alone on its GPU is free: it asks nobody, and one atomic load on
// its path of calls is all that it pays. So is the only one that had commands for a
// second. Otherwise an executor asks before it launches something, and reports when
// what it launched has ended. DESIGN.md says why that is a socket, and what an executor
// that lies can gain.
package turn
