package guestdriver

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

// Options is what a driver has to work with.
type Options struct {
	VM     mmio.VM
	Device mmio.Device

	// Calls makes page tables by para-virtual calls instead of stores, through slots in
	// this memory at this address. nil: by stores.
	Calls mmio.Guest
	Slots uint64
	// Batch is how many page table entries go into a call; 0: as many as fit.
	Batch int

	// Fresh says that the GPU's memory is zero where this driver has not written: a part is when
	// it is new. Then Open clears nothing, and takes a hundredth of the exits.
	Fresh bool

	// Idle lets time pass while the driver polls.
	Idle func()

	// Silent leaves the GPU's interrupts disabled: nobody handles them. The driver always polls.
	Silent bool
}

// Errors.
var (
	ErrNoGPU   = errors.New("no GPU that this driver knows")
	ErrMemory  = errors.New("too little memory")
	ErrCall    = errors.New("a para-virtual call was refused")
	ErrStopped = errors.New("the channel was stopped")
	ErrTimeout = errors.New("the GPU does not answer")
)

// Where things are in the GPU's memory.
const (
	barInst    = 0x01000
	channelPA  = 0x02000
	playlistPA = 0x03000
	barDir     = 0x10000
	barTable   = 0x20000
	chanDir    = 0x30000
	ringPA     = 0x40000
	fencePA    = 0x41000
	paramPA    = 0x42000
	codePA     = 0x43000
	pushPA     = 0x50000
	pushSize   = 0x10000
	tablePA    = 0x60000 // of small pages, 256 KiB
	dataPA     = 0x100000

	ringOrder = 9
	vaBase    = 0x20000000 // addresses of the channel: vaBase + where it is in memory
	directory = vaBase / nvc0.TableSpan
	userdBase = 0x06000000 // in BAR1

	barData, barControl, barCalls = 1, 3, 5

	spaceBAR, spaceChannel = 1, 2
)

// Driver has one channel of a GPU, open.
type Driver struct {
	o      Options
	size   uint64 // of the GPU's memory
	next   uint64 // free memory
	space  uint8  // the small pages' table maps 128 MiB >> so much
	put    uint32
	push   uint32 // offset in the push buffer
	seq    uint32
	pages  []uint64
	loaded map[uint32]uint64 // kernels, by number
	calls  []uint32
}

// Buffer is memory of the GPU that the channel can use.
type Buffer struct {
	VA   uint64
	Size uint64
	pa   uint64
}

// Open brings the GPU up.
func Open(o Options) (*Driver, error) {
	d := &Driver{o: o, next: dataPA, loaded: map[uint32]uint64{}}
	if o.Idle == nil {
		d.o.Idle = func() {}
	}
	d.Phase(mmio.Init)
	if id := d.reg(0); id>>20&0xff != 0xc0 {
		return nil, fmt.Errorf("PMC_ID is %#x: %w", id, ErrNoGPU)
	}
	d.size = uint64(d.reg(0x10f20c)) << 20
	if d.size <= dataPA {
		return nil, fmt.Errorf("%d bytes: %w", d.size, ErrMemory)
	}
	for d.space = 3; d.space > 0 && nvc0.TableSpan>>d.space < d.size; d.space-- {
	}
	if !o.Silent {
		d.set(0x140, 1)
	}
	d.set(0x2140, 0xffffffff)
	d.set(0x2254, userdBase>>12)
	if o.Calls != nil {
		if err := d.openCalls(); err != nil {
			return nil, err
		}
	} else {
		d.openTables()
	}
	if err := d.openChannel(); err != nil {
		return nil, err
	}
	if err := d.Wait(); err != nil {
		return nil, err
	}
	d.Phase(mmio.Other)
	return d, nil
}

// Phase labels what follows in the counters.
func (d *Driver) Phase(p mmio.Phase) { d.set(0x1480, uint32(p)) }

func (d *Driver) reg(at uint64) uint32 {
	return uint32(d.o.Device.Read(mmio.Access{VM: d.o.VM, Size: 4, Offset: at}))
}

func (d *Driver) set(at uint64, w uint32) {
	d.o.Device.Write(mmio.Access{VM: d.o.VM, Size: 4, Offset: at, Write: true, Data: uint64(w)})
}

func (d *Driver) store(bar uint8, at uint64, size uint8, w uint64) {
	d.o.Device.Write(mmio.Access{VM: d.o.VM, BAR: bar, Size: size, Offset: at, Write: true, Data: w})
}

func (d *Driver) load(bar uint8, at uint64, size uint8) uint64 {
	return d.o.Device.Read(mmio.Access{VM: d.o.VM, BAR: bar, Size: size, Offset: at})
}

// flush makes changed page tables known.
func (d *Driver) flush(dir uint64) {
	d.set(nvc0.RegTLBSpace, uint32(dir>>8))
	d.set(nvc0.RegTLBTrigger, nvc0.TLBFlush|1)
	for range 1 << 16 {
		if d.reg(0x100c80)&0x8000 != 0 {
			return
		}
		d.o.Idle()
	}
}

// openTables makes the tables of BAR1 and BAR3 through the PRAMIN window, and those of the
// channel through BAR3.
func (d *Driver) openTables() {
	pramin := func(at, w uint64) {
		d.set(0x1700, uint32(at>>16))
		d.store(0, 0x700000+at&0xffff, 8, w)
	}
	pramin(barInst+nvc0.InstDirectory, barDir|1)
	pramin(barInst+nvc0.InstLimit, 1<<nvc0.AddressBits-1)
	d.set(0x1700, barDir>>16)
	for at := uint64(0); at < nvc0.DirectorySize; at += 8 {
		if at == 0 {
			d.store(0, 0x700000+at, 8, uint64(nvc0.MakePDE(barTable, 0, 0)))
		} else if !d.o.Fresh {
			d.store(0, 0x700000+at, 8, 0)
		}
	}
	d.set(0x1700, barTable>>16)
	for i := range uint64(nvc0.LargeEntries) {
		if (i+1)*nvc0.LargePage <= d.size {
			d.store(0, 0x700000+8*i, 8, uint64(nvc0.MakePTE(i*nvc0.LargePage, nvc0.TargetVRAM, false)))
		} else if !d.o.Fresh {
			d.store(0, 0x700000+8*i, 8, 0)
		}
	}
	d.set(0x1704, 1<<31|barInst>>12)
	d.set(0x1714, 1<<31|barInst>>12)
	d.flush(barDir)
	d.zero(chanDir, nvc0.DirectorySize)
	d.zero(tablePA, nvc0.SmallEntries>>d.space*8)
	d.store(barControl, chanDir+8*directory, 8, uint64(nvc0.MakePDE(0, tablePA, d.space)))
	d.flush(chanDir)
}

// zero clears memory through BAR3.
func (d *Driver) zero(from, size uint64) {
	if d.o.Fresh {
		return
	}
	for at := uint64(0); at < size; at += 8 {
		d.store(barControl, from+at, 8, 0)
	}
}

// openCalls asks for the same.
func (d *Driver) openCalls() error {
	d.store(barCalls, 4, 4, d.o.Slots&0xffffffff)
	d.store(barCalls, 8, 4, d.o.Slots>>32)
	d.store(barCalls, 0, 4, 1)
	if d.load(barCalls, 0, 4) != 1 {
		return fmt.Errorf("slots at %#x: %w", d.o.Slots, ErrCall)
	}
	d.call(1, spaceBAR)
	d.call(5, spaceBAR, 0, 1)
	var all []nvc0.PTE
	for at := uint64(0); at+nvc0.LargePage <= d.size; at += nvc0.LargePage {
		all = append(all, nvc0.MakePTE(at, nvc0.TargetVRAM, false))
	}
	if err := d.mapCalls(spaceBAR, 0, all, true); err != nil {
		return err
	}
	d.call(4, 0, spaceBAR)
	d.call(4, 1, spaceBAR)
	d.call(1, spaceChannel)
	d.call(5, spaceChannel, directory, 2|uint32(d.space)<<8)
	return d.flushCalls()
}

// openChannel makes and lists the channel.
func (d *Driver) openChannel() error {
	for _, r := range []struct{ at, size uint64 }{{ringPA, 4096}, {fencePA, 4096}, {paramPA, 4096}, {codePA, 4096}, {pushPA, pushSize}} {
		if err := d.mapRange(r.at, r.size); err != nil {
			return err
		}
	}
	inst := func(at int, w uint64) { d.store(barControl, channelPA+uint64(at), 8, w) }
	d.zero(channelPA, nvc0.PageSize)
	inst(nvc0.InstUserd, 0)
	inst(nvc0.InstRing, (vaBase+ringPA)|ringOrder<<48)
	inst(nvc0.InstDirectory, chanDir|1)
	inst(nvc0.InstLimit, 1<<nvc0.AddressBits-1)
	d.store(barData, fencePA, 4, 0)
	d.set(0x3000, 0) // as whoever had it before may not have
	d.set(0x3000, 3<<30|channelPA>>12)
	d.set(0x3004, 0x001f0001)
	if d.o.Calls != nil {
		d.call(3, 0, spaceChannel)
		if err := d.flushCalls(); err != nil {
			return err
		}
	}
	d.store(barControl, playlistPA, 8, 4<<32)
	d.set(0x70000, 1)
	d.set(0x2270, playlistPA>>12)
	d.set(0x2274, 1|0x1f<<20)
	d.set(0x409500, 1<<31|channelPA>>12)
	d.set(0x409504, 3)
	return d.Submit(nvc0.Incr(0, nvc0.MethodObject, 1), nvc0.ClassM2MF, nvc0.Incr(1, nvc0.MethodObject, 1), nvc0.ClassCompute)
}

// mapRange maps memory at the channel's addresses, and tells the GPU.
func (d *Driver) mapRange(pa, size uint64) error {
	var all []nvc0.PTE
	for at := pa; at < pa+size; at += nvc0.PageSize {
		e := nvc0.MakePTE(at, nvc0.TargetVRAM, false)
		all = append(all, e)
		d.pages = append(d.pages, at)
		if d.o.Calls == nil {
			d.store(barControl, tablePA+at/nvc0.PageSize*8, 8, uint64(e))
		}
	}
	if d.o.Calls == nil {
		d.flush(chanDir)
		return nil
	}
	return d.mapCalls(spaceChannel, vaBase+pa, all, false)
}

// call adds a para-virtual call to those that go out together.
func (d *Driver) call(op uint32, args ...uint32) {
	d.calls = append(append(d.calls, op|uint32(len(args)+1)<<16), args...)
	if d.o.Batch == 1 {
		_ = d.flushCalls() // a refusal shows with what needs it
	}
}

// flushCalls makes the calls.
func (d *Driver) flushCalls() error {
	if len(d.calls) == 0 {
		return nil
	}
	page := make([]byte, 8+4*len(d.calls))
	binary.LittleEndian.PutUint32(page[4:], uint32(len(d.calls)))
	for i, w := range d.calls {
		binary.LittleEndian.PutUint32(page[8+4*i:], w)
	}
	d.calls = d.calls[:0]
	if err := d.o.Calls.WriteMemory(d.o.Slots, page); err != nil {
		return err
	}
	d.store(barCalls, 0xc, 4, 0)
	var status [4]byte
	if err := d.o.Calls.ReadMemory(d.o.Slots, status[:]); err != nil {
		return err
	}
	if s := binary.LittleEndian.Uint32(status[:]); s != 1 {
		return fmt.Errorf("status %#x: %w", s, ErrCall)
	}
	return nil
}

// mapCalls maps consecutive pages by calls.
func (d *Driver) mapCalls(space uint32, va uint64, all []nvc0.PTE, large bool) error {
	const most = 128
	n, size, flag := d.o.Batch, uint64(nvc0.PageSize), uint32(0)
	if n <= 0 || n > most {
		n = most
	}
	if large {
		size, flag = nvc0.LargePage, 1<<31
	}
	for len(all) > 0 {
		part := all[:min(n, len(all))]
		all = all[len(part):]
		args := []uint32{space, uint32(va), uint32(va>>32) | flag, uint32(len(part))}
		for _, e := range part {
			args = append(args, uint32(e), uint32(e>>32))
		}
		if len(d.calls)+len(args)+1 > 1022 {
			if err := d.flushCalls(); err != nil {
				return err
			}
		}
		d.call(6, args...)
		va += size * uint64(len(part))
	}
	return nil
}
