// Package isolation judges whether a card can be given to a guest, before any
// guest fails to start, and says why not and what to do about it in words.
//
// What there is to know comes from a Source: on a Xen host the hypervisor (its
// IOMMU, device groups and log) and the topology of ports; elsewhere the
// kernel's IOMMU groups. The judgement itself is a pure function of the card
// and these facts.
//
// It does not ask whether a card is in use; passthrough/bind does.
package isolation
