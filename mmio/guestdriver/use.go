package guestdriver

import (
	"encoding/binary"
	"fmt"

	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

// polls is how often the driver looks for the end of a command.
const polls = 1 << 22

// Alloc takes memory for the channel.
func (d *Driver) Alloc(size uint64) (Buffer, error) {
	size = (size + nvc0.PageSize - 1) &^ (nvc0.PageSize - 1)
	if size == 0 || size > d.size-d.next {
		return Buffer{}, fmt.Errorf("%d bytes of %d: %w", size, d.size-d.next, ErrMemory)
	}
	b := Buffer{VA: vaBase + d.next, Size: size, pa: d.next}
	d.next += size
	return b, d.mapRange(b.pa, size)
}

// Write copies dwords into a buffer, by stores.
func (d *Driver) Write(b Buffer, words []uint32) {
	for i := 0; i < len(words); i += 2 {
		if i+1 == len(words) {
			d.store(barData, b.pa+4*uint64(i), 4, uint64(words[i]))
			return
		}
		d.store(barData, b.pa+4*uint64(i), 8, uint64(words[i])|uint64(words[i+1])<<32)
	}
}

// Read copies dwords out of a buffer, by loads.
func (d *Driver) Read(b Buffer, n int) []uint32 {
	words := make([]uint32, 0, n+1)
	for i := 0; i < n; i += 2 {
		w := d.load(barData, b.pa+4*uint64(i), 8)
		words = append(words, uint32(w), uint32(w>>32))
	}
	return words[:n]
}

// Submit gives the GPU methods, with a fence behind them.
func (d *Driver) Submit(words ...uint32) error {
	if d.o.Calls != nil {
		if err := d.flushCalls(); err != nil {
			return err
		}
	}
	d.seq++
	const fence = vaBase + fencePA
	words = append(words, nvc0.Incr(0, nvc0.MethodSemaphoreHigh, 4), fence>>32, fence&0xffffffff, d.seq, nvc0.SemaphoreRelease)
	size := uint32(4*len(words)+7) &^ 7
	if size > pushSize {
		return fmt.Errorf("%d methods: %w", len(words), ErrMemory)
	}
	if d.push+size > pushSize {
		if err := d.waitFor(d.seq - 1); err != nil {
			return err
		}
		d.push = 0
	}
	if d.seq%(1<<ringOrder-1) == 0 { // the ring is full, at worst
		if err := d.waitFor(d.seq - 1); err != nil {
			return err
		}
	}
	d.Write(Buffer{pa: pushPA + uint64(d.push)}, words)
	d.store(barData, ringPA+8*uint64(d.put), 8, nvc0.IBEntry(vaBase+pushPA+uint64(d.push), uint32(len(words))))
	d.push += size
	d.put = (d.put + 1) & (1<<ringOrder - 1)
	d.store(barData, userdBase+nvc0.UserdIBPut, 4, uint64(d.put))
	return nil
}

// Wait waits until all that was submitted is done.
func (d *Driver) Wait() error { return d.waitFor(d.seq) }

// Done reports whether all that was submitted is done.
func (d *Driver) Done() bool {
	return int32(uint32(d.load(barData, fencePA, 4))-d.seq) >= 0
}

func (d *Driver) waitFor(seq uint32) error {
	for i := range polls {
		if int32(uint32(d.load(barData, fencePA, 4))-seq) >= 0 {
			return nil
		}
		if i%16 == 15 {
			if intr := d.reg(0x2100); intr&(1<<8|1<<28) != 0 {
				return fmt.Errorf("PFIFO_INTR is %#x, the fault was at %#x: %w", intr, d.reg(0x2804), ErrStopped)
			}
		}
		d.o.Idle()
	}
	return ErrTimeout
}

// Copy lets the GPU copy n bytes.
func (d *Driver) Copy(to, from Buffer, n uint32) error {
	return d.Submit(
		nvc0.Incr(0, nvc0.M2MFOutHigh, 2), uint32(to.VA>>32), uint32(to.VA),
		nvc0.Incr(0, nvc0.M2MFInHigh, 6), uint32(from.VA>>32), uint32(from.VA), n, n, n, 1,
		nvc0.Incr(0, nvc0.M2MFExec, 1), 0x100110,
	)
}

// Kernel puts a kernel's code where launches find it.
func (d *Driver) kernel(number uint32) uint64 {
	va, ok := d.loaded[number]
	if !ok {
		at := codePA + 8*uint64(len(d.loaded))
		va = vaBase + at
		d.loaded[number] = va
		d.store(barData, at, 8, nvc0.KernelMagic|uint64(number)<<32)
	}
	return va
}

// Launch runs a kernel of n threads. The parameters are one set at a time: it waits for
// the launch before.
func (d *Driver) Launch(number uint32, out, a, b Buffer, x uint32, n int) error {
	if err := d.Wait(); err != nil {
		return err
	}
	return d.LaunchNext(number, out, a, b, x, n)
}

// LaunchNext is Launch for whose launch before is known to be done.
func (d *Driver) LaunchNext(number uint32, out, a, b Buffer, x uint32, n int) error {
	code := d.kernel(number)
	p := nvc0.Params(out.VA, a.VA, b.VA, x)
	for i := 0; i < len(p); i += 8 {
		d.store(barData, paramPA+uint64(i), 8, binary.LittleEndian.Uint64(p[i:]))
	}
	const params = vaBase + paramPA
	return d.Submit(
		nvc0.Incr(1, nvc0.ComputeCodeHigh, 2), uint32(code>>32), uint32(code),
		nvc0.Incr(1, nvc0.ComputeParamHigh, 2), params>>32, params&0xffffffff,
		nvc0.Incr(1, nvc0.ComputeGridYX, 2), uint32((n+63)/64), 1,
		nvc0.Incr(1, nvc0.ComputeBlockYX, 2), uint32(min(n, 64)), 1,
		nvc0.Incr(1, nvc0.ComputeLaunch, 1), 0,
	)
}

// Close unmaps everything and takes the channel down.
func (d *Driver) Close() error {
	d.Phase(mmio.Close)
	err := d.Wait()
	d.set(0x2274, 0x1f<<20)
	d.set(0x2634, 0)
	if d.o.Calls == nil {
		for _, pa := range d.pages {
			d.store(barControl, tablePA+pa/nvc0.PageSize*8, 8, 0)
		}
		d.flush(chanDir)
	} else {
		for i := 0; i < len(d.pages); {
			n := 1
			for d.o.Batch != 1 && i+n < len(d.pages) && d.pages[i+n] == d.pages[i]+uint64(n)*nvc0.PageSize && n < 4096 {
				n++
			}
			d.call(7, spaceChannel, uint32(vaBase+d.pages[i]), 0, uint32(n))
			i += n
		}
	}
	d.set(0x3000, 0)
	if d.o.Calls != nil {
		d.call(2, spaceChannel)
		if e := d.flushCalls(); err == nil {
			err = e
		}
	}
	d.Phase(mmio.Other)
	return err
}
