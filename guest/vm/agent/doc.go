// Package agent manages the PCI devices in a VM: it finds the GPUs and the runtime for
// each, and releases them so that they can be detached. It serves AgentService to the
// host, and offers a GPU to the VM's applications.
//
// # States of a device
//
// A function appears, and the kernel binds its driver. The function's profile names the
// runtimes to try. A probe in another process finds out which one works, and which of its
// devices belongs to the function. Then the function is ready, and sessions can start on
// it.
//
// # Release
//
// After a release, a function has no driver and can be unplugged. First, the agent checks
// that the function has a hot-plug slot, and that no session or other process uses it.
// Then it writes a name that no driver has to the function's driver_override, and unbinds
// its driver. It reads both back. The kernel forgets the override together with the
// device, and it may find the device again: for a moment during the unplug, or
// permanently. So, while anything is released, drivers do not bind automatically to new
// devices (drivers_autoprobe), and the agent asks the kernel for a driver for each
// function that is not released.
//
// What is released is written to a journal before the first write. The journal survives
// gpuguest, but not a boot. What fails is undone, except if the kernel does not return
// from an unbind: then it is unknown what has been done.
//
// # Remote GPUs
//
// A host lends the VM a GPU with a call that it holds (Borrow). As long as it does, and no
// card of the VM is ready, applications are offered that GPU. A session that begins there
// waits for a lease: the call streams who waits, and the host answers with Grant. If the
// call ends, new applications wait for the next one; sessions go on.
//
// Package guest/vm/channel transports bytes between the VM and its host. Sessions are in
// guest/session.
package agent
