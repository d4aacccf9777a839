package executor

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/guest/turn"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// chair is an arbiter that says what the test wants.
type chair struct {
	t    *testing.T
	conn *net.UnixConn
}

// newChair has the session share its device, with nothing running.
func newChair(t *testing.T, a *session) *chair {
	t.Helper()
	theirs, ours := socketPair(t)
	t.Cleanup(func() { ours.Close() })
	go a.readTurns(theirs)
	h := &chair{t, ours}
	h.say(turn.Frame{Kind: turn.Hello}, turn.Frame{Kind: turn.Share})
	h.hears(turn.End, 0)
	return h
}

// say sends frames of epoch 1.
func (h *chair) say(frames ...turn.Frame) {
	h.t.Helper()
	for _, f := range frames {
		if f.Kind != turn.Hello {
			f.Epoch = 1
		}
		b := f.Encode()
		if _, err := h.conn.Write(b[:]); err != nil {
			h.t.Fatal(err)
		}
	}
}

func (h *chair) next() turn.Frame {
	h.t.Helper()
	_ = h.conn.SetReadDeadline(time.Now().Add(time.Minute))
	var b [turn.FrameSize]byte
	if _, err := io.ReadFull(h.conn, b[:]); err != nil {
		h.t.Fatalf("it says nothing: %v", err)
	}
	f, err := turn.Decode(&b)
	if err != nil {
		h.t.Fatal(err)
	}
	return f
}

// hears wants the next frame to be that one.
func (h *chair) hears(k turn.Kind, number uint64) turn.Frame {
	h.t.Helper()
	f := h.next()
	if f.Kind != k || f.Number != number || f.Epoch != 1 {
		h.t.Fatalf("%+v, want %s of turn %d", f, k, number)
	}
	if k == turn.End && f.What != turn.EndOffers {
		h.t.Fatalf("%+v does not say that offers are understood", f)
	}
	return f
}

// grants gives the session the turn that it asks for.
func (h *chair) grants(number uint64) turn.Frame {
	h.t.Helper()
	f := h.hears(turn.Ask, number)
	h.say(turn.Frame{Kind: turn.Grant, Number: number})
	return f
}

// offers waits until the session knows what it is offered: 0, nothing.
func (h *chair) offers(a *session, number uint64) {
	h.t.Helper()
	testkit.Until(h.t, "the offer is known", func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		return testkit.Want(a.turns[0].offer == number, a.turns[0].offer)
	})
}

// What is offered begins with what is launched, without a question, and once.
func TestTurnThatIsOfferedBeginsWithTheLaunch(t *testing.T) {
	c, a, q, k, b := newDesk(t).ones()
	h := newChair(t, a)
	h.say(turn.Frame{Kind: turn.Offer, Number: 1})
	h.offers(a, 1)
	c.launch(q, k, b, 1, 1024, 0)
	if f := h.hears(turn.Begin, 1); f.Name == "" || f.What == 0 {
		t.Errorf("%+v has no name or no kind", f)
	}
	h.hears(turn.End, 1)
	c.call(&wire.Finish{Queue: q})
	c.launch(q, k, b, 1, 1024, 0)
	asked := h.hears(turn.Ask, 2)
	h.say(turn.Frame{Kind: turn.Grant, Number: 2}, turn.Frame{Kind: turn.Offer, Number: 3})
	h.hears(turn.End, 2)
	h.offers(a, 3)
	c.launch(q, k, b, 1, 1024, 0)
	if f := h.hears(turn.Begin, 3); f.What != asked.What || f.Name != asked.Name {
		t.Errorf("a launch has begun as %+v that was asked for as %+v before", f, asked)
	}
	h.hears(turn.End, 3)
	c.call(&wire.Finish{Queue: q})
	equal(t, c.read(q, b, 4096), 4)
}

// An offer that finds the same turn asked for is a grant that came earlier.
func TestOfferOfWhatWasAskedForIsTaken(t *testing.T) {
	c, a, q, k, b := newDesk(t).ones()
	h := newChair(t, a)
	c.launch(q, k, b, 1, 1024, 0)
	h.hears(turn.Ask, 1)
	h.say(turn.Frame{Kind: turn.Offer, Number: 1})
	h.hears(turn.Begin, 1)
	h.hears(turn.End, 1)
	h.say(turn.Frame{Kind: turn.Grant, Number: 1}) // was under way
	c.call(&wire.Finish{Queue: q})
	c.launch(q, k, b, 1, 1024, 0)
	h.grants(2)
	c.call(&wire.Finish{Queue: q})
	equal(t, c.read(q, b, 4096), 3)
}

// What voids an offer: the arbiter, a freeze, an offer of something else. Then turns are asked for.
func TestOfferIsVoid(t *testing.T) {
	c, a, q, k, b := newDesk(t).ones()
	h := newChair(t, a)
	n := uint64(1)
	for name, voids := range map[string]func(){
		"revoked": func() {
			h.say(turn.Frame{Kind: turn.Offer, Number: n})
			h.offers(a, n)
			h.say(turn.Frame{Kind: turn.Revoke, Number: n})
			h.offers(a, 0)
		},
		"frozen": func() {
			h.say(turn.Frame{Kind: turn.Offer, Number: n})
			h.offers(a, n)
			if _, err := a.freeze(t.Context(), time.Minute); err != nil {
				t.Fatal(err)
			}
			a.thaw()
			h.offers(a, 0)
		},
		"of another turn": func() { h.say(turn.Frame{Kind: turn.Offer, Number: n + 1}) },
		"of a former one": func() { h.say(turn.Frame{Kind: turn.Offer, Number: n - 1}) },
	} {
		voids()
		c.launch(q, k, b, 1, 1024, 0)
		h.grants(n)
		h.hears(turn.End, n)
		c.call(&wire.Finish{Queue: q})
		n++
		if t.Failed() {
			t.Fatal(name)
		}
	}
	equal(t, c.read(q, b, 4096), uint32(n))
}

// A command that is ready when its turn's predecessor ends begins the turn that was offered ahead.
func TestCommandThatIsReadyTakesWhatWasOffered(t *testing.T) {
	c, a, q, k, b := newDesk(t).ones()
	h := newChair(t, a)
	a.mu.Lock()
	a.turns[0].usual = time.Second // so a turn has one command
	a.mu.Unlock()
	for range 3 {
		c.launch(q, k, b, 1, 1024, 0)
	}
	h.hears(turn.Ask, 1)
	h.say(turn.Frame{Kind: turn.Offer, Number: 1}, turn.Frame{Kind: turn.Offer, Number: 2})
	h.hears(turn.Begin, 1)
	h.hears(turn.End, 1)
	f := h.next()
	if f.Kind == turn.Ask { // it ended before the second offer came
		h.say(turn.Frame{Kind: turn.Grant, Number: 2})
	} else if f.Kind != turn.Begin || f.Number != 2 {
		t.Fatalf("%+v after the first turn", f)
	}
	h.hears(turn.End, 2)
	h.grants(3)
	h.hears(turn.End, 3)
	c.call(&wire.Finish{Queue: q})
	equal(t, c.read(q, b, 4096), 4)
}
