package mmio

import (
	"errors"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

// ram is a device of 4 KiB of memory that fails the test on what a router must not let through.
type ram struct {
	t     testing.TB
	bytes [4096]byte
	stop  chan struct{} // closed when a reset may end
	begun chan struct{}
}

func (r *ram) Read(a Access) (v uint64) {
	r.look(a)
	for i := range a.Size {
		v |= uint64(r.bytes[a.Offset+uint64(i)]) << (8 * i)
	}
	return v
}

func (r *ram) Write(a Access) {
	r.look(a)
	for i := range a.Size {
		r.bytes[a.Offset+uint64(i)] = byte(a.Data >> (8 * i))
	}
}

func (r *ram) Reset(VM) {
	close(r.begun)
	<-r.stop
	r.bytes = [4096]byte{}
}

func (r *ram) look(a Access) {
	if a.VM != 7 || a.BAR != 1 || a.Offset+uint64(a.Size) > 4096 || a.Offset%uint64(a.Size) != 0 || a.Data > Ones(a.Size) {
		r.t.Errorf("got through: %v", a)
	}
}

var function = Function{BARs: [MaxBARs]Window{1: {Size: 4096}}}

// TestMalformedAccessesReachNoDevice: P8 for what is malformed, and for sizes: eight
// bytes are twice four.
func TestMalformedAccessesReachNoDevice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var r Router
		d := &ram{t: &testing.T{}}
		if err := r.Attach(7, d, function, nil); err != nil {
			t.Fatal(err)
		}
		stats, _ := r.Stats(7)
		for range 20 {
			a := Access{
				VM:     VM(rapid.SampledFrom([]uint32{7, 7, 7, 8}).Draw(t, "vm")),
				BAR:    rapid.SampledFrom([]uint8{1, 1, 1, 0, 5, 6, 255}).Draw(t, "bar"),
				Size:   rapid.SampledFrom([]uint8{1, 2, 4, 8, 0, 3, 16, 255}).Draw(t, "size"),
				Offset: rapid.OneOf(rapid.Uint64Range(0, 5000), rapid.Uint64()).Draw(t, "offset"),
				Data:   rapid.Uint64().Draw(t, "data"),
			}
			good := a.VM == 7 && a.BAR == 1 && (a.Size == 1 || a.Size == 2 || a.Size == 4 || a.Size == 8) && a.Offset%uint64(a.Size) == 0 && a.Offset < 4096
			before, lost := stats.Total().Refusals(), r.lost.Total().Refusals()
			r.Write(a)
			if v := r.Read(a); good && v != a.Data&Ones(a.Size) || !good && v != Ones(a.Size) {
				t.Fatalf("%v: read %#x", a, v)
			}
			refused := stats.Total().Refusals() - before + r.lost.Total().Refusals() - lost
			if good && refused != 0 || !good && refused != 2 {
				t.Fatalf("%v: %d refused", a, refused)
			}
		}
		if d.t.(*testing.T).Failed() {
			t.Fatal("something malformed got through")
		}
	})
}

func TestAccessesDuringAResetAreRefusedAndCounted(t *testing.T) {
	var r Router
	d := &ram{t: t, stop: make(chan struct{}), begun: make(chan struct{})}
	if err := r.Attach(7, d, function, nil); err != nil {
		t.Fatal(err)
	}
	r.Write(Access{VM: 7, BAR: 1, Size: 4, Offset: 8, Data: 5})
	var done sync.WaitGroup
	done.Go(func() { r.Reset(7) })
	<-d.begun
	r.Write(Access{VM: 7, BAR: 1, Size: 4, Offset: 12, Data: 5})
	if v := r.Read(Access{VM: 7, BAR: 1, Size: 4, Offset: 8}); v != 0xffffffff {
		t.Errorf("read %#x during a reset", v)
	}
	close(d.stop)
	done.Wait()
	if v := r.Read(Access{VM: 7, BAR: 1, Size: 8, Offset: 8}); v != 0 {
		t.Errorf("read %#x after it", v)
	}
	s, _ := r.Stats(7)
	if n := s.Total().Refused[Resetting]; n != 2 {
		t.Errorf("%d refusals counted", n)
	}
}

func TestDetachedDeviceIsNotReached(t *testing.T) {
	var r Router
	if err := r.Attach(7, &ram{t: t}, function, nil); err != nil {
		t.Fatal(err)
	}
	if err := r.Attach(7, &ram{t: t}, function, nil); !errors.Is(err, ErrAttached) {
		t.Errorf("attached twice: %v", err)
	}
	r.Detach(7)
	r.Detach(7)
	if v := r.Read(Access{VM: 7, BAR: 1, Size: 1}); v != 0xff {
		t.Errorf("read %#x", v)
	}
	if err := r.Attach(7, &ram{t: t}, Function{BARs: [MaxBARs]Window{{Size: 48}}}, nil); !errors.Is(err, ErrFunction) {
		t.Errorf("a BAR of 48 bytes: %v", err)
	}
}

func TestEveryReasonAndPhaseHasAName(t *testing.T) {
	seen := map[string]bool{}
	for r := range Reason(Reasons) {
		if n := r.String(); n == "" || seen[n] {
			t.Errorf("reason %d is called %q", r, n)
		} else {
			seen[n] = true
		}
	}
	var s Stats
	s.SetPhase(200)
	if s.Phase() != Other {
		t.Error("an unknown phase")
	}
}

// TestResetOfADetachedDeviceEnds: a reset that was under way when the device was taken away is
// done with, and does not reach it.
func TestResetOfADetachedDeviceEnds(t *testing.T) {
	for range 200 {
		var r Router
		d := &ram{t: t, stop: make(chan struct{}), begun: make(chan struct{})}
		close(d.stop)
		if err := r.Attach(7, d, function, nil); err != nil {
			t.Fatal(err)
		}
		var done sync.WaitGroup
		done.Go(func() { r.Detach(7) })
		done.Go(func() { r.Reset(7) })
		done.Go(func() { r.Write(Access{VM: 7, BAR: 1, Size: 4, Offset: 8, Data: 5}) })
		done.Wait()
	}
}
