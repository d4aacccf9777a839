// Package uevent receives the kernel's events about PCI devices: a device has appeared or
// disappeared, got or lost its driver, or changed. So nobody has to poll, in the control
// domain or in a guest.
//
// Events are hints: they come after the change, and if there are too many, the kernel
// drops some. Then the listener returns an event of its own, Lost, and the caller must
// read everything again.
package uevent
