// Package clitest is a cluster for tests of the command line: a ClusterService
// whose objects are in memory and whose answers keep the service's rules.
// Names that do not exist are NOT_FOUND, what a role may not do is
// PERMISSION_DENIED, without a leader only stale reads work, a capacity is never
// given away twice, and watches tell every change, deletions included. Machines
// are the VMs and cards of its hosts, and Sessions those of one host.
package clitest
