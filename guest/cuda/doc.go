// Package cuda serves sessions of processes that use CUDA. It is the engine "driver":
// NVIDIA's driver itself locks such a process, takes its state from the GPU into host memory,
// and restores it, also on another GPU of the same chip. Nothing is put between the process
// and the driver, so a session costs nothing while nothing is moved.
//
// # Parts
//
// A session is a job: a tree of processes of which one or more use CUDA, since half a job
// can't be moved. Manager owns the run folder and the sessions. A session has at most one
// operation (swap, suspend, resume, rehearsal) at a time, run as a list of steps by
// guest/engine. The driver is asked through helper processes (guest/cuda/ask); who has its
// nodes open is found in /proc (guest/cuda/holders).
//
// # Guarantees
//
//   - What can be known from outside is checked before anything is touched (check.go). Each
//     check has a code of its own, and a canary goes through all calls before the
//     processes do.
//   - A step brings all members of a session into one state on given GPUs, and its undo
//     brings them into the state before. Both begin with the state that the driver
//     reports, so they may be repeated, by this gpuguest or the next.
//   - What is asked of the driver is journalled before it is asked. A helper whose gpuguest
//     died is waited for; then the driver's word decides whether its call was done.
//   - If the driver says that a process has failed, or refuses a restore for good, the
//     session is lost at once. Nothing is tried again that can't work, and the other
//     processes stay as they are, so that they can be ended safely.
//   - A process is never killed, but when its state is in a folder (disk.go). If the driver does not answer, the session is held.
//
// # Run folder
//
//	lock                held by the one gpuguest that uses the folder
//	offers.json         offers, so that they outlive gpuguest
//	sessions/ID.json    the journal of a session, replaced by rename
package cuda
