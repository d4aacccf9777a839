// Package sysfstest simulates a machine whose kernel enforces its rules: a driver is
// bound only to devices that its table or the override names, a write that Linux refuses
// is refused with the same error, and a device that a guest has cannot be taken
// unnoticed. It behaves like Linux 6.1.
//
//	m := sysfstest.New()
//	m.Add(pcitest.NVIDIACard("0000:65:00", "", -1, 0)...)
//	m.Load(sysfstest.Pciback())
//	b := bind.New(m, ...)
//
// Tests cause faults: the nth write fails, hangs, or is the last one before the process
// under test crashes; a device falls off the bus; a driver refuses a device. If a device
// that a guest has was taken from its driver, Violations reports that.
package sysfstest
