package mmiotest

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/guestdriver"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

// Ballast is how many words lie in the GPU's memory while [Endure] computes, and are checked
// at its end.
const Ballast = 128

// Endure computes on one channel, for as long as next says so before each round. What a round
// computes with is what the round before it has left in the GPU's memory, so a GPU that loses
// or mixes up contents, commands or page tables shows in the next result. Every word of each
// result is checked. next gets the number of rounds that were right.
func Endure(o guestdriver.Options, seed uint64, n int, next func(right int) bool) error {
	g, err := guestdriver.Open(o)
	if err != nil {
		return fmt.Errorf("open the GPU: %w", err)
	}
	e := endurance{g: g, n: n, r: rand.New(rand.NewPCG(seed, 2))} //nolint:gosec // test data
	if err := e.begin(); err != nil {
		return err
	}
	round := 0
	for ; next(round); round++ {
		if err := e.round(); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
	}
	if err := e.end(); err != nil {
		return fmt.Errorf("after %d rounds: %w", round, err)
	}
	return g.Close()
}

type endurance struct {
	g *guestdriver.Driver
	n int
	r *rand.Rand

	state, other, factor, ballast, copied guestdriver.Buffer
	// What is in these buffers.
	has, factors, lies []uint32
}

// begin fills the GPU's memory.
func (e *endurance) begin() (err error) {
	for _, b := range []struct {
		at *guestdriver.Buffer
		n  int
	}{{&e.state, e.n}, {&e.other, e.n}, {&e.factor, e.n}, {&e.ballast, Ballast}, {&e.copied, Ballast}} {
		if *b.at, err = e.g.Alloc(uint64(4 * b.n)); err != nil {
			return fmt.Errorf("a buffer of %d words: %w", b.n, err)
		}
	}
	e.has, e.factors, e.lies = words(e.r, e.n), words(e.r, e.n), words(e.r, Ballast)
	for i := range e.factors {
		e.factors[i] |= 1 // or the state would become zero
	}
	e.g.Phase(mmio.Copy)
	e.g.Write(e.state, e.has)
	e.g.Write(e.factor, e.factors)
	e.g.Write(e.ballast, e.lies)
	return nil
}

// round multiplies the state, and mixes what comes of it.
func (e *endurance) round() error {
	for _, kernel := range []uint32{nvc0.KernelMadd, nvc0.KernelMix} {
		arg := e.r.Uint32N(64) + 1
		e.g.Phase(mmio.Launch)
		if err := e.g.Launch(kernel, e.other, e.state, e.factor, arg, e.n); err != nil {
			return fmt.Errorf("launch kernel %d: %w", kernel, err)
		}
		e.state, e.other = e.other, e.state
		e.has = nvc0.Compute(kernel, e.has, e.factors, arg, e.n)
	}
	if err := e.g.Wait(); err != nil {
		return err
	}
	e.g.Phase(mmio.Copy)
	if got := e.g.Read(e.state, e.n); !slices.Equal(got, e.has) {
		return fmt.Errorf("it has computed %#x, want %#x", got, e.has)
	}
	return nil
}

// end has the GPU copy what lay in its memory all the time.
func (e *endurance) end() error {
	e.g.Phase(mmio.Copy)
	if err := e.g.Copy(e.copied, e.ballast, 4*Ballast); err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	if err := e.g.Wait(); err != nil {
		return fmt.Errorf("wait for the copy: %w", err)
	}
	if got := e.g.Read(e.copied, Ballast); !slices.Equal(got, e.lies) {
		return fmt.Errorf("what lay in its memory is %#x, was %#x", got, e.lies)
	}
	return nil
}
