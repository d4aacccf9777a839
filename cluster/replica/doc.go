// Package replica replicates the state of a cluster with Raft, and does what
// only the leader may do.
//
// What it promises:
//
//   - Apply answers once the command is committed on a majority's disks and
//     applied here or on the leader. A command whose fate is not known is sent
//     again with the same id, which the state machine applies once. An error
//     that wraps ErrTimeout leaves the fate open; every other error says that
//     the command was not applied.
//   - Read is linearizable unless the caller asks for a stale view.
//   - An entry that this build must not skip ends the node (ErrStopped). It
//     keeps its log, and goes on where it was after an upgrade.
//   - A disk that refuses a write ends no process: the node stays silent until
//     the write succeeds, or, when the disk may have lost data, until it is
//     started anew. See guard.
//
// # Reads
//
// A leader takes its commit index and then proves that it was still the leader
// when it took it: a majority of the voters must answer, in the same term, an
// AppendEntries that was sent after that moment. Then it waits until the index
// is applied. Two things of the library would weaken this and are avoided. Its
// VerifyLeader counts answers of non-voters, and answers to heartbeats that
// were already under way; so it only triggers the heartbeats here, and acks
// counts. Its leader lease says when to step down, not that nobody else leads:
// a voter that restarts forgets its promise; so no lease is relied on, and no
// clock decides what a read returns. Readers that come while a round is under
// way share the next one, so the price is a round trip however many there are.
//
// A leader's first act is a barrier: an entry of its own term must be
// committed before its commit index is worth anything. A follower asks the
// leader for such an index and waits until it has applied it.
//
// # Members
//
// Every host is a Raft server; three to seven are voters. See members.go for
// the rules.
//
// # Time
//
// Liveness, stability and the expiry of reservations are measured on the
// leader's monotonic clock and begin anew with every leader. The wall clock is
// recorded in entries and compared with the expiry of join tokens; nothing
// else depends on it.
package replica
