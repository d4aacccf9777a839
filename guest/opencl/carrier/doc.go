// Package carrier is the process beside an application whose GPU is on another host.
//
// Here live the carrier's end of the streams (requests, answers, bulk transfers),
// ExecutorService, which it forwards to the far executor, the contents that pass
// through it in a swap, and the connections.
//
// Not here: what is said on the wire (package remote), the far executor (package
// executor), and which GPU is lent to whom.
//
// Both sides of a carrier are hostile: the application, which shares memory with
// it, and the far host. What the far host sends is written only to where the
// session's protocol lets an executor write, and to reply slots and completion words
// that wait.
package carrier
