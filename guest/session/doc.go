// Package session serves the sessions of gpuguest. It gives each application that
// connects a session with an executor of its own, and moves sessions from one
// executor to another.
//
// # Parts
//
// Manager owns the run folder, the offers and the sessions and serves
// GuestService. A session is one application: three memfds, one executor, and
// at most one operation (swap, suspend, resume) at a time. An operation is a
// list of named steps; each registers its undo before it runs and is
// journalled in the session's session.json before it begins.
//
// # Guarantees
//
//   - Up to the commit point of an operation, every failure runs the undos of the
//     steps that have begun, in reverse order, each once. A cancelled context is a
//     failure, too. Then the application continues where it was.
//   - The commit point of a swap and of a resume is one store, that of the
//     ring's owner word. The commit point of a suspend is the rename of the
//     session.json that records it, after the state is complete and synced.
//   - A state that the VM has no room for is kept on the host (away.go). It is
//     sent out while it is extracted, and read back at the resume. The session
//     drops its copy after the host has confirmed the same size and digest. It
//     runs again only with a state that has this mark, which is in the journal.
//   - A dead gpuguest changes nothing for running applications. The next one
//     over the same run folder takes their sessions over and finishes or rolls
//     back the operations that were in progress. The owner word decides which of
//     the two.
//   - An application can damage its own session only. It can write to the ring.
//     So an owner word that names neither executor of an operation is ignored,
//     and the journal decides.
//
// # Run folder
//
//	lock                     held by the one gpuguest that uses the folder
//	offers.json              offers, so that they outlive gpuguest
//	sessions/ID/session.json the journal, replaced by rename
//	sessions/ID/graph.bin    object graph of a suspended session
//	sessions/ID/executor-N.log, .log.1, .pipe
//	                         standard error of executor N
//	sessions/ID/x/           belongs to the session's user: sockets and caches of executors
//	probe/                   the same for probes
package session
