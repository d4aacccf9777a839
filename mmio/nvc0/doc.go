// Package nvc0 is a GPU in software: the part of NVIDIA's NVC0 (Fermi) that has
// to do with who may reach what. It has video memory, channels with instance
// blocks, a playlist, push buffers and their methods, page tables with a TLB,
// copies (M2MF), semaphores, faults, and a clock of its own by which commands take time. A
// compute class runs a handful of integer kernels, so that results can be checked.
//
// Each frame of its memory has an owner. An access on behalf of anybody else is a
// [Violation], which is told and not done: a mediator above it has a hole then.
//
// Not here: whose accesses are trapped and what becomes of them
// (mmio/mediate), and display, video, microcode and the instruction set of shaders, which are
// not modelled at all. Offsets and layouts are those of envytools' documentation and of Linux's nouveau.
package nvc0
