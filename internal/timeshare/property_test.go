package timeshare

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var everyPolicy = []Policy{FIFO, Credit, Band, Fair}

// model is what a scheduler has to know, kept in the simplest way.
type model struct {
	config  Config
	now     time.Duration
	pending map[OwnerID]int
	runs    bool    // a command
	running OwnerID // whose
	leaving bool    // its owner has left
	started time.Duration
	busy    time.Duration
	ended   uint64
}

// kind is the sentinel that an error wraps.
func kind(err error) error {
	for _, e := range []error{
		ErrConfig, ErrWeight, ErrOwnerExists, ErrUnknownOwner, ErrTooMany, ErrCount, ErrTime, ErrDuration,
		ErrNothingPending, ErrBusy, ErrNotRunning,
	} {
		if errors.Is(err, e) {
			return e
		}
	}
	return err
}

// refuse is what an event has to be refused for: the faults, of which any may
// be named.
func refuse(t *rapid.T, what string, err error, faults ...error) bool {
	faults = slices.DeleteFunc(faults, func(e error) bool { return e == nil })
	if len(faults) == 0 && err != nil || len(faults) > 0 && !slices.Contains(faults, kind(err)) {
		t.Fatalf("%s: %v, want one of %v", what, err, faults)
	}
	return len(faults) > 0
}

func when(fault bool, err error) error {
	if fault {
		return err
	}
	return nil
}

// TestHostileEventsAreRefusedAndAccountsHold tells two schedulers the same random events, many
// of them impossible. What is impossible is refused, by the right error, and
// changes nothing; the time adds up; decisions can be followed; both
// decide the same, though one is asked twice.
func TestHostileEventsAreRefusedAndAccountsHold(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := DefaultConfig(rapid.SampledFrom(everyPolicy).Draw(t, "policy"))
		c.MaxPending = rapid.SampledFrom([]int{1, 5, 4096}).Draw(t, "max")
		c.Overdue = rapid.SampledFrom([]time.Duration{0, 5 * ms}).Draw(t, "overdue")
		c.AsPublished = rapid.Bool().Draw(t, "as published")
		a, errA := New(c)
		b, errB := New(c)
		if errA != nil || errB != nil {
			t.Fatal(errA, errB)
		}
		m := &model{config: c, pending: map[OwnerID]int{}}
		for range rapid.IntRange(1, 150).Draw(t, "events") {
			if !m.follow(t, a, b) {
				m.event(t, a, b)
			}
			m.check(t, a, b)
		}
	})
}

// follow does what the scheduler says, most of the time.
func (m *model) follow(t *rapid.T, a, b *Scheduler) bool {
	if rapid.IntRange(0, 2).Draw(t, "follow") == 0 {
		return false
	}
	now := m.now
	d := a.Next(now)
	if again := b.Next(now); again != d || b.Next(now) != d {
		t.Fatalf("decided %v and %v", d, again)
	}
	switch d.Action {
	case Run:
		refuse(t, "start", a.Start(now, d.Owner))
		refuse(t, "start", b.Start(now, d.Owner))
		m.pending[d.Owner]--
		m.runs, m.running, m.started = true, d.Owner, now
		return true
	case Busy:
		ran := min(time.Duration(rapid.Int64Range(0, int64(20*ms)).Draw(t, "ran")), MaxTime-now)
		now += ran
		refuse(t, "end", a.End(now, d.Owner, ran))
		refuse(t, "end", b.End(now, d.Owner, ran))
		m.finish(now, ran)
		return true
	}
	return false
}

func (m *model) finish(now, ran time.Duration) {
	m.now = now
	m.busy += ran
	m.ended++
	m.runs, m.leaving = false, false
}

// event is one that may be impossible.
func (m *model) event(t *rapid.T, a, b *Scheduler) {
	id := OwnerID(rapid.SampledFrom([]string{"a", "b", "c", "d", ""}).Draw(t, "owner"))
	if m.runs && rapid.Bool().Draw(t, "of the running one") {
		id = m.running
	}
	now := m.now + time.Duration(rapid.OneOf(
		rapid.Int64Range(0, int64(3*ms)), rapid.Int64Range(0, int64(time.Hour)),
		rapid.SampledFrom([]int64{-1, math.MinInt64 / 4, int64(MaxTime), math.MaxInt64 / 4}),
	).Draw(t, "later"))
	if rapid.IntRange(0, 40).Draw(t, "extreme") == 0 {
		now = time.Duration(rapid.Int64().Draw(t, "time"))
	}
	badTime := when(now < m.now || now > MaxTime, ErrTime)
	n, joined := m.pending[id]
	unknown := when(!joined, ErrUnknownOwner)
	switch rapid.SampledFrom([]string{"join", "leave", "submit", "withdraw", "weigh", "start", "end", "ask"}).Draw(t, "event") {
	case "join":
		weight := rapid.OneOf(rapid.IntRange(1, 4), rapid.SampledFrom([]int{0, -1, MaxWeight, MaxWeight + 1, math.MinInt})).Draw(t, "weight")
		err := a.Join(now, id, weight)
		same(t, err, b.Join(now, id, weight))
		if refuse(t, "join", err, badTime, when(weight < 1 || weight > MaxWeight, ErrWeight), when(joined || m.mine(id), ErrOwnerExists)) {
			return
		}
		m.pending[id] = 0
	case "leave":
		dropped, err := a.Leave(now, id)
		_, errB := b.Leave(now, id)
		same(t, err, errB)
		if refuse(t, "leave", err, badTime, unknown) {
			return
		}
		if dropped != n {
			t.Fatalf("%d commands dropped of %d", dropped, n)
		}
		delete(m.pending, id)
		m.leaving = m.leaving || m.mine(id)
	case "submit":
		count := rapid.OneOf(rapid.IntRange(1, 3), rapid.SampledFrom([]int{0, -1, 5, 5000, math.MaxInt, math.MinInt})).Draw(t, "count")
		k := Kind(rapid.Uint64().Draw(t, "kind"))
		err := a.Submit(now, id, k, count)
		same(t, err, b.Submit(now, id, k, count))
		if refuse(t, "submit", err, badTime, unknown, when(count < 1, ErrCount), when(count > m.config.MaxPending-n, ErrTooMany)) {
			return
		}
		m.pending[id] += count
	case "withdraw":
		index := rapid.OneOf(rapid.IntRange(0, 5), rapid.SampledFrom([]int{-1, 4096, math.MaxInt, math.MinInt})).Draw(t, "index")
		err := a.Withdraw(now, id, index)
		same(t, err, b.Withdraw(now, id, index))
		if refuse(t, "withdraw", err, badTime, unknown, when(joined && (index < 0 || index >= n), ErrNothingPending)) {
			return
		}
		m.pending[id]--
	case "weigh":
		weight := rapid.OneOf(rapid.IntRange(1, 4), rapid.SampledFrom([]int{0, -1, MaxWeight, MaxWeight + 1, math.MinInt})).Draw(t, "weight")
		err := a.SetWeight(now, id, weight)
		same(t, err, b.SetWeight(now, id, weight))
		if refuse(t, "weigh", err, badTime, unknown, when(weight < 1 || weight > MaxWeight, ErrWeight)) {
			return
		}
	case "start":
		err := a.Start(now, id)
		same(t, err, b.Start(now, id))
		if refuse(t, "start", err, badTime, unknown, when(m.runs, ErrBusy), when(joined && n == 0, ErrNothingPending)) {
			return
		}
		m.pending[id]--
		m.runs, m.running, m.started = true, id, now
	case "end":
		ran := rapid.OneOf(rapid.Int64Range(0, int64(3*ms)), rapid.SampledFrom([]int64{-1, math.MinInt64, math.MaxInt64})).Draw(t, "ran")
		err := a.End(now, id, time.Duration(ran))
		same(t, err, b.End(now, id, time.Duration(ran)))
		mine := m.mine(id)
		if refuse(t, "end", err, badTime, when(!joined && !mine, ErrUnknownOwner), when(!mine, ErrNotRunning),
			when(mine && (ran < 0 || time.Duration(ran) > now-m.started), ErrDuration)) {
			return
		}
		m.finish(now, time.Duration(ran))
	case "ask":
		now = min(max(now, m.now), MaxTime) // Next refuses nothing
		if d, other := a.Next(now), b.Next(now); d != other {
			t.Fatalf("decided %v and %v", d, other)
		}
	}
	m.now = now
}

// mine reports whether a command of an owner runs.
func (m *model) mine(id OwnerID) bool { return m.runs && m.running == id }

func same(t *rapid.T, a, b error) {
	if fmt.Sprint(a) != fmt.Sprint(b) {
		t.Fatalf("one says %v, the other %v", a, b)
	}
}

// check compares a scheduler's accounts and decision with the model.
func (m *model) check(t *rapid.T, a, b *Scheduler) {
	d := a.Next(m.now)
	if other := b.Next(m.now); d != other || a.Next(m.now) != d {
		t.Fatalf("decided %v and %v", d, other)
	}
	pending := 0
	var commands uint64
	for id, n := range m.pending {
		pending += n
		u, err := a.Usage(id)
		if err != nil || u.Pending != n || u.Busy < 0 || u.Waited < 0 {
			t.Fatalf("owner %q has %d pending, and %+v, %v", id, n, u, err)
		}
		commands += u.Commands
	}
	if commands > m.ended {
		t.Fatalf("%d commands of %d have ended", commands, m.ended)
	}
	want := Idle
	switch {
	case m.runs:
		want = Busy
	case pending > 0 && d.Action == Wait:
		want = Wait
		if n, ok := m.pending[d.Owner]; !ok || n > 0 && !m.config.AsPublished || d.Until <= m.now || d.Until > m.now+m.config.Wait {
			t.Fatalf("%+v at %v, of %v", d, m.now, m.pending)
		}
	case pending > 0:
		want = Run
		if m.pending[d.Owner] == 0 {
			t.Fatalf("%+v, of %v", d, m.pending)
		}
	}
	if d.Action != want {
		t.Fatalf("decided to %v, want %v", d.Action, want)
	}
	sum := a.Totals()
	all := sum.Busy + sum.Waited + sum.Idle + sum.Other
	if m.runs {
		all += m.now - m.started
	}
	if sum.Busy != m.busy || all != m.now || min(sum.Waited, sum.Idle, sum.Other) < 0 {
		t.Fatalf("at %v, busy for %v: %+v", m.now, m.busy, sum)
	}
}

// TestChargedTimeIsBusyTime lets owners stay, so that what each was charged adds up.
func TestChargedTimeIsBusyTime(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		w.run(t, 200*ms)
		var sum time.Duration
		for _, o := range w.owners {
			u, err := w.s.Usage(o.id)
			if err != nil {
				t.Fatal(err)
			}
			sum += u.Busy
		}
		if sum != w.s.Totals().Busy || sum != w.busy {
			t.Fatalf("charged %v, busy for %v, really %v", sum, w.s.Totals().Busy, w.busy)
		}
	})
}

// world is some owners with random weights, lengths and think times.
type world struct {
	s       *Scheduler
	config  Config
	owners  []*subject
	longest time.Duration // of the commands
	now     time.Duration
	busy    time.Duration
}

type subject struct {
	id      OwnerID
	weight  int
	lengths []time.Duration // in turn
	thinks  []time.Duration
	burst   int

	turn    int
	at      time.Duration // of the next submission
	left    int           // of the burst
	waiting time.Duration // since when the oldest command waits
	delay   time.Duration // the longest one
}

func drawWorld(t *rapid.T) *world {
	c := DefaultConfig(rapid.SampledFrom(everyPolicy).Draw(t, "policy"))
	c.Period, c.MaxLag = 10*ms, 10*ms
	c.WaitCharge = rapid.IntRange(leastWaitCharge, 100).Draw(t, "wait charge")
	s, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{s: s, config: c}
	for i := range rapid.IntRange(2, 4).Draw(t, "owners") {
		o := &subject{
			id:     OwnerID(fmt.Sprint("o", i)),
			weight: rapid.IntRange(1, 3).Draw(t, "weight"),
			burst:  rapid.IntRange(1, 3).Draw(t, "burst"),
		}
		length := rapid.OneOf(rapid.Int64Range(int64(10*us), int64(5*ms)), rapid.Int64Range(int64(5*us), int64(50*us)))
		think := rapid.OneOf(rapid.Int64Range(0, int64(2*ms)), rapid.Int64Range(0, int64(20*ms)), rapid.Just(int64(0)))
		for range 3 {
			o.lengths = append(o.lengths, time.Duration(length.Draw(t, "length")))
			o.thinks = append(o.thinks, time.Duration(think.Draw(t, "think")))
			w.longest = max(w.longest, o.lengths[len(o.lengths)-1])
		}
		if err := s.Join(0, o.id, o.weight); err != nil {
			t.Fatal(err)
		}
		w.owners = append(w.owners, o)
	}
	return w
}

// run does what the scheduler decides.
func (w *world) run(t *rapid.T, until time.Duration) {
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	for w.now < until {
		next := never
		for _, o := range w.owners {
			if o.left == 0 && w.now >= o.at {
				must(w.s.Submit(w.now, o.id, Kind(o.turn), o.burst))
				o.left, o.waiting = o.burst, w.now
			}
			if o.left == 0 {
				next = min(next, o.at)
			}
		}
		d := w.s.Next(w.now)
		switch d.Action {
		case Run:
			o := w.owners[slices.IndexFunc(w.owners, func(o *subject) bool { return o.id == d.Owner })]
			o.delay = max(o.delay, w.now-o.waiting)
			length := o.lengths[o.turn%3]
			must(w.s.Start(w.now, o.id))
			w.advance(t, w.now+length)
			must(w.s.End(w.now, o.id, length))
			w.busy += length
			o.waiting = w.now
			if o.left--; o.left == 0 {
				o.at = w.now + o.thinks[o.turn%3]
			}
			o.turn++
		case Wait:
			w.now = min(next, d.Until)
		case Idle:
			w.now = next
		}
	}
	for _, o := range w.owners {
		if o.left > 0 {
			o.delay = max(o.delay, w.now-o.waiting)
		}
	}
}

// advance lets time pass while a command runs: others submit.
func (w *world) advance(t *rapid.T, to time.Duration) {
	for {
		var first *subject
		for _, o := range w.owners {
			if o.left == 0 && o.at <= to && (first == nil || o.at < first.at) && !w.isRunning(o) {
				first = o
			}
		}
		if first == nil {
			break
		}
		w.now = max(w.now, first.at)
		if err := w.s.Submit(w.now, first.id, Kind(first.turn), first.burst); err != nil {
			t.Fatal(err)
		}
		first.left, first.waiting = first.burst, w.now
	}
	w.now = to
}

func (w *world) isRunning(o *subject) bool { return w.s.running != nil && w.s.running.id == o.id }

// bound is how long the oldest command of an owner may wait.
func (w *world) bound(o *subject) time.Duration {
	n, weights := float64(len(w.owners)), 0
	for _, other := range w.owners {
		weights += other.weight
	}
	part := float64(weights) / float64(o.weight)
	switch w.config.Policy {
	case FIFO: // all that was there before
		var before time.Duration
		for _, other := range w.owners {
			before += time.Duration(other.burst) * w.longest
		}
		return before
	case Fair:
		// Each of the others gets what it has saved up, what the owner is ahead by
		// its last command and a wait, and the rest of a command. While it gets that, all
		// of the time on the clock is charged but a part of the waits.
		owed := n*float64(w.config.MaxLag+2*w.longest) + part*float64(w.longest+w.config.Wait)
		return time.Duration(owed * 100 / float64(w.config.WaitCharge))
	default:
		// Some periods, until the owner has got new time and others have used up theirs.
		return time.Duration(part*(4*float64(w.config.Period)+n*float64(w.longest)) + n*float64(w.config.Wait+w.longest))
	}
}

// TestNobodyStarves: every owner with a command runs one within a bound.
func TestNobodyStarves(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		w.run(t, time.Second)
		for _, o := range w.owners {
			if bound := w.bound(o); o.delay > bound {
				t.Fatalf("%s: a command of %q, weight %d, waited for %v, which is more than %v", w.config.Policy, o.id, o.weight, o.delay, bound)
			}
		}
	})
}
