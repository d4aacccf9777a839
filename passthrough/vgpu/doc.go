// Package vgpu cuts cards into virtual GPUs and says how many more of each
// kind there could be.
//
// There are three ways, and every card has its own: one host may have all of
// them, and a card that has none is passed through whole all the same.
//
//   - SR-IOV virtual functions that are devices as they come: their number is
//     set for the whole card, from none to some and back (Resize).
//   - Mediated devices: mdev_supported_types of the card or of its virtual
//     functions (Linux, Documentation/driver-api/vfio-mediated-device.rst).
//   - NVIDIA's own interface on virtual functions, since its vGPU software 17:
//     nvidia/creatable_vgpu_types and current_vgpu_type.
//
// Capacity is the least of what the kernel offers now and what remains when
// instances that are only scheduled are counted like those that exist. Where a
// figure is not known, less is promised. MIG gives the same for slices of a
// GPU, which NVML tells of.
//
// What exists is read from the kernel each time; nothing is remembered but names
// of types. Who has an instance is the caller's knowledge and passed in.
package vgpu
