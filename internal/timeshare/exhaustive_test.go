package timeshare

import (
	"fmt"
	"testing"
	"time"
)

// Every small system: owners whose commands take 1 or 3 ms and who think for 0 or 1 ms
// behind each, in all patterns of a length, with all offsets of 0 or 1 ms, for 30 ms.

const (
	horizon = 30 * ms
	longest = 3 * ms // of the commands
)

// step is one command of a pattern.
type step struct{ runs, thinks time.Duration }

// patterns is all of a length.
func patterns(length int) (all [][]step) {
	if length == 0 {
		return [][]step{nil}
	}
	for _, p := range patterns(length - 1) {
		for _, s := range []step{{ms, 0}, {ms, ms}, {3 * ms, 0}, {3 * ms, ms}} {
			all = append(all, append(append([]step(nil), p...), s))
		}
	}
	return all
}

// actor is an owner that follows a pattern.
type actor struct {
	id      OwnerID
	pattern []step
	n       int           // which command is next
	at      time.Duration // when it is submitted; never: it has one
	since   time.Duration // when it was
	used    time.Duration
	joint   []time.Duration // with each other owner: since when both always had commands; never: not
	low     []time.Duration // the least of used minus the other's since then
	high    []time.Duration
}

// findings is what went wrong in a run, or how close it came.
type findings struct {
	unfair  time.Duration // the largest difference of the time of two who both always had commands
	delay   time.Duration // the longest from a command's submission to its start
	wait    time.Duration // the longest wait on purpose before one start
	saved   time.Duration // the most that an owner came back with
	refused string        // work was there, and neither ran nor was waited with
}

func (f *findings) add(o findings) {
	f.unfair, f.delay = max(f.unfair, o.unfair), max(f.delay, o.delay)
	f.wait, f.saved = max(f.wait, o.wait), max(f.saved, o.saved)
	if f.refused == "" {
		f.refused = o.refused
	}
}

// observe keeps the difference of each pair that always had commands.
func observe(all []*actor, f *findings) {
	for i, a := range all {
		for j, b := range all[:i] {
			if a.at != never || b.at != never {
				a.joint[j] = never
				continue
			}
			d := a.used - b.used
			if a.joint[j] == never {
				a.joint[j], a.low[j], a.high[j] = 0, d, d
			}
			a.low[j], a.high[j] = min(a.low[j], d), max(a.high[j], d)
			f.unfair = max(f.unfair, a.high[j]-a.low[j])
		}
	}
}

// play runs one system.
func play(tb testing.TB, c Config, ps [][]step, offsets int) (f findings) {
	s, err := New(c)
	ok(tb, err)
	var all []*actor
	for i, p := range ps {
		a := &actor{id: OwnerID(rune('a' + i)), pattern: p, at: time.Duration(offsets>>i&1) * ms}
		a.joint, a.low, a.high = make([]time.Duration, i), make([]time.Duration, i), make([]time.Duration, i)
		for j := range a.joint {
			a.joint[j] = never
		}
		all = append(all, a)
		ok(tb, s.Join(0, a.id, 1))
	}
	now, waited := time.Duration(0), time.Duration(0)
	for now < horizon {
		submit(tb, s, all, now, &f)
		observe(all, &f)
		next := never
		for _, a := range all {
			next = min(next, a.at)
		}
		d := s.Next(now)
		switch d.Action {
		case Run:
			a := all[d.Owner[0]-'a']
			f.delay, f.wait = max(f.delay, now-a.since), max(f.wait, waited)
			waited = 0
			now = serve(tb, s, all, a, now, &f)
		case Wait:
			to := min(next, d.Until)
			waited += to - now
			now = to
		case Idle:
			if next == never {
				f.refused = "idle, and all have commands"
				return f
			}
			now = next
		}
	}
	return f
}

func submit(tb testing.TB, s *Scheduler, all []*actor, now time.Duration, f *findings) {
	for _, a := range all {
		if a.at > now {
			continue
		}
		ok(tb, s.Submit(a.at, a.id, 1, 1))
		a.since, a.at = a.at, never
		if p, is := s.policy.(*fair); is {
			f.saved = max(f.saved, p.virtual-s.byID[a.id].virtual)
		}
	}
}

// serve runs a command to its end; others submit meanwhile.
func serve(tb testing.TB, s *Scheduler, all []*actor, a *actor, now time.Duration, f *findings) time.Duration {
	p := a.pattern[a.n%len(a.pattern)]
	a.n++
	ok(tb, s.Start(now, a.id))
	end := now + p.runs
	for {
		first := end
		for _, o := range all {
			first = min(first, o.at)
		}
		if first >= end {
			break
		}
		submit(tb, s, all, first, f)
		observe(all, f)
	}
	a.used += p.runs
	ok(tb, s.End(end, a.id, p.runs))
	if a.at = end + p.thinks; p.thinks == 0 { // it comes back before anybody is asked
		submit(tb, s, all, end, f)
	}
	observe(all, f)
	return end
}

// everySystem runs all systems of n owners with patterns of a length.
func everySystem(tb testing.TB, c Config, n, length int) (f findings, runs int) {
	all := patterns(length)
	ps := make([][]step, n)
	var choose func(i int)
	choose = func(i int) {
		if i == n {
			for offsets := range 1 << n {
				f.add(play(tb, c, ps, offsets))
				runs++
			}
			return
		}
		for _, p := range all {
			ps[i] = p
			choose(i + 1)
		}
	}
	choose(0)
	return f, runs
}

// TestEverySmallSystem holds FAIR to its bounds in every small system, and shows that CREDIT
// and BAND do not keep to the second:
// (a) nothing is idle while there is work, but for waits of at most Wait before a start;
// (b) two owners that always have commands differ by one command of each, over any interval;
// (c) a command starts within the longest commands of all and a wait, and what others have saved up;
// (d) an owner that was away comes back with no more than MaxLag.
func TestEverySmallSystem(t *testing.T) {
	if testing.Short() {
		t.Skip("many systems")
	}
	for _, size := range []struct{ owners, length int }{{1, 2}, {2, 3}, {3, 2}} {
		for _, p := range everyPolicy {
			c := DefaultConfig(p)
			c.MaxLag = longest
			if p != Fair {
				c.Period, c.Wait = 5*ms, min(c.Wait*4, 2*ms) // several periods, and waits that are long enough to be of use
			}
			f, runs := everySystem(t, c, size.owners, size.length)
			t.Logf("%d owners, %-6s: %6d systems, %v", size.owners, p, runs, fmt.Sprintf("unfair %v, delay %v, wait %v, saved %v", f.unfair, f.delay, f.wait, f.saved))
			if f.refused != "" || f.wait > c.Wait {
				t.Errorf("%s, %d owners: (a) %s, waited %v", p, size.owners, f.refused, f.wait)
			}
			if p != Fair {
				if size.owners > 1 && f.unfair <= 2*longest && p != FIFO {
					t.Errorf("%s, %d owners: keeps to (b), which it is not known for", p, size.owners)
				}
				continue
			}
			n := int64(size.owners)
			if f.unfair > 2*longest {
				t.Errorf("%d owners: (b) the difference was %v, want %v", size.owners, f.unfair, 2*longest)
			}
			if bound := time.Duration(n*int64(longest)) + c.Wait + time.Duration((n-1)*int64(c.MaxLag)); f.delay > bound {
				t.Errorf("%d owners: (c) a command waited for %v, want %v", size.owners, f.delay, bound)
			}
			if f.saved > c.MaxLag {
				t.Errorf("%d owners: (d) one came back with %v, want %v", size.owners, f.saved, c.MaxLag)
			}
		}
	}
}
