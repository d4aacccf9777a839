// Package discover makes one list of GPUs of what a host's sources say: the
// scan of its PCI devices, NVML, and the OpenCL runtimes. A physical card is
// one entry, whoever else knows it; what is no card (a runtime on the
// processors) is an entry of its own. It is a pure function: a source that
// failed takes no GPU away but makes its health tell.
//
// A card is named as the runtime that serves it is (nvidia-0), else by its PCI
// address. Sources are matched by PCI address, else by UUID.
//
// Left out, unless a runtime serves them, are the consoles of management
// controllers and of emulated machines: display controllers that are no GPUs.
package discover
