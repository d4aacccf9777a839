// Package isolation judges whether a card can be given to a VM. If not, it explains why
// and what to do about it, before a VM fails to start.
//
// The facts come from a Source: on a Xen host, the hypervisor (its IOMMU, device groups
// and log) and the topology of ports; otherwise the kernel's IOMMU groups. The judgement
// is a pure function of the card and these facts.
//
// It does not check whether a card is in use; passthrough/bind does.
package isolation
