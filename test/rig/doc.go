// Package rig starts a private hostd on GPUs that a test, a bench or the demo
// declares, and drives it as a user would: with the gpuctl command.
//
// It needs nothing but the built programs, so that it also serves on machines
// without a Go toolchain: see Root.
package rig
