// Package scheduler binds claims to GPUs: it asks placement where a claim can
// go and proposes that as one log entry. The state machine has the last word.
// A choice that somebody else took in the meantime is refused there, and the
// scheduler looks again.
//
// Claims that may wait stay pending. While a host leads the cluster, Run binds
// them, the oldest first, whenever something has changed that may help.
package scheduler
