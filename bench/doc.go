// Command bench measures gpuctl beside the native runtime, both in one run and
// in turns, and prints each figure with its target. The figures are written as
// JSON to bench/out. It needs the built programs only, no Go toolchain.
package main
