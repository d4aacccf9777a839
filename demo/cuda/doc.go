// Command cuda shows what gpuctl does with CUDA programs: a loop of kernels is suspended, so
// that its GPU is free, resumed, and moved to a second GPU if there is one. It knows the
// result of every kernel, and compares at the end; the exit status reports whether all were
// right.
//
// Without an NVIDIA GPU it uses the fake driver of test/cuda, which keeps the rules of
// the real one and copies the contents of memory.
package main
