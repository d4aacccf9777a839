//go:build amd64 || arm64

package shm

// Spin pauses the processor n times. A pause takes 10 to 50 ns on amd64. So use few of them
// between two polls, to keep a wait short.
//
//go:noescape
func Spin(n int)

// Pause hints to the processor that this is a spin loop.
func Pause() { Spin(1) }
