package mediate

import (
	"context"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/guestdriver"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

// TestVCPUsOfManyVMs has VMs on the host's clock, each with a goroutine of its own as its vCPU, beside
// one whose two vCPUs attack, and one that comes and goes. It is for the race detector.
func TestVCPUsOfManyVMs(t *testing.T) {
	var violated sync.Once
	hw, err := nvc0.New(nvc0.Config{VRAM: 32 * mib, Mediated: true, Violated: func(v nvc0.Violation) {
		violated.Do(func() { t.Errorf("violation: %v", v) })
	}})
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	gpu, err := New(Config{Hardware: hw, Clock: func() time.Duration { return time.Since(begin) }, Policy: timeshare.DefaultConfig(timeshare.Fair), Reserve: 8 * mib})
	if err != nil {
		t.Fatal(err)
	}
	router := &mmio.Router{}
	create := func(vm mmio.VM, mode Mode) *guest {
		g := &guest{bytes: make([]byte, mib)}
		v, err := gpu.Create(Request{VM: vm, Memory: 4 * mib, Channels: 4, Mode: mode, Tables: 200, Guest: g})
		if err != nil {
			t.Error(err)
			return nil
		}
		if err := router.Attach(vm, gpu, gpu.Function(), v.Stats()); err != nil {
			t.Error(err)
		}
		return g
	}
	ctx, stop := context.WithCancel(t.Context())
	var loop, honest, others sync.WaitGroup
	loop.Go(func() { gpu.Run(ctx) })
	for i, mode := range everyMode {
		vm := mmio.VM(i + 1)
		g := create(vm, mode)
		honest.Go(func() {
			o := guestdriver.Options{VM: vm, Device: router, Idle: runtime.Gosched}
			if mode == Para {
				o.Calls, o.Slots = g, 0x10000
			}
			d, err := guestdriver.Open(o)
			if err != nil {
				t.Error(err)
				return
			}
			work(t, d, uint32(vm))
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	create(8, Lazy)
	for i := range uint64(2) {
		others.Go(func() {
			rnd := rand.New(rand.NewPCG(i, 7))
			for ctx.Err() == nil {
				a := mmio.Access{VM: 8, BAR: uint8(rnd.IntN(6)), Size: 4, Offset: rnd.Uint64() % (1 << (8 + rnd.IntN(20))) &^ 3, Data: rnd.Uint64()}
				router.Write(a)
				router.Read(a)
			}
		})
	}
	others.Go(func() {
		for ctx.Err() == nil {
			create(9, Eager)
			router.Write(mmio.Access{VM: 9, Size: 8, Offset: 0x700000, Data: secret})
			router.Reset(9)
			router.Detach(9)
			if err := gpu.Destroy(9); err != nil {
				t.Error(err)
			}
		}
	})
	honest.Wait()
	stop()
	others.Wait()
	loop.Wait()
}
