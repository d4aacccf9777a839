package turn

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/internal/timeshare"
)

// Config is how GPUs are shared.
type Config struct {
	// Policy decides who is next. Its Overdue is not used.
	Policy timeshare.Config
	// Limit is how long a turn may last while others wait. Then it is taken back, and
	// others run beside what has not ended.
	Limit time.Duration
	// End is after how long a turn that was taken back, and has not ended since, is
	// reported as Endless, if others have wanted the GPU in the second half of that time. 0: never.
	End time.Duration
	// Report is told what happens. It may not call the Arbiter. nil: nobody is.
	Report func(Report)
	Log    *slog.Logger
}

// The defaults of a Config.
const (
	DefaultLimit = 5 * time.Second
	DefaultEnd   = 10 * time.Minute
	leastLimit   = 10 * time.Millisecond
)

// DefaultConfig returns the fair queue with its default limits.
func DefaultConfig() Config {
	return Config{Policy: timeshare.DefaultConfig(timeshare.Fair), Limit: DefaultLimit, End: DefaultEnd}
}

// Check returns an error if c can't be worked with.
func (c Config) Check() error {
	if _, err := timeshare.New(c.Policy); err != nil {
		return err
	}
	if c.Limit < leastLimit {
		return fmt.Errorf("a turn's limit of %v is less than %v: %w", c.Limit, leastLimit, timeshare.ErrConfig)
	}
	if c.End != 0 && c.End < c.Limit {
		return fmt.Errorf("sessions would be ended after %v, before a turn's limit of %v: %w", c.End, c.Limit, timeshare.ErrConfig)
	}
	return nil
}

// Member is a session at an arbiter.
type Member struct {
	Session string
	Owner   string // sessions of one owner have one share together
	Weight  int    // of the owner; the largest of its sessions' counts
}

// Event is what a Report is about.
type Event int

// The events.
const (
	// Overdue: a turn was taken back, as others wait. It is reported again if the executor
	// names another command than the one that the turn was asked for.
	Overdue Event = iota
	// Endless: a turn that was taken back has not ended, and others want the GPU. The session is to be ended.
	Endless
	// Ended: a turn that was taken back has ended after all.
	Ended
	// Breach: an executor has broken the rules. Its seat is gone, and the session is to be ended.
	Breach
	// Gone: an executor's connection has broken. Its seat is gone.
	Gone
)

// Report is something that happened at an arbiter.
type Report struct {
	Event   Event
	GPU     string
	Session string
	Owner   string
	Name    string        // of the command, as the executor says
	For     time.Duration // how long the turn has lasted
	Waiting int           // sessions that wait, or have their turn beside it
	Err     error         // of Breach and Gone
}

// Timing of the arbiter's own decisions.
const (
	// idleAfter is how long others must have asked for nothing until the only session that
	// did is let free.
	idleAfter = time.Second
	// linger is how long an owner's account is kept after its last session has gone: it
	// must not get rid of what it has had too much by coming anew.
	linger = 30 * time.Second
	// A session that has begun a turn too late is offered nothing for so long, and for so many
	// times as long as that turn lasted.
	barredFor   = time.Second
	barredTimes = 20
)

// Arbiter gives the turns of one GPU.
type Arbiter struct {
	gpu   string
	cfg   Config
	began time.Time
	// telling keeps reports in order. It is taken without mu.
	telling sync.Mutex

	mu      sync.Mutex
	sched   *timeshare.Scheduler
	seats   []*Seat // in the order in which they came
	owners  map[timeshare.OwnerID]*owner
	running *Seat       // whose turn it is in the books; nil: nobody's
	offered *Seat       // whose next turn may begin without being asked for; nil: nobody's
	drains  int         // sessions that wait with turn 0
	timer   *time.Timer // asks the scheduler again
	sweeper *time.Timer // lets sessions free, and forgets owners
	reports []Report    // to be delivered without the lock
}

// owner is an owner with sessions here, or one that had some.
type owner struct {
	id    timeshare.OwnerID
	asks  []*Seat // that wait, oldest first
	last  *Seat   // whose turn ended last
	seats int
	left  time.Duration // when the last one left
}

// New returns an arbiter without sessions. Its errors wrap [timeshare.ErrConfig].
func New(gpu string, c Config) (*Arbiter, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	s, err := timeshare.New(c.Policy)
	if err != nil {
		return nil, err
	}
	a := &Arbiter{gpu: gpu, cfg: c, began: time.Now(), sched: s, owners: map[timeshare.OwnerID]*owner{}}
	a.timer = time.AfterFunc(time.Hour, a.again)
	a.sweeper = time.AfterFunc(time.Hour, a.sweep)
	return a, nil
}

// Close stops the arbiter's timers and lets everybody go.
func (a *Arbiter) Close() {
	a.mu.Lock()
	seats := slices.Clone(a.seats)
	a.mu.Unlock()
	for _, s := range seats {
		s.Leave()
	}
	a.timer.Stop()
	a.sweeper.Stop()
}

func (a *Arbiter) now() time.Duration { return time.Since(a.began) }

// unlock releases the lock, and tells what was to be told, in the order in which it happened.
func (a *Arbiter) unlock() {
	none := len(a.reports) == 0
	a.mu.Unlock()
	if none {
		return
	}
	a.telling.Lock()
	defer a.telling.Unlock()
	a.mu.Lock()
	todo := a.reports
	a.reports = nil
	a.mu.Unlock()
	if a.cfg.Report == nil {
		return
	}
	for _, r := range todo {
		a.cfg.Report(r)
	}
}

func (a *Arbiter) report(e Event, s *Seat, lasted time.Duration, err error) {
	a.reports = append(a.reports, Report{
		Event: e, GPU: a.gpu, Session: s.who.Session, Owner: s.who.Owner, Name: s.name, For: lasted, Waiting: a.others(s), Err: err,
	})
}

// others returns how many sessions wait, or have their turn, beside one.
func (a *Arbiter) others(s *Seat) int {
	n := a.waiting()
	if a.running != nil && a.running != s {
		n++
	}
	return n
}

// waiting returns how many sessions have asked and wait.
func (a *Arbiter) waiting() (n int) {
	for _, o := range a.owners {
		n += len(o.asks)
	}
	return n
}

// Join gives a session a seat. device is which of its devices this GPU is. conn is
// connected to its executor, and is the arbiter's from now on, even if there is an error.
func (a *Arbiter) Join(m Member, device int, conn *net.UnixConn) (*Seat, error) {
	s := &Seat{a: a, who: m, conn: conn, state: free}
	if err := s.send(Frame{Kind: Hello, Number: uint64(device), What: HelloKeeps}); err != nil {
		conn.Close()
		return nil, err
	}
	a.mu.Lock()
	defer a.unlock()
	now := a.now()
	o := a.owners[timeshare.OwnerID(m.Owner)]
	if o == nil {
		o = &owner{id: timeshare.OwnerID(m.Owner)}
		if err := a.sched.Join(now, o.id, max(m.Weight, 1)); err != nil {
			conn.Close()
			return nil, fmt.Errorf("gpu %s: session %s: %w", a.gpu, m.Session, err)
		}
		a.owners[o.id] = o
	}
	o.seats++
	s.owner = o
	s.active = now
	a.seats = append(a.seats, s)
	a.weigh(now, o)
	a.sweeper.Reset(idleAfter / 2)
	a.enter(now) // the newcomer, too: it may have run for long, as after a restart of gpuguest
	a.decide()
	go s.read()
	return s, nil
}

// weigh gives an owner the largest weight of its sessions.
func (a *Arbiter) weigh(now time.Duration, o *owner) {
	w := 0
	for _, s := range a.seats {
		if s.owner == o {
			w = max(w, s.who.Weight)
		}
	}
	if w > 0 {
		a.books("weight", a.sched.SetWeight(now, o.id, min(w, timeshare.MaxWeight)))
	}
}

// books logs what the scheduler refuses. Each such message is a fault of this package.
func (a *Arbiter) books(what string, err error) {
	if err != nil {
		a.cfg.Log.Error("turns are not as the scheduler has them", "gpu", a.gpu, "call", what, "err", err)
	}
}

// enter makes all sessions that are free take turns, if there are several. What one has
// running is a turn that it need not ask for.
func (a *Arbiter) enter(now time.Duration) {
	if len(a.seats) < 2 {
		return
	}
	for _, s := range a.seats {
		if s.state != free {
			continue
		}
		s.epoch++
		s.state, s.number, s.offer, s.stale, s.name, s.named = asked, 0, 0, 0, "", false
		a.drains++
		a.queue(now, s, 0)
		a.tell(s, Frame{Kind: Share, Epoch: s.epoch})
	}
}

// queue enters into the books that a session waits.
func (a *Arbiter) queue(now time.Duration, s *Seat, what uint64) {
	s.since = now
	a.want()
	s.owner.asks = append(s.owner.asks, s)
	a.books("submit", a.sched.Submit(now, s.owner.id, timeshare.Kind(what), 1))
}

// tell sends a frame. An executor that does not read loses its seat.
func (a *Arbiter) tell(s *Seat, f Frame) {
	if err := s.send(f); err != nil && !s.gone {
		s.conn.Close() // the reader reports it
	}
}

// stop ends what a session has in the books: its turn, or its place among those that wait.
func (a *Arbiter) stop(now time.Duration, s *Seat) {
	switch s.state {
	case asked:
		i := slices.Index(s.owner.asks, s)
		s.owner.asks = slices.Delete(s.owner.asks, i, i+1)
		a.books("withdraw", a.sched.Withdraw(now, s.owner.id, i))
		if s.number == 0 {
			a.drains--
		}
		s.use.Waited += now - s.since
	case running:
		ran := now - s.since
		a.running = nil
		a.books("end", a.sched.End(now, s.owner.id, ran))
		s.use.Busy += ran
		s.use.Turns++
		s.owner.last = s
	case lapsed:
		s.expire.Stop()
		s.excused = false
		s.use.Overrun += now - s.since - s.charged
		if s.overdue {
			a.report(Ended, s, now-s.since, nil)
		}
		if s.charged == 0 { // it began too late, and was charged to nobody
			s.barred = now + max(barredFor, barredTimes*(now-s.since))
		}
	case free, idle:
	}
	s.active = now
	s.state = idle
}

// decide starts whoever is next, and sets the timer for what comes then.
func (a *Arbiter) decide() {
	for {
		now := a.now()
		if a.drain(now) {
			continue
		}
		switch d := a.sched.Next(now); d.Action {
		case timeshare.Idle:
			a.timer.Stop()
			return
		case timeshare.Wait:
			a.offer(now, a.owners[d.Owner].last)
			a.timer.Reset(max(d.Until-now, 0))
			return
		case timeshare.Busy:
			if a.running == nil || a.waiting() == 0 {
				a.timer.Stop()
				return
			}
			if left := a.running.since + a.cfg.Limit - now; left > 0 {
				a.timer.Reset(left)
				return
			}
			a.lapse(now, a.running)
		case timeshare.Run:
			a.grant(now, a.owners[d.Owner], 0)
		}
	}
}

// drain reports whether the turn of what ran at the begin of an epoch begins now. Such
// turns come first, as they have begun already: a turn beside one would pay for it.
func (a *Arbiter) drain(now time.Duration) bool {
	if a.drains == 0 || a.running != nil {
		return false
	}
	for _, o := range a.owners {
		for i, s := range o.asks {
			if s.number == 0 {
				a.grant(now, o, i)
				return true
			}
		}
	}
	return false
}

// grant begins the turn of an owner's session that waits.
func (a *Arbiter) grant(now time.Duration, o *owner, i int) {
	s := a.start(now, o, i)
	if s.number == 0 {
		a.drains--
	} else {
		a.tell(s, Frame{Kind: Grant, Epoch: s.epoch, Number: s.number})
		a.ahead(now, s)
	}
}

// start enters into the books that the turn of an owner's session that waits begins.
func (a *Arbiter) start(now time.Duration, o *owner, i int) *Seat {
	s := o.asks[i]
	if a.offered != s {
		a.revoke()
	}
	a.offered = nil
	o.asks = slices.Delete(o.asks, i, i+1)
	a.books("start", a.sched.Start(now, o.id))
	s.use.Waited += now - s.since
	s.state, s.since = running, now
	a.running = s
	return s
}

// ahead offers the next turn already to the session that has its turn, if the GPU will be kept idle
// for its owner: so it need not hear from us between the two.
func (a *Arbiter) ahead(now time.Duration, s *Seat) {
	if s.takes && s.number > 0 && now >= s.barred && len(s.owner.asks) == 0 && a.sched.Keeps() {
		a.offered, s.offer = s, s.number+1
		a.tell(s, Frame{Kind: Offer, Epoch: s.epoch, Number: s.offer})
	}
}

// offer lets a session for whose owner the GPU is kept idle begin its next turn without
// asking: what it launches needs no message there and back first.
func (a *Arbiter) offer(now time.Duration, s *Seat) {
	if a.offered == s {
		return
	}
	a.revoke()
	if s == nil || s.gone || s.state != idle || !s.takes || now < s.barred {
		return
	}
	a.offered, s.offer = s, s.number+1
	a.tell(s, Frame{Kind: Offer, Epoch: s.epoch, Number: s.offer})
}

// forget makes an offer void that a session has: it is told something else.
func (a *Arbiter) forget(s *Seat) {
	if a.offered == s {
		a.offered = nil
	}
}

// revoke takes back what was offered.
func (a *Arbiter) revoke() {
	if s := a.offered; s != nil {
		a.offered = nil
		a.tell(s, Frame{Kind: Revoke, Epoch: s.epoch, Number: s.offer})
	}
}

// begin enters into the books that a session has begun the turn that it was offered.
func (a *Arbiter) begin(now time.Duration, s *Seat, f Frame) {
	if s.state == idle {
		s.number, s.name, s.named = f.Number, f.Name, false
	}
	if a.running != nil {
		// Another turn has been granted meanwhile. This one goes on beside it, as one that was taken
		// back; that has to be rare, so there are no offers for some time afterwards.
		a.stop(now, s)
		s.state, s.since, s.charged, s.overdue = lapsed, now, 0, false
		a.late(s)
		return
	}
	if s.state == idle {
		s.state = asked
		a.queue(now, s, f.What)
	}
	a.start(now, s.owner, slices.Index(s.owner.asks, s))
	a.ahead(now, s)
}

// lapse takes a turn back.
func (a *Arbiter) lapse(now time.Duration, s *Seat) {
	ran := now - s.since
	a.running = nil
	a.books("end", a.sched.End(now, s.owner.id, ran))
	s.use.Busy += ran
	s.use.Turns++
	s.state, s.charged = lapsed, ran
	a.tooLong(now, s)
}

// late has a turn that began too late, and goes on beside others, be told of when it has lasted as long as a turn may.
func (a *Arbiter) late(s *Seat) {
	a.after(s, a.cfg.Limit, func(now time.Duration) {
		if a.others(s) == 0 {
			a.late(s)
		} else {
			a.tooLong(now, s)
		}
	})
}

// tooLong tells of a turn that was taken back, and has its session be ended if it goes on. It has the time from now on: nobody
// may have waited until now.
func (a *Arbiter) tooLong(now time.Duration, s *Seat) {
	s.use.Lapses++
	s.overdue = true
	a.tell(s, Frame{Kind: Lapse, Epoch: s.epoch, Number: s.number})
	a.report(Overdue, s, now-s.since, nil)
	left := timeshare.MaxTime
	if a.cfg.End != 0 {
		left = a.cfg.End - a.cfg.Limit
	}
	a.after(s, left, func(now time.Duration) {
		switch {
		case a.cfg.End == 0:
		case a.wanted(now, s):
			a.report(Endless, s, now-s.since, nil)
		default:
			s.excused = true
		}
	})
}

// after does something if a turn that was taken back still lasts after d.
func (a *Arbiter) after(s *Seat, d time.Duration, do func(now time.Duration)) {
	epoch, number := s.epoch, s.number
	s.expire = time.AfterFunc(d, func() {
		a.mu.Lock()
		defer a.unlock()
		if s.state == lapsed && s.epoch == epoch && s.number == number && !s.gone {
			do(a.now())
		}
	})
}

// wanted reports whether other sessions have used the GPU, or asked for it, in the second half of the time
// after which the one that keeps it is ended.
func (a *Arbiter) wanted(now time.Duration, keeps *Seat) bool {
	return slices.ContainsFunc(a.seats, func(s *Seat) bool {
		return s != keeps && (s.state != idle || now-s.active < a.cfg.End/2)
	})
}

// want has those that keep the GPU be ended after all, as somebody wants it again.
func (a *Arbiter) want() {
	for _, s := range a.seats {
		if s.excused {
			s.excused = false
			s.expire.Reset(a.cfg.End)
		}
	}
}

// again is what the timer does.
func (a *Arbiter) again() {
	a.mu.Lock()
	defer a.unlock()
	a.decide()
}

// sweep lets the only session free that has asked for something lately, and forgets
// owners that have left.
func (a *Arbiter) sweep() {
	a.mu.Lock()
	defer a.unlock()
	now := a.now()
	var active []*Seat
	for _, s := range a.seats {
		if s.state != idle || now-s.active < idleAfter {
			active = append(active, s)
		}
	}
	if len(active) == 1 && (active[0].state == running || active[0].state == idle) {
		a.release(now, active[0])
	}
	for id, o := range a.owners {
		if o.seats == 0 && now-o.left > linger {
			_, err := a.sched.Leave(now, id)
			a.books("leave", err)
			delete(a.owners, id)
		}
	}
	a.decide()
	if len(a.owners) > 0 {
		a.sweeper.Reset(idleAfter / 2)
	}
}

// release lets a session free.
func (a *Arbiter) release(now time.Duration, s *Seat) {
	a.stop(now, s)
	a.forget(s)
	s.state, s.stale, s.offer = free, 0, 0
	s.epoch++
	a.tell(s, Frame{Kind: Free, Epoch: s.epoch})
}

// remove takes a seat away. The caller holds the lock.
func (a *Arbiter) remove(s *Seat) {
	if s.gone {
		return
	}
	now := a.now()
	a.stop(now, s)
	a.forget(s)
	s.gone = true
	s.conn.Close()
	a.seats = slices.DeleteFunc(a.seats, func(other *Seat) bool { return other == s })
	if s.owner.seats--; s.owner.seats == 0 {
		s.owner.left = now
	} else {
		a.weigh(now, s.owner)
	}
	if len(a.seats) == 1 && a.seats[0].state != free && a.seats[0].state != lapsed {
		a.release(now, a.seats[0])
	}
	a.decide()
}

// errRules is wrapped by the error of a Breach.
var errRules = errors.New("it breaks the rules of turns")

// OwnerUse is what an owner has had of a GPU.
type OwnerUse struct {
	Owner    string
	Weight   int
	Sessions int
	Waiting  int           // sessions that have asked and wait
	Turns    uint64        // that have ended
	Busy     time.Duration // how long these lasted
	Idled    time.Duration // for how long the GPU was kept idle for the owner
}

// Owners returns what the owners have had, by name.
func (a *Arbiter) Owners() []OwnerUse {
	a.mu.Lock()
	defer a.unlock()
	var all []OwnerUse
	for id, o := range a.owners {
		u, err := a.sched.Usage(id)
		if o.seats == 0 || err != nil {
			continue
		}
		all = append(all, OwnerUse{
			Owner: string(id), Weight: u.Weight, Sessions: o.seats, Waiting: len(o.asks), Turns: u.Commands, Busy: u.Busy, Idled: u.Waited,
		})
	}
	slices.SortFunc(all, func(x, y OwnerUse) int { return compare(x.Owner, y.Owner) })
	return all
}

func compare(x, y string) int {
	switch {
	case x < y:
		return -1
	case x > y:
		return 1
	}
	return 0
}
