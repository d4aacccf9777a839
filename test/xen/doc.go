// Package xen tests the product on real Xen: hostd and gpuctl in the control
// domains of the lab's two hosts, with libvirt's libxl driver, emulated cards,
// and VMs that say from inside what they have. TestKVM does so on a host with
// KVM, for what is different there. They need the lab: `make lab-test`.
package xen
