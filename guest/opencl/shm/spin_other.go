//go:build !amd64 && !arm64

package shm

// Spin pauses the processor n times, if the architecture supports it.
func Spin(int) {}

// Pause hints to the processor that this is a spin loop, if the architecture supports it.
func Pause() {}
