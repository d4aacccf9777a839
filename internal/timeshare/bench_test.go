package timeshare

import (
	"fmt"
	"testing"
	"time"
)

// BenchmarkDecision measures Next with 64 owners, every second of which has a
// command.
func BenchmarkDecision(b *testing.B) {
	for _, p := range everyPolicy {
		b.Run(string(p), func(b *testing.B) {
			s, _, now := many(b, p, 64)
			b.ReportAllocs()
			for b.Loop() {
				if d := s.Next(now); d.Action != Run && d.Action != Wait {
					b.Fatal(d)
				}
			}
		})
	}
}

// BenchmarkCommand measures all that is asked and told for a command: Submit, Next,
// Start and End.
func BenchmarkCommand(b *testing.B) {
	for _, p := range everyPolicy {
		b.Run(string(p), func(b *testing.B) {
			s, ids, now := many(b, p, 64)
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				d := s.Next(now)
				for d.Action == Wait {
					now = d.Until
					d = s.Next(now)
				}
				if s.Start(now, d.Owner) != nil {
					b.Fatal(d)
				}
				now += time.Duration(i%7) * 100 * us
				if s.End(now, d.Owner, time.Duration(i%7)*100*us) != nil || s.Submit(now, ids[i%64], Kind(i%5), 1) != nil {
					b.Fatal(d)
				}
				i++
			}
		})
	}
}

func many(tb testing.TB, p Policy, n int) (*Scheduler, []OwnerID, time.Duration) {
	tb.Helper()
	s, err := New(DefaultConfig(p))
	ok(tb, err)
	var ids []OwnerID
	var now time.Duration
	for i := range n {
		id := OwnerID(fmt.Sprint("owner", i))
		ids = append(ids, id)
		ok(tb, s.Join(now, id, 1+i%3))
		ok(tb, s.Submit(now, id, Kind(i), 2-i%2))
		ok(tb, s.Start(now, id))
		now += time.Duration(i) * 10 * us
		ok(tb, s.End(now, id, time.Duration(i)*10*us))
	}
	return s, ids, now
}
