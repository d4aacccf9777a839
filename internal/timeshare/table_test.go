package timeshare

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"
)

// scenario is who shares the GPU, and what Fair has to reach.
type scenario struct {
	name    string
	tenants []tenant
	jain    float64 // mean of windows of 500 ms, at least
	busy    float64 // at least
	limit   float64 // what no scheduler exceeds that keeps to a mean of 0.99, 0: not computed
}

// pair is two owners with commands of about these lengths.
func pair(a, b, think time.Duration) []tenant {
	return []tenant{{length: about(a), think: around(think)}, {length: about(b), think: around(think)}}
}

// weighted gives weights to a pair.
func weighted(wa, wb int, p []tenant) []tenant {
	p[0].weight, p[1].weight = wa, wb
	return p
}

// limit is the largest part of the time that a GPU is busy if commands of length
// a run beside those of length b, whose owners have such weights and think for such a
// time, and Jain's index is 0.99: the owner of the short ones runs so many of
// them after each long one, and the GPU is idle while it thinks, but
// for the once while the long one runs.
func limit(a, b, think time.Duration, wa, wb int) float64 {
	x := (1 - math.Sqrt(1/0.99-1)) / 2 // a's part in proportion to weights: 1/(2(x²+(1-x)²)) = 0.99
	n := x / (1 - x) * float64(wa) / float64(wb) * float64(b) / float64(a)
	work := n*float64(a) + float64(b)
	return work / (work + max(n-1, 0)*float64(think))
}

func scenarios() []scenario {
	const usual = 200 * us
	pairs := func(name string, a, b, think time.Duration) scenario {
		return scenario{name, pair(a, b, think), 0.99, 0.9, limit(a, b, think, 1, 1)}
	}
	uniform := []tenant{
		{length: about(ms), think: between(0, 500*us)},
		{length: about(10 * ms), think: between(0, 500*us)},
	}
	three := []tenant{
		{length: about(ms), think: around(usual)},
		{length: about(5 * ms), think: around(usual)},
		{length: about(10 * ms), think: around(usual)},
	}
	bursts := []tenant{
		{length: about(ms), think: around(5 * ms), burst: 20},
		{length: about(10 * ms), think: around(usual)},
	}
	slow := pairs("1 ms beside 10 ms, think 500 us", ms, 10*ms, 500*us)
	slow.busy = 0.83 // and the limit is 0.835
	coarse := pairs("1 ms beside 100 ms", ms, 100*ms, usual)
	coarse.jain = 0.985 // ideal turns have 0.991, as a window has no whole number of them
	return []scenario{
		pairs("1 ms beside 10 ms", ms, 10*ms, usual),
		pairs("1 ms beside 1 ms", ms, ms, usual),
		pairs("1 ms beside 50 ms", ms, 50*ms, usual),
		coarse,
		pairs("1 ms beside 10 ms, think 0", ms, 10*ms, 0),
		pairs("1 ms beside 10 ms, think 50 us", ms, 10*ms, 50*us),
		pairs("1 ms beside 10 ms, think 100 us", ms, 10*ms, 100*us),
		{"1 ms beside 10 ms, think 0 to 500 us", uniform, 0.99, 0.9, limit(ms, 10*ms, 250*us, 1, 1)},
		slow,
		{"1 ms beside 1 ms, weights 1:3", weighted(1, 3, pair(ms, ms, usual)), 0.99, 0.9, limit(ms, ms, usual, 3, 1)},
		{"1 ms beside 10 ms, weights 1:3", weighted(1, 3, pair(ms, 10*ms, usual)), 0.99, 0.9, limit(ms, 10*ms, usual, 1, 3)},
		{"1 ms beside 10 ms, weights 3:1", weighted(3, 1, pair(ms, 10*ms, usual)), 0.99, 0.87, limit(ms, 10*ms, usual, 3, 1)}, // and the limit is 0.880
		{"1, 5 and 10 ms", three, 0.99, 0.9, 0},
		{"2 of 1 ms, 2 of 10 ms", append(pair(ms, 10*ms, usual), pair(ms, 10*ms, usual)...), 0.99, 0.9, 0},
		{"bursts of 20 of 1 ms beside 10 ms", bursts, 0.99, 0.9, 0},
	}
}

// asPublished is BAND as GPUvm's code has it.
func asPublished() Config {
	c := DefaultConfig(Band)
	c.AsPublished = true
	return c
}

// TestTable prints what the policies reach, and checks what Fair has to.
func TestTable(t *testing.T) {
	var b strings.Builder
	policies := []struct {
		name   string
		config Config
	}{
		{"FIFO", DefaultConfig(FIFO)},
		{"CREDIT", DefaultConfig(Credit)},
		{"BAND as published", asPublished()},
		{"BAND", DefaultConfig(Band)},
		{"FAIR", DefaultConfig(Fair)},
	}
	fmt.Fprintf(&b, "| %-36s ", "mean Jain, worst Jain, GPU busy %")
	for _, p := range policies {
		fmt.Fprintf(&b, "| %-17s ", p.name)
	}
	fmt.Fprintln(&b, "| limit |")
	for _, sc := range scenarios() {
		fmt.Fprintf(&b, "| %-36s ", sc.name)
		for _, p := range policies {
			o := simulate(t, p.config, sc.tenants, 120*time.Second, 500*ms)
			fmt.Fprintf(&b, "| %.3f %.3f %5.1f ", o.mean, o.worst, 100*o.busy)
			if p.config.Policy == Fair && (o.mean < sc.jain || o.busy < sc.busy) {
				t.Errorf("%s: Jain %.4f, want %.3f; busy %.4f, want %.3f", sc.name, o.mean, sc.jain, o.busy, sc.busy)
			}
		}
		if sc.limit == 0 {
			fmt.Fprintln(&b, "|   –   |")
		} else {
			fmt.Fprintf(&b, "| %5.1f |\n", 100*sc.limit)
		}
	}
	t.Log("\n" + b.String())
}

// TestReplay replays GPUvm's set-up: one command of each owner at a time, half of the
// owners with commands of 1 ms, half with long ones, lengths within 20 %, an
// exponential think time of 0.2 ms on average, 120 s, windows of 500 ms.
// The figures to compare with are those of a replay of the published code, made
// independently of this package.
func TestReplay(t *testing.T) {
	var b strings.Builder
	fmt.Fprintln(&b, "| L | owners | BAND as published: Jain, busy % (reference) | FAIR: Jain, busy % (reference) |")
	for _, r := range []struct {
		long                 time.Duration
		owners               int
		band, bandBusy       float64
		fair, fairBusy       float64
		bandNear, fairAtMost float64 // how far Jain's index may be from the reference
	}{
		{10 * ms, 2, 0.994, 0.815, 1.000, 0.918, 0.002, 0.003},
		{10 * ms, 4, 0.998, 0.985, 0.999, 0.994, 0.002, 0.003},
		{10 * ms, 8, 0.996, 0.984, 0.998, 1.000, 0.002, 0.003},
		{50 * ms, 2, 0.705, 0.920, 0.996, 0.911, 0.01, 0.003},
		{50 * ms, 4, 0.980, 0.998, 0.981, 0.993, 0.01, 0.003},
		{50 * ms, 8, 0.913, 0.990, 0.944, 1.000, 0.01, 0.003},
	} {
		var tenants []tenant
		for range r.owners / 2 {
			tenants = append(tenants, pair(ms, r.long, 200*us)...)
		}
		band := simulate(t, asPublished(), tenants, 120*time.Second, 500*ms)
		fair := simulate(t, DefaultConfig(Fair), tenants, 120*time.Second, 500*ms)
		fmt.Fprintf(&b, "| %v | %d | %.3f %.1f (%.3f %.1f) | %.3f %.1f (%.3f %.1f) |\n", r.long, r.owners,
			band.mean, 100*band.busy, r.band, 100*r.bandBusy, fair.mean, 100*fair.busy, r.fair, 100*r.fairBusy)
		if math.Abs(band.mean-r.band) > r.bandNear || math.Abs(band.busy-r.bandBusy) > 0.005 {
			t.Errorf("%v, %d owners: BAND has Jain %.4f and is busy for %.4f, want %.3f and %.3f", r.long, r.owners, band.mean, band.busy, r.band, r.bandBusy)
		}
		if fair.mean < r.fair-r.fairAtMost || fair.busy < r.fairBusy-0.003 {
			t.Errorf("%v, %d owners: Fair has Jain %.4f and is busy for %.4f, want %.3f and %.3f", r.long, r.owners, fair.mean, fair.busy, r.fair, r.fairBusy)
		}
	}
	t.Log("\n" + b.String())
}
