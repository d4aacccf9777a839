package turn

import (
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/timeshare"
)

// honest is an executor that keeps the rules. What it sends and what it is told is under way until the
// test delivers it.
type honest struct {
	t      *testing.T
	name   string
	seat   *Seat
	conn   *net.UnixConn
	says   uint64        // with each End
	kind   uint64        // of its next turn, which is to last for 50 µs, doubled so often
	thinks uint64        // for 10 µs between turns, doubled so often
	since  time.Duration // when it began what it does

	state state // as the executor has it: free, idle, asked or running
	epoch uint32
	n     uint64
	offer uint64
	turns int

	in, out []Frame // under way
	unheard int     // frames sent while there was something to hear
}

func (tb *table) honest(name, owner string) *honest {
	tb.t.Helper()
	theirs, ours := pair(tb.t)
	tb.t.Cleanup(func() { theirs.Close() })
	h := &honest{t: tb.t, name: name, conn: theirs}
	var err error
	if h.seat, err = tb.Join(Member{Session: name, Owner: owner, Weight: 1}, 0, ours); err != nil {
		tb.t.Fatal(err)
	}
	return h
}

// told takes what the arbiter has sent.
func (h *honest) told() {
	raw, err := h.conn.SyscallConn()
	if err != nil {
		h.t.Fatal(err)
	}
	_ = raw.Read(func(fd uintptr) bool {
		var b [FrameSize]byte
		for {
			n, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_DONTWAIT)
			if err != nil || n != FrameSize {
				return true
			}
			f, err := Decode(&b)
			if err != nil {
				h.t.Fatal(err)
			}
			h.in = append(h.in, f)
		}
	})
}

func (h *honest) sends(f Frame) {
	f.Epoch, f.Number, f.Name = h.epoch, h.n, "spin"
	h.out = append(h.out, f)
	h.unheard++
}

// holds begins a turn.
func (h *honest) holds() { h.state, h.offer, h.since = running, 0, h.seat.a.now() }

// hears does what the oldest frame under way says, as an executor does.
func (h *honest) hears() {
	f := h.in[0]
	h.in = h.in[1:]
	h.unheard = 0
	switch f.Kind {
	case Share:
		h.epoch, h.n = f.Epoch, 0
		h.holds()
	case Free:
		h.epoch, h.offer, h.state = f.Epoch, 0, free
	case Grant:
		if h.state == asked && f.Epoch == h.epoch && f.Number == h.n {
			h.holds()
		}
	case Offer:
		switch {
		case f.Epoch != h.epoch || h.state == free:
		case h.state != asked && f.Number == h.n+1:
			h.offer = f.Number
		case h.state == asked && f.Number == h.n:
			h.holds()
			h.sends(Frame{Kind: Begin})
		}
	case Revoke:
		if f.Epoch == h.epoch && f.Number == h.offer {
			h.offer = 0
		}
	}
}

// hearsAll does what all frames under way say.
func (h *honest) hearsAll() {
	for h.told(); len(h.in) > 0; {
		h.hears()
	}
}

// asks has a request for a turn under way.
func (h *honest) asks(kind uint64) {
	h.n++
	h.state, h.offer = asked, 0
	h.sends(Frame{Kind: Ask, What: kind})
}

// acts does one of the things that an executor may do now.
func (h *honest) acts(r *rand.Rand) {
	if len(h.in) == 0 {
		h.unheard = 0
	}
	now := h.seat.a.now()
	switch {
	case h.unheard > mostStale/4: // it does not hear so late
		h.hears()
	case len(h.out) > mostStale/4: // nor is it heard so late
		h.arrives()
	case h.state == running && now-h.since < 50*time.Microsecond<<h.kind:
	case h.state == running:
		h.turns++
		h.state, h.since, h.kind = idle, now, r.Uint64N(7)
		h.sends(Frame{Kind: End, What: h.says})
	case h.state == idle && now-h.since < 10*time.Microsecond<<h.thinks:
	case h.state == idle && h.offer != 0 && r.IntN(2) == 0:
		h.n++
		h.holds()
		h.sends(Frame{Kind: Begin, What: h.kind})
	case h.state == idle:
		h.asks(h.kind)
	case h.state == asked && r.IntN(20) == 0:
		h.state = idle
		h.sends(Frame{Kind: Withdraw})
	}
}

// arrives has the arbiter handle the oldest frame under way to it.
func (h *honest) arrives() {
	f := h.out[0]
	h.out = h.out[1:]
	if err := h.seat.handle(f); err != nil {
		h.t.Fatalf("%s: %v", h.name, err)
	}
}

// lasts has some time pass for the arbiter. A session is late: it is offered nothing for a while.
func (tb *table) lasts(d time.Duration, late *Seat) {
	tb.Arbiter.mu.Lock()
	tb.began = tb.began.Add(-d)
	if late != nil {
		late.barred = tb.now() + 5*ms
	}
	tb.Arbiter.mu.Unlock()
	tb.again()
}

// agree checks that the arbiter's books agree with its seats.
func (tb *table) agree() {
	tb.t.Helper()
	tb.Arbiter.mu.Lock()
	defer tb.Arbiter.mu.Unlock()
	for _, s := range tb.seats {
		asks := 0
		for _, other := range s.owner.asks {
			if other == s {
				asks++
			}
		}
		want := 0
		if s.state == asked {
			want = 1
		}
		if asks != want || (s.state == running) != (tb.running == s) {
			tb.t.Fatalf("session %s, whose turn is %s, waits %d times; it is its turn: %v", s.who.Session, s.state, asks, tb.running == s)
		}
	}
}

// Whatever crosses what on the way, who keeps the rules is not accused of breaking them, and has its turns.
func TestExecutorsThatKeepTheRulesKeepTheirSeats(t *testing.T) {
	for seed := range uint64(100) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 1))
			tb := newTable(t, func(c *Config) {
				c.Policy = timeshare.DefaultConfig(timeshare.Fair)
				c.Limit = time.Second
			})
			var all []*honest
			for i := range 5 {
				h := tb.honest(fmt.Sprint(i), fmt.Sprint("owner ", i/2))
				if r.IntN(4) > 0 {
					h.says = EndOffers
				}
				h.thinks = r.Uint64N(9)
				all = append(all, h)
			}
			for range 10000 {
				h := all[r.IntN(len(all))]
				h.told()
				switch what := r.IntN(6); {
				case what == 0 && len(h.out) > 0:
					h.arrives()
				case what == 1 && len(h.in) > 0:
					h.hears()
				case what <= 3:
					h.acts(r)
				case what == 4:
					var late *Seat
					if r.IntN(10) == 0 {
						late = h.seat
					}
					tb.lasts(time.Duration(r.IntN(4<<r.IntN(8)))*time.Microsecond, late)
				case what == 5 && r.IntN(50) == 0:
					tb.lasts(2*time.Second, nil)
					tb.sweep()
				}
				tb.agree()
			}
			// At last, each has all that it has asked for.
			waits := func(h *honest) bool {
				h.told()
				return len(h.in)+len(h.out) > 0 || h.state == asked || h.state == running
			}
			for range 10000 {
				if !slices.ContainsFunc(all, waits) {
					break
				}
				for _, h := range all {
					h.hearsAll()
					for h.state == running {
						h.acts(r)
						tb.lasts(ms, nil)
					}
					for len(h.out) > 0 {
						h.arrives()
					}
				}
				tb.lasts(ms, nil)
				tb.agree()
			}
			for _, h := range all {
				if h.turns == 0 || waits(h) {
					t.Errorf("session %s has had %d turns, and its turn is %s", h.name, h.turns, h.state)
				}
			}
		})
	}
}

// turn is a whole turn of an executor, which nobody else wants.
func (h *honest) turn(tb *table, kind uint64, d time.Duration) {
	h.asks(kind)
	for h.arrives(); h.seat.Use().Keeps == 0; tb.lasts(ms/10, nil) {
	}
	tb.lasts(d, nil)
	h.sends(Frame{Kind: End, What: h.says})
	h.arrives()
}

// An offer crosses the request for the same turn, and that one waits: the GPU is kept idle for a third owner,
// whose executor is of an earlier release. The turn begins, and once.
func TestOfferCrossesARequestThatWaits(t *testing.T) {
	const short, long = 1, 2
	for range 20 { // on a busy machine nobody may be waited for
		tb := newTable(t, func(c *Config) { c.Policy = timeshare.DefaultConfig(timeshare.Fair) })
		a, b, c := tb.honest("a", "A"), tb.honest("b", "B"), tb.honest("c", "C")
		a.says = EndOffers
		for _, h := range []*honest{a, b, c} {
			h.hearsAll()
			h.sends(Frame{Kind: End, What: h.says})
			h.arrives()
		}
		// b has had the most and c the least; c thinks for 1 ms and a does not. b wants less than c thinks.
		a.turn(tb, long, 5*ms)
		for range 20 {
			b.turn(tb, short, ms/2)
		}
		for range 40 {
			c.turn(tb, short, ms/50)
			tb.lasts(ms, nil)
		}
		for range 30 {
			a.turn(tb, short, ms/50)
		}
		c.turn(tb, short, ms/50)
		a.told()
		a.in, a.state = nil, idle
		b.asks(short) // a is waited for
		b.arrives()
		a.asks(long)
		a.arrives()
		a.told()
		if !a.seat.Use().Waiting || !b.seat.Use().Waiting || len(a.in) != 1 {
			continue
		}
		a.hears()
		a.arrives()
		tb.agree()
		a.sends(Frame{Kind: End, What: a.says})
		a.arrives()
		tb.agree()
		if u := a.seat.Use(); u.Waiting || u.Keeps > 0 {
			t.Errorf("after its turn it has %+v", u)
		}
		return
	}
	t.Error("there was no such time")
}
