package turn

import (
	"slices"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/timeshare"
)

// offers ends a turn, and says that offers are understood.
func (p *player) offers() {
	p.t.Helper()
	p.send(Frame{Kind: End, Epoch: p.epoch, Number: p.n, What: EndOffers})
}

// begins begins the turn that was offered.
func (p *player) begins() {
	p.t.Helper()
	p.n++
	p.send(Frame{Kind: Begin, Epoch: p.epoch, Number: p.n, What: 7, Name: "spin"})
}

func fair(c *Config) {
	c.Policy = timeshare.DefaultConfig(timeshare.Fair)
	c.Policy.Wait = time.Second
	c.Policy.MaxLag = time.Minute
}

// passes ends a session's turn, which the other one gets, and asks for the next one.
func (p *player) passes(to *player) {
	p.t.Helper()
	to.ask()
	to.is(asked)
	p.end()
	to.wants(Grant)
	p.ask()
	p.is(asked)
}

// behind returns two sessions, of which b has had the GPU for 300 ms longer. It is a's turn, and b waits.
func (tb *table) behind() (a, b *player) {
	tb.t.Helper()
	a, b = tb.two()
	b.ask()
	b.wants(Grant)
	testkit.Until(tb.t, "b has had so much more", func() error {
		u := b.seat.Use()
		return testkit.Want(u.Keeps >= 300*ms, u)
	})
	b.passes(a)
	return a, b
}

// offered returns two sessions, of which b waits for its turn while the GPU is kept idle for a: for
// some 60 ms, as a usually thinks for 8 ms. Its next turn is offered to a.
func (tb *table) offered() (a, b *player) {
	tb.t.Helper()
	a, b = tb.behind()
	a.offers()
	if f := a.wants(Offer); f.Epoch != a.epoch || f.Number != a.n+1 {
		tb.t.Fatalf("a was offered %+v in epoch %d after turn %d", f, a.epoch, a.n)
	}
	return a, b
}

// state returns what the session does at the arbiter.
func (p *player) state() state {
	p.seat.a.mu.Lock()
	defer p.seat.a.mu.Unlock()
	return p.seat.state
}

// begun waits until the arbiter knows that a turn has begun, and reports whether that was in time.
func (p *player) begun() bool {
	p.t.Helper()
	testkit.Until(p.t, p.name+"'s turn has begun", func() error {
		s := p.state()
		return testkit.Want(s == running || s == lapsed, s)
	})
	return p.state() == running
}

func TestOwnerThatIsWaitedForBeginsWithoutAsking(t *testing.T) {
	for range 20 { // on a busy machine it may come too late
		tb := newTable(t, fair)
		a, b := tb.offered()
		before := a.seat.Use()
		a.begins()
		if !a.begun() {
			continue
		}
		if u := b.seat.Use(); !u.Waiting {
			t.Errorf("b has %+v beside it", u)
		}
		a.end()
		a.is(idle)
		if u := a.seat.Use(); u.Turns != before.Turns+1 || u.Busy <= before.Busy || u.Lapses != before.Lapses {
			t.Errorf("a had %+v, and before %+v", u, before)
		}
		b.wants(Grant)
		return
	}
	t.Error("it always comes too late")
}

// An owner that will be waited for anyway knows that before its turn has ended.
func TestNextTurnIsOfferedAhead(t *testing.T) {
	for range 20 {
		tb := newTable(t, fair)
		a, b := tb.offered()
		a.begins()
		if !a.begun() {
			continue
		}
		a.wants(Offer)
		if s := a.state(); s != running {
			t.Errorf("the next turn is offered when this one is %s", s)
		}
		n := a.seat.Use().Turns
		a.offers()
		a.begins() // nothing is heard in between
		testkit.Until(t, "the next turn has begun, or the offer is void", func() error {
			u := a.seat.Use()
			return testkit.Want(u.Turns == n+1 && a.state() != idle, u)
		})
		if a.state() != running {
			continue
		}
		if u := b.seat.Use(); !u.Waiting {
			t.Errorf("b has %+v beside it", u)
		}
		return
	}
	t.Error("it always comes too late")
}

// What was offered is taken back when another one has its turn. A turn that has begun meanwhile is
// charged to nobody, so there are no offers for some time.
func TestTurnThatBeginsTooLateIsTheLastOneForSomeTime(t *testing.T) {
	tb := newTable(t, fair)
	a, b := tb.offered()
	b.wants(Grant)
	a.begins() // Revoke is under way
	a.wants(Revoke)
	a.is(lapsed)
	if b.state() != running {
		t.Errorf("b is %s", b.state())
	}
	a.offers()
	a.is(idle)
	if u := a.seat.Use(); u.Overrun <= 0 {
		t.Errorf("a had %+v", u)
	}
	tb.Arbiter.mu.Lock()
	if left := a.seat.barred - a.seat.active; left < barredFor {
		t.Errorf("there are offers again after %v", left)
	}
	a.seat.barred += time.Hour // the rest may take that long on a busy machine
	tb.Arbiter.mu.Unlock()
	// As before, but nothing is offered now.
	b.passes(a)
	a.offers()
	b.wants(Grant)
	b.end()
	b.is(idle)
	if len(a.got) > 0 {
		t.Errorf("a was told %+v", <-a.got)
	}
	tb.mu.Lock()
	defer tb.mu.Unlock()
	if len(tb.reports) > 0 {
		t.Errorf("told of %+v", tb.reports)
	}
}

// A turn that has begun too late is told of like any other if it doesn't end, and its session is ended.
func TestTurnThatBeginsTooLateAndDoesNotEndIsToldOf(t *testing.T) {
	tb := newTable(t, fair)
	a, b := tb.offered()
	b.wants(Grant)
	tb.Arbiter.mu.Lock()
	tb.cfg.Limit, tb.cfg.End = 30*ms, 100*ms
	tb.Arbiter.mu.Unlock()
	a.begins()
	a.wants(Revoke)
	a.wants(Lapse)
	a.send(Frame{Kind: Keeps, Epoch: a.epoch, Number: a.n, Name: "forever"})
	testkit.Until(t, "the name of what keeps it", func() error {
		tb.mu.Lock()
		defer tb.mu.Unlock()
		named := func(r Report) bool {
			return r.Event == Overdue && r.Name == "forever" && r.Waiting == 1 && r.For >= 30*ms
		}
		return testkit.Want(slices.ContainsFunc(tb.reports, named), tb.reports)
	})
	if r := tb.told(Endless, "a"); r.For < 100*ms {
		t.Errorf("told of %+v", r)
	}
	a.end()
	tb.told(Ended, "a")
	a.is(idle)
	if u := a.seat.Use(); u.Lapses != 1 {
		t.Errorf("it had %+v", u)
	}
	if b.state() != running {
		t.Errorf("b is %s", b.state())
	}
}

// A session that asks while the offer is under way has asked and begun the same turn.
func TestOfferThatCrossesWhatIsAskedFor(t *testing.T) {
	tb := newTable(t, fair)
	a, b := tb.offered()
	a.ask()
	a.n-- // the same turn
	a.begins()
	switch f := a.next(); f.Kind {
	case Grant:
		a.is(running)
	case Revoke: // on a busy machine
		a.is(lapsed)
		b.wants(Grant)
	default:
		t.Fatalf("a was told %+v", f)
	}
	a.offers()
	a.is(idle)
}

// An executor that does not say that it understands offers gets none.
func TestExecutorOfAnEarlierReleaseIsOfferedNothing(t *testing.T) {
	tb := newTable(t, fair)
	a, b := tb.behind()
	a.end()
	b.wants(Grant) // after the wait for a
	if len(a.got) > 0 {
		t.Errorf("a was told %+v", <-a.got)
	}
}

// Only what was offered may begin without being asked for, and once.
func TestBeginOfWhatWasNotOfferedIsABreach(t *testing.T) {
	for name, do := range map[string]func(a *player){
		"another turn":   func(a *player) { a.n++; a.begins() },
		"the last turn":  func(a *player) { a.n--; a.begins() },
		"one that ended": func(a *player) { a.begins(); a.offers(); a.n--; a.begins() },
	} {
		t.Run(name, func(t *testing.T) {
			tb := newTable(t, fair)
			a, b := tb.offered()
			do(a)
			tb.told(Breach, "a")
			for f := range b.got {
				if f.Kind == Free {
					return
				}
			}
			t.Error("b is not free, and is alone")
		})
	}
}

// An offer ends with its epoch.
func TestOfferEndsWhenTheOtherSessionLeaves(t *testing.T) {
	tb := newTable(t, fair)
	a, b := tb.offered()
	b.conn.Close()
	for f := range a.got {
		if f.Kind == Free {
			a.begins() // under way, and of an earlier epoch
			a.is(free)
			tb.mu.Lock()
			defer tb.mu.Unlock()
			if len(tb.reports) != 1 || tb.reports[0].Event != Gone {
				t.Errorf("told of %+v", tb.reports)
			}
			return
		}
	}
	t.Error("a is alone, and not free")
}
