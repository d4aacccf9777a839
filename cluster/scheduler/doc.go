// Package scheduler binds claims to GPUs. It asks placement where a claim can go, and
// proposes that as one log entry. The state machine decides. If another claim has taken a
// chosen GPU in the meantime, the state machine refuses the entry, and the scheduler
// chooses again.
//
// A claim that has a home is placed there first. If that fails, and the claim and the
// policy of the queue allow it, it is placed on another host, which then lends the GPU:
//
//	fcfs  at home only
//	rq    elsewhere, too; the session stays where it began
//	mrq   elsewhere, too; the session moves home once, when a GPU is free there
//
// The move itself is the work of the home's hostd.
//
// Claims that may wait stay pending (see Waits). While a host leads the cluster, Run binds them, the
// oldest first, whenever a change may make that possible, and GiveUp ends what hosts had
// that were removed by force.
package scheduler
