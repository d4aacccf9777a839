//go:build !amd64 && !arm64

package shm

// Spin pauses the processor n times, where it can.
func Spin(int) {}

// Pause tells the processor that this is a spin loop, where it can.
func Pause() {}
