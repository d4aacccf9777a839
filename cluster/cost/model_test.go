package cost

import (
	"math"
	"testing"
	"time"
)

func near(t *testing.T, what string, got, want, percent float64) {
	t.Helper()
	if math.Abs(got-want) > math.Abs(want)*percent/100 {
		t.Errorf("%s: %.4g, want %.4g within %g %%", what, got, want, percent)
	}
}

// The figures that mrCUDA's authors have published, from their own constants.
func TestPublishedConstantsGiveThePublishedFigures(t *testing.T) {
	m := Published()
	const million = 1_000_000
	near(t, "replay of 10⁶ calls, s", m.Replay.Of(million, 0).Seconds(), 2.27, 0.5)
	near(t, "record of 10⁶ calls, s", m.Record.Of(million, 0).Seconds(), 0.283, 0.5)
	near(t, "a call through the helper, µs", float64(m.Helper.Of(million, 0).Microseconds())/million, 9.983, 0.5)
	// Regions below 101 KB take 21 µs each, whatever their size.
	near(t, "a region of 1 KiB, µs", m.Sync.Of(1000, 1<<10).Seconds()*1e3, 21.2, 1)
	near(t, "a region of 100 KB, µs", m.Sync.Of(1000, 100_000).Seconds()*1e3, 26.9, 1)
	// Their measured 1.20 s for 1024 regions of 1 KiB is a whole switch: by the model, the
	// fixed part of the replay is nearly all of it.
	r := Run{Regions: 1024, Size: 1 << 10}
	near(t, "a switch with 1024 regions of 1 KiB, s", m.Switch(r, 1).Seconds(), 1.20, 6)
	near(t, "their memory alone, ms", float64(m.Sync.Of(1024, 1<<10).Microseconds())/1e3, 21.7, 1)
}

// A run like the poster's LAMMPS: remoting makes it five times as long, so that moving it
// home after 25, 50 and 75 % of the work saves 60, 40 and 20 % of the remote run.
func TestLikeThePostersLAMMPSRunMovedHome(t *testing.T) {
	m := Published()
	n := Network{RTT: 20 * time.Microsecond, Rate: 4.779e9}
	r := Run{Compute: 200 * time.Second, Calls: 9_000_000, Bytes: 760 << 30, Regions: 300, Size: 1 << 20}
	away := m.Away(r, n)
	near(t, "remote to local", away.Seconds()/r.Compute.Seconds(), 5, 3)
	for share, want := range map[float64]float64{0.25: -60, 0.5: -40, 0.75: -20} {
		got := 100 * (m.Moved(r, n, share).Seconds()/away.Seconds() - 1)
		if math.Abs(got-want) > 3 {
			t.Errorf("moved home after %g %%: %.1f %%, want %g %%", 100*share, got, want)
		}
	}
	if all := m.Moved(r, n, 0).Seconds(); all < r.Compute.Seconds() || all > r.Compute.Seconds()+2 {
		t.Errorf("moved home at once: %.1f s", all)
	}
}

func TestModelBearsAnyNumbers(t *testing.T) {
	m := Published()
	for _, r := range []Run{{}, {Calls: math.MaxUint64, Bytes: math.MaxUint64, Regions: math.MaxUint64, Size: math.MaxUint64, Compute: math.MaxInt64 / 64}} {
		for _, n := range []Network{{}, {RTT: math.MaxInt64 / 64, Rate: math.SmallestNonzeroFloat64}, {Rate: math.Inf(1)}, {Rate: math.NaN()}} {
			for _, share := range []float64{-1, 0, 0.5, 1, 2} {
				if d := m.Moved(r, n, share); d < 0 {
					t.Errorf("%+v %+v %v: %v", r, n, share, d)
				}
			}
		}
	}
}
