// Package mpqemu serves a device to QEMU over the protocol of its multi-process mode: the
// device is in this process, and QEMU shows a VM a PCI function in its place
// (-device x-pci-proxy-dev,fd=N). It needs no Xen, KVM or GPU, so tests use it everywhere.
//
// The protocol is QEMU's own (include/hw/remote/mpqemu-link.h) and has no version. It is
// written down here as QEMU 7.2 speaks it. QEMU sends one message at a time and waits for
// the answer, except to messages about memory and interrupts.
//
// # Trust
//
// QEMU may be in the hands of its VM. Each message is checked. The VM's memory is read
// and written as files, not mapped: a QEMU that makes a file shorter cannot end this
// process with SIGBUS.
//
// # Limits
//
// BARs have 32 bits. The only interrupt is INTx, and only with KVM, as QEMU passes it on
// as an irqfd; what raises the level again after the VM has acknowledged it is the next
// Interrupt. QEMU passes at most eight ranges of memory, and only of a shared backend
// (memory-backend-memfd,share=on).
//
// # vfio-user
//
// QEMU 10.1 and cloud-hypervisor have the successor of this protocol. It would be another
// package with the same Serve, and needs: a negotiation of the version; the descriptions
// of regions and interrupts (GET_INFO, GET_REGION_INFO, GET_IRQ_INFO), which come from the
// same mmio.Function; DMA_MAP and DMA_UNMAP for the VM's memory; and REGION_READ and
// REGION_WRITE, whose configuration region is a pciconf.Space. Writes to a BAR are then
// posted: QEMU does not wait for them.
package mpqemu
