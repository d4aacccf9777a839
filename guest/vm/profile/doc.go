// Package profile says which OpenCL runtime serves a PCI device, and with what
// environment. What it knows comes with the program, in two files: the vendors'
// GPUs, and emulated devices, which only who asks for them gets. An operator's
// folder adds to it and overrides it.
//
// Whether the runtime is installed and works is for a probe to say.
package profile
