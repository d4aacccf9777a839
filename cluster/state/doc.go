// Package state is the replicated state machine of a cluster: the inventory,
// what is claimed of it, and what happened. A log of commands goes in (Apply),
// immutable views come out (View). It holds nothing but facts of the log:
// what changes often is asked of the hosts, liveness is the leader's.
//
// # Guarantees
//
//   - Apply is deterministic and total. No clock, randomness, input, output or
//     order of a map decides anything: times and actors are facts of the
//     entry. Any command, however hostile, gets an answer in words. Equal logs
//     give snapshots that are equal byte by byte, with restores in between too.
//   - An entry is applied as a whole or, unless it is OK, not at all. The
//     exceptions are ConfirmAssignments, ReleaseAssignments and
//     CancelAssignments: they do what they can, and the answer (STALE or
//     NOT_FOUND) names what they could not.
//   - A command with an id is applied once: a repetition gets the first answer,
//     as long as it is among the last 4096 with an id. An answer of more than
//     64 KiB is remembered without its objects.
//   - Of no GPU is more given away than there is. A slice counts from the
//     entry that schedules it until its host says that it is gone. Who holds
//     a whole GPU holds it alone. Check lists every violation; tests call it
//     after every entry. There is one exception: a host may report a GPU
//     smaller than what is held of it. Nothing is taken from anybody then; it
//     gets nothing new, and an Overcommitted event says so.
//   - Nothing new goes to a GPU that is cordoned, failed or not reported, or
//     whose host is down, draining or removed. Reasons carry the codes
//     cordoned, health, unknown, down, draining, busy, memory, profile, group.
//   - Everything stored has passed the bounds in validate.go, so that a
//     snapshot of it can be written and read.
//
// # Commands that are not known
//
// An entry begins with its format and a policy. Decode answers a command that
// this build does not know (its version is above Protocol, or its operation
// is not there) with an *ErrUnknownCommand. With STOP the host must apply
// nothing after it, or it would diverge: it has to be upgraded. With SKIP it
// is applied as nil, which only moves the index: Note is the only such
// command, everything else stops. Nobody should meet one: a command of a
// version above View.Protocol, the lowest of all hosts, must not be proposed,
// and Apply refuses it. A host that does not report a protocol has the first.
//
// # Life of an assignment
//
//	PutClaim, Assign ──> SCHEDULED ──confirmed──> RESIDENT
//	                         │                       │
//	                         └──── ReleaseAssignments, DeleteClaim, RemoveHost by force
//	                                                 ▼
//	                 (none) <──confirmed gone──  RELEASING
//
// Its token is the index of the entry that made it and never changes; those
// of one entry share it and are all of one claim. Numbers in ids are never
// used again. A host may say "gone" in every state (a machine that was
// started anew has nothing left). A confirmation that it is resident which
// crosses its release changes nothing. With the last assignment a claim goes
// if it was deleted; if not, it is PENDING again: placing it anew is the
// leader's if it may wait, else of who released it. A claim is RELEASING only
// when it was deleted; reservations that it owns go with it.
//
// A host that is removed by force can confirm nothing. Its assignments are
// RELEASING and hold their GPUs, which are no longer present, until
// CancelAssignments, which is refused for hosts that are there. If the host
// comes back under its name, it confirms them itself.
//
// # What is derived
//
// GPU.used_memory is what assignments and reservations take together;
// free_memory what a claim with a memory need can still get, 0 unless the GPU
// may get something new; free says that nobody holds any of it. Model.gpus
// counts those present, Model.free those of them that are free and may get
// something new. The rank of a model is an operator's, or what the host of
// its first GPU (by id) says; GPU.rank is always its host's word. Derived
// fields change with the entry that makes them change, in time that does not
// depend on the size of the cluster.
//
// # What has changed
//
// View.ChangedSince names the objects that have changed after an older view,
// for whoever keeps something that is made of all of them. At least the last
// 8192 changes of each kind are known; a restore begins anew. This is no part
// of the state: hosts may differ in it.
//
// # Snapshots
//
// A stream of SnapshotRecords, each after its length: header, objects,
// identities, tokens, the last 10 000 events, the last answers, trailer with
// count and checksum. A GPU without limits in it has its model's, which come
// before: they are most of the bytes. Restore reads into a new state and puts
// it in place only when the checksum of all of it is right.
//
// # Memory
//
// Objects are protobuf messages that are never changed after they are stored;
// a changed one is a shallow copy. GPUs of one model share their limits and
// names. Of migrations that are over the last 1000 are kept.
package state
