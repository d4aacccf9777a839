// Package member is this host's membership in a cluster. It joins the cluster
// (Init, Join), keeps the membership on disk, and serves the port on which hosts
// and remote users reach this host. It reports the host and its GPUs, and
// confirms the host's assignments to the cluster.
//
// # Start
//
// A Node begins in no cluster (New). The parts of the daemon that use it are made
// with it. Start serves them, and makes the host the member that it was.
//
// # On disk
//
// The data folder has node.json (who this host is), pki (the authority and this
// host's certificate) and raft. node.json is written last: a join that was
// interrupted leaves files that nothing reads. Every host has the authority's
// key, because every host may become the leader. So whoever is root on a host can
// sign certificates. What a certificate allows is decided by the identities in
// the log.
//
// # Assignments
//
// The log says which claims have this host's GPUs. The host confirms: RESIDENT
// when it has seen the assignment, gone when nothing uses the GPU by that claim
// any more. A loop compares the two again and again, so a crash of either side at
// any moment leaves nothing behind.
package member
