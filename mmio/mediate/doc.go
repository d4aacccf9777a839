// Package mediate shares one GPU among VMs that each believe to have one.
//
// Each VM has a partition of the memory, channels of its own and registers that
// are only its own. What the hardware goes by (instance blocks, page directories
// and tables, playlists) are shadows in memory that no VM reaches, made of what
// the VM wrote and checked entry by entry. One command runs at a time, and
// internal/timeshare decides whose.
//
// Here live [GPU], the mediator, and [VGPU], what one VM has of it; the modes of
// keeping shadows; quotas; scrubbing; saving and restoring.
//
// Not here: how accesses get out of a hypervisor (transports), what registers there are
// (mmio/regs), the hardware (mmio/nvc0), and who is to have a VGPU (the inventory).
//
// An address of a VM is a [GuestPA] and one of the hardware a [HostPA]. Only
// (*VGPU).host makes one of the other. Lines with a comment "check:" are what isolation
// rests on; `make mutate-mmio` removes each in turn and expects a test to fail.
// DESIGN.md says why all this is as it is.
package mediate
