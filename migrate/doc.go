// Package migrate moves a VM with its GPU to another host, or gives it another
// model of GPU where it is, while the applications in it go on: the plan with
// every reason why a host cannot take it, and the transaction that carries the
// plan out.
//
// A transaction is a list of named steps, each with its undo. Every step brings
// about a state and may be repeated, so that after a crash of anything whoever
// drives it repeats the step that was under way, forward or backward. What has
// been done is in the replicated record ([Journal]); what is true is asked of
// the hosts ([Site]). The record's token fences: a driver that was replaced
// cannot write, and stops.
//
// Until the commit the source could be gone back to. The state of the
// applications is never in one place only for the transaction's convenience: it
// rests frozen in the VM's own memory from the first step that touches it to
// the last, and goes where the VM goes. What the VM has no room for leaves it
// ([AgentFacts], by the same judgement in the plan and in the step) and is then
// at both ends, before anything else is touched, until the transaction is over:
// at whichever end the VM is, there is all of it. When neither end can be reached the
// migration is held: the VM lives, its state is safe, and an operator is told.
//
// A VM that cannot be moved alive is stopped and started with the other card, if
// that was asked for; its applications end.
//
// Here are no connections, no libvirt and no PCI: sites are interfaces. What a
// host does for a step is in hostd/migration/endpoint.
package migrate
