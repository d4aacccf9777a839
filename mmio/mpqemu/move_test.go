package mpqemu_test

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/guestdriver"
	"github.com/gpuctl/gpuctl/mmio/mediate"
	"github.com/gpuctl/gpuctl/mmio/mmiotest"
	"github.com/gpuctl/gpuctl/mmio/mpqemu"
	"github.com/gpuctl/gpuctl/mmio/server"
)

// moving is a device that is a GPU, and another one after a move.
type moving struct {
	mu sync.RWMutex
	d  mmio.Device
}

func (m *moving) Read(a mmio.Access) uint64 {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.d.Read(a)
}

func (m *moving) Write(a mmio.Access) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	m.d.Write(a)
}

// stepping is a machine in which something happens after every so many accesses.
type stepping struct {
	*machine
	n    int
	step func()
}

func (s *stepping) Read(a mmio.Access) uint64 {
	s.next()
	return s.machine.Read(a)
}

func (s *stepping) Write(a mmio.Access) {
	s.next()
	s.machine.Write(a)
}

func (s *stepping) next() {
	if s.n++; s.n%97 == 0 {
		s.step()
	}
}

// TestDriverGoesOnWhenItsGPUMoves moves the contents of a machine's part from one GPU to another
// and back, wherever the machine's driver is then, through a real QEMU.
func TestDriverGoesOnWhenItsGPUMoves(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var worked sync.WaitGroup
	t.Cleanup(func() { cancel(); worked.Wait() })
	var gpus [2]*mediate.GPU
	for i := range gpus {
		var err error
		gpus[i], err = server.NewGPU(server.Model{Memory: 16 << 20, Parts: 4, Policy: timeshare.Fair}, func(e mediate.Event) {
			if e.Reason != 0 || e.Name == "hardware" {
				t.Error(e)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		worked.Go(func() { gpus[i].Run(ctx) })
	}
	ours, theirs := pair(t)
	s, err := mpqemu.New(ours, 1, gpus[0].Function())
	if err != nil {
		t.Fatal(err)
	}
	request := mediate.Request{VM: 1, Name: "vm", Memory: 4 << 20, Channels: 4, Mode: mediate.Lazy, Tables: 1024, Guest: s.Guest()}
	if _, err := gpus[0].Create(request); err != nil {
		t.Fatal(err)
	}
	d := &moving{d: gpus[0]}
	worked.Go(func() { _ = s.Serve(ctx, d) })
	m := start(t, theirs)
	for bar, at := range bases {
		if at != 0 {
			m.setConfig(uint32(0x10+4*bar), uint32(at))
		}
	}
	m.setConfig(4, 6)
	moves := 0
	move := func() {
		from, to := gpus[moves%2], gpus[1-moves%2]
		if err := from.Pause(1); err != nil {
			t.Fatal(err)
		}
		testkit.Until(t, "the GPU is at rest", func() error {
			if err := from.AtRest(1); !errors.Is(err, mediate.ErrBusy) {
				return err
			}
			return mediate.ErrBusy
		})
		var b bytes.Buffer
		d.mu.Lock()
		defer d.mu.Unlock()
		err := from.Save(1, &b)
		if err == nil {
			_, err = to.Restore(request, &b)
		}
		if err == nil {
			err = errors.Join(from.Destroy(1), to.Resume(1))
		}
		if err != nil {
			t.Fatal(err)
		}
		d.d = to
		moves++
	}
	for round := range uint64(3) {
		o := guestdriver.Options{Device: &stepping{m, 0, move}, Fresh: true}
		if err := mmiotest.ComputeWith(o, round, 16); err != nil {
			t.Fatalf("round %d, after %d moves: %v", round, moves, err)
		}
	}
	if moves < 6 {
		t.Errorf("it has moved %d times", moves)
	}
}
