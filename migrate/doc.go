// Package migrate moves a VM with its GPU to another host, or gives it another GPU model
// on the same host, while its applications go on. It makes the plan, with all reasons why
// a host cannot take the VM, and executes the transaction of the plan.
//
// A transaction is a list of named steps, each with an undo. Each step brings about a
// state and may be repeated. So, after a crash of anything, the next driver repeats the
// interrupted step, forward or backward. The replicated record ([Journal]) contains what
// has been done; the hosts ([Site]) know what is true. The record's token is a fencing
// token: a driver that was replaced cannot write the record any more, and stops.
//
// Before the commit, everything can be undone. The state of the applications is frozen in
// the VM's own memory from the first step that affects it to the last, and moves with the
// VM. What the VM has no room for leaves it ([AgentFacts]; plan and step use the same
// decision). It is then on both hosts before anything else is changed, until the
// transaction has ended. So, on whichever host the VM is, its state is complete. If
// neither host can be reached, the migration is held: the VM exists, its state is safe,
// and an operator is informed.
//
// A VM that cannot be migrated live is stopped and started with the other card, if the
// operator permits it. Its applications end.
//
// This package uses no connections, libvirt or PCI: sites are interfaces. Package
// hostd/migration/endpoint does a host's part of each step.
package migrate
