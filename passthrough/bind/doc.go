// Package bind takes PCI functions from their drivers, gives them to a driver
// that hands them to guests (xen-pciback, vfio-pci and its variants) and
// returns them to where they were.
//
// A take names all functions of a card and happens to all of them or to none.
// What a function had, driver, override and its entry in pciback's list, is in
// a journal on disk before the first change, so that a process that is killed
// between any two writes finds on its next start what to finish or to undo.
// Every write is bounded in time and read back. A function that is in use is
// not touched, and the error says by whom.
//
// It loads no modules, resets nothing (package reset) and does not judge
// isolation (package isolation). What guests a hypervisor has it is told by
// who makes a Binder.
package bind
