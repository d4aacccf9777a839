// Package e2e tests the built programs on the machine's own OpenCL runtimes:
// real applications, real swaps, real failures.
package e2e
