//go:build amd64 || arm64

package shm

// Spin pauses the processor n times.
//
//go:noescape
func Spin(n int)

// Pause tells the processor that this is a spin loop.
func Pause() { Spin(1) }
