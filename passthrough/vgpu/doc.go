// Package vgpu creates virtual GPUs on cards, and computes how many more of each profile
// are possible.
//
// There are three ways. Each card has one of them, and one host may have cards of all
// kinds. A card without any is passed through as a whole.
//
//   - SR-IOV virtual functions that can be used as they are: their number is
//     set for the whole card, from 0 and to 0 (Resize).
//   - Mediated devices: mdev_supported_types of the card or of its virtual
//     functions (Linux, Documentation/driver-api/vfio-mediated-device.rst).
//   - NVIDIA's own interface on virtual functions, since its vGPU software 17:
//     nvidia/creatable_vgpu_types and current_vgpu_type.
//
// The capacity is the lower of what the kernel offers now, and what remains if scheduled
// instances count like existing ones. If a number is unknown, less is promised. MIG
// computes the same for slices of a GPU, from what NVML reports.
//
// Existing instances are read from the kernel each time. Only the names of types are
// remembered. The caller knows who has an instance, and passes that in.
package vgpu
