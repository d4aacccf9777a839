// Package migration drives migrations of VMs on this host and serves
// MigrationService: it gathers the facts of a plan from all hosts, records a
// migration, runs its transaction (migrate) against the hosts, and takes over
// what a host that has gone has left half-way.
//
// A migration is driven by the host that the VM was on when it began. When
// that one is down its destination goes on, else the host that leads: there is
// one that may, so that drivers do not take it from each other.
package migration
