package timeshare

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

type scenario struct {
	name    string
	tenants []tenant
}

func pair(a, b time.Duration, think time.Duration) []tenant {
	return []tenant{{length: about(a), think: around(think)}, {length: about(b), think: around(think)}}
}

func scenarios() []scenario {
	return []scenario{
		{"1 ms beside 10 ms", pair(ms, 10*ms, 200*us)},
		{"1 ms beside 1 ms", pair(ms, ms, 200*us)},
		{"1 ms beside 50 ms", pair(ms, 50*ms, 200*us)},
		{"1 ms beside 100 ms", pair(ms, 100*ms, 200*us)},
		{"1 ms beside 10 ms, think 0", pair(ms, 10*ms, 0)},
		{"1 ms beside 10 ms, think 50 us", pair(ms, 10*ms, 50*us)},
		{"1 ms beside 10 ms, think 100 us", pair(ms, 10*ms, 100*us)},
		{"1 ms beside 10 ms, think 0 to 500 us", []tenant{
			{length: about(ms), think: between(0, 500*us)}, {length: about(10 * ms), think: between(0, 500*us)},
		}},
		{"1 ms beside 10 ms, think 500 us", pair(ms, 10*ms, 500*us)},
		{"1 ms beside 1 ms, weights 1:3", []tenant{
			{weight: 1, length: about(ms), think: around(200 * us)}, {weight: 3, length: about(ms), think: around(200 * us)},
		}},
		{"1 ms beside 10 ms, weights 1:3", []tenant{
			{weight: 1, length: about(ms), think: around(200 * us)}, {weight: 3, length: about(10 * ms), think: around(200 * us)},
		}},
		{"1 ms beside 10 ms, weights 3:1", []tenant{
			{weight: 3, length: about(ms), think: around(200 * us)}, {weight: 1, length: about(10 * ms), think: around(200 * us)},
		}},
		{"1, 5 and 10 ms", []tenant{
			{length: about(ms), think: around(200 * us)}, {length: about(5 * ms), think: around(200 * us)}, {length: about(10 * ms), think: around(200 * us)},
		}},
		{"2 of 1 ms, 2 of 10 ms", append(pair(ms, 10*ms, 200*us), pair(ms, 10*ms, 200*us)...)},
		{"bursts of 20 of 1 ms beside 10 ms", []tenant{
			{length: about(ms), think: around(5 * ms), burst: 20}, {length: about(10 * ms), think: around(200 * us)},
		}},
	}
}

func TestTable(t *testing.T) {
	published := DefaultConfig(Band)
	published.FullWait = true
	var b strings.Builder
	policies := []Config{DefaultConfig(FIFO), DefaultConfig(Credit), published, DefaultConfig(Band), DefaultConfig(Fair)}
	fmt.Fprintf(&b, "| %-38s", "mean Jain, worst Jain, GPU busy %")
	for _, name := range []string{"FIFO", "CREDIT", "BAND as published", "BAND", "FAIR"} {
		fmt.Fprintf(&b, "| %-17s ", name)
	}
	fmt.Fprintln(&b, "|")
	for _, sc := range scenarios() {
		fmt.Fprintf(&b, "| %-38s", sc.name)
		for _, c := range policies {
			o := simulate(t, c, sc.tenants, 120*time.Second, 500*ms)
			fmt.Fprintf(&b, "| %.3f %.3f %5.1f ", o.mean, o.worst, 100*o.busy)
		}
		fmt.Fprintln(&b, "|")
	}
	t.Log("\n" + b.String())
}
