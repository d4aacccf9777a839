// Package lab boots two Xen hosts, xena and xenb, in QEMU on this machine, with
// plain emulation: neither KVM nor nested virtualization is needed. Each runs
// Debian's Xen, its dom0 and libvirt's libxl driver, and owns emulated PCI cards
// behind root ports that stand for GPUs of several models. A network joins the
// two.
//
// An image is built once for what it is built from (package folder image/), the
// hosts boot from it once, and QEMU snapshots of the booted hosts start every
// later lab within seconds. All of that is kept in one folder, the cache.
//
// The package starts, stops and reaches hosts, and injects the faults that only
// the outside can: a host without power, a network that is cut. What runs in the
// hosts is the business of package labtest and of the tests that use it.
package lab
