// Package profile defines which OpenCL runtime is used for a PCI device, and with which
// environment. The program contains two files of profiles: vendors' GPUs, and emulated
// devices, which are used only on request. Files in an operator's folder add to them and
// override them.
//
// Whether the runtime is installed and works is found out by a probe.
package profile
