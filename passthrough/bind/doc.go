// Package bind takes PCI functions from their drivers, binds them to a driver for VMs
// (xen-pciback, vfio-pci and its variants), and returns them to their former drivers.
//
// A take is for all functions of a card, and either all are bound or none. The former
// state of a function (driver, override and its entry in pciback's list) is written to a
// journal on disk before the first change. So if the process is killed between any two
// writes, its next start finds what to finish or to undo. Each write has a time limit and
// is read back. A function that is in use is not changed, and the error names the users.
//
// The package loads no modules, resets nothing (package reset) and does not judge
// isolation (package isolation). The caller of New provides which VMs have functions.
package bind
