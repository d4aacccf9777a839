// Package libvirt starts real libvirtds by hand, each a host of its own as far
// as libvirt can tell: a private process, mount, network, UTS and IPC
// namespace, its own /etc/libvirt, /run and /var/lib/libvirt, a host UUID, and
// a network that joins them. They run guests in plain emulation, which do
// nothing but count, so that a test sees whether a guest went on. All is up in
// seconds, needs no hypervisor, and leaves the machine's own libvirt alone.
//
// What can't be had there is PCI passthrough: that takes a lab of Xen hosts.
//
// The end of the process that called Start is the end of everything it
// started, however it ends.
package libvirt
