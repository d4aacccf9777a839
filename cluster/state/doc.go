// Package state is the replicated state machine of a cluster: the inventory, the claims
// on it, and events. Commands of the log are applied (Apply), and immutable views are
// read (View). The state contains only facts of the log. What changes often is read from
// the hosts, and the leader knows which hosts are alive.
//
// # Guarantees
//
//   - Apply is deterministic and total. Clocks, randomness, input, output and the
//     order of maps have no influence: times and actors are fields of the
//     entry. Any command, however hostile, gets a result. Equal logs
//     give snapshots that are equal byte for byte, even with restores in between.
//   - An entry is applied as a whole or, if its result is not OK, not at all. The
//     exceptions are ConfirmAssignments, ReleaseAssignments and
//     CancelAssignments: they do what they can, and the result (STALE or
//     NOT_FOUND) names what they could not do.
//   - A command with an id is applied once. A repetition gets the first result,
//     as long as it is among the last 4096 with an id. Of a result of more than
//     64 KiB, the objects are not kept.
//   - No GPU is assigned beyond its capacity. A slice counts from the
//     entry that schedules it until its host confirms that it is gone. If a claim has
//     a whole GPU, no other claim has a part of it. Check lists all violations; tests call it
//     after each entry. There is one exception: a host may report that a GPU is
//     smaller than what is assigned of it. Then nothing is taken from any claim; the GPU
//     gets nothing new, and an Overcommitted event records it.
//   - Nothing new is assigned on a GPU that is cordoned, failed or not reported, or
//     whose host is down, draining or removed. Reasons have the codes
//     cordoned, health, unknown, down, draining, busy, memory, profile, group.
//   - Everything that is stored is within the bounds of validate.go, so that a
//     snapshot of it can be written and read.
//
// # Unknown commands
//
// An entry begins with its format and a policy. If this version does not know a command
// (the command's version is above Protocol, or its operation is unknown), Decode returns
// an *ErrUnknownCommand. With the policy STOP, the host must apply nothing after it,
// because its state would differ: it has to be upgraded. With SKIP, the entry is applied
// as nil, which only advances the index. Note is the only such command; all others stop.
// Normally that does not happen: a command of a version above View.Protocol, the lowest
// of all hosts, must not be proposed, and Apply refuses it. A host that does not report a
// protocol has version 1.
//
// # Assignments
//
//	PutClaim, Assign ──> SCHEDULED ──confirmed──> RESIDENT
//	                         │                       │
//	                         └──── ReleaseAssignments, DeleteClaim, RemoveHost by force
//	                                                 ▼
//	                 (none) <──confirmed gone──  RELEASING
//
// The token of an assignment is the index of the entry that made it, and never changes.
// All assignments of one entry have the same token and belong to one claim. Numbers in
// ids are never used again. A host may confirm "gone" in every state (a computer that was
// restarted has nothing left). A confirmation of RESIDENT that arrives after the release
// changes nothing. When the last assignment is gone, the claim is removed if it was
// deleted; otherwise it is PENDING again. If it may wait, the leader binds it again,
// otherwise the caller who released it. So does a host that manages the claim: see
// WasBound. A claim is RELEASING only after it was deleted. Reservations that it owns are
// removed with it.
//
// A host that was removed by force can confirm nothing. Its assignments are RELEASING and
// keep their GPUs, which are no longer present, until CancelAssignments, which the leader
// proposes. That is refused for hosts that exist. If the host comes back under its name
// before, it confirms them itself.
//
// # Derived fields
//
// GPU.used_memory is the sum of assignments and reservations. GPU.free_memory is what a
// claim with a memory need can still get; it is 0 if the GPU gets nothing new. GPU.free
// means that no claim has any part of it. Model.gpus counts the present GPUs, Model.free
// those of them that are free and may get something new. The rank of a model is set by an
// operator, or reported by the host of its first GPU (by id). GPU.rank is always what its
// host reports. A derived field changes with the entry that causes the change, in time
// that does not depend on the size of the cluster.
//
// # Changes
//
// View.ChangedSince returns the names of the objects that have changed since an older
// view, for code that derives something from all objects. At least the last 8192 changes
// of each kind are known. After a restore, they are unknown. They are not a part of the
// state: hosts may differ in them.
//
// # Snapshots
//
// A snapshot is a stream of SnapshotRecords, each after its length: header, objects,
// identities, tokens, the last 10 000 events, the last results, and a trailer with the
// count and a checksum. A GPU without limits has those of its model, which come first;
// that saves most of the bytes. Restore reads into a new state, and uses it only if the
// checksum of everything is right.
//
// # Memory
//
// Objects are protobuf messages that are never changed after they are stored. A changed
// object is a shallow copy. GPUs of one model share their limits and names. Of migrations
// that have ended, the last 1000 are kept.
package state
