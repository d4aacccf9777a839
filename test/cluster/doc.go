// Package cluster has no code of its own: its tests run clusters of real
// hostds on one machine, with PoCL's CPU devices as GPUs, and drive them with
// gpuctl.
package cluster
