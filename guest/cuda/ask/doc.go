// Package ask asks NVIDIA's driver through a helper process.
//
// Each request has a process of its own: the driver's library may hang, and it may damage
// the process that has loaded it. The helper reads one Request from its standard input,
// carries it out, writes one Answer to its standard output, and ends. Client starts it as the
// user of the process that it asks about, with no capability but CAP_SYS_PTRACE, and kills it
// after a deadline. That user can kill it, too, which is the same as a crash.
//
// Here live the two messages with their limits, and the Client. The library itself is
// called in guest/cuda/driver, which only the helper uses.
package ask
