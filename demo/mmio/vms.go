package main

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/guestdriver"
	"github.com/gpuctl/gpuctl/mmio/mediate"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
	"github.com/gpuctl/gpuctl/mmio/simulate"
)

const vmMemory = 4 * simulate.MiB

// honest launches a kernel that computes, one that takes 1 ms, checks the result, and
// so on.
type honest struct {
	m         *simulate.Machine
	v         *mediate.VGPU
	d         *guestdriver.Driver
	in, out   guestdriver.Buffer
	data      []uint32
	round     uint32
	at        time.Duration // of its next launch; -1: it waits
	computing bool
	checked   int
}

const elements = 64

func newHonest(m *simulate.Machine, mode mediate.Mode) (h *honest, err error) {
	h = &honest{m: m}
	if h.v, err = m.Add(mediate.Request{VM: honestVM, Name: "honest", Memory: vmMemory, Channels: 4, Mode: mode, Tables: 128}); err != nil {
		return nil, err
	}
	if h.d, err = m.Open(h.v, honestVM, 0); err != nil {
		return nil, err
	}
	if h.in, err = h.d.Alloc(4 * elements); err != nil {
		return nil, err
	}
	if h.out, err = h.d.Alloc(4 * elements); err != nil {
		return nil, err
	}
	for i := range uint32(elements) {
		h.data = append(h.data, i*2654435761+1)
	}
	h.d.Write(h.in, h.data)
	access(m, honestVM, 0, 0x1700, 4, secretAt>>16)
	access(m, honestVM, 0, 0x700000+secretAt&0xffff, 8, secret)
	return h, h.d.Wait()
}

func access(m *simulate.Machine, vm mmio.VM, bar uint8, at uint64, size uint8, w uint64) {
	m.Router.Write(mmio.Access{VM: vm, BAR: bar, Size: size, Offset: at, Data: w})
}

func (h *honest) hasSecret() bool {
	access(h.m, honestVM, 0, 0x1700, 4, secretAt>>16)
	return h.m.Router.Read(mmio.Access{VM: honestVM, Size: 8, Offset: 0x700000 + secretAt&0xffff}) == secret
}

// next is when it does something by itself.
func (h *honest) next() time.Duration {
	if h.at < 0 {
		return h.m.Clock + time.Hour
	}
	return h.at
}

func (h *honest) act() error {
	if h.at < 0 && h.d.Done() {
		if h.computing {
			if err := h.check(); err != nil {
				return err
			}
		}
		h.at = h.m.Clock + 100*time.Microsecond
	}
	if h.at < 0 || h.m.Clock < h.at {
		return nil
	}
	h.at = -1
	h.computing = !h.computing
	if !h.computing {
		return h.d.LaunchNext(nvc0.KernelLoop, h.out, h.in, h.in, 1000, 1)
	}
	h.round++
	if h.round%40 == 0 { // now and then it maps more memory, and computes there
		for range 4 {
			var err error
			if h.out, err = h.d.Alloc(4 * elements); err != nil {
				return err
			}
		}
	}
	return h.d.LaunchNext(nvc0.KernelMix, h.out, h.in, h.in, 1+h.round%32, elements)
}

func (h *honest) check() error {
	want := nvc0.Compute(nvc0.KernelMix, h.data, nil, 1+h.round%32, elements)
	if have := h.d.Read(h.out, elements); !slices.Equal(have, want) {
		return fmt.Errorf("round %d: %w", h.round, errResults)
	}
	h.checked++
	return nil
}

func (h *honest) finish() error {
	if err := h.d.Wait(); err != nil {
		return err
	}
	if h.checked == 0 {
		return errResults
	}
	return nil
}

// hostile floods the GPU, and attacks in each window in another way.
type hostile struct {
	m      *simulate.Machine
	v      *mediate.VGPU
	d      *guestdriver.Driver
	queued int
	n      int
}

func newHostile(m *simulate.Machine) (h *hostile, err error) {
	h = &hostile{m: m}
	h.v, err = m.Add(mediate.Request{VM: hostileVM, Name: "hostile", Memory: vmMemory, Channels: 4, Mode: mediate.Lazy, Tables: 128})
	if err != nil {
		return nil, err
	}
	h.d, err = m.Open(h.v, hostileVM, 0)
	return h, err
}

// act keeps 8 commands of 10 ms queued.
func (h *hostile) act() error {
	if h.d.Done() {
		h.queued = 0
	}
	for ; h.queued < 8; h.queued++ {
		if err := h.d.LaunchNext(nvc0.KernelLoop, guestdriver.Buffer{}, guestdriver.Buffer{}, guestdriver.Buffer{}, 10000, 1); err != nil {
			return err
		}
	}
	return nil
}

func (h *hostile) set(at uint64, w uint32) { access(h.m, hostileVM, 0, at, 4, uint64(w)) }

// attack tries a way to reach the other VM, or to stop it.
func (h *hostile) attack() error {
	h.n++
	switch h.n % 8 {
	case 1: // all of the card's memory through the window
		for base := range uint32(64) {
			h.set(0x1700, base<<4|1<<24*(base&1))
			access(h.m, hostileVM, 0, 0x700000, 8, 0xbadbadbadbad)
		}
		h.set(0x1700, 0)
	case 2: // the registers that rule everybody
		for _, at := range []uint64{0x200, 0x2630, 0x262c, 0x5000, 0x40000, 0x60000, 0x6000c, 0x104050, 0x10a000, 0x1718} {
			h.set(at, 0xffffffff)
		}
	case 3: // pages of others
		for i := range uint64(128) {
			access(h.m, hostileVM, 3, 0x60000+0x1800+8*i, 8, uint64(nvc0.MakePTE((i<<16)+vmMemory, uint8(i%4), false)))
		}
		h.set(nvc0.RegTLBSpace, 0x300)
		h.set(nvc0.RegTLBTrigger, 1<<31)
	case 4: // channels of others
		for i := range uint64(128) {
			access(h.m, hostileVM, 3, 0x3000+8*i, 8, i)
			h.set(nvc0.RegKick, uint32(i)+4)
			h.set(0x3000+8*(i%4+4), 1<<31)
		}
		h.set(nvc0.RegPlaylistLength, 128)
	case 5: // tables and instance blocks of others, with cycles
		access(h.m, hostileVM, 3, 0x30000+8*100, 8, uint64(nvc0.MakePDE(0x30000, 0x30000, 3)))
		access(h.m, hostileVM, 3, 0x30000+8*101, 8, uint64(nvc0.MakePDE(vmMemory, vmMemory, 0)))
		h.set(0x3008, 1<<31|vmMemory>>12)
		h.set(nvc0.RegTLBSpace, 0x300)
		for range 200 {
			h.set(nvc0.RegTLBTrigger, 1<<31)
		}
	case 6: // malformed accesses
		for i := range uint64(256) {
			access(h.m, hostileVM, uint8(i), 0x1<<(i%64)|i, uint8(i), i)
		}
	case 7: // a push buffer that jumps out of range: its channel is stopped
		return h.jump()
	}
	return nil
}

func (h *hostile) jump() error {
	for i := range uint64(512) { // its whole ring
		access(h.m, hostileVM, 1, 0x40000+8*i, 8, nvc0.IBEntry(0x3_0000_0000, 1000))
	}
	access(h.m, hostileVM, 1, 0x06000000+nvc0.UserdIBPut, 4, 510)
	if err := h.d.Wait(); !errors.Is(err, guestdriver.ErrStopped) {
		return fmt.Errorf("%w: its channel goes on (%v)", errTame, err) //nolint:errorlint // that it is not the expected one is the point
	}
	h.set(0x2100, 0xffffffff)
	var err error
	h.queued = 0
	h.d, err = h.m.Open(h.v, hostileVM, 0)
	return err
}
