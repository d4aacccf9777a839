package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/wait"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/guestdriver"
	"github.com/gpuctl/gpuctl/mmio/mmiotest"
)

// device is a PCI function of this guest. It implements mmio.Device.
type device struct{ bars [mmio.MaxBARs][]byte }

// plug finds the function at a slot, and maps its BARs.
func plug(slot int) (*device, error) {
	dir := fmt.Sprintf("/sys/bus/pci/devices/0000:00:%02x.0", slot)
	if err := os.WriteFile(filepath.Join(dir, "enable"), []byte("1"), 0); err != nil {
		return nil, err
	}
	if err := disableINTx(dir); err != nil {
		return nil, err
	}
	d := &device{}
	for i := range d.bars {
		f, err := os.OpenFile(filepath.Join(dir, fmt.Sprintf("resource%d", i)), os.O_RDWR|os.O_SYNC, 0)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		st, err := f.Stat()
		if err == nil {
			d.bars[i], err = unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		}
		f.Close()
		if err != nil {
			return nil, fmt.Errorf("BAR %d of slot %#x: %w", i, slot, err)
		}
	}
	return d, nil
}

// disableINTx disables the function's interrupt pin, as this driver polls. Otherwise the VM would have
// an interrupt that nobody handles: Linux starts all that it has mapped when it arrives on
// another Xen host. Linux enables the pin again when it resumes, so the GPU's interrupts must
// be off, too.
func disableINTx(dir string) error {
	const command, noINTx = 4, 1 << 10
	f, err := os.OpenFile(filepath.Join(dir, "config"), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	var b [2]byte
	if _, err := f.ReadAt(b[:], command); err != nil {
		return err
	}
	binary.LittleEndian.PutUint16(b[:], binary.LittleEndian.Uint16(b[:])|noINTx)
	_, err = f.WriteAt(b[:], command)
	return err
}

// Read is one load. sync/atomic would do more than that: its stores are exchanges.
func (d *device) Read(a mmio.Access) uint64 {
	p := unsafe.Pointer(&d.bars[a.BAR][a.Offset])
	switch a.Size {
	case 1:
		return uint64(load((*uint8)(p)))
	case 2:
		return uint64(load((*uint16)(p)))
	case 4:
		return uint64(load((*uint32)(p)))
	}
	return load((*uint64)(p))
}

func (d *device) Write(a mmio.Access) {
	p := unsafe.Pointer(&d.bars[a.BAR][a.Offset])
	switch a.Size {
	case 1:
		store((*uint8)(p), uint8(a.Data))
	case 2:
		store((*uint16)(p), uint16(a.Data))
	case 4:
		store((*uint32)(p), uint32(a.Data))
	default:
		store((*uint64)(p), a.Data)
	}
}

//go:noinline
func load[T any](p *T) T { return *p }

//go:noinline
func store[T any](p *T, v T) { *p = v }

const words = 16

// counted counts accesses: each is an exit, and costs milliseconds in emulation.
type counted struct {
	*device
	exits int
}

func (c *counted) Read(a mmio.Access) uint64 { c.exits++; return c.device.Read(a) }
func (c *counted) Write(a mmio.Access)       { c.exits++; c.device.Write(a) }

// compute says after each round what it took. The part has to be new: what is zero is not
// cleared.
func compute(ctx context.Context, n int) error {
	d, err := plug(slotMediated)
	if err != nil {
		return err
	}
	for i := range n {
		if err := ctx.Err(); err != nil {
			return err
		}
		c := &counted{device: d}
		began := time.Now()
		if err := mmiotest.ComputeWith(guestdriver.Options{Device: c, Fresh: true, Silent: true}, uint64(i), words); err != nil {
			return fmt.Errorf("round %d, after %d exits and %v: %w", i, c.exits, time.Since(began), err)
		}
		if err := json.NewEncoder(os.Stdout).Encode(map[string]float64{"round": float64(i), "exits": float64(c.exits), "seconds": time.Since(began).Seconds()}); err != nil {
			return err
		}
	}
	return nil
}

// Host and guests of the lab share a processor: who computes for long leaves the others some of it.
const (
	pollEvery  = 10 * time.Millisecond
	roundEvery = 200 * time.Millisecond
)

// endure computes until a signal comes, and says each round that was right, and at its end that
// all was. The part has to be new.
func endure(ctx context.Context, n int) error {
	d, err := plug(slotMediated)
	if err != nil {
		return err
	}
	out, rounds := json.NewEncoder(os.Stdout), 0
	o := guestdriver.Options{Device: d, Fresh: true, Silent: true, Idle: func() { _ = wait.For(ctx, pollEvery) }}
	err = mmiotest.Endure(o, uint64(os.Getpid()), n, func(right int) bool {
		rounds = right
		return out.Encode(map[string]int{"round": right}) == nil && wait.For(ctx, roundEvery) == nil
	})
	if err != nil {
		return err
	}
	return out.Encode(map[string]int{"right": rounds})
}

// read reads the id of the mediated GPU.
func read() error {
	d, err := plug(slotMediated)
	if err != nil {
		return err
	}
	fmt.Printf("%#x\n", d.Read(mmio.Access{Size: 4})) //nolint:forbidigo // a program of the lab
	return nil
}

// measure takes the median of the reads of each function. They take turns, so that what
// else the host does meets both.
func measure(_ context.Context, n int) error {
	var took [2][]time.Duration
	var functions [2]*device
	for i, slot := range []int{slotNull, slotMediated} {
		d, err := plug(slot)
		if err != nil {
			return err
		}
		functions[i] = d
	}
	for range n {
		for i, d := range functions {
			began := time.Now()
			d.Read(mmio.Access{Size: 4})
			took[i] = append(took[i], time.Since(began))
		}
	}
	for _, t := range took {
		slices.Sort(t)
	}
	at := func(i, percent int) float64 {
		return float64(took[i][len(took[i])*percent/100]) / float64(time.Microsecond)
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]float64{
		"null_us": at(0, 50), "mediated_us": at(1, 50), "ratio": at(1, 50) / at(0, 50), "null_p90_us": at(0, 90), "mediated_p90_us": at(1, 90),
	})
}

// hostile writes anything anywhere.
func hostile(ctx context.Context, n int) error {
	d, err := plug(slotMediated)
	if err != nil {
		return err
	}
	r := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // test data
	for i := 0; i < n && ctx.Err() == nil; i++ {
		bar := []uint8{0, 0, 0, 1, 3, 5}[r.IntN(6)]
		size := uint8(1) << r.IntN(4)
		off := r.Uint64N(uint64(len(d.bars[bar]))) &^ uint64(size-1)
		switch r.IntN(4) {
		case 0: // registers that channels and page tables hang on
			targets := []uint64{0x1700, 0x1704, 0x1714, 0x2254, 0x2270, 0x2274, 0x2634, 0x3000, 0x3004, 0x100cb8, 0x100cbc}
			bar, size, off = 0, 4, targets[r.IntN(len(targets))]
		case 1: // the window
			bar, size, off = 0, 4, 0x700000+r.Uint64N(1<<20)&^3
		default:
		}
		a := mmio.Access{BAR: bar, Size: size, Offset: off, Data: r.Uint64()}
		if i%3 == 0 {
			d.Read(a)
		} else {
			d.Write(a)
		}
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]int{"accesses": n})
}
