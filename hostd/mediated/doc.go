// Package mediated manages the mediated GPUs of a host: which VM has a part of which, and
// the processes that have the GPUs.
//
// A VM gets a part for its next start, because a VM that runs does not look for new
// functions. The part is made while the domain is paused: Xen's store tells of a new
// domain before libvirt lets it run. A domain that was quicker is told to the operator and
// gets nothing; it never runs with half a GPU.
//
// # Phases
//
//	ready      it belongs to the VM, which does not run
//	attaching  its server is being made; after a crash it is looked for, and undone or kept
//	attached   the VM has it
//	detaching  it is being taken back; repeated after a crash
//
// While a migration moves the VM there are also
//
//	parked    no command begins; the VM is here, or has left
//	expected  the VM is to come, and gets the part while its domain is paused
//	awaiting  it is here, and its accesses wait until the contents are, too
//
// Each is recorded before the work for it begins. What is true is asked of Xen (which
// domain a VM has) and of the GPU's process (which domain has a part).
//
// # Other packages
//
// The process and what a VM may do with its part are mmio/server's. Cards and their
// slices are package cards'. The API sends a request to the one or the other by the GPU's
// name (cardapi).
package mediated
