package cost

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestNothingMeasuredIsAWideRangeThatSaysSo(t *testing.T) {
	total, stop := Link{}.Move(1<<30, Here{Total: time.Second, Stop: 10 * time.Millisecond, Measured: true})
	if total.Measured || stop.Measured || stop.High < 10*stop.Low || stop.Low > stop.Likely {
		t.Errorf("%+v %+v", total, stop)
	}
	if p := (Link{}).PerSecond(Activity{Calls: 1000, Waits: -1}); p.Measured || p.Low != 0 || p.High < p.Likely {
		t.Errorf("%+v", p)
	}
}

func TestAFasterLinkCostsLess(t *testing.T) {
	here := Here{Total: time.Second, Stop: 5 * time.Millisecond, Measured: true}
	slow := Link{}.Calibrated(time.Millisecond, 1e8)
	fast := Link{}.Calibrated(50*time.Microsecond, 1e10)
	_, s := slow.Move(4<<30, here)
	_, f := fast.Move(4<<30, here)
	if !s.Measured || !f.Measured || f.Likely >= s.Likely || f.Likely <= here.Stop {
		t.Errorf("%+v %+v", s, f)
	}
	a := Activity{Waits: 2000, Bytes: 5e7}
	if p := slow.PerSecond(a); p.Likely != 2500*time.Millisecond {
		t.Errorf("2000 waits of 1 ms and 50 MB at 100 MB/s: %+v", p)
	}
}

// Moves that behave in one way are predicted within the range after the first of them.
func TestMovesAreLearned(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rtt := time.Duration(rapid.Int64Range(20_000, 5_000_000).Draw(t, "rtt"))
		rate := rapid.Float64Range(1e7, 1e10).Draw(t, "rate")
		fixed := time.Duration(rapid.Int64Range(0, 200_000_000).Draw(t, "fixed"))
		share := rapid.Float64Range(0, 1).Draw(t, "frozen")
		here := Here{Total: time.Second, Stop: 3 * time.Millisecond, Measured: true}
		l := Link{}.Calibrated(rtt, rate)
		for range 3 {
			memory := rapid.Uint64Range(1<<20, 1<<36).Draw(t, "memory")
			frozen := uint64(share * float64(memory))
			actual := here.Stop + Trips*rtt + fixed + time.Duration(float64(frozen)/rate*1e9)
			if _, stop := l.Move(memory, here); l.Moves > 0 && (actual < stop.Low || actual > stop.High) {
				t.Fatalf("%v, predicted %+v", actual, stop)
			}
			l = l.Learn(memory, frozen, here, actual)
		}
	})
}

func TestACalibrationThatFailedChangesNothing(t *testing.T) {
	l := Link{}.Calibrated(time.Millisecond, 1e9)
	for _, rate := range []float64{0, -1, math.NaN(), math.Inf(1)} {
		if got := l.Calibrated(time.Millisecond, rate); got != l {
			t.Errorf("%v: %+v", rate, got)
		}
	}
	if got := l.Calibrated(0, 1e9); got != l {
		t.Errorf("%+v", got)
	}
	if got := l.Calibrated(3*time.Millisecond, 2e9); got.RTT != 2*time.Millisecond || got.Rate != 1.5e9 || got.Samples != 2 {
		t.Errorf("%+v", got)
	}
}
