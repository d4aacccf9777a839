// Package member is this host's membership in a cluster: how it begins (Init,
// Join), what is kept of it on disk, the port on which hosts and remote users
// reach it, the host's reports, and the word that it owes the cluster about
// its own assignments.
//
// # On disk
//
// The data folder has node.json (who this host is; written last, so that a
// membership that did not come about leaves nothing that counts), pki (the
// authority and this host's certificate) and raft. Every host has the
// authority's key, because every host may come to lead: whoever takes over a
// host as root can sign certificates. What a certificate is good for is decided
// by the identities in the log all the same.
//
// # Assignments
//
// The log says what this host's GPUs are given to. The host says what has come
// of it: RESIDENT once it has taken note, gone once nothing uses the GPU by
// that claim any more. The loop that does so compares the two again and again,
// so that a crash of either side at any moment leaves nothing behind.
package member
