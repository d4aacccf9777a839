package timeshare

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

const (
	us = time.Microsecond
	ms = time.Millisecond
)

// tenant is an owner that submits a burst of commands, waits until they have
// ended, thinks, and submits the next.
type tenant struct {
	weight int
	length func(*rand.Rand) time.Duration
	think  func(*rand.Rand) time.Duration
	burst  int // 0: 1

	id   OwnerID
	at   time.Duration // when it submits next; never: it has commands
	left int           // commands of its burst
	used []time.Duration
}

const never = time.Duration(math.MaxInt64)

// Distributions.

func exactly(d time.Duration) func(*rand.Rand) time.Duration {
	return func(*rand.Rand) time.Duration { return d }
}

// about is uniform within 20 % of a length.
func about(d time.Duration) func(*rand.Rand) time.Duration {
	return func(r *rand.Rand) time.Duration { return time.Duration(float64(d) * (0.8 + 0.4*r.Float64())) }
}

// around has an exponential distribution.
func around(d time.Duration) func(*rand.Rand) time.Duration {
	return func(r *rand.Rand) time.Duration { return time.Duration(float64(d) * r.ExpFloat64()) }
}

func between(from, to time.Duration) func(*rand.Rand) time.Duration {
	return func(r *rand.Rand) time.Duration { return from + time.Duration(float64(to-from)*r.Float64()) }
}

// outcome is what a simulation gave.
type outcome struct {
	mean, worst float64   // Jain's index over windows
	busy        float64   // part of the time
	share       []float64 // of the busy time
	totals      Totals
	kept        float64 // part of the commands, those after which the scheduler said before that it waits
}

// simulate runs tenants on one GPU for a time. Nothing takes time but commands,
// thinking and waits.
func simulate(tb testing.TB, c Config, tenants []tenant, length, window time.Duration) outcome {
	tb.Helper()
	s, err := New(c)
	if err != nil {
		tb.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, 2))
	n := int(length / window)
	all := make([]*tenant, len(tenants))
	for i := range tenants {
		t := tenants[i]
		t.id = OwnerID(fmt.Sprint("t", i))
		t.weight, t.burst = max(t.weight, 1), max(t.burst, 1)
		t.used = make([]time.Duration, n)
		t.at = t.think(r)
		all[i] = &t
		ok(tb, s.Join(0, t.id, t.weight))
	}
	var (
		now     time.Duration
		runner  *tenant
		started time.Duration
		ends    = never
		asks    = never
		ended   int
		kept    int
	)
	for now < length {
		next := min(ends, asks)
		for _, t := range all {
			next = min(next, t.at)
		}
		now = next
		if now >= ends {
			kind, length := s.kind, s.byID[runner.id].length
			usual, _ := length.predict(kind)
			keeps := s.Keeps()
			ok(tb, s.End(now, runner.id, now-started))
			if ended++; keeps {
				kept++
				if d := s.Next(now); now-started <= 2*usual && (d.Action != Wait || d.Owner != runner.id) {
					tb.Fatalf("at %v, %s was to be waited for, and it is %+v", now, runner.id, d)
				}
			}
			for at := started; at < now && int(at/window) < n; {
				to := min(now, at-at%window+window)
				runner.used[at/window] += to - at
				at = to
			}
			if runner.left--; runner.left == 0 {
				runner.at = now + runner.think(r)
			}
			runner, ends = nil, never
		}
		for _, t := range all {
			if now >= t.at {
				ok(tb, s.Submit(now, t.id, 1, t.burst))
				t.at, t.left = never, t.burst
			}
		}
		asks = never
		switch d := s.Next(now); d.Action {
		case Run:
			for _, t := range all {
				if t.id == d.Owner {
					runner = t
				}
			}
			ok(tb, s.Start(now, d.Owner))
			started, ends = now, now+runner.length(r)
		case Wait:
			if d.Until <= now {
				tb.Fatalf("at %v wait until %v", now, d.Until)
			}
			asks = d.Until
		}
	}
	o := judge(all, n, length, s)
	o.kept = float64(kept) / float64(max(ended, 1))
	return o
}

// Before most commands of an owner that is behind have ended, it is clear that it will be waited for.
func TestKeepsIsSaidAhead(t *testing.T) {
	two := []tenant{{length: about(ms), think: around(50 * us)}, {length: about(10 * ms), think: around(50 * us)}}
	for _, p := range everyPolicy {
		o := simulate(t, DefaultConfig(p), two, 20*time.Second, 500*ms)
		if p == Fair && o.kept < 0.6 || p != Fair && o.kept > 0 {
			t.Errorf("%s: after %.0f %% of the commands", p, 100*o.kept)
		}
	}
	three := append(slices.Clone(two), tenant{weight: 3, length: between(100*us, 5*ms), think: around(300 * us), burst: 2})
	if o := simulate(t, DefaultConfig(Fair), three, 20*time.Second, 500*ms); o.kept == 0 {
		t.Error("never, with three")
	}
}

func judge(all []*tenant, n int, length time.Duration, s *Scheduler) outcome {
	o := outcome{worst: 1, share: make([]float64, len(all)), totals: s.Totals()}
	var busy float64
	for w := range n {
		var sum, squares float64
		for i, t := range all {
			x := float64(t.used[w]) / float64(t.weight)
			sum, squares = sum+x, squares+x*x
			o.share[i] += float64(t.used[w])
			busy += float64(t.used[w])
		}
		j := 1.0
		if squares > 0 {
			j = sum * sum / float64(len(all)) / squares
		}
		o.mean += j / float64(n)
		o.worst = min(o.worst, j)
	}
	for i := range o.share {
		o.share[i] /= busy
	}
	o.busy = busy / float64(length)
	return o
}

func ok(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
