// Package scheduler binds claims to GPUs. It asks placement where a claim can go, and
// proposes that as one log entry. The state machine decides. If another claim has taken a
// chosen GPU in the meantime, the state machine refuses the entry, and the scheduler
// chooses again.
//
// Claims that may wait stay pending. While a host leads the cluster, Run binds them, the
// oldest first, whenever a change may make that possible.
package scheduler
