// Package clitest is a fake cluster for tests of the command line: a ClusterService with
// its objects in memory. It enforces the service's rules: names that do not exist are
// NOT_FOUND, what a role must not do is PERMISSION_DENIED, without a leader only stale
// reads work, a capacity is never assigned twice, and watches report each change,
// including deletions. Machines has the VMs and cards of its hosts, and Sessions those of
// one host.
package clitest
