// Package arena allocates the executor's part of the arena, [0, split): the
// content of buffers on devices that compute in host memory, and shadows of
// mapped regions. It hands out offsets and never touches the memory: whoever
// frees a range also punches the hole.
//
// Allocation is best fit over free extents, which coalesce. Everything is in
// pages of 4 KiB, and what is 2 MiB or larger begins at a multiple of 2 MiB,
// so that it can be backed and pinned in huge pages.
package arena
