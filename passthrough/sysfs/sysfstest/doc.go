// Package sysfstest is a machine in memory whose kernel keeps its rules: a
// driver is bound only to what its table or the override names, a store that
// Linux refuses is refused with the same error, what a guest holds cannot be
// taken without a trace. Its semantics are those of Linux 6.1.
//
//	m := sysfstest.New()
//	m.Add(pcitest.NVIDIACard("0000:65:00", "", -1, 0)...)
//	m.Load(sysfstest.Pciback())
//	b := bind.New(m, ...)
//
// A test breaks it on purpose: the nth write fails, hangs, or is the last that
// the process under test lives to make; a device falls off the bus; a driver
// refuses a device. Where two functions belong to two owners, or a guest's
// device was torn away, Violations says so.
package sysfstest
