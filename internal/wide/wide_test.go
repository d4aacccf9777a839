package wide

import (
	"errors"
	"sync/atomic"
	"testing"
)

func TestEachByteIsWorkedOnOnce(t *testing.T) {
	for _, x := range [][2]int{{0, 10}, {1, 10}, {10, 10}, {11, 10}, {1 << 16, 7}} {
		done := make([]atomic.Int32, x[0])
		Do(x[0], x[1], func(off, end int) {
			if off%x[1] != 0 || end-off > x[1] {
				t.Errorf("%v: from %d to %d", x, off, end)
			}
			for i := off; i < end; i++ {
				done[i].Add(1)
			}
		})
		for i := range done {
			if n := done[i].Load(); n != 1 {
				t.Fatalf("%v: byte %d %d times", x, i, n)
			}
		}
	}
}

func TestAnErrorOfAPartIsReturned(t *testing.T) {
	broken := errors.New("broken")
	var parts atomic.Int32
	err := Try(100, 10, func(off, _ int) error {
		parts.Add(1)
		if off == 50 {
			return broken
		}
		return nil
	})
	if !errors.Is(err, broken) || parts.Load() != 10 {
		t.Errorf("%v after %d parts", err, parts.Load())
	}
	if err := Try(100, 10, func(int, int) error { return nil }); err != nil {
		t.Error(err)
	}
}
