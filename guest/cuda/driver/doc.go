// Package driver is the inside of a helper process: it loads libcuda.so.1 and
// libnvidia-ml.so.1, does the one thing that it is asked (guest/cuda/ask), and answers.
//
// Both libraries are found at run time and called by declarations of our own, so that
// gpuguest is built without NVIDIA's files and runs without them. The arguments of the
// driver's functions are structures of 64 bytes whose unused bytes are zero. Which bytes are
// used depends on the driver's version (abi.go).
//
// Nothing here decides what is to be done with a process; guest/cuda does.
package driver
