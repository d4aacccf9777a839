// Package discover makes one list of GPUs from the sources of a host: the scan of its PCI
// devices, NVML, and the OpenCL runtimes. A physical card is one entry, however many
// sources have it. A runtime that computes on processors is an entry of its own. The
// package is a pure function. If a source has failed, its GPUs stay in the list, and
// their health contains the failure.
//
// A card has the name that the runtime gave it (nvidia-0), or its PCI address. Sources
// are matched by PCI address, otherwise by UUID.
//
// The display controllers of management controllers and emulated machines are no GPUs.
// They are left out, unless a runtime serves them.
package discover
