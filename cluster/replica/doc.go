// Package replica replicates the state of a cluster with Raft, and runs the leader's
// tasks.
//
// Guarantees:
//
//   - Apply returns when the command is committed on a majority's disks and
//     applied on this host or on the leader. A command whose outcome is unknown is sent
//     again with the same id; the state machine applies it once. After an error
//     that wraps ErrTimeout, the outcome is unknown. After any other error,
//     the command was not applied.
//   - Read is linearizable unless the caller asks for a stale view.
//   - An unknown entry that must not be skipped stops the node (ErrStopped). It
//     keeps its log, and continues there after an upgrade.
//   - If the disk refuses a write, the process does not end. The node sends nothing until
//     the write succeeds or, if the disk may have lost data, until it is
//     started again. See guard.
//
// # Reads
//
// A leader reads its commit index, and then proves that it was still the leader at that
// time: a majority of the voters must answer, in the same term, an AppendEntries that was
// sent after that time. Then it waits until the index is applied. Two things in the
// library would weaken this and are not used. Its VerifyLeader counts answers of
// non-voters, and answers to heartbeats that were sent before; so it is only used to
// trigger heartbeats, and acks counts. Its leader lease decides when to step down, but it
// does not prove that nobody else leads, because a voter that restarts forgets its
// promise; so no lease is used, and no clock decides what a read returns. Readers that
// arrive during a round share the next one, so there is one round trip for any number of
// them.
//
// A new leader first writes a barrier: its commit index is valid only after an entry of
// its own term is committed. A follower asks the leader for an index and waits until it
// has applied it.
//
// # Members
//
// Every host is a Raft server; up to seven of them are voters. See members.go for the
// rules.
//
// # Time
//
// Liveness, stability and the expiry of reservations are measured on the leader's
// monotonic clock, and start again with each leader. The wall clock is recorded in
// entries and compared with the expiry of join tokens. Nothing else depends on it.
package replica
