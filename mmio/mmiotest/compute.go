package mmiotest

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/guestdriver"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

// Compute opens the GPU, adds, multiplies and mixes n random words, copies the result, and
// checks every word of it. Two calls with one seed do the same. idle is called while it
// waits; nil: nothing is to be done.
func Compute(d mmio.Device, vm mmio.VM, seed uint64, n int, idle func()) error {
	return ComputeWith(guestdriver.Options{Device: d, VM: vm, Idle: idle}, seed, n)
}

// ComputeWith is Compute with a driver that has these options.
func ComputeWith(o guestdriver.Options, seed uint64, n int) error {
	g, err := guestdriver.Open(o)
	if err != nil {
		return fmt.Errorf("open the GPU: %w", err)
	}
	r := rand.New(rand.NewPCG(seed, 1)) //nolint:gosec // test data
	var buffers [4]guestdriver.Buffer
	for i := range buffers {
		if buffers[i], err = g.Alloc(uint64(4 * n)); err != nil {
			return fmt.Errorf("buffer %d: %w", i, err)
		}
	}
	a, b, out, copied := buffers[0], buffers[1], buffers[2], buffers[3]
	x, y := words(r, n), words(r, n)
	g.Phase(mmio.Copy)
	g.Write(a, x)
	g.Write(b, y)
	for _, kernel := range []uint32{nvc0.KernelAdd, nvc0.KernelMadd, nvc0.KernelMix} {
		arg := r.Uint32N(64) + 1
		g.Phase(mmio.Launch)
		if err := g.Launch(kernel, out, a, b, arg, n); err != nil {
			return fmt.Errorf("launch kernel %d: %w", kernel, err)
		}
		if err := g.Wait(); err != nil {
			return fmt.Errorf("wait for kernel %d: %w", kernel, err)
		}
		g.Phase(mmio.Copy)
		if err := g.Copy(copied, out, uint32(4*n)); err != nil {
			return fmt.Errorf("copy after kernel %d: %w", kernel, err)
		}
		if err := g.Wait(); err != nil {
			return fmt.Errorf("wait for the copy after kernel %d: %w", kernel, err)
		}
		got, want := g.Read(copied, n), nvc0.Compute(kernel, x, y, arg, n)
		if !slices.Equal(got, want) {
			return fmt.Errorf("kernel %d computed %#x, want %#x", kernel, got, want)
		}
	}
	return g.Close()
}

func words(r *rand.Rand, n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = r.Uint32()
	}
	return out
}
