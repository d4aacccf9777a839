// Package uevent listens to what the kernel tells of PCI devices: that one has
// come or gone, got or lost its driver, or changed. So nobody has to poll, in
// the control domain or in a guest.
//
// Events are hints: they come after the fact, and when too many come at once the
// kernel drops some. The listener then says so with an event of its own, Lost,
// and its owner looks at everything again.
package uevent
