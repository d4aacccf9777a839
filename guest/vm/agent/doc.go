// Package agent is what a VM knows of its PCI devices: which are GPUs, what
// runtime serves each, and whether the VM can part with one. It serves
// AgentService to the host, and offers the VM's applications a GPU.
//
// # A device's way
//
// A function appears; the kernel binds its driver; its profile names the
// runtimes to try; a probe in a process of its own says that one works, and
// with which of its devices. Then the function is ready and sessions can
// start on it.
//
// # Release
//
// A release ends with a function that has no driver and can be unplugged:
// first it is checked that it has a hot-plug slot and that neither a session
// nor any process uses it. Then a name that no driver has is written to its
// driver_override, and its driver is unbound. Both are read back. The kernel
// forgets the override with the device, and may find the device again, for a
// moment while it is being unplugged or for good: so, as long as anything is
// released, no driver binds by itself to what is plugged (drivers_autoprobe),
// and the agent asks for a driver for each function that was not released.
//
// What is released is journalled before the first write and outlives gpuguest,
// but not the boot. What fails is undone; a kernel that does not return from
// an unbind is not, as nobody knows what it has done.
//
// How bytes come from and go to the host is in guest/vm/channel, sessions are in
// guest/session.
package agent
