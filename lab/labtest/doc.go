// Package labtest is what tests of real Xen hosts are written with. It holds no
// test of the product's parts, only of the lab itself: that its hosts are what
// the other tests take them for.
//
// Start gives a test both hosts, freshly from their snapshots, and skips it
// unless GPUCTL_LAB=1, for a lab takes minutes and all of the machine. Guest
// describes an HVM or PVH guest; its methods create, destroy and migrate it and
// plug devices, each by libvirt as an operator would do by hand, and ask the
// init inside it (lab/guestinit) what it sees.
package labtest
