// Package mmiotest is what tests of mediated GPUs do as a VM: it computes on whatever
// device there is, and checks the results. The device may be in this process, behind a
// real QEMU, or in a VM of real Xen.
package mmiotest
