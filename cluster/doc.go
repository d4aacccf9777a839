// Package cluster has the replicated inventory, in the packages below it:
//
//   - state: the state machine on go-memdb, its log entries and snapshots
//   - query: filters over its objects
//   - placement: chooses GPUs for a claim, as a pure function of the state
//   - scheduler: binds claims; on the leader, also those that wait
//   - replica: Raft, membership, reads and the leader's tasks
//   - pki: the cluster's CA, certificates and join tokens
//   - access: roles, who may call what, and the audit trail
//   - remote: enrolment, and connections of users from outside
//   - clustertest: clusters inside a test
//
// state imports none of the others. No package here imports hostd or knows a command
// line.
package cluster
