// Package regs says what each register of a mediated GPU's BAR0 is to a VM, in
// one table. What is not in the table is denied.
//
// Not here: what a register does. Of that the table has a sentence for the
// documentation; the code is in mmio/mediate.
package regs
