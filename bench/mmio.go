package main

import (
	"context"
	"fmt"
	"time"

	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/guestdriver"
	"github.com/gpuctl/gpuctl/mmio/mediate"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
	"github.com/gpuctl/gpuctl/mmio/simulate"
)

// madd is the benchmark of the part mmio: three buffers of so many bytes.
const maddBytes = 256 << 10

// mmio counts what a mediated GPU costs in each mode, and measures how it is shared. Nothing
// here depends on the machine but the costs of accesses.
func (b *bench) mmio(ctx context.Context) error {
	calls := map[int]float64{}
	for _, way := range []struct {
		name  string
		mode  mediate.Mode
		batch int
	}{{"eager", mediate.Eager, 0}, {"lazy", mediate.Lazy, 0}, {"para, single", mediate.Para, 1}, {"para, multicall", mediate.Para, 0}} {
		v, err := madd(way.mode, way.batch)
		if err != nil {
			return fmt.Errorf("%s: %w", way.name, err)
		}
		for p := mmio.Init; p < mmio.Phases; p++ {
			c := v.Stats().Counters(p)
			b.report.add(way.name+", "+p.String()+": exits", "", 0, float64(c.Exits()), "", nil)
			if way.mode == mediate.Para {
				b.report.add(way.name+", "+p.String()+": hypercalls", "", 0, float64(c.Hypercalls), "", nil)
			} else {
				b.report.add(way.name+", "+p.String()+": shadow updates", "", 0, float64(c.Scans), "", nil)
			}
		}
		all := v.Stats().Total()
		b.report.add(way.name+": exits but for data", "", 0, float64(all.Exits()-dataExits), "", nil)
		switch way.mode {
		case mediate.Lazy:
			b.report.add("lazy: shadow updates in all", "", 0, float64(all.Scans), "10", func() bool { return all.Scans <= 10 })
		case mediate.Para:
			calls[way.batch] = float64(all.Hypercalls)
		}
	}
	ratio := calls[1] / calls[0]
	b.report.add("hypercalls, single to multicall", "×", 0, ratio, "20", func() bool { return ratio >= 20 })
	if err := b.accesses(ctx); err != nil {
		return err
	}
	for _, n := range []int{2, 4, 8} {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		jain, busy, err := simulate.Share(timeshare.DefaultConfig(timeshare.Fair), n, 10*time.Millisecond, 20*time.Second)
		if err != nil {
			return err
		}
		b.report.add(fmt.Sprintf("%d VMs, 1 and 10 ms: Jain's index", n), "", 0, jain, "0.99", func() bool { return jain >= 0.99 })
		b.report.add(fmt.Sprintf("%d VMs, 1 and 10 ms: GPU busy", n), "%", 0, 100*busy, "90", func() bool { return busy >= 0.9 })
	}
	return nil
}

// dataExits is the loads and stores by which madd copies its input and output, eight
// bytes each: those a GPU without mediation has, too.
const dataExits = 3 * maddBytes / 8

// madd opens a driver, adds two vectors, reads the result and closes.
func madd(mode mediate.Mode, batch int) (*mediate.VGPU, error) {
	m, err := simulate.New(24*simulate.MiB, 8*simulate.MiB, timeshare.DefaultConfig(timeshare.Fair), nil)
	if err != nil {
		return nil, err
	}
	v, err := m.Add(mediate.Request{VM: 1, Name: "bench", Memory: 8 * simulate.MiB, Channels: 1, Mode: mode, Tables: 256})
	if err != nil {
		return nil, err
	}
	d, err := m.Open(v, 1, batch)
	if err != nil {
		return nil, err
	}
	d.Phase(mmio.Init)
	var bufs [3]guestdriver.Buffer
	for i := range bufs {
		if bufs[i], err = d.Alloc(maddBytes); err != nil {
			return nil, err
		}
	}
	const n = maddBytes / 4
	x, y := make([]uint32, n), make([]uint32, n)
	for i := range x {
		x[i], y[i] = uint32(i)*2654435761, uint32(i*i)
	}
	d.Phase(mmio.Copy)
	d.Write(bufs[0], x)
	d.Write(bufs[1], y)
	d.Phase(mmio.Launch)
	if err := d.Launch(nvc0.KernelMadd, bufs[2], bufs[0], bufs[1], 7, n); err != nil {
		return nil, err
	}
	if err := d.Wait(); err != nil {
		return nil, err
	}
	d.Phase(mmio.Copy)
	want := nvc0.Compute(nvc0.KernelMadd, x, y, 7, n)
	for i, w := range d.Read(bufs[2], n) {
		if w != want[i] {
			return nil, fmt.Errorf("element %d is %d, want %d", i, w, want[i])
		}
	}
	if err := d.Close(); err != nil {
		return nil, err
	}
	if len(m.Violations) > 0 {
		return nil, fmt.Errorf("%v", m.Violations[0])
	}
	return v, nil
}

// accesses measures what the router and the mediator take for an access.
func (b *bench) accesses(ctx context.Context) error {
	m, err := simulate.New(24*simulate.MiB, 8*simulate.MiB, timeshare.DefaultConfig(timeshare.Fair), nil)
	if err != nil {
		return err
	}
	v, err := m.Add(mediate.Request{VM: 1, Name: "bench", Memory: 8 * simulate.MiB, Channels: 4, Mode: mediate.Lazy, Tables: 256})
	if err != nil {
		return err
	}
	if _, err := m.Open(v, 1, 0); err != nil {
		return err
	}
	m.Settle()
	m.Router.Write(mmio.Access{VM: 1, Size: 4, Offset: 0x1700, Data: 0x20})
	for _, a := range []struct {
		name string
		mmio.Access
	}{
		{"virtual register, read", mmio.Access{Size: 4, Offset: 0x2140}},
		{"virtual register, write", mmio.Access{Size: 4, Offset: 0x2200, Write: true, Data: 1}},
		{"unknown register, read", mmio.Access{Size: 4, Offset: 0x500000}},
		{"PRAMIN, read of 8 bytes", mmio.Access{Size: 8, Offset: 0x700100}},
		{"PRAMIN, write of 8 bytes", mmio.Access{Size: 8, Offset: 0x700100, Write: true, Data: 7}},
		{"BAR1, read of 8 bytes", mmio.Access{BAR: 1, Size: 8, Offset: 0x200100}},
		{"BAR3, write of 8 bytes", mmio.Access{BAR: 3, Size: 8, Offset: 0x200100, Write: true, Data: 7}},
		{"USERD, read", mmio.Access{BAR: 1, Size: 4, Offset: 0x06000088}},
	} {
		a.VM = 1
		const rounds, each = 2000, 100
		ns := make([]float64, 0, rounds)
		for range rounds {
			begin := time.Now()
			for range each {
				if a.Write {
					m.Router.Write(a.Access)
				} else {
					m.Router.Read(a.Access)
				}
			}
			ns = append(ns, float64(time.Since(begin).Nanoseconds())/each)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		p50 := median(ns)
		b.report.add(a.name+", p50", "ns", 0, p50, "300", func() bool { return p50 <= 300 })
	}
	return nil
}
