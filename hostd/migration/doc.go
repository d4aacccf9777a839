// Package migration runs migrations of VMs on this host and serves MigrationService. It
// collects the facts for a plan from all hosts, records a migration, runs its transaction
// (package migrate) against the hosts, and takes over migrations whose driver does not
// run any more.
//
// The driver of a migration is the host that the VM was on when it began. If that host is
// down, the destination takes over. If both are down, the leader does. This rule always
// names one host, so two hosts do not take a migration from each other.
package migration
