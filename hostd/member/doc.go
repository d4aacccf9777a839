// Package member is this host's membership in a cluster. It joins the cluster (Init,
// Join), keeps the membership on disk, and serves the port at which hosts and remote
// users reach this host. It reports the host and its GPUs, and confirms the host's
// assignments to the cluster.
//
// # Start
//
// New makes a Node that is in no cluster yet. The other parts of the daemon get it when
// they are made. Start serves them, and resumes the host's membership.
//
// # On disk
//
// The data folder has node.json (the host's identity), pki (the authority and this host's
// certificate) and raft. node.json is written last: a join that was interrupted leaves
// files that nothing reads. Every host has the authority's key, because every host may
// become the leader. So root on any host can sign certificates. What a certificate allows
// is decided by the identities in the log.
//
// # Assignments
//
// The log contains which claims have this host's GPUs. The host confirms each assignment:
// RESIDENT when it has seen the assignment, gone when nothing uses the GPU for that claim
// any more. A loop compares the two periodically, so a crash of either side at any moment
// leaves nothing behind.
package member
