package timeshare

import (
	"errors"
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// bench is a scheduler whose commands a test runs one after the other.
type bench struct {
	*testing.T
	*Scheduler
	at time.Duration
}

func newBench(t *testing.T, c Config) *bench {
	t.Helper()
	s, err := New(c)
	ok(t, err)
	return &bench{T: t, Scheduler: s}
}

func (b *bench) join(id OwnerID, weight int) { b.Helper(); ok(b, b.Join(b.at, id, weight)) }
func (b *bench) submit(id OwnerID, n int)    { b.Helper(); ok(b, b.Submit(b.at, id, 0, n)) }

// does lets an owner's next command start now and run.
func (b *bench) does(id OwnerID, ran time.Duration) {
	b.Helper()
	ok(b, b.Start(b.at, id))
	b.at += ran
	ok(b, b.End(b.at, id, ran))
}

// wants checks a decision.
func (b *bench) wants(want Decision) {
	b.Helper()
	if diff := cmp.Diff(want, b.Next(b.at)); diff != "" {
		b.Fatalf("at %v (-want +got):\n%s", b.at, diff)
	}
}

// runs lets the scheduler choose for a time, each owner's commands of one
// length, and returns how long each ran. While one waits for an owner, nobody comes.
func (b *bench) runs(d time.Duration, length map[OwnerID]time.Duration) map[OwnerID]time.Duration {
	b.Helper()
	used := map[OwnerID]time.Duration{}
	for end := b.at + d; b.at < end; {
		switch next := b.Next(b.at); next.Action {
		case Run:
			b.does(next.Owner, length[next.Owner])
			used[next.Owner] += length[next.Owner]
		case Wait:
			b.at = next.Until
		default:
			b.Fatalf("at %v decided to %v", b.at, next.Action)
		}
	}
	return used
}

func TestConfigThatCantBeWorkedWithIsRefused(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"policy":          func(c *Config) { c.Policy = "lottery" },
		"no policy":       func(c *Config) { c.Policy = "" },
		"period":          func(c *Config) { c.Policy, c.Period = Credit, 0 },
		"negative period": func(c *Config) { c.Period = -1 },
		"wait":            func(c *Config) { c.Wait = 2 * time.Hour },
		"negative wait":   func(c *Config) { c.Wait = math.MinInt64 },
		"lag":             func(c *Config) { c.MaxLag = math.MaxInt64 },
		"overdue":         func(c *Config) { c.Overdue = -1 },
		"free waits":      func(c *Config) { c.WaitCharge = 0 },
		"wait charge":     func(c *Config) { c.WaitCharge = 101 },
		"nothing pending": func(c *Config) { c.MaxPending = 0 },
	} {
		c := DefaultConfig(Fair)
		change(&c)
		if _, err := New(c); !errors.Is(err, ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, p := range everyPolicy {
		if _, err := New(DefaultConfig(p)); err != nil {
			t.Error(err)
		}
	}
}

func TestDecisionsOfEachPolicy(t *testing.T) {
	for _, p := range everyPolicy {
		t.Run(string(p), func(t *testing.T) {
			c := DefaultConfig(p)
			c.Overdue = time.Second
			b := newBench(t, c)
			b.wants(Decision{Action: Idle})
			b.join("a", 1)
			b.wants(Decision{Action: Idle})
			b.submit("a", 2)
			b.wants(Decision{Action: Run, Owner: "a"})
			ok(t, b.Start(b.at, "a"))
			b.wants(Decision{Action: Busy, Owner: "a", Until: time.Second})
			b.at = 3 * ms
			ok(t, b.End(b.at, "a", 2*ms))
			b.wants(Decision{Action: Run, Owner: "a"})
			if n, err := b.Leave(b.at, "a"); n != 1 || err != nil {
				t.Fatal(n, err)
			}
			b.wants(Decision{Action: Idle})
			want := Totals{Busy: 2 * ms, Other: ms}
			if diff := cmp.Diff(want, b.Totals()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestFIFOKeepsTheOrderOfSubmission(t *testing.T) {
	b := newBench(t, DefaultConfig(FIFO))
	b.join("a", 1)
	b.join("b", MaxWeight)
	b.submit("a", 2)
	b.submit("b", 1)
	b.submit("a", 1)
	for _, id := range []OwnerID{"a", "a", "b", "a"} {
		b.wants(Decision{Action: Run, Owner: id})
		b.does(id, ms)
	}
	b.wants(Decision{Action: Idle})
}

func TestOwnersThatAlwaysHaveCommandsShareByWeight(t *testing.T) {
	for _, p := range []Policy{Credit, Band, Fair} {
		b := newBench(t, DefaultConfig(p))
		length := map[OwnerID]time.Duration{"a": ms, "b": 3 * ms, "c": 10 * ms}
		weights := map[OwnerID]int{"a": 1, "b": 2, "c": 5}
		for _, id := range []OwnerID{"a", "b", "c"} {
			b.join(id, weights[id])
			b.submit(id, 4096)
		}
		used := b.runs(16*time.Second, length)
		for id, w := range weights {
			if part := float64(used[id]) / float64(16*time.Second) * 8 / float64(w); part < 0.95 || part > 1.05 {
				t.Errorf("%s: %q has %v, which is %.3f of its share", p, id, used[id], part)
			}
		}
	}
}

// TestFairIsNeverFurtherOffThanTwoCommands is the theorem of start-time fair
// queueing: what two owners that always have commands get in any time differs,
// in proportion to their weights, by no more than a command of each.
func TestFairIsNeverFurtherOffThanTwoCommands(t *testing.T) {
	b := newBench(t, DefaultConfig(Fair))
	length := map[OwnerID]time.Duration{"a": ms, "b": 7 * ms}
	b.join("a", 3)
	b.join("b", 2)
	b.submit("a", 4096)
	b.submit("b", 4096)
	var ahead, least, most time.Duration // a before b, times 6
	for b.at < 5*time.Second {
		used := b.runs(1, length)
		ahead += 2*used["a"] - 3*used["b"]
		least, most = min(least, ahead), max(most, ahead)
	}
	if off, bound := most-least, 2*ms+3*7*ms; off > bound {
		t.Errorf("off by %v, which is more than %v", off, bound)
	}
}

func TestFairWaitsForAnOwnerThatIsBehind(t *testing.T) {
	b := newBench(t, DefaultConfig(Fair))
	b.join("short", 1)
	b.join("long", 1)
	b.submit("short", 1)
	b.does("short", ms)
	b.submit("long", 2)
	b.does("long", 10*ms) // now its commands are known to be long
	b.submit("short", 1)
	b.does("short", ms)
	// Nothing is known of its think time but 10 ms while the other one ran,
	// which counts as a pause of 8 ms: too long to wait for.
	b.wants(Decision{Action: Run, Owner: "long"})
	for range 40 { // it has come back after 100 µs each time since
		b.submit("short", 2)
		b.does("short", us)
		b.does("short", us)
		b.at += 100 * us
	}
	b.submit("short", 1)
	b.does("short", ms)
	end := b.at
	d := b.Next(b.at)
	if d.Action != Wait || d.Owner != "short" || d.Until <= end || d.Until > end+2*ms {
		t.Fatalf("at %v: %+v", b.at, d)
	}
	// It is waited for until then, and not once more.
	b.at = d.Until - 1
	b.wants(d)
	b.at++
	b.wants(Decision{Action: Run, Owner: "long"})
	b.at += time.Second
	b.wants(Decision{Action: Run, Owner: "long"})
	if u, err := b.Usage("short"); err != nil || u.Waited != d.Until-end || b.Totals().Waited != u.Waited {
		t.Errorf("waited for %v: %+v, %v, %+v", d.Until-end, u, err, b.Totals())
	}
	// Once it comes, it runs. A wait is over when it has come, or at its end, even if
	// nobody asks then.
	b.submit("short", 1)
	b.wants(Decision{Action: Run, Owner: "short"})
	before := b.Totals()
	b.does("short", us)
	if d = b.Next(b.at); d.Action != Wait {
		t.Fatalf("%+v", d)
	}
	b.at += 50 * us
	b.submit("short", 1)
	b.at += ms
	b.does("short", us)
	if waited := b.Totals().Waited - before.Waited; waited != 50*us {
		t.Errorf("waited for %v, want 50µs", waited)
	}
	end = b.at
	d = b.Next(b.at)
	b.at = d.Until + ms
	b.wants(Decision{Action: Run, Owner: "long"})
	if waited := b.Totals().Waited - before.Waited; d.Action != Wait || waited != 50*us+d.Until-end {
		t.Errorf("waited for %v, want %v", waited, 50*us+d.Until-end)
	}
}

func TestFairTakesThoseThatAreEvenInOrderOfSubmission(t *testing.T) {
	b := newBench(t, DefaultConfig(Fair))
	b.join("a", 1)
	b.join("b", 1)
	b.submit("b", 1)
	b.submit("a", 1)
	b.wants(Decision{Action: Run, Owner: "b"})
}

func TestRunTimeThatCantBeIsRefused(t *testing.T) {
	b := newBench(t, DefaultConfig(Credit))
	b.join("a", 1)
	b.submit("a", 1)
	ok(t, b.Start(b.at, "a"))
	for _, ran := range []time.Duration{-1, math.MinInt64, ms + 1, math.MaxInt64} {
		if err := b.End(ms, "a", ran); !errors.Is(err, ErrDuration) {
			t.Errorf("%v: %v", ran, err)
		}
	}
	ok(t, b.End(ms, "a", ms))
	if u, err := b.Usage("a"); err != nil || u.Busy != ms || u.Commands != 1 {
		t.Errorf("%+v, %v", u, err)
	}
}

// An owner that did not use its time for 10 s has no 5 s of it.
func TestCreditThatIsNotUsedIsLost(t *testing.T) {
	b := newBench(t, DefaultConfig(Credit))
	length := map[OwnerID]time.Duration{"a": ms, "b": ms}
	b.join("a", 1)
	b.join("b", 1)
	for range 4 {
		b.submit("b", 2500)
		b.runs(2500*ms, length)
	}
	b.submit("a", 1000)
	b.submit("b", 1000)
	if used := b.runs(200*ms, length); used["b"] < 60*ms {
		t.Errorf("b has had %v of 200ms", used["b"])
	}
}

// Nor has one its part of 10 s in which nobody had a command: it has that of one
// period, 15 ms.
func TestCreditOfTimeThatNobodyWantedIsLost(t *testing.T) {
	b := newBench(t, DefaultConfig(Credit))
	length := map[OwnerID]time.Duration{"a": ms, "b": ms}
	b.join("a", 1)
	b.join("b", 1)
	b.at = 10 * time.Second
	b.submit("a", 100)
	b.submit("b", 100)
	if used := b.runs(25*ms, length); used["b"] < 5*ms {
		t.Errorf("b has had %v of the first 25ms", used["b"])
	}
}

// bandWaits is a scheduler that waits for "short".
func bandWaits(t *testing.T) (*bench, Decision) {
	t.Helper()
	b := newBench(t, DefaultConfig(Band))
	b.join("short", 1)
	b.join("long", 1)
	b.join("other", 1)
	b.submit("long", 1) // it needs a period to see who has had more
	b.does("long", 10*ms)
	b.submit("short", 1)
	b.does("short", ms)
	b.at += 500 * ms
	b.submit("long", 2)
	b.submit("short", 1)
	b.Next(b.at)
	b.does("long", 10*ms)
	b.does("short", ms)
	d := b.Next(b.at)
	if d.Action != Wait || d.Owner != "short" || d.Until != b.at+500*us {
		t.Fatalf("%+v", d)
	}
	return b, d
}

func TestBandWaitsForAnOwnerThatHadLess(t *testing.T) {
	b, d := bandWaits(t)
	b.at = d.Until - 1
	b.wants(d)
	b.at++
	b.wants(Decision{Action: Run, Owner: "long"})

	b, _ = bandWaits(t)
	b.at += 100 * us
	b.submit("short", 1)
	b.wants(Decision{Action: Run, Owner: "short"})
}

func TestBandWaitsForNobodyWhoHasLeft(t *testing.T) {
	b, _ := bandWaits(t)
	if _, err := b.Leave(b.at, "short"); err != nil {
		t.Fatal(err)
	}
	b.wants(Decision{Action: Run, Owner: "long"})
}

// What owners have had is compared in proportion to their weights: else Band
// stops to wait for the heavy one as soon as it has had as much as the light one.
func TestBandWaitsByWeight(t *testing.T) {
	o := simulate(t, DefaultConfig(Band), weighted(1, 3, pair(ms, ms, 200*us)), 60*time.Second, 500*ms)
	if o.mean < 0.99 {
		t.Errorf("Jain's index by weight is %.3f", o.mean)
	}
}

// Were the time of waits given to nobody, as published, the owner of long commands
// would be in debt for as long as short ones take to fill periods.
func TestTimeOfBandsWaitsIsGivenOut(t *testing.T) {
	o := simulate(t, DefaultConfig(Band), []tenant{
		{length: exactly(10 * us), think: exactly(450 * us)},
		{length: exactly(100 * ms), think: exactly(0), burst: 4},
	}, 60*time.Second, 500*ms)
	if part := o.busy * o.share[1]; part < 0.3 {
		t.Errorf("the owner of long commands has %.3f of the time", part)
	}
}

func TestFairDoesNotWaitIfWaitingIsOff(t *testing.T) {
	c := DefaultConfig(Fair)
	c.Wait = 0
	o := simulate(t, c, pair(ms, 10*ms, 200*us), 10*time.Second, 500*ms)
	if o.totals.Waited != 0 || o.busy < 0.99 {
		t.Errorf("waited for %v, busy for %.3f", o.totals.Waited, o.busy)
	}
}

// No wait is longer than what it spares the other owner.
func TestFairDoesNotWaitLongerThanTheCommandThatCouldRun(t *testing.T) {
	o := simulate(t, DefaultConfig(Fair), []tenant{
		{length: exactly(100 * us), think: exactly(200 * us)},
		{length: exactly(100 * us), think: exactly(0), burst: 10},
	}, 10*time.Second, 500*ms)
	if o.totals.Waited > 10*ms {
		t.Errorf("waited for %v", o.totals.Waited)
	}
}

// Without the limit the owner that comes back would run alone for 10 s.
func TestIdleOwnerSavesUpNoMoreThanTheLimit(t *testing.T) {
	b := newBench(t, DefaultConfig(Fair))
	length := map[OwnerID]time.Duration{"idle": ms, "busy": ms}
	b.join("idle", 1)
	b.join("busy", 1)
	b.submit("idle", 1)
	b.does("idle", ms)
	for range 4 {
		b.submit("busy", 2500)
		b.runs(2500*ms, length)
	}
	b.submit("busy", 4096)
	b.submit("idle", 4096)
	used := b.runs(time.Second, length)
	if ahead := used["idle"] - used["busy"]; ahead < 90*ms || ahead > 110*ms {
		t.Errorf("the owner that was idle had %v more, want about 100ms", ahead)
	}
}

// A newcomer has saved nothing up, however long ago it joined.
func TestNewcomerSavesNothingUp(t *testing.T) {
	b := newBench(t, DefaultConfig(Fair))
	length := map[OwnerID]time.Duration{"new": ms, "busy": ms}
	b.join("new", 1)
	b.join("busy", 1)
	b.submit("busy", 4000)
	b.runs(time.Second, length)
	b.submit("new", 4000)
	used := b.runs(time.Second, length)
	if ahead := used["new"] - used["busy"]; ahead > 2*ms {
		t.Errorf("the newcomer had %v more", ahead)
	}
}

// Were a newcomer put at the GPU's virtual time, an owner that joins anew for each of
// its commands would run alone: the other one is ahead by its last command.
func TestOwnersThatComeAndGoStarveNobody(t *testing.T) {
	b := newBench(t, DefaultConfig(Fair))
	b.join("stays", 1)
	b.submit("stays", 100)
	b.does("stays", 100*ms)
	ran := 0
	for range 100 {
		b.join("comes and goes", 1)
		b.submit("comes and goes", 1)
		d := b.Next(b.at)
		if d.Action != Run {
			t.Fatalf("decided to %v", d.Action)
		}
		if d.Owner == "stays" {
			ran++
		}
		b.does(d.Owner, 5*ms)
		if _, err := b.Leave(b.at, "comes and goes"); err != nil {
			t.Fatal(err)
		}
	}
	if ran < 50 {
		t.Errorf("the owner that stays ran %d of 100 commands", ran)
	}
}

// The owner runs for 0.1 ms and lets everybody wait for 0.9 ms. Another one always has
// commands. Its part of the time on the clock is no less than the charge
// allows for: charge/(charge+1).
func TestOwnerThatMakesOthersWaitPaysForIt(t *testing.T) {
	for charge, least := range map[int]float64{50: 1. / 3, 100: 1. / 2} {
		c := DefaultConfig(Fair)
		c.WaitCharge = charge
		o := simulate(t, c, []tenant{
			{length: exactly(100 * us), think: exactly(900 * us)},
			{length: exactly(10 * ms), think: exactly(0), burst: 4},
		}, 20*time.Second, 500*ms)
		part := o.busy * o.share[1]
		least -= float64(10*ms) / float64(20*time.Second) // the command that runs at the end
		t.Logf("charge %d %%: the owner that always has commands gets %.3f of the time, the GPU is busy for %.3f", charge, part, o.busy)
		if part < least {
			t.Errorf("charge %d %%: the owner that always has commands gets %.3f of the time, want %.3f", charge, part, least)
		}
	}
}

// Commands that are said to take no time would otherwise run without end.
func TestCommandsThatTakeNoTimeStarveNobody(t *testing.T) {
	for _, p := range everyPolicy {
		b := newBench(t, DefaultConfig(p))
		b.join("free", 1)
		b.join("other", 1)
		b.submit("other", 1)
		b.does("other", ms)
		b.submit("free", 1)
		b.submit("other", 1)
		n := 0
		for ; n < 100_000; n++ {
			d := b.Next(b.at)
			if d.Action == Wait {
				b.at = d.Until
				continue
			}
			ok(t, b.Start(b.at, d.Owner))
			b.submit("free", 1)
			b.at += 10 * us
			ok(t, b.End(b.at, d.Owner, 0))
			if d.Owner == "other" {
				break
			}
		}
		if n == 100_000 {
			t.Errorf("%s: the other owner does not run", p)
		}
	}
}

func TestLengthIsPredictedByKind(t *testing.T) {
	var l lengths
	if _, known := l.predict(1); known {
		t.Error("a length is known before anything ran")
	}
	for range 20 {
		l.learn(1, ms)
		l.learn(2, 10*ms)
	}
	for k, want := range map[Kind]time.Duration{1: ms, 2: 10 * ms} {
		if d, known := l.predict(k); !known || d != want {
			t.Errorf("kind %d: %v, %v", k, d, known)
		}
	}
	if d, known := l.predict(3); !known || d <= ms || d >= 10*ms { // of all
		t.Errorf("unknown kind: %v, %v", d, known)
	}
	for range 40 {
		l.learn(1, 5*ms) // it has changed
	}
	if d, _ := l.predict(1); d < 4900*us || d > 5*ms {
		t.Errorf("after a change: %v", d)
	}
	for k := Kind(10); k < 100_000; k++ { // kinds without end take no memory, and none is taken for another
		l.learn(k, ms)
		if d, known := l.predict(k); !known || d != ms {
			t.Fatalf("kind %d: %v, %v", k, d, known)
		}
	}
	l.all.value = 2 * ms
	for k := Kind(100_000); k < 101_000; k++ {
		if d, known := l.predict(k); !known || d != 2*ms {
			t.Fatalf("kind %d, which never ran: %v, %v", k, d, known)
		}
	}
}

func TestOverdueCommandIsReportedOnce(t *testing.T) {
	c := DefaultConfig(Fair)
	c.Overdue = time.Second
	b := newBench(t, c)
	b.join("a", 1)
	b.submit("a", 2)
	for range 2 { // of each command
		ok(t, b.Start(b.at, "a"))
		since := b.at
		if o, late := b.Overrun(since + time.Second - 1); late {
			t.Errorf("early: %+v", o)
		}
		b.at = since + time.Second
		if o, late := b.Overrun(b.at); !late || o != (Overrun{Owner: "a", Since: since}) {
			t.Errorf("%+v, %v", o, late)
		}
		b.wants(Decision{Action: Busy, Owner: "a"}) // there is no more to wait for
		b.at += time.Second
		if o, late := b.Overrun(b.at); late {
			t.Errorf("again: %+v", o)
		}
		ok(t, b.End(b.at, "a", 2*time.Second))
	}
	if o, late := b.Overrun(b.at); late {
		t.Errorf("nothing runs: %+v", o)
	}
}

func TestOwnerThatLeavesKeepsTheGPUUntilItsCommandEnds(t *testing.T) {
	for _, p := range everyPolicy {
		c := DefaultConfig(p)
		c.Overdue = ms
		b := newBench(t, c)
		b.join("a", 1)
		b.join("b", 1)
		b.submit("a", 3)
		b.submit("b", 1)
		ok(t, b.Start(b.at, "a"))
		if n, err := b.Leave(b.at, "a"); n != 2 || err != nil {
			t.Fatal(n, err)
		}
		if d := b.Next(b.at); d.Action != Busy || d.Owner != "a" {
			t.Errorf("%s: %+v", p, d)
		}
		for what, err := range map[string]error{
			"start":  b.Start(b.at, "b"),
			"join":   b.Join(b.at, "a", 1),
			"submit": b.Submit(b.at, "a", 0, 1),
		} {
			if want := map[string]error{"start": ErrBusy, "join": ErrOwnerExists, "submit": ErrUnknownOwner}[what]; !errors.Is(err, want) {
				t.Errorf("%s: %s: %v", p, what, err)
			}
		}
		b.at += ms
		if o, late := b.Overrun(b.at); !late || o.Owner != "a" {
			t.Errorf("%s: %+v, %v", p, o, late)
		}
		ok(t, b.End(b.at, "a", ms))
		b.wants(Decision{Action: Run, Owner: "b"})
		b.join("a", 1)
		if err := b.End(b.at, "a", 0); !errors.Is(err, ErrNotRunning) {
			t.Errorf("%s: ended twice: %v", p, err)
		}
	}
}

func TestQueueDoesNotGrow(t *testing.T) {
	c := DefaultConfig(FIFO)
	c.MaxPending = 4
	b := newBench(t, c)
	b.join("a", 1)
	b.submit("a", 1)
	b.submit("a", 1)
	for range 10_000 {
		b.submit("a", 1)
		b.does("a", us)
	}
	if n := cap(b.byID["a"].queue); n > 16 {
		t.Errorf("the queue of at most 4 commands has room for %d", n)
	}
	b.submit("a", 2)
	if err := b.Submit(b.at, "a", 0, 1); !errors.Is(err, ErrTooMany) {
		t.Errorf("a fifth command: %v", err)
	}
}

func TestOwnersAreLimited(t *testing.T) {
	b := newBench(t, DefaultConfig(Fair))
	for i := range MaxOwners {
		b.join(OwnerID(rune('a'+i)), 1)
	}
	if err := b.Join(b.at, "one more", 1); !errors.Is(err, ErrTooMany) {
		t.Error(err)
	}
	if _, err := b.Usage("one more"); !errors.Is(err, ErrUnknownOwner) {
		t.Error(err)
	}
}

// What dividing by the weight leaves over is not lost: else commands of less
// than 1.024 µs would cost this owner nothing.
func TestHeavyOwnerPaysForItsShortestCommands(t *testing.T) {
	b := newBench(t, DefaultConfig(Fair))
	b.join("heavy", MaxWeight)
	b.join("light", 1)
	b.submit("heavy", 4096)
	b.submit("light", 3)
	used := b.runs(4000*1023*time.Nanosecond, map[OwnerID]time.Duration{"heavy": 1023 * time.Nanosecond, "light": us})
	if used["light"] < 3*us {
		t.Errorf("%v", used)
	}
}

func TestCommandThatIsWithdrawnDoesNotRun(t *testing.T) {
	b := newBench(t, DefaultConfig(FIFO))
	b.join("a", 1)
	b.join("b", 1)
	b.submit("a", 1)
	b.submit("b", 1)
	b.submit("a", 2)
	ok(t, b.Withdraw(b.at, "a", 0))
	b.wants(Decision{Action: Run, Owner: "b"})
	b.does("b", ms)
	ok(t, b.Withdraw(b.at, "a", 1))
	b.does("a", ms)
	b.wants(Decision{Action: Idle})
	if err := b.Withdraw(b.at, "a", 0); !errors.Is(err, ErrNothingPending) {
		t.Errorf("withdrew a command that has run: %v", err)
	}
}

func TestWeightThatIsChangedCountsFromThenOn(t *testing.T) {
	for _, p := range []Policy{Credit, Fair} {
		b := newBench(t, DefaultConfig(p))
		b.join("a", 1)
		b.join("b", 1)
		b.submit("a", 2000)
		b.submit("b", 2000)
		length := map[OwnerID]time.Duration{"a": ms, "b": ms}
		if u := b.runs(400*ms, length); u["a"] != u["b"] {
			t.Errorf("%s: alike, they have %v", p, u)
		}
		ok(t, b.SetWeight(b.at, "a", 3))
		u := b.runs(400*ms, length)
		if u["a"] < 290*ms || u["a"] > 310*ms {
			t.Errorf("%s: with weights 3:1 they have %v", p, u)
		}
		if use, _ := b.Usage("a"); use.Weight != 3 {
			t.Errorf("%s: its weight is %d", p, use.Weight)
		}
	}
}
