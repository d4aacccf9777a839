package turn

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/timeshare"
)

const ms = time.Millisecond

// player is an executor's end of a connection.
type player struct {
	t    *testing.T
	name string
	conn *net.UnixConn
	seat *Seat
	got  chan Frame

	epoch uint32
	n     uint64
}

// table is an arbiter with what it has reported.
type table struct {
	*Arbiter
	t *testing.T

	mu      sync.Mutex
	reports []Report
}

func newTable(t *testing.T, change func(*Config)) *table {
	t.Helper()
	tb := &table{t: t}
	c := DefaultConfig()
	c.Policy = timeshare.DefaultConfig(timeshare.FIFO)
	if change != nil {
		change(&c)
	}
	c.Report = func(r Report) {
		tb.mu.Lock()
		defer tb.mu.Unlock()
		tb.reports = append(tb.reports, r)
	}
	a, err := New("g", c)
	if err != nil {
		t.Fatal(err)
	}
	tb.Arbiter = a
	t.Cleanup(a.Close)
	return tb
}

// told waits for a report on a session.
func (tb *table) told(e Event, session string) (r Report) {
	tb.t.Helper()
	testkit.Until(tb.t, fmt.Sprintf("event %d of %s", e, session), func() error {
		tb.mu.Lock()
		defer tb.mu.Unlock()
		for _, r = range tb.reports {
			if r.Event == e && r.Session == session {
				return nil
			}
		}
		return fmt.Errorf("told of %+v", tb.reports)
	})
	return r
}

func pair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = c.(*net.UnixConn)
	}
	return ends[0], ends[1]
}

func (tb *table) sit(name, owner string, weight int) *player {
	tb.t.Helper()
	theirs, ours := pair(tb.t)
	p := &player{t: tb.t, name: name, conn: theirs, got: make(chan Frame, 100000)}
	tb.t.Cleanup(func() { theirs.Close() })
	go func() {
		defer close(p.got)
		var b [FrameSize]byte
		for {
			if _, err := io.ReadFull(theirs, b[:]); err != nil {
				return
			}
			f, err := Decode(&b)
			if err != nil {
				tb.t.Error(err)
				return
			}
			p.got <- f
		}
	}()
	var err error
	if p.seat, err = tb.Join(Member{Session: name, Owner: owner, Weight: weight}, 3, ours); err != nil {
		tb.t.Fatal(err)
	}
	if f := p.next(); f.Kind != Hello || f.Number != 3 || f.What != HelloKeeps {
		tb.t.Fatalf("%s got %+v first", name, f)
	}
	return p
}

func (p *player) next() Frame {
	p.t.Helper()
	select {
	case f := <-p.got:
		return f
	case <-testkit.Context(p.t).Done():
		p.t.Fatalf("%s gets nothing", p.name)
	}
	return Frame{}
}

// wants checks the next frame.
func (p *player) wants(k Kind) Frame {
	p.t.Helper()
	f := p.next()
	if f.Kind != k {
		p.t.Fatalf("%s got %+v, want %s", p.name, f, k)
	}
	switch k {
	case Share, Free:
		p.epoch, p.n = f.Epoch, 0
	case Grant:
		if f.Number != p.n || f.Epoch != p.epoch {
			p.t.Fatalf("%s got %+v for turn %d in epoch %d", p.name, f, p.n, p.epoch)
		}
	}
	return f
}

func (p *player) send(f Frame) {
	p.t.Helper()
	b := f.Encode()
	if _, err := p.conn.Write(b[:]); err != nil {
		p.t.Fatalf("%s: %s: %v", p.name, f.Kind, err)
	}
}

func (p *player) ask() {
	p.t.Helper()
	p.n++
	p.send(Frame{Kind: Ask, Epoch: p.epoch, Number: p.n, What: 7, Name: "spin"})
}

func (p *player) end() {
	p.t.Helper()
	p.send(Frame{Kind: End, Epoch: p.epoch, Number: p.n})
}

// enters takes part with nothing running.
func (p *player) enters() {
	p.t.Helper()
	p.wants(Share)
	p.end()
}

// is waits until the arbiter has the session in a state.
func (p *player) is(want state) {
	p.t.Helper()
	testkit.Until(p.t, fmt.Sprintf("%s is %s", p.name, want), func() error {
		s := p.state()
		return testkit.Want(s == want, s)
	})
}

// mayReadLate gives a session's socket room for frames that its reader, which has no processor
// just now, reads later. An executor whose socket is full loses its seat.
func (p *player) mayReadLate() {
	p.t.Helper()
	const room = 64 << 20
	raw, err := p.seat.conn.SyscallConn()
	if err != nil {
		p.t.Fatal(err)
	}
	var force error
	if err := raw.Control(func(fd uintptr) { force = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, room) }); err != nil {
		p.t.Fatal(err)
	}
	if force != nil { // without rights it gets what the system allows
		if err := p.seat.conn.SetWriteBuffer(room); err != nil {
			p.t.Fatal(err)
		}
	}
}

// limit changes how long a turn may last, and returns how long it might.
func (tb *table) limit(d time.Duration) (before time.Duration) {
	tb.Arbiter.mu.Lock()
	defer tb.Arbiter.mu.Unlock()
	before, tb.cfg.Limit = tb.cfg.Limit, d
	return before
}

// two returns two sessions of different owners that take turns.
func (tb *table) two() (a, b *player) {
	tb.t.Helper()
	limit := tb.limit(time.Hour) // on a busy machine, turn 0 may take longer than some tests' turns
	a, b = tb.sit("a", "A", 1), tb.sit("b", "B", 1)
	a.enters()
	b.enters()
	a.is(idle)
	b.is(idle)
	tb.limit(limit)
	return a, b
}

func TestSessionAloneOnItsGPUIsAskedNothing(t *testing.T) {
	tb := newTable(t, nil)
	a := tb.sit("a", "A", 1)
	b := tb.sit("b", "B", 1)
	a.enters()
	b.enters()
	b.is(idle)
	b.seat.Leave()
	a.wants(Free)
	a.is(free)
	if u := a.seat.Use(); u.Shared {
		t.Errorf("alone, it has %+v", u)
	}
}

func TestTurnsExcludeEachOther(t *testing.T) {
	tb := newTable(t, nil)
	a, b := tb.two()
	a.ask()
	a.wants(Grant)
	b.ask()
	b.is(asked)
	if u := b.seat.Use(); !u.Waiting {
		t.Errorf("it has %+v", u)
	}
	a.end()
	b.wants(Grant)
	b.end()
	b.is(idle)
	if u := a.seat.Use(); u.Turns == 0 || u.Busy <= 0 {
		t.Errorf("a had %+v", u)
	}
	if u := b.seat.Use(); u.Waited <= 0 {
		t.Errorf("b had %+v", u)
	}
}

func TestWhatRunsWhenOthersComeIsATurn(t *testing.T) {
	tb := newTable(t, nil)
	a, b := tb.sit("a", "A", 1), tb.sit("b", "B", 1)
	a.wants(Share)
	b.enters()
	b.is(idle)
	b.ask()
	b.is(asked) // a has something running
	a.end()
	b.wants(Grant)
}

func TestSessionsOfOneOwnerHaveOneShare(t *testing.T) {
	tb := newTable(t, func(c *Config) {
		c.Policy = timeshare.DefaultConfig(timeshare.Fair)
		c.Policy.Wait = 0
	})
	all := []*player{tb.sit("a1", "A", 1), tb.sit("a2", "A", 3), tb.sit("a3", "A", 1), tb.sit("b", "B", 3)}
	for _, p := range all {
		p.enters()
	}
	for _, p := range all {
		p.is(idle)
	}
	for _, p := range all {
		p.ask()
		testkit.Until(t, p.name+" waits or has its turn", func() error {
			u := p.seat.Use()
			return testkit.Want(u.Waiting || u.Keeps > 0, u)
		})
	}
	for range 100 {
		// All others wait when a turn ends.
		var runs *player
		testkit.Until(t, "a grant", func() error {
			for _, p := range all {
				select {
				case f := <-p.got:
					runs = p
					return testkit.Want(f.Kind == Grant, f)
				default:
				}
			}
			return errors.New("nobody has a turn")
		})
		time.Sleep(ms) // a command of that length
		runs.end()
		runs.ask()
		testkit.Until(t, runs.name+" waits or has its turn", func() error {
			u := runs.seat.Use()
			return testkit.Want(u.Waiting || u.Keeps > 0 && len(runs.got) > 0, u)
		})
	}
	owners := tb.Owners()
	if len(owners) != 2 || owners[0].Owner != "A" || owners[0].Weight != 3 || owners[0].Sessions != 3 {
		t.Fatalf("owners are %+v", owners)
	}
	// As four owners, B would have a quarter. Commands take longer on a busy machine, so that B's
	// turns make up for its time, or the other way round.
	turns, busy := owners[0].Turns+owners[1].Turns, owners[0].Busy+owners[1].Busy
	if float64(owners[1].Turns) < 0.4*float64(turns) && owners[1].Busy.Seconds() < 0.4*busy.Seconds() {
		t.Errorf("A with three sessions had %+v, B with one %+v", owners[0], owners[1])
	}
}

func TestExecutorThatDiesGivesItsTurnUp(t *testing.T) {
	tb := newTable(t, nil)
	a, b := tb.two()
	c := tb.sit("c", "C", 1)
	c.enters()
	c.is(idle)
	a.ask()
	a.wants(Grant)
	b.ask()
	b.is(asked)
	c.ask()
	c.is(asked)
	a.conn.Close()
	tb.told(Gone, "a")
	b.wants(Grant)
	b.conn.Close()
	c.wants(Free) // it is alone
}

func TestSessionThatWaitsTakesBackWhatItAskedFor(t *testing.T) {
	tb := newTable(t, nil)
	a, b := tb.two()
	a.ask()
	a.wants(Grant)
	b.ask()
	b.is(asked)
	b.send(Frame{Kind: Withdraw, Epoch: b.epoch, Number: b.n})
	b.is(idle)
	a.end()
	a.is(idle)
	// The grant is under way when it is withdrawn: that turn is over.
	b.ask()
	b.wants(Grant)
	b.send(Frame{Kind: Withdraw, Epoch: b.epoch, Number: b.n})
	a.ask()
	a.wants(Grant)
}

func TestTurnThatDoesNotEndIsTakenBack(t *testing.T) {
	tb := newTable(t, func(c *Config) { c.Limit, c.End = 30*ms, 100*ms })
	a, b := tb.two()
	a.ask()
	a.wants(Grant)
	b.ask()
	a.wants(Lapse)
	b.wants(Grant)
	if r := tb.told(Overdue, "a"); r.Owner != "A" || r.Name != "spin" || r.Waiting != 1 || r.For < 30*ms {
		t.Errorf("told of %+v", r)
	}
	if r := tb.told(Endless, "a"); r.Name != "spin" {
		t.Errorf("told of %+v", r)
	}
	a.is(lapsed)
	a.end()
	tb.told(Ended, "a")
	a.is(idle)
	if u := a.seat.Use(); u.Lapses != 1 || u.Overrun <= 0 {
		t.Errorf("it had %+v", u)
	}
}

// Who keeps the GPU is ended for the sake of others only: not when they have gone, or want nothing any more,
// and not at once when somebody comes again.
func TestTurnThatDoesNotEndMayLastWhenNobodyWantsTheGPUAnyMore(t *testing.T) {
	for _, leaves := range []bool{false, true} {
		const end = 300 * ms
		tb := newTable(t, func(c *Config) { c.Limit, c.End = 30*ms, end })
		a, b := tb.two()
		a.ask()
		a.wants(Grant)
		b.ask()
		a.wants(Lapse)
		b.wants(Grant)
		b.end()
		b.is(idle)
		if leaves {
			b.seat.Leave()
		}
		endless := func() bool {
			tb.mu.Lock()
			defer tb.mu.Unlock()
			return slices.ContainsFunc(tb.reports, func(r Report) bool { return r.Event == Endless })
		}
		time.Sleep(2 * end)
		if endless() {
			t.Fatal("it is to be ended, and nobody wants its GPU")
		}
		c := tb.sit("c", "C", 1)
		c.enters()
		began := time.Now()
		c.ask()
		c.wants(Grant)
		tb.told(Endless, "a") // c keeps its turn
		if d := time.Since(began); d < end/2 {
			t.Errorf("it is to be ended %v after somebody has come", d)
		}
	}
}

// A turn that nobody minded until now is taken back at once, and its session gets the time that all get.
func TestTurnThatLastedLongBeforeAnybodyWaitedIsNotEndedAtOnce(t *testing.T) {
	const end = 300 * ms
	tb := newTable(t, func(c *Config) { c.Limit, c.End = 30*ms, end })
	a, b := tb.two()
	a.ask()
	a.wants(Grant)
	time.Sleep(2 * end)
	began := time.Now()
	b.ask()
	b.wants(Grant)
	if r := tb.told(Endless, "a"); time.Since(began) < end-30*ms || r.For < 3*end-30*ms {
		t.Errorf("it is to be ended %v after somebody has come, by %+v", time.Since(began), r)
	}
}

// The turn was asked for one command, and another one of it does not end.
func TestCommandThatKeepsATurnIsNamed(t *testing.T) {
	tb := newTable(t, func(c *Config) { c.Limit, c.End = 30*ms, 0 })
	a, b := tb.two()
	a.ask()
	a.wants(Grant)
	b.ask()
	a.wants(Lapse)
	a.send(Frame{Kind: Keeps, Epoch: a.epoch, Number: a.n, Name: "forever"})
	var names []string
	testkit.Until(t, "another command is named", func() error {
		tb.mu.Lock()
		defer tb.mu.Unlock()
		names = nil
		for _, r := range tb.reports {
			names = append(names, r.Name)
		}
		return testkit.Want(len(names) > 1, names)
	})
	if u := a.seat.Use(); u.Name != "forever" || !slices.Equal(names, []string{"spin", "forever"}) {
		t.Errorf("told of %v, now %q", names, u.Name)
	}
	a.end()
	tb.told(Ended, "a")
}

func TestTurnMayLastWhileNobodyWaits(t *testing.T) {
	tb := newTable(t, func(c *Config) { c.Limit = 10 * ms })
	a, b := tb.two()
	c := tb.sit("c", "C", 1)
	c.enters()
	a.ask()
	a.wants(Grant)
	testkit.Until(t, "the limit is over", func() error {
		u := a.seat.Use()
		return testkit.Want(u.Keeps > 20*ms, u)
	})
	a.is(running)
	b.ask()
	a.wants(Lapse)
	b.wants(Grant)
}

func TestOnlySessionThatDoesSomethingIsLetFree(t *testing.T) {
	tb := newTable(t, nil)
	a, b := tb.two()
	for range 10 {
		a.ask()
		a.wants(Grant)
		a.end()
	}
	testkit.Until(t, "it is free", func() error {
		select {
		case f := <-a.got:
			if f.Kind != Free {
				return fmt.Errorf("got %+v", f)
			}
			a.epoch, a.n = f.Epoch, 0
			return nil
		default:
		}
		if a.seat.Use().Shared {
			a.ask()
			if f := a.next(); f.Kind == Grant {
				a.end()
			} else if f.Kind == Free {
				a.epoch, a.n = f.Epoch, 0
				return nil
			}
		}
		return errors.New("it takes turns")
	})
	b.ask()
	a.wants(Share)
	b.is(asked) // until what a has launched is over
	a.end()
	b.wants(Grant)
}

func TestExecutorThatBreaksTheRulesLosesItsSeat(t *testing.T) {
	for name, f := range map[string]func(p *player) []Frame{
		"asks twice": func(p *player) []Frame {
			return []Frame{{Kind: Ask, Epoch: p.epoch, Number: 1}, {Kind: Ask, Epoch: p.epoch, Number: 2}}
		},
		"asks for a turn that it had":   func(p *player) []Frame { return []Frame{{Kind: Ask, Epoch: p.epoch, Number: 0}} },
		"ends what it has not":          func(p *player) []Frame { return []Frame{{Kind: End, Epoch: p.epoch, Number: 1}} },
		"withdraws what it has not":     func(p *player) []Frame { return []Frame{{Kind: Withdraw, Epoch: p.epoch, Number: 9}} },
		"names what keeps no turn":      func(p *player) []Frame { return []Frame{{Kind: Keeps, Epoch: p.epoch, Number: 1}} },
		"speaks of an epoch to come":    func(p *player) []Frame { return []Frame{{Kind: Ask, Epoch: p.epoch + 1, Number: 1}} },
		"speaks for the arbiter":        func(p *player) []Frame { return []Frame{{Kind: Grant, Epoch: p.epoch, Number: 1}} },
		"speaks of the past too often":  func(p *player) []Frame { return make([]Frame, mostStale+1) },
		"sends what nobody understands": func(p *player) []Frame { return []Frame{{Kind: 99}} },
	} {
		t.Run(name, func(t *testing.T) {
			tb := newTable(t, nil)
			a, b := tb.two()
			c := tb.sit("c", "C", 1)
			c.enters()
			c.is(idle)
			b.ask()
			b.wants(Grant)
			for _, m := range f(a) {
				if m.Kind == 0 {
					m = Frame{Kind: Ask, Epoch: a.epoch - 1, Number: 1}
				}
				b := m.Encode()
				_, _ = a.conn.Write(b[:])
			}
			if r := tb.told(Breach, "a"); r.Err == nil {
				t.Error("without a reason")
			}
			b.end() // others go on
			c.ask()
			c.wants(Grant)
		})
	}
}

// An executor that asks and withdraws without end is read at a pace, and others get their turns.
func TestFloodOfRequestsKeepsNobodyOut(t *testing.T) {
	tb := newTable(t, nil)
	a, b := tb.two()
	a.mayReadLate()
	stop := make(chan struct{})
	sent := make(chan int)
	go func() {
		n := 0
		defer func() { sent <- n }()
		for i := uint64(1); ; i++ {
			for _, k := range []Kind{Ask, Withdraw} {
				f := Frame{Kind: k, Epoch: a.epoch, Number: i}.Encode()
				select {
				case <-stop:
					return
				default:
				}
				if _, err := a.conn.Write(f[:]); err != nil {
					return
				}
				n++
			}
		}
	}()
	began := time.Now()
	for range 200 {
		b.ask()
		b.wants(Grant)
		b.end()
	}
	took := time.Since(began)
	close(stop)
	a.conn.Close() // it may be in a write
	n := <-sent
	const inSocket = 8192 // frames
	if most := int(took/framesPeriod+2)*framesPerPeriod + inSocket; n > most {
		t.Errorf("%d frames were taken in %v, at most %d should", n, took, most)
	}
}

// A newcomer must not get rid of what its owner has had too much.
func TestOwnerThatComesAnewKeepsItsAccount(t *testing.T) {
	tb := newTable(t, func(c *Config) { c.Policy = timeshare.DefaultConfig(timeshare.Fair) })
	a, b := tb.two()
	c := tb.sit("c", "C", 1)
	c.enters()
	a.ask()
	a.wants(Grant)
	time.Sleep(5 * ms) // a command of that length
	a.end()
	a.is(idle)
	a.seat.Leave()
	b.is(idle)
	again := tb.sit("a2", "A", 1)
	again.enters()
	again.is(idle)
	var use OwnerUse
	for _, u := range tb.Owners() {
		if u.Owner == "A" {
			use = u
		}
	}
	if use.Busy < 5*ms {
		t.Errorf("its account says %+v", use)
	}
}

func TestConfigIsChecked(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"policy": func(c *Config) { c.Policy.Policy = "best" },
		"limit":  func(c *Config) { c.Limit = 0 },
		"end":    func(c *Config) { c.End = c.Limit - 1 },
	} {
		c := DefaultConfig()
		change(&c)
		if _, err := New("g", c); !errors.Is(err, timeshare.ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzFrame(f *testing.F) {
	for _, x := range []Frame{
		{Kind: Hello, Number: 1},
		{Kind: Share, Epoch: 1},
		{Kind: Free, Epoch: 1<<32 - 1},
		{Kind: Grant, Number: 1<<64 - 1},
		{Kind: Ask, Epoch: 2, Number: 3, What: 4, Name: "kernel"},
		{Kind: End, Name: "\xff\x01\x00rest"},
		{Kind: 0},
		{Kind: Withdraw},
		{Kind: Lapse},
	} {
		b := x.Encode()
		f.Add(b[:])
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var b [FrameSize]byte
		copy(b[:], data)
		x, err := Decode(&b)
		if err != nil {
			if !errors.Is(err, ErrFrame) {
				t.Fatal(err)
			}
			return
		}
		for _, r := range x.Name {
			if r <= ' ' || r >= 0x7f {
				t.Fatalf("name %q", x.Name)
			}
		}
		again := x.Encode()
		if y, err := Decode(&again); err != nil || y != x {
			t.Fatalf("%+v becomes %+v, %v", x, y, err)
		}
	})
}

func TestSettingsOfAFileAreChecked(t *testing.T) {
	c, err := Settings{}.Config()
	if err != nil || c.Policy.Policy != timeshare.Fair || c.Limit != DefaultLimit || c.End != DefaultEnd {
		t.Errorf("of nothing: %+v, %v", c, err)
	}
	c, err = Settings{Policy: "fair", WaitCharge: 100, Limit: "100ms", EndAfter: Never}.Config()
	if err != nil || c.Policy.WaitCharge != 100 || c.Limit != 100*ms || c.End != 0 {
		t.Errorf("%+v, %v", c, err)
	}
	for _, s := range []Settings{
		{Policy: "best"},
		{WaitCharge: 5},
		{WaitCharge: 101},
		{Policy: "fifo", WaitCharge: 50},
		{Limit: "soon"},
		{Limit: "-1s"},
		{Limit: "0s"},
		{Limit: Never},
		{EndAfter: "1s"},
		{EndAfter: "x"},
		{Limit: "1ms"},
	} {
		if _, err := s.Config(); !errors.Is(err, timeshare.ErrConfig) {
			t.Errorf("%+v: %v", s, err)
		}
	}
}
