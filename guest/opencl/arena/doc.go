// Package arena allocates the executor's part of the arena, [0, split). It has the contents
// of buffers on devices that compute in host memory, and shadows of mapped regions. The
// package returns offsets and never accesses the memory: whoever frees a range also punches
// the hole.
//
// Allocation is best fit over free extents. Free extents that touch each other are merged.
// All sizes are multiples of pages of 4 KiB. An allocation of 2 MiB or more begins at a
// multiple of 2 MiB, so that huge pages can back and pin it.
package arena
