// Package cluster holds the replicated inventory. What lives where:
//
//   - state: the state machine on go-memdb, its log entries and snapshots
//   - query: filters over its objects
//   - placement: where a claim goes, as a pure function of the state
//   - store: Raft, membership, reads and the leader's work
//   - pki: the cluster's CA, certificates and join tokens
//   - access: roles, and who may do what
//   - clustertest: clusters inside a test
//
// Imports point down this list's order: state knows none of the others, store
// knows state. Nothing here knows hostd, a command line or an HTTP server.
package cluster
